"""Train a GPT.

    python train.py config/train_shakespeare_char.py --max_iters=500
    python train.py config/train_shakespeare_char.py --max_iters=500 --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    python train.py --help

The settings below are nanoGPT's for GPT-2 (124M); a config file and `--key=value` change them.
Ctrl-C, SIGTERM or a lost terminal finishes the step, saves, and says how to go on.
"""

import steady

steady.start_script()  # before torch is imported: CUDA's allocator, Ctrl-C, closed streams

import time
from collections.abc import Iterable
from itertools import islice, takewhile
from pathlib import Path

import torch

import convert
from configurator import configure
from model import GPT, GPTConfig
from steady import checkpoint, compiling, distributed, folder, hardware, memory, optim
from steady.dataloader import DataLoader, DataSet, eval_batches
from steady.float8 import use_float8
from steady.generate import sample_while_training
from steady.profiler import Profiler
from steady.recompute import use_activation_checkpointing
from steady.runlog import RunLog
from steady.stop import Saving, StopRequest, stopped

# output and evaluation
out_dir = "out"  # folder of the checkpoints and metrics.jsonl
init_from = "scratch"  # scratch, resume (out_dir/ckpt.pt), or weights: a run's or a hub's model
eval_interval = 2000  # iterations between evaluations, after which it saves; 0: only a last save
eval_iters = 200  # batches of batch_size sequences from each split, always the same sequences
eval_only = False  # evaluate once and exit
log_interval = 1  # iterations between log lines
sample_interval = 0  # iterations between printed samples; 0: none
always_save_checkpoint = True  # at every evaluation and before a decay; False: at the best ones
wandb_log = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
wandb_project = "owt"  # Weights & Biases: the project
wandb_run_name = "gpt2"  # Weights & Biases: the run
# data
dataset = "openwebtext"  # a folder in data/, or a path
verify_data = False  # compare its files with the checksums in its meta.json first
batch_size = 12  # sequences in a micro-batch; split further if they do not fit, same global batch
gradient_accumulation_steps = 40  # micro-batches in an iteration, all processes counted together
block_size = 1024  # tokens in a sequence
seed = 1337  # of the initial weights, the data order and dropout
# model
n_layer = 12  # blocks
n_head = 12  # query heads
n_kv_head = 0  # key/value heads, a divisor of n_head; 0: as many as n_head
n_embd = 768  # width
n_hidden = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64
vocab_size = 0  # of the model; 0: the data set's, rounded up to a multiple of 64
dropout = 0.0  # 0.1 and more where a small text is read many times
rope_theta = 10000.0  # base of the rotary embeddings
qk_norm = False  # normalise queries and keys
tied_embeddings = True  # the output head shares the token embedding
# optimizer
optimizer = "adamw"  # adamw, or muon for the blocks' matrices: learns faster
learning_rate = 6e-4  # peak learning rate
max_iters = 600000  # iterations to train for
weight_decay = 1e-1  # of matrices and embeddings
beta1 = 0.9  # AdamW (also beside Muon): decay of the gradient's running mean
beta2 = 0.95  # AdamW (also beside Muon): decay of its square's running mean
grad_clip = 1.0  # largest gradient norm; 0.0: no clipping
# learning-rate schedule
lr_schedule = "cosine"  # cosine, or wsd: warm-up, stable, decay as 1 - sqrt
decay_lr = True  # False: constant after warm-up
warmup_iters = 2000  # iterations of linear warm-up
lr_decay_iters = 0  # iteration at which min_lr is reached; 0: max_iters
min_lr = 6e-5  # final learning rate, usually a tenth of learning_rate
decay_fraction = 0.2  # wsd: share of the schedule spent decaying
# system
device = "auto"  # auto, cpu, cuda, cuda:N, mps
dtype = "auto"  # auto, float32, bfloat16, float16: what matrix products are computed in
compile = True  # torch.compile the model; falls back with a line that says why
compile_mode = "default"  # default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
fp8 = False  # the blocks' products in FP8: NVIDIA Ada and newer; faster from n_embd=768 on
activation_checkpointing = "none"  # recompute for memory: none, selective (not attention), block
parallel = "ddp"  # several processes: ddp, or fsdp to divide a model too large for one GPU
backend = "auto"  # between processes: auto, nccl, gloo
profile = False  # write out_dir/trace.json of a few steps

config = configure(globals())

# -----------------------------------------------------------------------------
# this process: rank, device, dtype, and what is compiled
process = distributed.this_process(parallel, device, dtype, n_embd)
plan = compiling.plan(compile, compile_mode, process.device)
distributed.start(process, config, plan.cuda_graphs)
out_path = Path(config["out_dir"])  # of the first process, if they differ
ckpt_path, best_path = out_path / "ckpt.pt", out_path / "best.pt"
if not eval_only or wandb_log:  # this run writes to out_dir: lock it
    distributed.on_rank0_first(process, lambda: folder.claim(out_path))
autocast = process.autocast()
torch.manual_seed(seed)  # the same in every process: initial weights are not exchanged

# -----------------------------------------------------------------------------
# data and model: three ways to start
data = DataSet(dataset, vocab_size)
if verify_data and process.master:
    data.verify()
