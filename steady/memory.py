"""If a training step does not fit into memory, split the same batch into smaller micro-batches.

`fit` tries real steps, except for sizes that a rough estimate rules out. Only the estimate counts
before the model is built, and with fsdp, where a process that fails would leave the others waiting.
On CPUs it is stricter, because Linux hands out memory that it does not have.
"""

import contextlib
import gc
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from steady import UserError, compiling, distributed, hardware
from steady.compiling import Plan
from steady.distributed import Process

# share of the memory that the estimate may use without a second try: on GPUs, and on CPUs, where
# uncompiled code takes up to 1.7 times the estimate
SAFETY_MARGIN, CPU_MARGIN = 0.8, 0.5

# the messages of GPUs, their libraries, and CPUs
OUT_OF_MEMORY_WORDS = "out of memory|ALLOC_FAILED|can't allocate memory|not enough memory|bad_alloc"

SMALLER = "use --activation_checkpointing=block (if it is not on), or a smaller block_size"


class Fit(NamedTuple):
    """A micro-batch that fits, the model that ran it, and a report for the user."""

    model: nn.Module
    batch_size: int
    report: str
    memory_flags: str  # flags for the next smaller micro-batch; "" if there is none


def batch_sizes(wanted: int, sequences: int) -> list[int]:
    """The micro-batch sizes to try for a process's `sequences`: about half each time (always a
    divisor of `sequences`), down to single sequences."""
    sizes = [wanted]
    while sizes[-1] > 1:
        sizes.append(next(n for n in range(sizes[-1] // 2, 0, -1) if sequences % n == 0))
    return sizes


def rough_gib(config: dict[str, Any], sequences: int, process: Process) -> float:
    """Rough memory of a step with a micro-batch of `sequences`, in GiB. On a GPU this rule of thumb
    for transformers is accurate to within a third: 12 n_layer n_embd^2 parameters of 16 bytes
    (weights, gradients and AdamW's two moments; 8 more to average weights; 4 for evaluation), and
    34 bytes per token, layer and unit of width (Korthikanti et al. 2022)."""
    width, layers = config.get("n_embd"), config.get("n_layer")
    if not isinstance(width, int) or not isinstance(layers, int):  # an edit has changed them
        return 0.0
    kind = config.get("activation_checkpointing", "none")
    parameters = 12 * layers * width**2 + config["vocab_size"] * width
    shards = process.world_size if process.shards_model else 1
    kept = {"none": 34, "selective": 4, "block": 2}[kind] * layers + (kind != "none") * 34
    activations = kept * process.dtype.itemsize / 2 * sequences * config["block_size"] * width
    bytes_each = 4 if config.get("eval_only") else 16 + 8 * config.get("average_weights", 0)
    return (bytes_each * parameters / shards + activations) / 2**30


def require_room(config: dict[str, Any], process: Process) -> None:
    """Raises UserError if the model is much too large for the machine. Allocates nothing.

    config: the settings, including the model's sizes.
    """
    needed = rough_gib(config, 1, process)
    available_gib = hardware.available_memory_gib(process.device)
    if needed > 1.5 * available_gib:
        raise UserError(
            f"a model of n_layer={config['n_layer']}, n_embd={config['n_embd']}, "
            f"vocab_size={config['vocab_size']} takes about {needed:,.1f} GiB to train with one "
            f"sequence, but {process.device} has {available_gib:.1f} GiB: {SMALLER} or model"
        )


def fit(
    trial: Callable[[int], nn.Module], config: dict[str, Any], process: Process, plan: Plan
) -> Fit:
    """Find a micro-batch that fits, the same on all processes: the one in the settings, or the next
    smaller one that fits.

    Args:
        trial: runs a step with a batch size, without communication (except for fsdp), and returns
            the model that it ran.
        config: the settings, including the model's sizes.

    If compiled code fails, the same step runs again in eager mode. A bug in the model then raises
    its error there, with a traceback. Raises UserError if nothing fits.
    """
    sequences = config["batch_size"] * config["gradient_accumulation_steps"]
    every_size = batch_sizes(config["batch_size"], sequences // process.world_size)
    available_gib = hardware.available_memory_gib(process.device)
    available_gib = min(distributed.gather_objects(process, available_gib))
    # on a GPU with a second try, skip only hopeless sizes, to save the time to compile them
    on_gpu = process.device.type == "cuda"
    margin = SAFETY_MARGIN if on_gpu else CPU_MARGIN
    limit = (2.0 if on_gpu and not process.shards_model else margin) * available_gib
    sizes = [size for size in every_size if rough_gib(config, size, process) <= limit]
    if on_gpu and not sizes:
        sizes = every_size[-1:]
    sizes = sizes[:1] if process.shards_model else sizes

    def flags(size: int) -> str:
        """The flags for the same global batch, and evaluations that are at least as large."""
        evals = math.ceil(config["eval_iters"] * config["batch_size"] / size)
        steps = sequences // size
        return f"--batch_size={size} --gradient_accumulation_steps={steps} --eval_iters={evals}"

    lines, reason = [], "too little memory (estimated)"
    while sizes:
        model, failed, broken = None, False, ""
        try:
            model = trial(sizes[0])
        except Exception as error:
            failed = True
            if not is_out_of_memory(error):
                # with fsdp the other processes wait in a collective, so there is no second try
                if not plan.compiled or process.shards_model:
                    raise
                message = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].rstrip()
                broken = f"{type(error).__name__}: {message}"
        if not (failed if process.shards_model else distributed.any_process(failed)):
            break
        del model
        release()
        if not process.shards_model and distributed.any_process(bool(broken)):  # uncompiled
            plan.fall_back(broken or "it failed in another process")
            lines.append(
                "warning: not compiled (--compile=False skips compiling), because compiling fails "
                f"here: {plan.obstacle}"
            )
        else:
            sizes, reason = sizes[1:], "out of memory"
    else:
        raise UserError(
            f"{reason}: {SMALLER}, batch_size (with more gradient_accumulation_steps) or model"
        )
    size = sizes[0]
    if size != config["batch_size"]:
        lines.append(
            f"{reason}: going on with {flags(size)}, the same global batch; pass these flags to "
            "start with this split next time"
        )
    if plan.cuda_graphs:  # torch itself prints the reasons
        skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        lines.append(f"CUDA graphs: {skipped or 'none'} skipped")
    # devices other than GPUs do not report their peak
    peak = hardware.peak_memory_gib(process.device) or rough_gib(config, size, process)
    if on_gpu:
        lines.append(f"memory {peak:.2f} of {available_gib:.2f} GiB in a trial step")
    if process.shards_model:
        # if there is ample memory, keep the gathered weights from forward to backward: this saves a
        # third of the communication
        weights = sum(p.numel() for p in model.parameters()) * process.dtype.itemsize / 2**30
        if not distributed.any_process(peak + weights > margin * available_gib):
            model.set_reshard_after_forward(False)
    compiling.allow_dynamic(plan)
    gc.collect()
    gc.freeze()  # later collections skip the set-up's objects: scanning them stalls a step
    smaller = next((flags(n) for n in every_size if n < size), "")
    return Fit(model, size, "\n".join(lines), smaller)


@contextlib.contextmanager
def undone(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """At the end of the `with` block, undo the trial step in it: drop all gradients (also outside
    the model), and give the buffers their earlier values. In the block, the optimizer's step only
    calls its closure. If the block changed parameters in place, it prints a note."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    empty = [(m, name) for m in model.modules() for name, b in m._buffers.items() if b is None]
    parameters = dict(model.named_parameters())
    versions = {p: p._version for p in parameters.values() if not p.is_inference()}
    tensors = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    trained = [x for x in tensors if x.is_leaf and x.requires_grad and x.grad is None]
    try:
        with mock.patch.object(optimizer, "step", lambda closure=None: closure and closure()):
            yield
        named = dict(model.named_parameters())
        if new := named.keys() - parameters.keys():
            raise UserError(
                f"{min(new)} was created in a forward pass, so it would not be trained: create "
                "parameters in __init__"
            )
        changed = [n for n, p in named.items() if p in versions and p._version != versions[p]]
        if changed:
            print(
                f"note: the trial step, on a batch of zeros, has changed {', '.join(changed[:5])}: "
                "only changes of buffers are undone before training"
            )
    finally:
        optimizer.zero_grad()
        for parameter in trained:
            parameter.grad = None
        for name, buffer in model.named_buffers():
            old = before.get(name, buffer)  # keep a buffer that the step registered
            if buffer.shape != old.shape:
                buffer.data = old
            elif not torch.equal(buffer, old):
                buffer.detach().copy_(old)
        for module, name in empty:
            module._buffers[name] = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that a GPU or the CPU is out of memory."""
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one; libraries raise their own
        return bool(re.search(OUT_OF_MEMORY_WORDS, str(error)))
    return isinstance(error, MemoryError)


def release() -> None:
    """Free the remains of a failed attempt: compiled code, CUDA graph pools, cached blocks."""
    torch._dynamo.reset()
    if torch.cuda.is_initialized():  # not on a CPU
        from torch._inductor import cudagraph_trees

        cudagraph_trees.reset_cudagraph_trees()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
