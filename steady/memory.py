"""If a training step does not fit into memory, split the same batch into smaller micro-batches.

`fit` tries real steps. A rough estimate is used only where trying is impossible: before the model
is built, and with fsdp, where a process that fails would leave the others waiting.
"""

import gc
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from configurator import CHOICES
from steady import UserError, compiling, distributed, hardware
from steady.compiling import Plan
from steady.distributed import Process

CHECKPOINTING = CHOICES["activation_checkpointing"]
SAFETY_MARGIN = 0.8  # share of the memory that a rough estimate may use if there is no second try

OUT_OF_MEMORY = "out of memory"
# the messages of GPUs, their libraries, and CPUs
OUT_OF_MEMORY_WORDS = "out of memory|ALLOC_FAILED|can't allocate memory|not enough memory|bad_alloc"


class Split(NamedTuple):
    """A way to split an iteration into micro-batches."""

    batch_size: int
    activation_checkpointing: str


class Fit(NamedTuple):
    """A split that fits, the model that ran it, and a report for the user."""

    model: nn.Module
    batch_size: int
    activation_checkpointing: str
    report: str
    memory_flags: str  # flags for the next smaller split; "" if there is none


def flags(split: Split, sequences: int, eval_sequences: int) -> str:
    """The flags for `split`, with the same global batch of `sequences`, and evaluations that are at
    least as large."""
    size, kind = split
    return (
        f"--batch_size={size} --gradient_accumulation_steps={sequences // size} "
        f"--activation_checkpointing={kind} --eval_iters={math.ceil(eval_sequences / size)}"
    )


def splits_to_try(wanted: Split, sequences: int) -> list[Split]:
    """The splits of a process's `sequences` to try, in order. Micro-batches shrink to about half
    each time (always a divisor of `sequences`), down to single sequences. Then activation
    checkpointing increases."""
    size, kind = wanted
    sizes = [size]
    while sizes[-1] > 1:
        half = sizes[-1] // 2
        sizes.append(next((n for n in range(half, 1, -1) if sequences % n == 0), 1))
    more = CHECKPOINTING[CHECKPOINTING.index(kind) + 1 :]
    return [Split(size, kind) for size in sizes] + [Split(1, kind) for kind in more]


def rough_gib(config: dict[str, Any], tokens: int, kind: str, process: Process) -> float:
    """Rough memory of a step with `tokens` tokens, in GiB. This rule of thumb for transformers is
    accurate to within a third: 12 n_layer n_embd^2 parameters of 16 bytes (weights, gradients and
    AdamW's two moments; 4 bytes for evaluation), and 34 bytes per token, layer and unit of width
    (Korthikanti et al. 2022)."""
    width, layers = config["n_embd"], config["n_layer"]
    parameters = 12 * layers * width**2 + config["vocab_size"] * width
    shards = process.world_size if process.shards_model else 1
    kept = {"none": 34, "selective": 4, "block": 2}[kind] * layers + (kind != "none") * 34
    scale = process.dtype.itemsize / 2
    bytes_each = 4 if config["eval_only"] else 16
    return (bytes_each * parameters / shards + kept * scale * tokens * width) / 2**30


def require_room(config: dict[str, Any], process: Process) -> None:
    """Raises UserError if the model is much too large for the machine. Allocates nothing.

    config: the settings, including the model's sizes.
    """
    needed = rough_gib(config, config["block_size"], "block", process)
    machine_gib = hardware.machine_memory_gib(process.device)
    if needed > 1.5 * machine_gib:
        raise UserError(
            f"a model of n_layer={config['n_layer']}, n_embd={config['n_embd']}, "
            f"vocab_size={config['vocab_size']} takes about {needed:,.1f} GiB to train with one "
            f"sequence, but {process.device} has {machine_gib:.1f} GiB: use a smaller model or "
            "block_size"
        )


