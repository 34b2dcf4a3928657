"""Train a GPT.

    python train.py config/train_shakespeare_char.py --batch_size=32
    python train.py config/train_shakespeare_char.py --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    python train.py --help

The settings below are those for GPT-2 (124M) on OpenWebText; a config file and `--key=value`
change them. Ctrl-C, SIGTERM or a lost terminal finishes the step, saves, and says how to go on.
"""

import gc
import math
import os
import shlex
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import environment  # before torch: it sets the CUDA allocator's variable

import torch

import checkpoint
import distributed
import hardware
import memory
from configurator import configure, read_settings, resolve
from convert import check_data, read_pretrained
from dataloader import DataLoader, TokenFile, read_meta, validation_batches
from model import CHECKPOINTING, GPT, GPTConfig
from optim import (
    SCHEDULES,
    allocate_state,
    build_optimizer,
    clip_in_step,
    flatten_gradients,
    learning_rate_at,
    load_moments,
)
from profiling import Profiler
from runlog import RunLog
from stop import StopRequest
from tokenizer import META_KEYS, from_meta

# output and evaluation
out_dir = "out"  # folder of the checkpoints and metrics.jsonl
init_from = "scratch"  # scratch, resume (out_dir/ckpt.pt), or a Hugging Face model's folder or id
eval_interval = 2000  # iterations between evaluations; 0: never
eval_iters = 200  # batches per evaluation and split, always the same ones
eval_only = False  # evaluate once and exit
log_interval = 1  # iterations between log lines
sample_interval = 0  # iterations between printed samples; 0: none
always_save_checkpoint = True  # save at every evaluation; False: only after a better one
# wandb
wandb_log = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
wandb_project = "owt"  # its project
wandb_run_name = "gpt2"  # its run name
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
vocab_size = 0  # 0: the data set's, rounded up to a multiple of 64
dropout = 0.0  # 0 for pretraining, 0.1 and more for finetuning
rope_theta = 10000.0  # base of the rotary embeddings
qk_norm = False  # normalise queries and keys
tied_embeddings = True  # the output head shares the token embedding
# optimizer
learning_rate = 6e-4  # peak learning rate
max_iters = 600000  # iterations to train for
weight_decay = 1e-1  # of matrices and embeddings
beta1 = 0.9  # AdamW
beta2 = 0.95  # AdamW
grad_clip = 1.0  # largest gradient norm; 0.0: no clipping
# learning-rate schedule
lr_schedule = "cosine"  # cosine, or wsd: warm-up, stable, decay
decay_lr = True  # False: constant after warm-up
warmup_iters = 2000  # iterations of linear warm-up
lr_decay_iters = 600000  # iteration at which min_lr is reached, usually max_iters
min_lr = 6e-5  # final learning rate, usually a tenth of learning_rate
decay_fraction = 0.2  # wsd: share of lr_decay_iters spent decaying
# system
device = "auto"  # auto, cpu, cuda, cuda:N, mps
dtype = "auto"  # auto, float32, bfloat16, float16: what matrix products are computed in
compile = True  # torch.compile the model; falls back with a line that says why
compile_mode = "default"  # default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs
activation_checkpointing = "none"  # none, selective (all but attention) or block: less memory
parallel = "ddp"  # several processes: ddp, or fsdp to divide a model too large for one GPU
backend = "auto"  # between processes: auto, nccl, gloo
profile = False  # write out_dir/trace.json of a few steps
memory_snapshot = False  # write out_dir/memory.pickle, the GPU memory's history in a few steps

config = configure(globals())

# -----------------------------------------------------------------------------
# check the settings before anything takes time
for key, choices in (
    ("lr_schedule", SCHEDULES),
    ("compile_mode", environment.COMPILE_MODES),
    ("activation_checkpointing", CHECKPOINTING),
    ("parallel", distributed.ENGINES),
    ("backend", distributed.BACKENDS),
):
    if config[key] not in choices:
        raise ValueError(f"unknown {key}={config[key]!r}: use {', '.join(choices)}")
auto_batch = batch_size == "auto"
if auto_batch:  # the global batch is what it is without this flag
    arguments = [argument for argument in sys.argv[1:] if argument != "--batch_size=auto"]
    batch_size = config["batch_size"] = resolve(read_settings(__file__), arguments)["batch_size"]
