"""Train a GPT.

    python train.py config/train_shakespeare_char.py --max_iters=500
    python train.py config/train_shakespeare_char.py --max_iters=500 --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    python train.py --help

The defaults below follow nanoGPT's for GPT-2 (124M). Config files and `--key=value` override them.
On Ctrl-C, SIGTERM or a closed terminal a run finishes its step, saves, and prints the command that
resumes it.
"""

import steady

steady.start_script()  # before importing torch: sets up CUDA's allocator and Ctrl-C

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import torch

import convert
from configurator import configure
from model import GPT, GPTConfig
from steady import checkpoint, compiling, distributed, folder, hardware, memory, optim
from steady.dataloader import DataLoader, DataSet, Replayable, eval_batches
from steady.distributed import reshard
from steady.float8 import use_float8
from steady.generate import evaluation_mode, sample_while_training
from steady.memory import undone
from steady.optim import AveragedWeights, own_gradients, schedule_end, set_second_target
from steady.recompute import use_activation_checkpointing
from steady.runlog import RunLog
from steady.sampled import saved_flops, use_sampled_softmax
from steady.stop import Saving, StopRequest, stop_message

# output and evaluation
out_dir = "out"  # folder for checkpoints and metrics.jsonl
init_from = "scratch"  # scratch, resume (ckpt.pt); to finetune: a run's folder, HF folder or hub ID
eval_interval = 2000  # iterations between evaluations (and saves); 0: only save at the end
eval_iters = 200  # evaluate on the same eval_iters * batch_size sequences each time
eval_only = False  # evaluate once and exit
log_interval = 1  # iterations between log lines
sample_interval = 0  # iterations between printed samples; 0: never
always_save_checkpoint = True  # False: save only at a new best and at the end
wandb_log = False  # also log to W&B (WANDB_MODE=offline needs no account)
wandb_project = "owt"  # W&B project name
wandb_run_name = "gpt2"  # W&B run name
# data
dataset = "openwebtext"  # a folder in data/, or a path
batch_size = 12  # sequences per micro-batch; split if out of memory (same global batch)
gradient_accumulation_steps = 40  # micro-batches per iteration, in total for all GPUs
block_size = 1024  # context length: tokens per sequence
short_sequences = 0.0  # first part of the schedule (0 to 1) that trains on half sequences
seed = 1337  # for initial weights, data order and dropout
# model
n_layer = 12  # transformer blocks
n_head = 12  # attention (query) heads
n_kv_head = 0  # key/value heads, a divisor of n_head; 0: n_head
n_embd = 768  # embedding width
n_hidden = 0  # MLP width; 0: 8/3 n_embd, rounded up to a multiple of 64
vocab_size = 0  # 0: the data set's, rounded up to a multiple of 64
dropout = 0.0  # use 0.1+ for many epochs on a small text
rope_theta = 10000.0  # base of the rotary embeddings
qk_norm = False  # apply RMSNorm to queries and keys
tied_embeddings = True  # share token embedding and output weights
# optimizer
optimizer = "adamw"  # adamw, or muon (for the blocks' matrices, with AdamW for the rest; faster)
learning_rate = 6e-4  # peak learning rate
max_iters = 600000  # iterations to train for
weight_decay = 1e-1  # for matrices and embeddings only
beta1 = 0.9  # AdamW's decay rate of the mean gradient
beta2 = 0.95  # AdamW's decay rate of the mean squared gradient
grad_clip = 1.0  # clip the gradient norm to this; 0.0: never
average_weights = False  # evaluate a blend of weights and their average, and save it in best.pt
sampled_softmax = 0  # train on the logits of this many tokens, drawn in each step; 0: all
second_target = 0.0  # weight of predicting the token after next; falls to 0 halfway through
# learning-rate schedule
lr_schedule = "cosine"  # cosine, or wsd (warmup, stable, decay as 1 - sqrt(progress))
decay_lr = True  # False: keep the rate constant after warmup
warmup_iters = 2000  # iterations of linear warmup
lr_decay_iters = 0  # iteration that reaches min_lr; 0: max_iters
min_lr = 6e-5  # final rate, often learning_rate / 10 or 0
decay_fraction = 0.2  # wsd: share of the schedule spent decaying
# system
device = "auto"  # auto, cpu, cuda, cuda:N, mps
dtype = "auto"  # dtype for computation: auto, float32, bfloat16, float16
compile = True  # torch.compile the model; falls back to eager and says why
compile_mode = "default"  # default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
fp8 = False  # FP8 matmuls in the blocks (NVIDIA Ada or newer; faster for wide models)
activation_checkpointing = "none"  # recompute: none, selective (all but attention), block (all)
parallel = "ddp"  # multi-GPU: ddp, or fsdp to shard a model too large for one GPU
backend = "auto"  # for torch.distributed: auto, nccl, gloo

