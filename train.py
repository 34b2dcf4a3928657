"""Train a GPT.

    python train.py config/train_shakespeare_char.py --max_iters=500
    python train.py config/train_shakespeare_char.py --max_iters=500 --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    python train.py --help

The settings below are nanoGPT's for GPT-2 (124M); a config file and `--key=value` change them.
Ctrl-C, SIGTERM or a lost terminal finishes the step, saves, and says how to go on.
"""

import gc
import time
from functools import partial
from pathlib import Path

from steady import checkpoint, compiling, distributed, folder, hardware, memory, optim, recompute
from steady.dataloader import DataLoader, DataSet, TokenFile, eval_batches
from steady.float8 import require_float8, use_float8
from steady.generate import sample_while_training
from steady.profiler import Profiler
from steady.runlog import RunLog
from steady.stop import Rescue, StopRequest, stopped
from steady.tokenizer import from_meta

import torch  # after steady, which sets the allocator's variable

import convert
from configurator import configure, without_auto
from model import GPT, GPTConfig

# output and evaluation
out_dir = "out"  # folder of the checkpoints and metrics.jsonl
init_from = "scratch"  # scratch, resume (out_dir/ckpt.pt), or a Hugging Face model's folder or id
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
batch_size: int | str = 12  # sequences in a micro-batch; auto: as many as fit, same global batch
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
fp8 = False  # the blocks' products in FP8: NVIDIA Ada and newer, n_embd of 768 or more
activation_checkpointing = "none"  # recompute for memory: none, selective (not attention), block
parallel = "ddp"  # several processes: ddp, or fsdp to divide a model too large for one GPU
backend = "auto"  # between processes: auto, nccl, gloo
profile = False  # write out_dir/trace.json of a few steps
memory_snapshot = False  # write out_dir/memory.pickle, the GPU memory's history in a few steps

config = configure(globals())
auto_batch = batch_size == "auto"
if auto_batch:  # changes only the split: the global batch is that of config file and defaults
    batch_size = config["batch_size"] = without_auto(__file__, "batch_size")

# -----------------------------------------------------------------------------
# this process, its device and dtype (objects from here on), and how the model is compiled
here = distributed.this_process(parallel)
out_path = Path(out_dir)
ckpt_path, best_path = out_path / "ckpt.pt", out_path / "best.pt"
if here.restarted and checkpoint.is_of_this_launch(ckpt_path):
    init_from = config["init_from"] = "resume"  # torchrun starts all anew after one has died
device = hardware.choose_device(device, here.local_rank if here.world_size > 1 else None)
dtype = hardware.choose_dtype(dtype, device, n_embd if here.world_size == 1 else 0)
hardware.require_cuda(device, memory_snapshot=memory_snapshot)
plan = compiling.plan(compile, compile_mode, device)
distributed.check(here, batch_size, gradient_accumulation_steps, dtype, plan.cuda_graphs)
distributed.start(here, device, backend, config)
if not eval_only or wandb_log:  # this run writes to out_dir: lock it
    distributed.first_does(here, partial(folder.claim, out_path))
autocast = hardware.autocast(device, dtype)
torch.manual_seed(seed)  # the same in every process: initial weights are not exchanged

# -----------------------------------------------------------------------------
# data and model: three ways to start
data = DataSet(dataset, vocab_size)
asked = GPTConfig.from_settings(config, data.padded_vocab_size)
if init_from == "scratch":
    start = checkpoint.Start(asked.settings())
elif init_from == "resume":
    start = checkpoint.resume(ckpt_path, asked, data, config, dtype)
else:
    start = convert.start_from(init_from, data, block_size, dropout)
model_config = GPTConfig(**start.model_config)
config |= {key: size for key, size in start.model_config.items() if key in config}  # as loaded
train_file, val_file = data.open(block_size, model_config.vocab_size)
tokenizer = from_meta(data.tokenizer) if sample_interval else None

# the global batch and that of evaluations, fixed however they are split
sequences_per_iter = batch_size * gradient_accumulation_steps
sequences_per_process = sequences_per_iter // here.world_size
eval_sequences = eval_iters * batch_size
step_shape = memory.StepShape(model_config, sequences_per_process, dtype, plan, here,
                              optimizer == "muon", fp8, eval_only, eval_sequences)  # fmt: skip
require_float8(step_shape, device)
memory.require_room(step_shape, device, auto_batch)
hardware.prepare(device, dtype, model_config.n_embd, block_size)
raw_model = GPT(model_config).requires_grad_(not eval_only)  # what is saved, sampled, counted
if start.weights is not None:
    checkpoint.load_weights(raw_model, start.weights, ckpt_path)