def fit(
    trial: Callable[[int, str], nn.Module], config: dict[str, Any], process: Process, plan: Plan
) -> Fit:
    """Find a split of an iteration's sequences that fits, the same on all processes: the one in the
    settings, or the next smaller one that fits.

    Args:
        trial: runs a step with a batch size and a kind of activation checkpointing, without
            communication (except for fsdp), and returns the model that it ran.
        config: the settings, including the model's sizes.

    If compiled code fails, the same step runs again in eager mode. A bug in the model then raises
    its error there, with a traceback. Raises UserError if nothing fits.
    """
    wanted = Split(config["batch_size"], config["activation_checkpointing"])
    per_process = config["batch_size"] * config["gradient_accumulation_steps"] // process.world_size
    sequences, eval_sequences = per_process * process.world_size, (
        config["eval_iters"] * config["batch_size"])  # fmt: skip
    available_gib = distributed.all_reduce_min(hardware.available_memory_gib(process.device))
    splits, lines = splits_to_try(wanted, per_process), []
    # fsdp has no second try. On a GPU, skip only hopeless splits, to save the time to compile them.
    # A CPU's system hands out memory that it does not have, so trying is not safe there.
    share = SAFETY_MARGIN if process.shards_model else 2.0 if process.device.type == "cuda" else 1.0
    limit = share * distributed.all_reduce_min(hardware.machine_memory_gib(process.device))

    def may_fit(split: Split) -> bool:
        tokens = split.batch_size * config["block_size"]
        return rough_gib(config, tokens, split.activation_checkpointing, process) <= limit

    smallest = splits[-1:] if process.device.type == "cuda" else []
    splits = [split for split in splits if may_fit(split)] or smallest
    splits = splits[:1] if process.shards_model else splits
    tried = 0
    while splits:
        tried = splits[0].batch_size
        model, failure = attempt(trial, splits[0], process, plan)
        if not (failure if process.shards_model else distributed.any_process(bool(failure))):
            if splits[0] != wanted:
                lines.append(
                    f"out of memory: going on with {flags(splits[0], sequences, eval_sequences)}, "
                    "the same global batch; pass these flags to start with this split next time"
                )
            if plan.cuda_graphs:
                lines.append(compiling.graphs_report())
            peak = hardware.peak_memory_gib(process.device)
            if peak is not None:
                lines.append(f"memory {peak:.2f} of {available_gib:.2f} GiB in a trial step")
            else:  # this device does not report its peak
                tokens = splits[0].batch_size * config["block_size"]
                peak = rough_gib(config, tokens, splits[0].activation_checkpointing, process)
            keep_unsharded_if_it_fits(model, peak, available_gib, process)
            gc.collect()
            gc.freeze()  # later collections skip the set-up's objects: scanning them stalls a step
            smaller = splits_to_try(splits[0], per_process)[1:2]
            less = flags(smaller[0], sequences, eval_sequences) if smaller else ""
            return Fit(model, *splits[0], "\n".join(lines), less)
        del model
        release()
        broken = failure not in ("", OUT_OF_MEMORY)
        if not process.shards_model and distributed.any_process(broken):  # try it uncompiled
            plan.fall_back(failure if broken else "it failed in another process")
            lines.append(
                f"warning: not compiled, because compiling fails here: {plan.obstacle} "
                "(TORCHDYNAMO_VERBOSE=1 shows the whole error, --compile=False skips compiling)"
            )
        else:
            splits = splits[1:]
    if process.shards_model and tried > 1:
        raise UserError(
            f"out of memory with {tried} sequences: use "
            f"--batch_size={tried // 2} and raise --gradient_accumulation_steps to match, or use "
            "--activation_checkpointing=block"
        )
    raise UserError(
        "out of memory even with one sequence and activation checkpointing: use a smaller "
        "block_size or model"
    )


def attempt(
    trial: Callable[[int, str], nn.Module], split: Split, process: Process, plan: Plan
) -> tuple[nn.Module | None, str]:
    """The result of `trial(*split)`, or why it failed: OUT_OF_MEMORY, or an error that the compiler
    may have caused. Raises errors that the compiler cannot have caused."""
    try:
        return trial(*split), ""
    except Exception as error:
        if is_out_of_memory(error):
            return None, OUT_OF_MEMORY
        # with fsdp the other processes wait in a collective, so there is no second try
        if not plan.compiled or process.shards_model:
            raise
        return None, compiling.why_not_compiled(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that a GPU or the CPU is out of memory."""
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one; libraries raise their own
        return bool(re.search(OUT_OF_MEMORY_WORDS, str(error)))
    return isinstance(error, MemoryError)


def keep_unsharded_if_it_fits(
    model: nn.Module, peak_gib: float, available_gib: float, process: Process
) -> None:
    """With fsdp, keep the gathered weights from forward to backward if there is ample memory: this
    saves a third of the communication."""
    if not process.shards_model:
        return
    weights = sum(p.numel() for p in model.parameters()) * process.dtype.itemsize / 2**30
    if distributed.all_reduce_min(SAFETY_MARGIN * available_gib - peak_gib - weights) > 0:
        distributed.keep_unsharded(model)


def release() -> None:
    """Free what a failed attempt left behind: compiled code, CUDA graph pools, cached blocks."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        from torch._inductor import cudagraph_trees

        cudagraph_trees.reset_cudagraph_trees()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