asked = GPTConfig.from_settings(config, data.padded_vocab_size)
config["init_from"] = checkpoint.begin_from(init_from, ckpt_path, process)
if config["init_from"] == "scratch":
    start = checkpoint.Start(asked.settings())
elif config["init_from"] == "resume":  # asked for, or torchrun has restarted this launch
    start = checkpoint.resume(ckpt_path, asked, data, config, process)
else:
    start = convert.start_from(init_from, data, block_size, dropout)
model_config = GPTConfig(**start.model_config)
config |= {key: size for key, size in start.model_config.items() if key in config}  # as loaded
train_file, val_file = data.open(block_size, model_config.vocab_size)

memory.require_room(config, process)
hardware.prepare(process.device, process.dtype, model_config.n_embd, block_size)
with process.build_device:  # weights are created and drawn where they are used
    raw_model = GPT(model_config)  # what is saved, sampled from and counted
if eval_only:
    raw_model.requires_grad_(False)
elif fp8:
    use_float8(raw_model, process)
distributed.shard(raw_model, process)  # parallel=fsdp
start.load_weights(raw_model)

# -----------------------------------------------------------------------------
# optimizer; any of torch's can take its place: opt = torch.optim.SGD(raw_model.parameters())
opt = optim.build_optimizer(raw_model, config, plan.compiled, process.dtype)
scaler = torch.amp.GradScaler(process.device.type, enabled=process.dtype == torch.float16)
if not eval_only:
    start.load_optimizer(opt, scaler)
parameters = [p for p in raw_model.parameters() if p.requires_grad]
static_gradients = optim.StaticGradients(parameters, plan.cuda_graphs)

# the global batch and that of evaluations, fixed however they are split into micro-batches
sequences_per_iter = batch_size * gradient_accumulation_steps
eval_sequences = eval_iters * batch_size
iter_num, best_val_loss = start.iter_num, start.best_val_loss
# where to go on in the data, even if the global batch was another before a resume
data_offset = start.sequences - iter_num * sequences_per_iter
if process.master and not eval_only:
    folder.archive_previous_run(out_path, start.outdated)
pretrained = start.pretrained  # what the weights came with, for exports
del start  # the checkpoint's tensors

log = RunLog(out_path, config, iter_num, quiet=not process.master)
log.line(plan.summary(process, fp8 and not eval_only))
log.line(f"model {raw_model.num_params():,} parameters, vocabulary {data.vocab_size} "
         f"({model_config.vocab_size} with padding)")  # fmt: skip
log.line(data.summary(sequences_per_iter * block_size))
log.settings(config, __file__)


# -----------------------------------------------------------------------------
# what the loop is made of
def forward_backward(model: torch.nn.Module, micro_batches: Iterable) -> torch.Tensor:
    """Add up the gradients of an iteration's mean loss over `micro_batches`, (tokens, targets) each
    of shape (batch, block_size); returns their share of that loss (scalar)."""
    loss = torch.zeros((), device=process.device)  # not an output of a CUDA graph: those change
    for tokens, targets in micro_batches:
        if plan.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # the last output may be overwritten now
        with autocast:
            micro_loss = model(tokens, targets) * (len(tokens) / sequences_per_iter)
        scaler.scale(micro_loss).backward()
        static_gradients.keep()
        loss += micro_loss.detach()
    return loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: Iterable) -> torch.Tensor:
    """This process's share of the mean loss over `batches`, (tokens, targets, share) each (scalar).
    The (compiled) model is the same as in training."""
    total = torch.zeros((), device=process.device)
    model.eval()
    for tokens, targets, share in batches:
        with autocast:
            total += share * model(tokens, targets)
    model.train()
    return total