raw_model.use_cudnn_attention(hardware.cudnn_attention(device, dtype, model_config.head_dim))
distributed.move_to_device(raw_model, here, device, dtype)

# -----------------------------------------------------------------------------
# optimizer: from here on the object, no longer the setting
gradients = optim.Gradients(raw_model, summed=here.sums_gradients)
optimizer = optim.build_optimizer(raw_model, config, plan.compiled, dtype)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
if start.optimizer is not None and not eval_only:
    checkpoint.load_optimizer(optimizer, scaler, start, ckpt_path)
if step_shape.in_float8:
    use_float8(raw_model, optimizer, plan)
iter_num, best_val_loss = start.iter_num, start.best_val_loss
pretrained_dtype = start.pretrained_dtype  # for convert.py
# where to go on in the data, even if the global batch was another before a resume
data_offset = start.sequences - iter_num * sequences_per_iter
if here.master and not eval_only:
    folder.set_aside(out_path, start.outdated)
del start  # the checkpoint's tensors

log = RunLog(out_path, config, iter_num, quiet=not here.master)
log.line(compiling.summary(device, dtype, plan, here, step_shape.in_float8))
log.line(raw_model.summary(data.vocab_size))
log.line(data.summary(sequences_per_iter * block_size))
log.settings(config, __file__)


