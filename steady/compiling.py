"""What a run uses of torch.compile, and how its model is compiled."""

import logging
import os
import platform
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn

from steady.distributed import Process
from steady.environment import (
    compile_obstacle,
    expandable_segments,
    provide_cache_folder,
    provide_libcuda,
)
from steady.kernels import kernels_work
from steady.recompute import repeated_blocks

GRAPH_MODES = ("reduce-overhead", "max-autotune")  # compile modes that record CUDA graphs
MIN_AUTOTUNE_PROCESSORS = 68  # multiprocessors below which torch does not autotune products
MAX_VERSIONS = 256  # of a block's code: each may use numbers of its own, such as its place


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

    def summary(self, process: Process, fp8: bool = False) -> str:
        """What a run will use, in one line, with what was asked for but cannot be had."""
        device, dtype = process.device, process.dtype
        compiled = f"to be compiled ({self.mode}), which takes a minute or so"
        if self.obstacle:
            compiled = f"not compiled ({self.obstacle})"
        name = str(device)
        if device.type == "cuda":
            name = f"{device} ({torch.cuda.get_device_name(device)})"
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            autotunes = self.compiled and self.mode.startswith("max-autotune")
            if autotunes and processors < MIN_AUTOTUNE_PROCESSORS:
                compiled += (
                    f", but not autotuned: {processors} multiprocessors, "
                    f"{MIN_AUTOTUNE_PROCESSORS} are needed"
                )
            if not kernels_work():
                compiled += ", without kernels of our own: slower, and more memory"
            if not expandable_segments():
                compiled += ", without expandable segments"
        elif self.compiled and self.mode in GRAPH_MODES:
            compiled += f", without CUDA graphs on {device.type}"
        computed = str(dtype).removeprefix("torch.")
        if device.type == "cuda" and dtype == torch.bfloat16:
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                computed += " (slow: this GPU only emulates it; float16 is what it has)"
        computed += " and float8" if fp8 else ""
        line = f"device {name}, dtype {computed}, {compiled}"
        if process.world_size > 1:
            line += f"\n{process.world_size} processes, {process.parallel}"
        return line


def plan(compile: bool, mode: str, device: torch.device) -> Plan:
    """Which parts of torch.compile this run can use. Mends what can be mended for it: where torch
    caches code, where Triton looks for the driver."""
    # Our loss is a custom autograd function; by default torch caches no graph that holds one, and
    # every start would trace and partition it (13 s instead of 4 for GPT-2 on an H200).
    if hasattr(functorch_config, "autograd_cache_allow_custom_autograd_functions"):
        functorch_config.autograd_cache_allow_custom_autograd_functions = True
    # So that a loss's graph may be gone through twice (torch.autograd.grad with retain_graph=True).
    functorch_config.donated_buffer = False
    # Before its first code for a CPU torch compiles four programs with all of its vector headers to
    # see which of the processor's instructions the compiler knows: 18 s on two cores. Compilers of
    # the last eight years know them; with an older one nothing is compiled, and a line says so.
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
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
    model: nn.Module, plan: Plan, sharded: bool = False, checkpointing: str = "none"
) -> nn.Module:
    """The model to run: `model` with its blocks compiled in place, one by one, or the compiled form
    of all of it with CUDA graphs, where each graph costs a launch; `model` itself if nothing is
    compiled.

    Compiled code is the model's own code. Blocks are alike, so code for one serves all, and
    starting takes no longer for a deep model. A model without blocks is compiled as a whole. Every
    new shape is compiled separately (dynamic=False): code for all shapes is slow.
    """
    parts = repeated_blocks(model) if sharded else compiled_parts(model)
    for part in parts:  # undo an earlier call
        part._compiled_call_impl = None
        if hasattr(part.forward, "_torchdynamo_orig_callable"):
            part.forward = part.forward._torchdynamo_orig_callable
    if not plan.compiled:
        return model
    # TORCHDYNAMO_SUPPRESS_ERRORS would run what cannot be compiled without a message.
    torch._dynamo.config.suppress_errors = False
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # call hooks that are added later too
    torch._dynamo.config.recompile_limit = MAX_VERSIONS
    torch._dynamo.config.accumulated_recompile_limit = 2 * MAX_VERSIONS
    if sharded:  # without activation checkpointing, recompute what costs next to nothing
        functorch_config.activation_memory_budget = 0.9 if checkpointing == "none" else 1.0
    from torch._dynamo.external_utils import wrap_inline  # takes seconds to import

    options = {"mode": plan.mode, "dynamic": False}
    if plan.cuda_graphs or not parts:
        return torch.compile(model, **options)
    for part in parts:
        if sharded:  # FSDP2's hooks, which exchange weights, stay outside of compiled code
            part.forward = torch.compile(part.forward, **options)
        else:
            # torch does not compile calls of its own layers, such as nn.Embedding, as they are
            part._compiled_call_impl = torch.compile(wrap_inline(part._call_impl), **options)
    return model


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """The model's blocks, and the layers beside them: embeddings, norms, the loss. (Not dropout and
    linear layers: one operation. Not embeddings on a CPU, whose code would add their gradients up
    in any order.)"""
    blocks = repeated_blocks(model)
    left_out = (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.Linear, nn.Dropout)
    if not next(model.parameters()).is_cuda:
        left_out += (nn.Embedding,)
    return blocks + [m for m in model.children() if not isinstance(m, left_out)] if blocks else []


def why_not_compiled(error: Exception) -> str:
    """What torch.compile says, in one line; with TORCHDYNAMO_VERBOSE=1 all of it is printed too."""
    if torch._dynamo.config.verbose:
        traceback.print_exception(error)
    text = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())
    text = f"{type(error).__name__}: {text}"
    if len(text) > 300:  # a compiler's command comes first, what it says last
        text = f"{text[:120]} ... {text[-170:]}"
    return text