config = configure(globals())
# code that computes settings from others belongs here; all functions see its results
config |= {name: globals()[name] for name in config}
asked = dict(config)  # as given; `config` gets a loaded model's sizes

# -----------------------------------------------------------------------------
# this process: rank, device, dtype, how to compile
# on a CPU, dtype=auto depends on n_embd
process = distributed.this_process(parallel, device, dtype, n_embd)
plan = compiling.plan(compile, compile_mode, process.device)
distributed.start(process, config, plan.cuda_graphs)  # gives all ranks the same out_dir
out_path = Path(config["out_dir"])
ckpt_path, best_path = out_path / "ckpt.pt", out_path / "best.pt"
autocast = process.autocast()
torch.manual_seed(seed)

# -----------------------------------------------------------------------------
# data and model: three ways to start
data = DataSet(dataset, vocab_size)
data.require_same(process)
requested = GPTConfig.from_settings(config, data.padded_vocab_size)
if not eval_only or wandb_log:  # this run writes to out_dir: lock it
    distributed.on_rank0_first(process, lambda: folder.claim(out_path))
# becomes "resume" if torchrun has restarted the processes after an error
config["init_from"] = checkpoint.resolve_init_from(init_from, ckpt_path, process)
if config["init_from"] == "scratch":
    start = checkpoint.Start(requested.settings())
elif config["init_from"] == "resume":
    start = checkpoint.resume(ckpt_path, requested, data, config, process)
else:
    start = convert.load_pretrained(init_from, data, block_size, dropout)
model_config = GPTConfig.from_settings(
    config | start.model_config, start.model_config["vocab_size"]
)
# from here on config has the loaded model's sizes; globals such as n_embd keep yours
config |= {key: value for key, value in model_config.settings().items() if key in config}
train_file, val_file = data.open(block_size, model_config.vocab_size)

memory.require_room(config, process)  # refuse a model that cannot fit
hardware.prepare(process.device, process.dtype, model_config.n_embd, block_size)  # TF32, oneDNN
with process.build_device:  # the device to train on; with fsdp the meta device
    raw_model = GPT(model_config)
if eval_only:
    raw_model.requires_grad_(False)
elif fp8:
    use_float8(raw_model, process)
use_activation_checkpointing(raw_model, activation_checkpointing)
distributed.shard(raw_model, process)  # fsdp: a shard for each rank; ddp: equal weights
start.load_weights(raw_model)

# -----------------------------------------------------------------------------
# optimizer: AdamW with and without weight decay, or Muon for the blocks' matrices and AdamW for
# the rest. Most torch optimizers work too: opt = torch.optim.SGD(raw_model.parameters())
opt = optim.build_optimizer(raw_model, config, plan.compiled, process.dtype)
scaler = torch.amp.GradScaler(process.device.type, enabled=process.dtype == torch.float16)
if not eval_only:
    start.load_optimizer(opt, scaler)
averages = AveragedWeights(raw_model, average_weights, start.average)

# sequences per iteration, and per evaluated file. Splitting a batch to fit into memory changes
# neither
sequences_per_iter = batch_size * gradient_accumulation_steps
eval_sequences = eval_iters * batch_size
short_iters = round(short_sequences * schedule_end(config))  # on half-length sequences
iter_num, best_val_loss = start.iter_num, start.best_val_loss
# keeps the position in the data if a resume changes the global batch size
data_offset = start.sequences - iter_num * sequences_per_iter
if process.master and not eval_only:
    folder.archive_previous_run(out_path, start.stale_files)
pretrained = start.pretrained  # a pretrained model's metadata, for exports
del start  # free the checkpoint's tensors

log = RunLog(out_path, config, iter_num, quiet=not process.master)
log.line(plan.summary(process, fp8 and not eval_only))
log.line(f"model {raw_model.num_params():,} parameters, vocabulary {data.vocab_size} "
         f"({model_config.vocab_size} with padding)")  # fmt: skip
log.line(data.summary(sequences_per_iter * block_size))
log.settings(config, asked, __file__)
use_sampled_softmax(raw_model, train_file, config, log.line)