# -----------------------------------------------------------------------------
# what the loop is made of
def micro_step(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Forward and backward of one micro-batch; returns its share of the iteration's mean loss."""
    if plan.cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()  # the last output may be overwritten now
    with autocast:
        micro_loss = model(tokens, targets) / gradient_accumulation_steps
    scaler.scale(micro_loss).backward()
    return micro_loss.detach()


@torch.no_grad()
def evaluate(file: TokenFile) -> float:
    """Mean loss over the fixed windows of `file`, through the same (compiled) model as training."""
    model.eval()
    total = torch.zeros((), device=device)
    for tokens, targets, share in eval_batches(file, batch_size, eval_sequences, device, here):
        if stop_request.asked():
            break  # the loop below asks too, and does without this loss
        with autocast:
            total += share * model(tokens, targets)
    model.train()
    distributed.all_reduce_sum(total)
    return total.item()


def try_step(size: int, checkpointing: str) -> torch.nn.Module:
    """Forward, backward and evaluation, to see if they fit; returns the model that ran."""
    recompute.use_activation_checkpointing(raw_model, checkpointing)
    gradients.keep(step_shape.adds_gradients_in_place(size))
    candidate = compiling.compile_model(raw_model, plan, here.shards_model, checkpointing)
    tokens = torch.zeros(size, block_size, dtype=torch.int64, device=device)
    targets = torch.zeros_like(tokens)  # given one tensor twice, torch compiles other code
    # CUDA graphs warm up, record and replay; otherwise a second run has gradients to add to.
    runs = 3 if plan.cuda_graphs else min(2, sequences_per_process // size)
    try:
        for _ in range(0 if eval_only else runs):
            micro_step(candidate, tokens, targets)
        gradients.flatten()  # where processes sum them, this copy must fit too
        if eval_interval or eval_only:
            with torch.no_grad(), autocast:
                candidate.eval()(tokens, targets)
    finally:
        candidate.train()
        gradients.clear()
    return candidate


def weights(best: float) -> dict:
    """The content of best.pt: all that sampling and converting need."""
    return {
        "model": raw_model.state_dict(), "model_config": model_config.settings(), "config": config,
        "tokenizer": data.tokenizer, "pretrained_dtype": pretrained_dtype, "iter_num": iter_num,
        "best_val_loss": best,
    }  # fmt: skip


def training_state() -> dict:
    """The content of ckpt.pt: all that is needed to go on bit for bit."""
    return weights(best_val_loss) | {
        "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
        "sequences": loader.position(iter_num), "data_ids": data.ids, "dtype": str(dtype),
    }  # fmt: skip


try_save = partial(checkpoint.try_save, here=here, say=log.line)
profiler = Profiler(out_path, here.master, profile, memory_snapshot, max_iters - iter_num, log.line)
stop_request = StopRequest(alone=here.world_size == 1, announce=here.master, saves=not eval_only)

# -----------------------------------------------------------------------------
# find out whether a step fits into memory; if not, split it further: the same loss curve
wanted = memory.Split(batch_size, activation_checkpointing)
fit = memory.fit(try_step, step_shape, wanted, device, auto_batch)
model, batch_size = fit.model, fit.split.batch_size  # what evaluate and the loop use
gradient_accumulation_steps = sequences_per_iter // batch_size
log.line(fit.report(step_shape))
loader = DataLoader(train_file, batch_size, gradient_accumulation_steps, seed, device, here,
                    data_offset)  # fmt: skip

# -----------------------------------------------------------------------------
# training loop
gc.collect()
gc.freeze()  # set-up left many objects; to look through them for garbage would stall a step
limits = hardware.limits(device, dtype, here.world_size)
log.start_clock(iter_num, sequences_per_iter * block_size, raw_model.flops_per_token(), limits)
micro_batches = loader.micro_batches(iter_num)
tokens, targets = next(micro_batches)
loss = torch.zeros((), device=device)  # our own tensor: a CUDA graph's output would be overwritten
stopping, saved_iter = stop_request.asked(), (iter_num if init_from == "resume" else None)
rescue = Rescue(ckpt_path, training_state, step_shape, fit.split, log.line)  # saves at an error
while not stopping:
    # ---- learning rate ------------------------------------------------------
    lr = optim.set_schedule(optimizer, iter_num, config)

    # ---- evaluate and save --------------------------------------------------
    finished = iter_num >= max_iters
    if eval_only or (eval_interval > 0 and (iter_num % eval_interval == 0 or finished)):
        began = time.perf_counter()
        losses = {"train_loss": evaluate(train_file), "val_loss": evaluate(val_file)}
        rescue.require_finite(losses, iter_num)
        if stopping := stop_request.asked():
            break  # the run that goes on evaluates again
        better = iter_num > 0 and not eval_only and losses["val_loss"] < best_val_loss
        log.evaluation({"iter": iter_num} | losses, time.perf_counter() - began, better)
        if eval_only:
            break
        if better and try_save(best_path, weights(losses["val_loss"])):
            best_val_loss = losses["val_loss"]
        if iter_num > 0 and (better or always_save_checkpoint):
            saved_iter = iter_num if try_save(ckpt_path, training_state()) else None
        log.restart_clock(iter_num)  # evaluation is not training time
    if iter_num > 0 and iter_num == optim.decay_start(config) and always_save_checkpoint:
        try_save(out_path / "before_decay.pt", training_state(), overwrite=False)  # to prolong it
        log.restart_clock(iter_num)
    if sample_interval and iter_num % sample_interval == 0 and iter_num > 0:
        with autocast:
            text = sample_while_training(raw_model, val_file.beginning(8), tokenizer, seed)
        log.line(f"iter {iter_num:6d} | sample: {text!r}")
        log.restart_clock(iter_num)
    if finished:
        break

    # ---- micro-steps --------------------------------------------------------
    torch.manual_seed(hash((seed, iter_num, here.rank)))  # so dropout is the same after a resume
    loss.zero_()
    for _ in range(gradient_accumulation_steps // here.world_size):
        loss += micro_step(model, tokens, targets)
        tokens, targets = next(micro_batches)  # while the device computes this one

    # ---- clip and step ------------------------------------------------------
    gradients.sum_over_processes()
    scaler.unscale_(optimizer)
    grad_norm = optim.clip_in_step(optimizer, grad_clip)
    stopping = stop_request.asked()
    log_due = stopping or iter_num % log_interval == 0 or iter_num + 1 == max_iters
    if log_due:  # copied now, so that reading waits for backward, but not for the optimizer
        distributed.all_reduce_sum(loss)
        read_numbers = hardware.read_later(loss, grad_norm, optimizer.skipped)
    rescue.whole = False  # weights and iteration do not match until iter_num is raised below
    scaler.step(optimizer)
    scaler.update()
    gradients.clear()

    # ---- log ----------------------------------------------------------------
    if log_due:
        loss_now, norm_now, skipped = read_numbers()  # waits for the device
        log.step(iter_num, loss_now, lr, norm_now, hardware.peak_memory_gib(device))
        rescue.require_finite({"loss": loss_now}, iter_num, skipped)
    iter_num, rescue.whole = iter_num + 1, True
    log.progress(iter_num)
    profiler.step()

# -----------------------------------------------------------------------------
# the end
saved = eval_only or saved_iter == iter_num or try_save(ckpt_path, training_state(), last=True)
log.close()
distributed.stop()
if not saved:
    raise SystemExit(f"error: could not save the checkpoint of iteration {iter_num}")
if not here.master:
    distributed.leave()
if stopping:
    print(stopped(iter_num, ckpt_path))
elif not eval_only:
    print(log.summary(iter_num, loader.position(iter_num) * block_size, best_val_loss, best_path))