if isinstance(batch_size, str):
    raise ValueError(f"batch_size={batch_size!r} must be an integer, or auto on the command line")
for least, below, keys in (
    (1, math.inf, ("batch_size", "gradient_accumulation_steps", "eval_iters", "log_interval")),
    (0, math.inf, ("eval_interval", "sample_interval", "vocab_size", "max_iters")),
    (0, math.inf, ("learning_rate", "min_lr", "weight_decay", "grad_clip")),
    (0, math.inf, ("warmup_iters", "lr_decay_iters", "decay_fraction")),
    (0, 1, ("beta1", "beta2")),
    (-(2**63), 2**63, ("seed",)),
):
    for key in keys:
        if not least <= config[key] < below:
            raise ValueError(f"{key}={config[key]} must be in [{least}, {below})")

# -----------------------------------------------------------------------------
# this process and its device
rank, local_rank, world_size = distributed.place()
master = rank == 0
ddp, fsdp = (world_size > 1 and parallel == engine for engine in distributed.ENGINES)
distributed.check_accumulation(gradient_accumulation_steps, world_size)
ckpt_path, best_path = Path(out_dir, "ckpt.pt"), Path(out_dir, "best.pt")
if master:
    checkpoint.make_folder(Path(out_dir))
if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and ckpt_path.exists():
    init_from = config["init_from"] = "resume"  # torchrun starts all anew after one has died
device = hardware.choose_device(device, local_rank if world_size > 1 else None)
dtype = hardware.choose_dtype(dtype, device)
if memory_snapshot and device.type != "cuda":
    raise ValueError(f"memory_snapshot=True needs a CUDA device, not {device}")
cuda_graphs = compile and compile_mode in environment.GRAPH_MODES and device.type == "cuda"
if fsdp and (cuda_graphs or dtype == torch.float16):
    raise ValueError(
        "parallel=fsdp exchanges weights inside a step, which CUDA graphs and float16's loss "
        "scaling do not allow: use compile_mode=default (or max-autotune-no-cudagraphs) and "
        "dtype=bfloat16, or parallel=ddp"
    )
distributed.start(device, backend, config)
available_gib = distributed.smallest(hardware.available_memory_gib(device))
if auto_batch and available_gib == math.inf:
    raise ValueError(f"batch_size=auto needs a CUDA device, not {device}")
amp = hardware.autocast(device, dtype)
torch.manual_seed(seed)

# -----------------------------------------------------------------------------
# data
data_dir = Path(__file__).parent / "data" / dataset
meta = read_meta(data_dir)
data_vocab = meta.get("vocab_size", vocab_size or 50304)
vocab_size = vocab_size or math.ceil(data_vocab / 64) * 64
tokenizer_meta = {key: meta[key] for key in META_KEYS if key in meta}
pretrained = None if init_from in ("scratch", "resume") else read_pretrained(init_from)
if pretrained:
    check_data(pretrained, init_from, block_size, dataset, tokenizer_meta)
    vocab_size = pretrained.model_config["vocab_size"]
train_file, val_file = (
    TokenFile(data_dir / name, block_size, min(data_vocab, vocab_size), meta.get("dtype", "uint16"))
    for name in ("train.bin", "val.bin")
)

# -----------------------------------------------------------------------------
# model and optimizer, new or from the checkpoint
saved = checkpoint.load(ckpt_path) if init_from == "resume" else None
pretrained_dtype = pretrained.dtype if pretrained else saved and saved.get("pretrained_dtype")
if pretrained_dtype:  # the architecture comes with the weights
    given = pretrained.model_config if pretrained else saved["model_config"]
    model_config = GPTConfig(**given | {"block_size": block_size, "dropout": dropout})
else:
    model_config = GPTConfig.from_settings(config, vocab_size)
hardware.prepare(device, dtype, model_config.n_embd, block_size)
raw_model = GPT(model_config).to("cpu" if fsdp else device)
config |= {key: value for key, value in raw_model.settings().items() if key in config}
raw_model.use_cudnn_attention(hardware.cudnn_attention(device, dtype, model_config.head_dim))
n_params, flops_per_token = raw_model.num_params(), raw_model.flops_per_token()
if pretrained:
    raw_model.load_state_dict(pretrained.weights)
    del pretrained
