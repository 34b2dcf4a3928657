"""What to do when a training step does not fit into memory: split the same batch further.

`fit` tries real steps. A rough estimate serves only where a step cannot be tried: before a model is
built, and with fsdp, where a process that fails would leave the others waiting.
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
SAFE = 0.8  # share of the memory that a rough estimate may take where there is no second try

OUT_OF_MEMORY = "out of memory"
# in the words of GPUs, their libraries, and CPUs
OUT_OF_MEMORY_WORDS = "out of memory|ALLOC_FAILED|can't allocate memory|not enough memory|bad_alloc"


class Split(NamedTuple):
    """How the sequences of an iteration are computed."""

    batch_size: int
    activation_checkpointing: str


class Fit(NamedTuple):
    """A split that fits, the model that was run to find out, and what to tell the user."""

    model: nn.Module
    batch_size: int
    activation_checkpointing: str
    report: str
    flags_for_less: str  # the settings of the next smaller split; "" if there is none


def flags(split: Split, sequences: int, eval_sequences: int) -> str:
    """The settings for `split`, with the same global batch of `sequences` and evaluations at least
    as large."""
    size, kind = split
    return (
        f"--batch_size={size} --gradient_accumulation_steps={sequences // size} "
        f"--activation_checkpointing={kind} --eval_iters={math.ceil(eval_sequences / size)}"
    )


def splits_to_try(wanted: Split, sequences: int) -> list[Split]:
    """In which order to look for a split of a process's `sequences` that fits: micro-batches of
    about half the size each time, divisors of `sequences`, then single sequences with more and more
    activation checkpointing."""
    size, kind = wanted
    sizes = [size]
    while sizes[-1] > 1:
        half = sizes[-1] // 2
        sizes.append(next((n for n in range(half, 1, -1) if sequences % n == 0), 1))
    more = CHECKPOINTING[CHECKPOINTING.index(kind) + 1 :]
    return [Split(size, kind) for size in sizes] + [Split(1, kind) for kind in more]


def rough_gib(config: dict[str, Any], tokens: int, kind: str, process: Process) -> float:
    """What a step of so many tokens takes, by a rule of thumb for transformers that is right to
    within a third: 12 n_layer n_embd^2 parameters of 16 bytes (weights, gradients and AdamW's two
    moments; 4 to evaluate), and 34 bytes per token, layer and unit of width (Korthikanti et al.
    2022)."""
    width, layers = config["n_embd"], config["n_layer"]
    parameters = 12 * layers * width**2 + config["vocab_size"] * width
    shards = process.world_size if process.shards_model else 1
    kept = {"none": 34, "selective": 4, "block": 2}[kind] * layers + (kind != "none") * 34
    scale = process.dtype.itemsize / 2
    bytes_each = 4 if config["eval_only"] else 16
    return (bytes_each * parameters / shards + kept * scale * tokens * width) / 2**30


def require_room(config: dict[str, Any], process: Process) -> None:
    """Raises UserError for a model that is much too large for the machine; nothing is allocated.

    config: the settings, with the sizes of the model.
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
    """How to split the sequences of an iteration, the same way on all processes: as the settings
    say if that fits, else the next split that does.

    Args:
        trial: runs a step with a batch size and a kind of activation checkpointing, exchanges
            nothing with other processes (except for fsdp), and returns the model that it ran.
        config: the settings, with the sizes of the model.

    Where compiled code fails, the same step runs uncompiled: an error of the model's own is then
    raised from there, with its traceback. Raises UserError when nothing fits.
    """
    wanted = Split(config["batch_size"], config["activation_checkpointing"])
    per_process = config["batch_size"] * config["gradient_accumulation_steps"] // process.world_size
    sequences, eval_sequences = per_process * process.world_size, (
        config["eval_iters"] * config["batch_size"])  # fmt: skip
    available_gib = distributed.all_reduce_min(hardware.available_memory_gib(process.device))
    splits, lines = splits_to_try(wanted, per_process), []
    # where there is no second try, on a CPU, whose memory is given out before it is there, and
    # where compiling what cannot fit would take time
    share = SAFE if process.shards_model else 2.0 if process.device.type == "cuda" else 1.0
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
                    "the same global batch; these flags make it permanent"
                )
            if plan.cuda_graphs:
                lines.append(compiling.graphs_report())
            peak = hardware.peak_memory_gib(process.device)
            if peak is not None:
                lines.append(f"memory {peak:.2f} of {available_gib:.2f} GiB in a trial step")
            else:  # this device does not count
                tokens = splits[0].batch_size * config["block_size"]
                peak = rough_gib(config, tokens, splits[0].activation_checkpointing, process)
            keep_gathered_if_there_is_room(model, peak, available_gib, process)
            gc.collect()
            gc.freeze()  # to search what set-up has made for garbage would stall a step
            smaller = splits_to_try(splits[0], per_process)[1:2]
            less = flags(smaller[0], sequences, eval_sequences) if smaller else ""
            return Fit(model, *splits[0], "\n".join(lines), less)
        del model
        release()
        broken = failure not in ("", OUT_OF_MEMORY)
        if not process.shards_model and distributed.any_process(broken):  # try it uncompiled
            plan.give_up(failure if broken else "it failed in another process")
            lines.append(
                f"warning: not compiled, because compiling fails here: {plan.obstacle} "
                "(TORCHDYNAMO_VERBOSE=1 shows all of it, --compile=False none)"
            )
        else:
            splits = splits[1:]
    if process.shards_model and tried > 1:
        raise UserError(
            f"out of memory with {tried} sequences: use "
            f"--batch_size={tried // 2} with --gradient_accumulation_steps so much "
            "larger, or --activation_checkpointing=block"
        )
    raise UserError(
        "out of memory even with one sequence and activation checkpointing: use a smaller "
        "block_size or model"
    )


def attempt(
    trial: Callable[[int, str], nn.Module], split: Split, process: Process, plan: Plan
) -> tuple[nn.Module | None, str]:
    """The result of `trial(*split)`, or why it failed: OUT_OF_MEMORY, or a reason that may be the
    compiler's. An error that cannot be the compiler's is raised."""
    try:
        return trial(*split), ""
    except Exception as error:
        if is_out_of_memory(error):
            return None, OUT_OF_MEMORY
        # with fsdp the other processes wait inside an exchange: there is no second try
        if not plan.compiled or process.shards_model:
            raise
        return None, compiling.why_not_compiled(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a GPU or a CPU."""
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one; libraries raise their own
        return bool(re.search(OUT_OF_MEMORY_WORDS, str(error)))
    return isinstance(error, MemoryError)


def keep_gathered_if_there_is_room(
    model: nn.Module, peak_gib: float, available_gib: float, process: Process
) -> None:
    """With fsdp, hold the gathered weights from forward to backward if there is ample room for
    them: a third of the exchanges less."""
    if not process.shards_model:
        return
    weights = sum(p.numel() for p in model.parameters()) * process.dtype.itemsize / 2**30
    if distributed.all_reduce_min(SAFE * available_gib - peak_gib - weights) > 0:
        distributed.keep_gathered(model)


def release() -> None:
    """Free what a failed attempt left: compiled code, CUDA graphs' pools, cached blocks."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        from torch._inductor import cudagraph_trees

        cudagraph_trees.reset_cudagraph_trees()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
