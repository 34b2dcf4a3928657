"""What a run uses of torch.compile, and how its model is compiled."""

import logging
import math
import os
import platform
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

from steady.distributed import Place
from steady.environment import (
    compile_obstacle,
    expandable_segments,
    provide_cache_folder,
    provide_libcuda,
)
from steady.kernels import kernels_work

import torch
import torch._functorch.config as functorch_config

# Our loss is a custom autograd function; by default torch caches no graph that holds one, and
# every start would trace and partition anew (13 s instead of 4 for GPT-2 on an H200).
if hasattr(functorch_config, "autograd_cache_allow_custom_autograd_functions"):
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
# Before its first code for a CPU torch compiles four programs with all of its vector headers to
# see which of the processor's instructions the compiler knows: 18 s on two cores. Compilers of
# the last eight years know them; with an older one nothing is compiled, and a line says so.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

GRAPH_MODES = ("reduce-overhead", "max-autotune")  # compile modes that record CUDA graphs
MAX_PARTS = 12  # of the stack of blocks: fewer take longer to compile, more take longer to run
MIN_AUTOTUNE_PROCESSORS = 68  # multiprocessors below which torch does not autotune products


@dataclass
class Plan:
    """What a run will use of torch.compile."""

    obstacle: str | None  # why nothing is compiled, or None
    mode: str
    cuda_graphs: bool

    @property
    def compiled(self) -> bool:
        return self.obstacle is None

    def give_up(self, obstacle: str) -> None:
        """Compile nothing after all."""
        self.obstacle, self.cuda_graphs = obstacle, False


def plan(compile: bool, mode: str, device: torch.device) -> Plan:
    """Which parts of torch.compile this run can use. Mends what can be mended for it: where torch
    caches code, where Triton looks for the driver."""
    unwritable = provide_cache_folder()  # without one, torch does not even train uncompiled
    if device.type == "cuda":
        provide_libcuda()
    obstacle = (unwritable or compile_obstacle(device)) if compile else "compile=False"
    cuda_graphs = not obstacle and mode in GRAPH_MODES and device.type == "cuda"
    if cuda_graphs:
        listen_for_skips()
    return Plan(obstacle, mode, cuda_graphs)


def listen_for_skips() -> None:
    """Keep the reasons that torch gives for not recording a CUDA graph in `skip_reasons`."""
    handler = logging.Handler()
    handler.emit = lambda record: skip_reasons.append(record.getMessage().splitlines()[0])
    logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs").addHandler(handler)


skip_reasons: list[str] = []


def graphs_report() -> str:
    """How many CUDA graphs this process has recorded, and why others were not; in one line."""
    from torch._inductor.cudagraph_trees import get_manager

    def count(nodes: list[Any]) -> int:
        return sum(1 + sum(count(c) for c in node.children.values()) for node in nodes)

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    recorded = count(list(manager.get_roots())) if manager else 0
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    why = "; ".join(dict.fromkeys(skip_reasons)) or "TORCH_LOGS=cudagraphs says why"
    return f"CUDA graphs: {recorded} recorded, " + (f"{skipped} skipped: {why}" if skipped else
                                                    "none skipped")  # fmt: skip


def compile_model(
    model: torch.nn.Module, plan: Plan, sharded: bool, checkpointing: str
) -> torch.nn.Module:
    """What to run in place of `model`: its compiled form, or itself if the plan says so.

    Blocks are alike, so code for a few of them serves all, and starting takes little longer for a
    deep model. These parts, and what comes before and after the blocks, are replaced by their
    compiled forms in `model` itself. With CUDA graphs the model is one piece, since each graph
    costs a launch. Of a model that FSDP has divided (`sharded`) the blocks alone are compiled, one
    by one, since weights are exchanged around them.

    Every new shape is compiled anew (dynamic=False): code for all shapes is slow.
    """
    # undo an earlier call
    for name in ("embed", "run_blocks", "head"):
        model.__dict__.pop(name, None)
    if not plan.compiled:
        return model
    # TORCHDYNAMO_SUPPRESS_ERRORS would run what cannot be compiled as it is, in silence.
    torch._dynamo.config.suppress_errors = False
    compiled = partial(torch.compile, mode=plan.mode, dynamic=False)
    if sharded:
        # Without activation checkpointing, recompute what costs next to nothing.
        functorch_config.activation_memory_budget = 0.9 if checkpointing == "none" else 1.0
        for block in model.blocks:
            block.forward = compiled(block.forward)
        return model
    if plan.cuda_graphs:
        return compiled(model)
    model.head = compiled(model.head)
    if model.token_embedding.weight.is_cuda:  # a CPU's code would add gradients up in any order
        model.embed = compiled(model.embed)
    blocks, together = list(model.blocks), math.ceil(len(model.blocks) / MAX_PARTS)
    parts = [blocks[i : i + together] for i in range(0, len(blocks), together)]
    run, run_uncompiled = compiled(run_in_turn), model.run_blocks

    def run_blocks(x, rope, cache=None):
        if cache is not None:  # a sample is drawn
            return run_uncompiled(x, rope, cache)
        for part in parts:
            x = run(part, x, rope)
        return x

    model.run_blocks = run_blocks
    return model


def run_in_turn(blocks, x, rope):
    for block in blocks:
        x = block(x, rope)
    return x


def is_compile_error(error: Exception) -> bool:
    """Whether torch says that compiling failed."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def why_not_compiled(error: Exception) -> str:
    """What torch.compile says, in one line; with TORCHDYNAMO_VERBOSE=1 all of it is printed too."""
    if torch._dynamo.config.verbose:
        traceback.print_exception(error)
    text = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())
    text = f"{type(error).__name__}: {text}"
    if len(text) > 300:  # a compiler's command comes first, what it says last
        text = f"{text[:120]} ... {text[-170:]}"
    return text


def summary(
    device: torch.device, dtype: torch.dtype, plan: Plan, here: Place, fp8: bool = False
) -> str:
    """What a run will use, in one line, with what was asked for but cannot be had."""
    compiled = f"to be compiled ({plan.mode}), which takes a minute or so"
    if plan.obstacle:
        compiled = f"not compiled ({plan.obstacle})"
    name = str(device)
    if device.type == "cuda":
        name = f"{device} ({torch.cuda.get_device_name(device)})"
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        autotunes = plan.compiled and plan.mode.startswith("max-autotune")
        if autotunes and processors < MIN_AUTOTUNE_PROCESSORS:
            compiled += (
                f", but not autotuned: {processors} multiprocessors, "
                f"{MIN_AUTOTUNE_PROCESSORS} are needed"
            )
        if not kernels_work():
            compiled += ", without kernels of our own: slower, and more memory"
        if not expandable_segments():
            compiled += ", without expandable segments"
    elif plan.compiled and plan.mode in GRAPH_MODES:
        compiled += f", without CUDA graphs on {device.type}"
    computed = str(dtype).removeprefix("torch.")
    if device.type == "cuda" and dtype == torch.bfloat16:
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            computed += " (slow: this GPU only emulates it; float16 is what it has)"
    computed += " and float8" if fp8 else ""
    line = f"device {name}, dtype {computed}, {compiled}"
    return line if here.world_size == 1 else f"{line}\n{here.world_size} processes, {here.parallel}"