def trial(micro_batch_size: int, checkpointing: str) -> torch.nn.Module:
    """A step and an evaluation, to see if they fit into memory; returns the model that ran."""
    use_activation_checkpointing(raw_model, checkpointing)
    model = compiling.compile_model(raw_model, plan, process.shards_model, checkpointing)
    tokens = torch.zeros(micro_batch_size, block_size, dtype=torch.int64, device=process.device)
    targets = torch.zeros_like(tokens)  # given one tensor twice, torch compiles other code
    buffers = [buffer.clone() for buffer in raw_model.buffers()]
    micro_steps = sequences_per_iter // process.world_size // micro_batch_size
    # CUDA graphs warm up, record and replay; otherwise a second run has gradients to add to
    runs = 0 if eval_only else 3 if plan.cuda_graphs else min(2, micro_steps)
    try:
        forward_backward(model, [(tokens, targets)] * runs)
        if eval_interval or eval_only:
            evaluate(model, [(tokens, targets, 1.0)])
    finally:
        opt.zero_grad(set_to_none=not plan.cuda_graphs)
        for buffer, before in zip(raw_model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return model


def weights() -> dict:
    """The content of best.pt: all that sampling and converting need."""
    return {
        "model": raw_model, "model_config": model_config.settings(), "config": config,
        "tokenizer": data.tokenizer, "pretrained": pretrained, "iter_num": iter_num,
        "best_val_loss": best_val_loss,
    }  # fmt: skip


def training_state() -> dict:
    """The content of ckpt.pt: all that is needed to go on bit for bit."""
    return weights() | {
        "optimizer": opt, "scaler": scaler, "sequences": loader.position(iter_num),
        "data_ids": data.ids, "dtype": str(process.dtype),
    }  # fmt: skip


def save(path: Path, content: dict, overwrite: bool = True) -> bool:
    """Save `content`; whether that worked. A save that fails prints a warning."""
    saved = checkpoint.try_save(path, content, process, log.line, overwrite=overwrite)
    log.restart_clock(iter_num)  # saving is not training time
    return saved


stop_request = StopRequest(process, saves=not eval_only)
trace = Profiler(out_path, profile and process.master, max_iters - iter_num, log.line)

# -----------------------------------------------------------------------------
# find out whether a step fits into memory; if not, split it further: the same loss curve
fit = memory.fit(trial, config, process, plan)
model = fit.model  # compiled: evaluations and steps use it
if fit.report:
    log.line(fit.report)
micro_steps = sequences_per_iter // fit.batch_size // process.world_size  # of this process
loader = DataLoader(train_file, fit.batch_size, sequences_per_iter // fit.batch_size, seed,
                    process, data_offset)  # fmt: skip
micro_batches = loader.micro_batches(iter_num)

# -----------------------------------------------------------------------------
# training loop; whatever ends it, the state is saved
log.start_clock(iter_num, sequences_per_iter * block_size, raw_model.flops_per_token(), process)
skipped = torch.zeros((), device=process.device)  # steps in a row whose gradients are not finite
stopping = stop_request.stop_requested()
with Saving(ckpt_path, training_state, process, not eval_only, fit.flags_for_less, log.line) as run:
    while not stopping:
        # ---- learning rate ----------------------------------------------------
        lr = optim.set_schedule(opt, iter_num, config)

        # ---- evaluate and save ------------------------------------------------
        finished = iter_num >= max_iters
        if eval_only or (eval_interval > 0 and (iter_num % eval_interval == 0 or finished)):
            began, losses = time.perf_counter(), {}
            for name, file in (("train_loss", train_file), ("val_loss", val_file)):
                batches = eval_batches(file, fit.batch_size, eval_sequences, process)
                batches = takewhile(lambda _: not stop_request.stop_requested(), batches)
                n_batches = eval_sequences / fit.batch_size / process.world_size
                batches = log.waiting(batches, n_batches, f"evaluating {name}")
                losses[name] = distributed.all_reduce_sum(evaluate(model, batches)).item()
            run.require_finite(losses, iter_num)
            if stopping := stop_request.stop_requested():
                break  # these losses are incomplete: the run that goes on evaluates again
            better = iter_num > 0 and not eval_only and losses["val_loss"] < best_val_loss
            losses |= data.bits_per_byte(losses["val_loss"])
            log.evaluation({"iter": iter_num} | losses, time.perf_counter() - began, better)
            if better and save(best_path, weights() | {"best_val_loss": losses["val_loss"]}):
                best_val_loss = losses["val_loss"]
            if iter_num > 0 and not eval_only and (better or always_save_checkpoint):
                save(ckpt_path, training_state())
            log.restart_clock(iter_num)  # evaluation is not training time
        if always_save_checkpoint and 0 < iter_num == optim.decay_start(config):
            save(out_path / "before_decay.pt", training_state(), overwrite=False)
        if sample_interval and iter_num > 0 and iter_num % sample_interval == 0:
            log.sample(iter_num, sample_while_training(raw_model, data, val_file, autocast, seed))
        if finished or eval_only:
            break

        # ---- forward and backward ---------------------------------------------
        torch.manual_seed(hash((seed, iter_num, process.rank)))  # dropout is the same on a resume
        loss = forward_backward(model, islice(micro_batches, micro_steps))
        distributed.sum_gradients(process, parameters, in_place=plan.cuda_graphs)

        # ---- clip and step ----------------------------------------------------
        scaler.unscale_(opt)
        grad_norm = optim.clip_gradients(opt, grad_clip)
        skipped = (skipped + 1) * ~grad_norm.isfinite()
        stopping = stop_request.stop_requested()
        log_due = stopping or iter_num % log_interval == 0 or iter_num + 1 == max_iters
        if log_due:  # copied now, so that reading waits for backward, but not for the optimizer
            distributed.all_reduce_sum(loss)
            numbers = hardware.to_host_async(loss, grad_norm, skipped)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=not plan.cuda_graphs)
        iter_num += 1

        # ---- log --------------------------------------------------------------
        if log_due:
            loss_now, norm_now, skipped_now = numbers()  # waits for the device
            log.step(iter_num - 1, loss_now, lr, norm_now)
            run.require_finite({"loss": loss_now}, iter_num - 1, skipped_now)
        log.progress(iter_num)
        trace.step()

# -----------------------------------------------------------------------------
# the end
log.close()
if stopping:
    print(stopped(iter_num, ckpt_path))
elif not eval_only:
    print(log.summary(iter_num, loader.position(iter_num) * block_size, best_val_loss, best_path))