# -----------------------------------------------------------------------------
# the parts of the training loop
def forward_backward(model: torch.nn.Module, micro_batches: Iterable, halve: bool) -> torch.Tensor:
    """Accumulate the gradients of `micro_batches`, which are pairs (tokens, targets) of shape
    (batch, block_size). Return their share of the iteration's mean loss (scalar).

    halve: cut each sequence into two shorter ones.
    """
    set_second_target(raw_model, iter_num, config)  # here: the trial step needs it too
    loss = torch.zeros((), device=process.device)  # a tensor that no CUDA graph overwrites
    for tokens, targets in micro_batches:
        share = len(tokens) / sequences_per_iter
        if halve:
            tokens, targets = (x.unflatten(1, (2, -1)).flatten(0, 1) for x in (tokens, targets))
        if plan.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # lets graphs reuse memory
        with autocast:
            micro_loss = model(tokens, targets) * share
        with own_gradients(raw_model, plan.cuda_graphs):  # a CUDA graph's replay overwrites them
            scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
    return loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: Iterable) -> torch.Tensor:
    """Return this process's part of the mean loss over `batches` of (tokens, targets, weight). The
    mean is the sum of all processes' parts."""
    total = torch.zeros((), device=process.device)
    with evaluation_mode(model):
        for tokens, targets, weight in batches:
            with autocast:
                total += weight * model(tokens, targets)
    reshard(raw_model)  # with fsdp: drop gathered weights, as a backward pass does
    return total


def estimate_losses() -> dict[str, float]:
    """Return the mean losses over all processes, on fixed sequences of either data file."""
    means = {}
    for name, file in (("train_loss", train_file), ("val_loss", val_file)):
        batches = eval_batches(file, fit.batch_size, eval_sequences, process)
        # stop_requested() is an all-reduce: all ranks stop after the same batch
        batches = takewhile(lambda _: not stop_request.stop_requested(), batches)
        n_batches = eval_sequences / fit.batch_size / process.world_size
        batches = log.waiting(batches, n_batches, f"evaluating {name}")
        means[name] = distributed.all_reduce_sum(evaluate(model, batches)).item()
    return means


def trial(micro_batch_size: int) -> torch.nn.Module:
    """Run forward and backward passes and an evaluation to see if they fit in memory. Return the
    model that ran."""
    model = compiling.compile_model(raw_model, plan, process.shards_model, activation_checkpointing)
    tokens = torch.zeros(micro_batch_size, block_size, dtype=torch.int64, device=process.device)
    # not `tokens` itself: compiled code would assume that both are always the same tensor
    targets = torch.zeros_like(tokens)
    micro_steps = sequences_per_iter // process.world_size // micro_batch_size
    # CUDA graphs need 3 runs (warm up, record, replay), others 2 (create .grad, then add to it)
    runs = 0 if eval_only else 3 if plan.cuda_graphs else min(2, micro_steps)
    with undone(raw_model, opt):  # afterwards: no gradients, and the buffers' earlier values
        for halve in (True, False) if iter_num < short_iters else (False,):
            forward_backward(model, [(tokens, targets)] * runs, halve)
        if eval_interval or eval_only:
            with averages.blended():
                evaluate(model, [(tokens, targets, 1.0)])
    return model


def weights() -> dict:
    """The content of best.pt, and a part of ckpt.pt: all that sampling and exporting need."""
    return {
        "model": raw_model, "model_config": model_config.settings(), "config": config,
        "tokenizer": data.tokenizer, "pretrained": pretrained, "iter_num": iter_num,
        "best_val_loss": best_val_loss,
    }  # fmt: skip


def training_state() -> dict:
    """The content of ckpt.pt: everything needed to resume. `save` writes objects as state dicts."""
    return weights() | {
        "optimizer": opt, "scaler": scaler, "average": averages,
        "sequences": loader.position(iter_num), "data_ids": data.ids, "dtype": str(process.dtype),
    }  # fmt: skip


def save(path: Path, content: dict, overwrite: bool = True) -> bool:
    """Save `content`. On failure print a warning and return False."""
    with log.paused():  # saving is not training time
        return checkpoint.try_save(path, content, process, log.line, overwrite=overwrite)


stop_request = StopRequest(process, saves=not eval_only)

# -----------------------------------------------------------------------------
# try a step; if it runs out of memory, use smaller micro-batches (same global batch)
fit = memory.fit(trial, config, process, plan)
model = fit.model  # raw_model (maybe with compiled blocks), or a compiled wrapper of it
if fit.report:
    log.line(fit.report)
