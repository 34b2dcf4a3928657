"""Where GPU memory goes, and what to do when there is not enough of it.

`estimate` says what a training step takes; `choose_split` finds a split of the global batch that
fits, by trying real steps.
"""

import gc
import re
from collections.abc import Callable

import torch

import distributed
from loss import CHUNK_ELEMENTS
from model import CHECKPOINTING, GPTConfig

Split = tuple[int, str]  # batch_size, activation_checkpointing


def estimate(
    config: GPTConfig,
    n_params: int,
    batch_size: int,
    checkpointing: str,
    accumulates: bool,
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = True,
    shards: int = 1,
    gathered: bool = False,
    summed: bool = False,
) -> dict[str, float]:
    """Peak memory of a training step without dropout, in GiB per component.

    The peak is at the end of the forward pass, or where backward has recomputed a block. Unless
    gradients are kept from micro-step to micro-step (`accumulates`), there are none then; they take
    the place of the activations that backward frees. With few activations it is at the step's end.

    Args:
        dtype: what matrix products are computed in.
        shards: processes that the model is divided among (FSDP).
        gathered: whether each holds all of its blocks' weights from forward to backward then.
        summed: whether gradients are moved into one tensor at the end, to be summed (DDP).
    """
    tokens, size = batch_size * config.block_size, dtype.itemsize
    width, kv_width = config.n_embd, config.n_kv_head * config.head_dim
    q_width = config.n_head * config.head_dim
    # values that one block keeps per token: its input, both norms' outputs, queries, the
    # attention's output, the residual after it; keys and values; gate, up and their product
    block = 4 * width + 2 * q_width + 2 * kv_width + 3 * config.n_hidden
    if not compiled:  # also the gate's SiLU, and the norms' inputs in float32
        block += config.n_hidden + (2 * width if size < 4 else 0)
    elif shards > 1:  # compiled with a budget: norms' outputs and the product are recomputed
        block -= config.n_hidden + 2 * width
    if dtype == torch.float16:  # the residual stream stays in float32
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
        recomputed = block + (3 * config.n_hidden + width if compiled else 0)
        if tokens * recomputed > chunk:  # not at the same time
            kept, chunk = kept + recomputed, 0
    head = config.vocab_size * width
    in_blocks = n_params - (head if config.tied_embeddings else 2 * head)
    if shards > 1 and not gathered:  # the blocks of this exchange and of the next one
        together = distributed.blocks_together(config.n_layer, in_blocks // config.n_layer)
        copied = min(1, 2 * together / config.n_layer)
    else:  # all, from forward to backward
        copied = gathered or size < 4
    copies = size * in_blocks * copied
    weights = 4 * n_params / shards
    components = {
        "weights": weights + copies,
        "gradients": weights if accumulates else 0,
        "optimizer": 2 * weights,
        "activations": size * tokens * (kept + 4 * width),  # and the loss's inputs and gradients
        "logits": size * chunk + 8 * head,  # one chunk, and the head's gradient being summed up
    }
    end = {"weights": weights, "gradients": (1 + summed) * weights, "optimizer": 2 * weights}
    components = max(components, end, key=lambda parts: sum(parts.values()))
    return {name: bytes_ / 2**30 for name, bytes_ in components.items()}


def describe(components: dict[str, float]) -> str:
    """`weights 0.50 + ... = 12.34 GiB`, or in whole MiB if it is less than one GiB."""
    total = sum(components.values())
    factor, digits, unit = (1, 2, "GiB") if total >= 1 else (1024, 0, "MiB")
    parts = (f"{name} {factor * size:.{digits}f}" for name, size in components.items())
    return f"{' + '.join(parts)} = {factor * total:.{digits}f} {unit}"


def choose_split(
    trial: Callable[[int, str], None],
    needs: Callable[[int, str, bool], dict[str, float]],
    per_step: int,
    wanted: Split,
    available_gib: float,
    auto: bool = False,
    fsdp: bool = False,
) -> Split:
    """The split of the `per_step` sequences of a step to train with, on all processes the same:
    `wanted` if that fits, else the next one that does.

    Args:
        trial: see `fit_batch`; the other arguments: see `splits_to_try`.
        auto: take the largest batch size that fits.
        fsdp: a process that fails inside an exchange leaves the others waiting, so there is no
            second try: what the first is, `needs` decides.

    Raises ValueError when nothing fits.
    """
    batch_size, checkpointing = wanted
    slack = 0.95 if fsdp else 1.1  # the estimate may be 5% too low, or 10% too high
    splits = splits_to_try(
        needs, per_step, None if auto else batch_size, checkpointing, available_gib, slack
    )
    found = fit_batch(trial, splits[:1]) if fsdp else fit_batch(trial, splits, distributed.any_of)
    if found:
        return found
    tried = splits[0][0]
    if fsdp and tried > 1:
        raise ValueError(
            f"out of memory with {tried} sequences: use --batch_size={tried // 2} with "
            "--gradient_accumulation_steps so much larger, or --activation_checkpointing=block"
        )
    components = needs(1, "block", per_step > 1)
    raise ValueError(
        f"out of memory even with one sequence and activation checkpointing: a step takes about "
        f"{describe(components)}; use a smaller block_size or model"
    )


def splits_to_try(
    needs: Callable[[int, str, bool], dict[str, float]],
    per_step: int,
    batch_size: int | None,
    checkpointing: str,
    available_gib: float,
    slack: float,
) -> list[Split]:
    """In which order to look for a split of the `per_step` sequences of a step that fits.

    Micro-batches of about half the size each time, divisors of `per_step`, then single sequences
    with ever more activation checkpointing. `batch_size` None (auto): all divisors from the largest
    down. What by `needs` (`estimate`, with the model's arguments) takes `slack` times
    `available_gib` is not tried: compiling takes time.
    """
    sizes = [batch_size or per_step]
    for size in range(sizes[0] - 1, 0, -1):
        if per_step % size == 0 and (batch_size is None or 2 * size <= sizes[-1]):
            sizes.append(size)
    more = CHECKPOINTING[CHECKPOINTING.index(checkpointing) + 1 :]
    splits = [(size, checkpointing) for size in sizes] + [(1, kind) for kind in more]

    def hopeless(split: Split) -> bool:
        components = needs(*split, split[0] < per_step)
        return sum(components.values()) > slack * available_gib

    return [split for split in splits if not hopeless(split)] or splits[-1:]


def fit_batch(
    trial: Callable[[int, str], None],
    splits: list[Split],
    agree: Callable[[bool], bool] = lambda failed: failed,
) -> Split | None:
    """The first of `splits` with which `trial` does not run out of memory; None if none.

    Args:
        trial: runs a full step with a batch size and a kind of activation checkpointing.
        agree: makes of this process's failure every process's.
    """
    for size, checkpointing in splits:
        failed = False
        try:
            trial(size, checkpointing)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; libraries raise their own
            if not re.search("out of memory|ALLOC_FAILED", str(error)):
                raise
            failed = True
        if not agree(failed):
            return size, checkpointing
        release()  # outside `except`: the exception holds the failed step's tensors
    return None


def release() -> None:
    """Free everything a failed attempt left: compiled code, CUDA graphs' pools, cached blocks."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        from torch._inductor import cudagraph_trees

        cudagraph_trees.reset_cudagraph_trees()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
