"""Where GPU memory goes, and what to do when there is not enough of it.

`estimate` says what a training step takes; `fit` finds a split of the global batch that fits, by
trying real steps.
"""

from __future__ import annotations

import bisect
import gc
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from steady import compiling, distributed, hardware
from steady.compiling import Plan
from steady.distributed import Place
from steady.loss import CHUNK_ELEMENTS
from steady.optim import MUON_ELEMENTS

import torch
from torch import nn

from configurator import CHOICES

if TYPE_CHECKING:
    from model import GPTConfig

CHECKPOINTING = CHOICES["activation_checkpointing"]

# Shares of the memory that an estimate may take. It has been up to 5% too low and 10% too high.
WORTH_TRYING = 1.1  # where a step is tried
SURE_TO_FIT = 0.95  # where there is no second try
ROOM_TO_SPARE = 0.8  # where the memory would only make steps faster

OUT_OF_MEMORY = "out of memory"
# in the words of GPUs, their libraries, and CPUs
OUT_OF_MEMORY_WORDS = "out of memory|ALLOC_FAILED|can't allocate memory|not enough memory|bad_alloc"


class Split(NamedTuple):
    """How the sequences of a step are computed."""

    batch_size: int
    activation_checkpointing: str


class StepShape(NamedTuple):
    """What a training step consists of, however its sequences are split into micro-batches."""

    model_config: GPTConfig
    sequences: int  # of one process
    dtype: torch.dtype  # what matrix products are computed in
    plan: Plan
    here: Place
    muon: bool = False
    fp8: bool = False
    eval_only: bool = False  # no step is taken, only its micro-batches are evaluated
    eval_sequences: int = 0  # of all processes

    @property
    def in_float8(self) -> bool:
        return self.fp8 and not self.eval_only  # evaluation is not

    @property
    def n_params(self) -> int:
        return num_params(self.model_config)

    @property
    def shards(self) -> int:
        """Processes that the model is divided among."""
        return self.here.world_size if self.here.shards_model else 1

    def keeps_gradients(self, batch_size: int) -> bool:
        """Whether there are gradients while the next micro-batch is computed."""
        return self.plan.cuda_graphs or batch_size < self.sequences

    def adds_gradients_in_place(self, batch_size: int) -> bool:
        """Whether they are kept in one tensor, see optim.Gradients; not those of a divided model,
        which FSDP2 makes anew."""
        return self.keeps_gradients(batch_size) and not self.here.shards_model

    def copies_gradients(self, batch_size: int) -> bool:
        """Whether they are copied into one tensor at the end, to be summed."""
        return self.here.sums_gradients and not self.adds_gradients_in_place(batch_size)


class Fit(NamedTuple):
    """A split that fits, and the model that was run to find out."""

    split: Split
    model: nn.Module
    memory: dict[str, float]  # what it takes, see `estimate`
    reason: str  # why it is not the split that was wanted; "" if it is
    warning: str = ""  # why the model is not compiled, though it was to be
    graphs: str = ""  # what CUDA graphs were recorded

    def report(self, step: StepShape) -> str:
        """What to tell the user."""
        line = f"{self.warning}{self.graphs}memory {describe(self.memory)}, by estimate"
        if not self.reason:
            return line
        return (
            f"{self.reason}: going on with {' '.join(flags(step, self.split))}, the same global "
            f"batch; these flags make it permanent\n{line}"
        )