micro_steps = sequences_per_iter // fit.batch_size // process.world_size  # per process
loader = DataLoader(train_file, fit.batch_size, sequences_per_iter // fit.batch_size, seed,
                    process, data_offset)  # fmt: skip
micro_batches = loader.micro_batches(iter_num)

# -----------------------------------------------------------------------------
# training loop. At its end `saving` saves the state and ends all processes but rank 0's. It also
# saves after an error, unless the model is sharded, the loss diverged or opt.step failed
flops_per_token = raw_model.flops_per_token() - saved_flops(raw_model, config)
log.start_clock(iter_num, sequences_per_iter * block_size, flops_per_token, process)
saving = Saving(ckpt_path, training_state, process, not eval_only, fit.memory_flags, log.line,
                stop_request)  # fmt: skip
with saving:  # from here on a signal ends the run after its step; before, at once
    stopping = stop_request.stop_requested()
    while not stopping:
        torch.manual_seed(hash((iter_num, seed)))  # the same after a resume; not those below
        # ---- learning rate: warm-up, then cosine or wsd -----------------------
        lr = optim.set_schedule(opt, iter_num, config)

        # ---- evaluate and save ------------------------------------------------
        finished = iter_num >= max_iters
        if eval_only or (eval_interval > 0 and (iter_num % eval_interval == 0 or finished)):
            # not training time; with average_weights, evaluate a blend
            with log.paused(), averages.blended():
                losses = estimate_losses()
                saving.require_finite(losses, iter_num)
                stopping = stop_request.stop_requested()
                if not stopping:  # else the losses are incomplete: the resumed run evaluates again
                    # not at iteration 0: nothing has been learned yet
                    better = iter_num > 0 and not eval_only and losses["val_loss"] < best_val_loss
                    best = {"best_val_loss": losses["val_loss"]}
                    losses |= data.bits_per_byte(losses["val_loss"])
                    log.evaluation({"iter": iter_num} | losses, better)
                    if better and save(best_path, weights() | best):
                        best_val_loss = losses["val_loss"]
            if stopping:
                break
            # outside of blended(): a resumed run needs the plain weights
            if iter_num > 0 and not eval_only and (better or always_save_checkpoint):
                save(ckpt_path, training_state())
        if always_save_checkpoint and 0 < iter_num == optim.decay_start(config):
            # longer runs can continue from here
            save(out_path / "before_decay.pt", training_state(), overwrite=False)
        if sample_interval and iter_num > 0 and iter_num % sample_interval == 0:
            with log.paused():
                sample = sample_while_training(raw_model, data, val_file, autocast, seed)
                log.line(f"iter {iter_num:6d} | sample: {sample!r}")
        if finished or eval_only:
            break

        # ---- forward and backward ---------------------------------------------
        # a resume gets the same dropout (integers have the same hash in every process)
        torch.manual_seed(hash((seed, iter_num, process.rank)))
        halve = iter_num < short_iters  # with short_sequences
        step_batches = Replayable(micro_batches, micro_steps)  # you may loop over it again
        loss = forward_backward(model, step_batches, halve)
        distributed.sum_gradients(process, raw_model, opt)  # one all-reduce; buffers: rank 0's
        torch.manual_seed(hash((seed, iter_num)))  # random numbers below: the same on all ranks

        # ---- clip and step ----------------------------------------------------
        scaler.unscale_(opt)
        grad_norm = optim.clip_gradients(opt, grad_clip)  # inf or NaN: opt.step changes nothing
        skipped = saving.count_skipped(grad_norm)  # steps in a row without a finite norm
        stopping = stop_request.stop_requested()
        log_due = stopping or iter_num % log_interval == 0 or iter_num + 1 == max_iters
        if log_due:  # copy now, so that read_numbers() need not wait for opt.step
            distributed.all_reduce_sum(loss)
            read_numbers = hardware.to_host_async(loss, grad_norm, skipped)
        scaler.step(opt)
        scaler.update()
        # directly after the step: a save after an error below must count it
        iter_num += 1
        opt.zero_grad()
        averages.update(iter_num)

        # ---- log --------------------------------------------------------------
        if log_due:
            loss_now, norm_now, skipped_now = read_numbers()
            log.step(iter_num - 1, loss_now, lr, norm_now)
            saving.require_finite({"loss": loss_now}, iter_num - 1, skipped_now)

# -----------------------------------------------------------------------------
# the end
log.close()
if stopping:
    print(stop_message(iter_num, ckpt_path))
elif not eval_only:
    print(log.summary(iter_num, loader.position(iter_num) * block_size, best_val_loss, best_path))