if saved:
    checkpoint.check_same_model(
        saved["model_config"] | {"tokenizer": saved["tokenizer"]},
        raw_model.settings() | {"tokenizer": tokenizer_meta},
        ckpt_path,
    )
    raw_model.load_state_dict(saved["model"])
if fsdp:
    distributed.shard(raw_model, device, dtype)
optimizer = build_optimizer(raw_model, learning_rate, (beta1, beta2), weight_decay)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
iter_num, best_val_loss, data_offset = 0, math.inf, 0
sequences_per_iter = batch_size * gradient_accumulation_steps
sequences_per_process = sequences_per_iter // world_size
eval_sequences = eval_iters * batch_size
tokens_per_iter = sequences_per_iter * block_size
if saved:
    load_moments(optimizer, saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    iter_num, best_val_loss = saved["iter_num"], saved["best_val_loss"]
    # no sequence twice, even if the global batch is another now
    data_offset = saved["sequences"] - iter_num * sequences_per_iter
    del saved
elif master and not eval_only:
    checkpoint.set_aside(Path(out_dir))
allocate_state(optimizer)

# raw_model stays what is saved, sampled and counted: no "_orig_mod." in any name
obstacle = environment.compile_obstacle(device) if compile else "compile=False"
cuda_graphs = cuda_graphs and not obstacle
# A CUDA graph's backward writes its gradients to memory that its next replay overwrites. So .grad
# is our own, allocated once, added to, and zeroed in place. (Marking steps or cloning activations,
# the usual advice, does not help.)
if cuda_graphs:
    flat_gradient = flatten_gradients(raw_model)

log = RunLog(Path(out_dir), config, iter_num, quiet=not master)
flops_per_iter = flops_per_token * tokens_per_iter
peak_flops = hardware.peak_flops(device, dtype)
log.line(environment.summary(device, dtype, obstacle, compile_mode))
if world_size > 1:
    log.line(f"{world_size} processes, {parallel}")
log.line(f"model {n_params:,} parameters, vocabulary {data_vocab} of {vocab_size}")
log.line(f"data {data_dir}, {len(train_file.tokens):,} tokens, {tokens_per_iter:,} per iteration")
if "unigram_entropy" in meta:
    log.line(f"knowing only token frequencies gives val loss {meta['unigram_entropy']:.4f}")
settings = ", ".join(f"{key}={value}" for key, value in config.items())
log.line(textwrap.fill(f"settings {settings}", 100, subsequent_indent="  ", break_on_hyphens=False))


def micro_step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Forward and backward; returns this micro-batch's part of the step's loss."""
    if cuda_graphs:
        torch.compiler.cudagraph_mark_step_begin()  # the last one's outputs are done with
    with amp:
        micro_loss = model(tokens, targets) / gradient_accumulation_steps
    scaler.scale(micro_loss).backward()
    return micro_loss.detach()


@torch.no_grad()
def evaluate(file: TokenFile) -> float:
    """Mean loss over the fixed windows of `file`, through the same (compiled) model as training."""
    model.eval()
    total, count = torch.zeros((), device=device), -(-eval_sequences // batch_size)
    batches = validation_batches(file, batch_size, count * batch_size, device, rank, world_size)
    for tokens, targets in batches:
        with amp:
            total += model(tokens, targets)  # into our own tensor: a graph's output does not last
    model.train()
    distributed.add_up(total)
    return total.item() / count


def try_step(size: int, checkpointing: str) -> None:
    """All that can run out of memory, with micro-batches of `size` sequences; leaves no trace."""
    global model
    raw_model.use_activation_checkpointing(checkpointing)
    model = raw_model
    # dynamic=False: another shape would otherwise be compiled for all shapes, and be slow
    if not obstacle and fsdp:
        distributed.compile_blocks(raw_model, compile_mode, checkpointing)
    elif not obstacle:
        model = torch.compile(raw_model, mode=compile_mode, dynamic=False)
    tokens = torch.zeros(size, block_size, dtype=torch.int64, device=device)
    targets = torch.zeros_like(tokens)  # not `tokens` again: code compiled for that is of no use
    try:
        for _ in range(3 if cuda_graphs else min(2, sequences_per_process // size)):
            micro_step(tokens, targets)  # a graph runs once to warm up, is recorded, then replayed
        if ddp and not cuda_graphs:
            flatten_gradients(raw_model)  # what summing them takes
        if eval_interval or eval_only:
            with torch.no_grad(), amp:
                model.eval()(tokens, targets)
    finally:
        model.train()
        optimizer.zero_grad(set_to_none=not cuda_graphs)


def print_sample() -> None:
    """Continue the first validation tokens, through the plain model and a generator of its own, so
    that neither CUDA graphs nor training's random numbers notice."""
    prompt = torch.from_numpy(val_file.tokens[:8].astype("int64"))[None].to(device)
    generator = torch.Generator(device).manual_seed(seed)
    raw_model.eval()
    with amp, torch.compiler.set_stance("force_eager"):
        out = raw_model.generate(
            prompt, 100, temperature=0.8, top_k=200, vocab_size=data_vocab, generator=generator
        )
    raw_model.train()
    log.line(f"iter {iter_num:6d} | sample: {tokenizer.decode(out[0].tolist())!r}")
    torch.cuda.empty_cache()  # blocks of other sizes than training uses; nothing without CUDA


def save(path: Path, content: dict) -> bool:
    """Write a checkpoint; if that fails, keep the old one, say so, and go on training."""
    failed, content = False, distributed.gather(content)
    try:
        if master:
            checkpoint.save(path, content)
    except (OSError, RuntimeError) as error:
        log.line(f"warning: {path} was not saved, the last good one is kept: {error}")
        failed = True
    return not distributed.any_of(failed)


def weights() -> dict:
    """What sampling needs: the content of best.pt and part of ckpt.pt."""
    return {
        "model": raw_model.state_dict(),
        "model_config": raw_model.settings(),
        "config": config,
        "tokenizer": tokenizer_meta,
        "pretrained_dtype": pretrained_dtype,
        "iter_num": iter_num,
        "best_val_loss": best_val_loss,
    }


def training_state() -> dict:
    """All that is needed to go on bit for bit: the content of ckpt.pt."""
    return weights() | {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "sequences": loader.position(iter_num),
    }


def stop_if_not_finite(losses: dict[str, float]) -> None:
    """A loss that is NaN or infinite ends the run before it is saved over a good checkpoint."""
    if not all(map(math.isfinite, losses.values())):
        found = " and ".join(f"{name} {loss}" for name, loss in losses.items())
        raise ValueError(
            f"{found} at iteration {iter_num}: not finite; checkpoints in {out_dir} were not "
            "overwritten: go on from there with a lower learning_rate, or with dtype=bfloat16"
        )


tokenizer = from_meta(tokenizer_meta) if sample_interval else None
profiler = Profiler(Path(out_dir), profile and master, memory_snapshot and master)
stop = StopRequest(alone=world_size == 1, announce=master)
stopping, saved_iter = False, None

# -----------------------------------------------------------------------------
# find out whether a step fits into memory, and split it further if not: the same global batch,
# the same data, the same loss curve
shards = world_size if fsdp else 1
step_memory = partial(
    memory.estimate, model_config, n_params, dtype=dtype, compiled=not obstacle,
    shards=shards, summed=ddp and not cuda_graphs,
)  # fmt: skip
wanted = batch_size, activation_checkpointing
fitting = memory.choose_split(
    try_step, step_memory, sequences_per_process, wanted, available_gib, auto_batch, fsdp
)
if fitting != wanted:
    batch_size, activation_checkpointing = fitting
    gradient_accumulation_steps = sequences_per_iter // batch_size
    why = "batch_size=auto" if auto_batch else "out of memory"
    log.line(
        f"{why}: going on with --batch_size={batch_size} --gradient_accumulation_steps="
        f"{gradient_accumulation_steps} --activation_checkpointing={activation_checkpointing}, "
        "the same global batch; these flags make it permanent"
    )
keeps_gradients = cuda_graphs or gradient_accumulation_steps > world_size
components = step_memory(batch_size, activation_checkpointing, keeps_gradients)
if fsdp:
    more = step_memory(batch_size, activation_checkpointing, keeps_gradients, gathered=True)
    if sum(more.values()) < 0.8 * available_gib:
        components = more
        distributed.keep_gathered(raw_model)
log.line(f"memory {memory.describe(components)}, by estimate")
loader = DataLoader(
    train_file, batch_size, gradient_accumulation_steps, seed, device, rank, world_size, data_offset
)

# -----------------------------------------------------------------------------
# training loop
gc.collect()
gc.freeze()  # set-up's many objects are no garbage; looking through them would stall a step
micro_batches = loader.micro_batches(iter_num)
tokens, targets = next(micro_batches)
loss = torch.zeros((), device=device)  # our own tensor: a CUDA graph's output would be overwritten
logged_at, logged_iter = time.perf_counter(), iter_num
while True:
    # ---- learning rate ------------------------------------------------------
    lr = learning_rate_at(iter_num, config)
    for group in optimizer.param_groups:
        group["lr"] = lr

    # ---- evaluate and save --------------------------------------------------
    finished = iter_num >= max_iters
    due = eval_only or (eval_interval > 0 and (iter_num % eval_interval == 0 or finished))
    if due and not stopping:
        began = time.perf_counter()
        losses = {"train_loss": evaluate(train_file), "val_loss": evaluate(val_file)}
        stop_if_not_finite(losses)
        better = losses["val_loss"] < best_val_loss
        note = f" | {time.perf_counter() - began:5.1f} s" + (" | best so far" if better else "")
        log.evaluation({"iter": iter_num} | losses, note)
        best_val_loss = min(best_val_loss, losses["val_loss"])
        if eval_only:
            break
        if iter_num > 0:
            if better:
                save(best_path, weights())
            if better or always_save_checkpoint:
                saved_iter = iter_num if save(ckpt_path, training_state()) else None
        logged_at, logged_iter = time.perf_counter(), iter_num  # evaluation is not training time
    if sample_interval and iter_num % sample_interval == 0 and iter_num > 0:
        print_sample()
        logged_at, logged_iter = time.perf_counter(), iter_num
    if finished or stopping:
        break

    # ---- micro-steps --------------------------------------------------------
    torch.manual_seed(hash((seed, iter_num, rank)))  # dropout too does not depend on a resume
    loss.zero_()
    for _ in range(gradient_accumulation_steps // world_size):
        loss += micro_step(tokens, targets)
        tokens, targets = next(micro_batches)  # now, while the device is busy with this one

    # ---- clip and step ------------------------------------------------------
    if ddp:
        distributed.add_up(flat_gradient if cuda_graphs else flatten_gradients(raw_model))
    scaler.unscale_(optimizer)
    grad_norm = clip_in_step(optimizer, grad_clip)
    shown = iter_num % log_interval == 0 or iter_num + 1 == max_iters
    if shown:  # copied already, so that reading it does not wait for the optimizer
        distributed.add_up(loss)
        read_numbers = hardware.read_later(loss, grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=not cuda_graphs)
    stopping = distributed.any_of(stop.requested)

    # ---- log ----------------------------------------------------------------
    if shown:
        loss_now, norm_now = read_numbers()  # waits for the device
        seconds = (time.perf_counter() - logged_at) / (iter_num + 1 - logged_iter)
        logged_at, logged_iter = time.perf_counter(), iter_num + 1
        log.step({
            "iter": iter_num,
            "loss": loss_now,
            "lr": lr,
            "grad_norm": norm_now,
            "ms": seconds * 1e3,
            "tokens_per_s": tokens_per_iter / seconds,
            "mfu": flops_per_iter / seconds / (peak_flops * world_size) if peak_flops else None,
            "memory_gib": hardware.peak_memory_gib(device),
        })  # fmt: skip
        stop_if_not_finite({"loss": loss_now})
    iter_num += 1
    log.progress(iter_num)
    written = profiler.step()
    if written:
        log.line(written)

# -----------------------------------------------------------------------------
saved_last = eval_only or saved_iter == iter_num or save(ckpt_path, training_state())
log.close()
distributed.stop()
if not saved_last:
    raise SystemExit(f"error: the last checkpoint at iteration {iter_num} was not saved")
if not master:
    distributed.leave()
if eval_only:
    sys.exit()
if stopping:
    command = [argument for argument in sys.argv[1:] if not argument.startswith("--init_from=")]
    print(f"stopped at iteration {iter_num}, saved {ckpt_path}; to go on:")
    print(f"  {shlex.join([*distributed.launcher(), sys.argv[0], *command, '--init_from=resume'])}")
else:
    print(f"finished at iteration {iter_num}, best val loss {best_val_loss:.4f}; to see samples:")
    print(f"  python sample.py --out_dir={out_dir}")