def estimate(
    step: StepShape, batch_size: int, checkpointing: str, gathered: bool = False
) -> dict[str, float]:
    """Peak memory of a training step without dropout, in GiB per component.

    The peak is at the end of the forward pass, or where backward has recomputed a block. Unless
    gradients are kept from micro-step to micro-step, there are none then; they take the place of
    the activations that backward frees. With few activations the peak is at the step's end.

    Args:
        gathered: whether each process holds the weights of all blocks from forward to backward,
            of a model that is divided among several.
    """
    config = step.model_config
    tokens, size = batch_size * config.block_size, step.dtype.itemsize
    width, kv_width = config.n_embd, config.n_kv_head * config.head_dim
    q_width = config.n_head * config.head_dim
    # values that one block keeps per token: its input, both norms' outputs, queries, the
    # attention's output, the residual after it; keys and values; gate, up and their product
    block = 4 * width + 2 * q_width + 2 * kv_width + 3 * config.n_hidden
    if not step.plan.compiled:  # also the gate's SiLU, and the norms' inputs in float32
        block += config.n_hidden + (2 * width if size < 4 else 0)
    elif step.shards > 1 or step.in_float8:  # norms' outputs and the product are recomputed
        block -= config.n_hidden + 2 * width
    if step.in_float8:  # gate and up take one byte each
        block -= config.n_hidden
    if step.dtype == torch.float16:  # the residual stream stays in float32
        block += 2 * width
    per_block = {
        "none": block,
        "selective": width + q_width,  # its input and attention's output
        "block": width,  # its input
    }[checkpointing]
    kept = config.n_layer * per_block
    chunk = min(CHUNK_ELEMENTS, tokens * config.vocab_size)
    if checkpointing != "none":
        # compiled, the gradients of gate, up, their product and the output are there with it
        recomputed = block + (3 * config.n_hidden + width if step.plan.compiled else 0)
        if tokens * recomputed > chunk:  # not at the same time
            kept, chunk = kept + recomputed, 0
    head = config.vocab_size * width
    in_blocks = step.n_params - (head if config.tied_embeddings else 2 * head)
    if step.shards > 1 and not gathered:  # the blocks of this exchange and of the next one
        together = distributed.blocks_per_exchange(config.n_layer, in_blocks // config.n_layer)
        share_copied = min(1.0, 2 * together / config.n_layer)
    else:  # all, from forward to backward
        share_copied = float(gathered or size < 4)
    copies = in_blocks * (1 if step.in_float8 else size * share_copied)  # of weights, in bytes
    weights = 4 * step.n_params / step.shards
    if step.eval_only:  # one block's values at a time, and copies of its weights
        held = weights + (copies if step.shards > 1 else copies / config.n_layer)
        activations = size * tokens * (block + 4 * width)
        parts = {"weights": held, "activations": activations, "logits": size * chunk}
        return {name: bytes_ / 2**30 for name, bytes_ in parts.items()}
    state = 2 * weights  # AdamW's two moments
    working = 0
    if step.muon:  # one moment of blocks; gradients, updates and their products while it works
        state -= 4 * in_blocks / step.shards
        working = 16 * min(MUON_ELEMENTS, in_blocks)
    components = {
        "weights": weights + copies,
        "gradients": weights if step.keeps_gradients(batch_size) else 0,
        "optimizer": state,
        "activations": size * tokens * (kept + 4 * width),  # and the loss's inputs and gradients
        "logits": size * chunk + 8 * head,  # one chunk, and the head's gradient being summed up
    }
    end = {
        "weights": weights + (copies if step.in_float8 else 0),  # others are gone by now
        "gradients": (1 + step.copies_gradients(batch_size)) * weights,
        "optimizer": state + working,
    }
    components = max(components, end, key=lambda parts: sum(parts.values()))
    return {name: bytes_ / 2**30 for name, bytes_ in components.items()}


def describe(components: dict[str, float]) -> str:
    """`weights 0.50 + ... = 12.34 GiB`, or in whole MiB if it is less than one GiB."""
    total = sum(components.values())
    factor, digits, unit = (1, 2, "GiB") if total >= 1 else (1024, 0, "MiB")
    parts = (f"{name} {factor * size:.{digits}f}" for name, size in components.items())
    return f"{' + '.join(parts)} = {factor * total:.{digits}f} {unit}"


def fit(
    try_step: Callable[[int, str], nn.Module],
    step: StepShape,
    wanted: Split,
    device: torch.device,
    auto: bool = False,
) -> Fit:
    """How to split the sequences of a step, on all processes the same: `wanted` if that fits, else
    the next split that does.

    Args:
        try_step: runs a step with a batch size and a kind of activation checkpointing, and returns
            the model that it ran.
        auto: take the largest batch size that fits.

    A process that fails inside an exchange of FSDP leaves the others waiting, so there is no second
    try then, and the estimate decides what the first is. Raises ValueError when nothing fits.
    """
    available_gib = distributed.all_reduce_min(hardware.available_memory_gib(device))
    sharded = step.shards > 1
    most_gib = min(available_gib, distributed.all_reduce_min(hardware.machine_memory_gib(device)))
    limit = (SURE_TO_FIT if sharded else WORTH_TRYING) * most_gib
    splits, warning = splits_to_try(step, wanted, limit, auto), ""
    first = splits[0]
    splits = [first] if sharded else splits
    if sum(estimate(step, *first).values()) > limit and device.type != "cuda":
        splits = []  # a CPU's memory is given out before it is there, and taking it kills processes
    while splits:
        model, failure = attempt(try_step, splits[0], step)
        if not (failure if sharded else distributed.any_process(bool(failure))):
            split = splits[0]
            reason = "batch_size=auto" if auto else OUT_OF_MEMORY
            reason = reason if split != wanted else ""
            graphs = compiling.graphs_report() + "\n" if step.plan.cuda_graphs else ""
            found = Fit(split, model, estimate(step, *split), reason, warning, graphs)
            return with_gathered_weights(found, step, available_gib)
        del model
        release()
        broken = failure not in ("", OUT_OF_MEMORY)
        if not sharded and distributed.any_process(broken):  # the same once more, uncompiled
            step.plan.give_up(failure if broken else "it failed in another process")
            warning = (
                f"warning: not compiled, because compiling fails here: {step.plan.obstacle} "
                "(TORCHDYNAMO_VERBOSE=1 shows all of it, --compile=False none)\n"
            )
        else:
            splits = splits[1:]
    if sharded and first.batch_size > 1:
        raise ValueError(
            f"out of memory with {first.batch_size} sequences: use "
            f"--batch_size={first.batch_size // 2} with --gradient_accumulation_steps so much "
            "larger, or --activation_checkpointing=block"
        )
    raise ValueError(
        f"out of memory even with one sequence and activation checkpointing: a step takes about "
        f"{describe(estimate(step, 1, 'block'))}; use a smaller block_size or model"
    )


def splits_to_try(
    step: StepShape, wanted: Split, limit_gib: float, auto: bool = False
) -> list[Split]:
    """In which order to look for a split of a step's sequences that fits.

    Micro-batches of about half the size each time, divisors of `step.sequences`, then single
    sequences with ever more activation checkpointing. With `auto` all divisors, from the largest
    down. What takes more than `limit_gib` by the estimate is left out, since compiling takes time;
    the last one is there in any case.
    """
    kind = wanted.activation_checkpointing
    sizes = [step.sequences if auto else wanted.batch_size]
    largest = bisect.bisect(  # that may fit: there may be too many above to look at each
        range(1, sizes[0] + 1), False,
        key=lambda size: sum(estimate(step, size, kind).values()) > limit_gib,
    )  # fmt: skip
    while sizes[-1] > 1:
        below = min(largest, sizes[-1] - 1) if auto else sizes[-1] // 2
        sizes.append(next((n for n in range(below, 1, -1) if step.sequences % n == 0), 1))
    more = CHECKPOINTING[CHECKPOINTING.index(kind) + 1 :]
    splits = [Split(size, kind) for size in sizes] + [Split(1, kind) for kind in more]
    fitting = [split for split in splits if sum(estimate(step, *split).values()) <= limit_gib]
    return fitting or splits[-1:]


def attempt(
    try_step: Callable[[int, str], nn.Module], split: Split, step: StepShape
) -> tuple[nn.Module | None, str]:
    """What `try_step(*split)` returns, or why it failed: OUT_OF_MEMORY, or what may be the
    compiler's fault. An error that cannot be the compiler's is raised."""
    try:
        return try_step(*split), ""
    except Exception as error:
        if is_out_of_memory(error):
            return None, OUT_OF_MEMORY
        if not step.plan.compiled:
            raise
        if step.shards == 1:
            return None, compiling.why_not_compiled(error)
        # the other processes wait inside an exchange: there is no second try
        if not compiling.is_compile_error(error):
            raise
        reason = compiling.why_not_compiled(error)
        raise ValueError(f"compiling fails here: {reason}: use --compile=False") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a GPU or a CPU."""
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one; libraries raise their own
        return bool(re.search(OUT_OF_MEMORY_WORDS, str(error)))
    return isinstance(error, MemoryError)


def flags_for_less(step: StepShape, split: Split) -> list[str]:
    """The settings that split a step further than `split`; none if that is not possible."""
    further = splits_to_try(step, split, math.inf)[1:2]
    return flags(step, further[0]) if further else []


def flags(step: StepShape, split: Split) -> list[str]:
    """The settings that split `step` so, with the same global batch and evaluations at least as
    large."""
    size, kind = split
    total = step.sequences * step.here.world_size
    return [
        f"--batch_size={size}",
        f"--gradient_accumulation_steps={total // size}",
        f"--activation_checkpointing={kind}",
        f"--eval_iters={math.ceil(step.eval_sequences / size)}",
    ]


def num_params(config: GPTConfig) -> int:
    """`GPT.num_params` of such a model, without building it."""
    width, heads = config.n_embd, 2 * config.n_head + 2 * config.n_kv_head
    norms = 2 * width + (2 * config.head_dim if config.qk_norm else 0)
    block = width * (heads * config.head_dim + 3 * config.n_hidden) + norms
    head = config.vocab_size * width
    return head * (1 if config.tied_embeddings else 2) + config.n_layer * block + width


def require_room(step: StepShape, device: torch.device, auto: bool) -> None:
    """Raises ValueError for a model of which `device` cannot hold a step of one sequence, and where
    it is not known how many it can hold, if that is asked for (`auto`); nothing is allocated."""
    if auto and hardware.available_memory_gib(device) == math.inf:
        hardware.require_cuda(device, batch_size="auto")
    machine_gib = hardware.machine_memory_gib(device)
    needed = estimate(step._replace(sequences=1), 1, "block")
    if sum(needed.values()) > WORTH_TRYING * machine_gib:
        raise ValueError(
            f"the model has {step.n_params:,} parameters: one sequence takes about "
            f"{describe(needed)}, but {device} has {machine_gib:.2f} GiB: use a smaller n_layer, "
            "n_embd, vocab_size or block_size"
        )


def with_gathered_weights(found: Fit, step: StepShape, available_gib: float) -> Fit:
    """Have a divided model hold its gathered weights from forward to backward if there is ample
    room for them: a third of the exchanges less."""
    if step.shards == 1:
        return found
    more = estimate(step, *found.split, gathered=True)
    if sum(more.values()) >= ROOM_TO_SPARE * available_gib:
        return found
    distributed.keep_gathered(found.model)
    return found._replace(memory=more)


def release() -> None:
    """Free everything a failed attempt left: compiled code, CUDA graphs' pools, cached blocks."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        from torch._inductor import cudagraph_trees

        cudagraph_trees.reset_cudagraph_trees()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
