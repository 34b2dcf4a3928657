"""Choosing how to use torch.compile, and compiling the model."""

import logging
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch._functorch.config as functorch_config
from torch import nn

from steady import environment
from steady.distributed import Process
from steady.float8 import Float8Linear
from steady.loss import kernels_work
from steady.recompute import repeated_blocks

GRAPH_MODES = ("reduce-overhead", "max-autotune")  # compile modes that record CUDA graphs
SKIPS_LOG = "torch._inductor.cudagraph_utils.__cudagraphs"


@dataclass
class Plan:
    """How a run will use torch.compile."""

    obstacle: str | None  # why nothing is compiled, or None
    mode: str
    cuda_graphs: bool

    @property
    def compiled(self) -> bool:
        return self.obstacle is None

    def fall_back(self, obstacle: str) -> None:
        """Fall back to eager, also for Muon's functions and for functions that you compiled."""
        self.obstacle, self.cuda_graphs = obstacle, False
        torch.compiler.set_stance("force_eager")

    def summary(self, process: Process, fp8: bool = False) -> str:
        """The device, dtype and compilation of a run in one line, and any unavailable features."""
        device, computed = process.device, str(process.dtype).removeprefix("torch.")
        compiled = f"will be compiled ({self.mode}), which takes about a minute"
        if self.obstacle:
            compiled = f"not compiled ({self.obstacle})"
        name = str(device)
        if device.type == "cuda":
            name += f" ({torch.cuda.get_device_name(device)})"
            if not kernels_work():
                compiled += ", without custom kernels (slower, more memory)"
            if not environment.expandable_segments():
                compiled += ", without expandable segments"
        elif self.compiled and self.mode in GRAPH_MODES:
            compiled += f", without CUDA graphs on {device.type}"
        computed += " and float8" if fp8 else ""
        line = f"device {name}, dtype {computed}, {compiled}"
        if process.world_size > 1:
            line += f"\n{process.world_size} processes, {process.parallel}"
        return line


def plan(compile: bool, mode: str, device: torch.device) -> Plan:
    """Which parts of torch.compile this run can use. If necessary, this also replaces
    an unusable cache folder and helps Triton find the driver."""
    # Our loss is a custom autograd function. By default torch does not cache graphs that contain
    # one, so every start would trace and partition it (13 s instead of 4 for GPT-2 on an H200).
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    # Allow two backward passes through a loss (torch.autograd.grad with retain_graph=True).
    functorch_config.donated_buffer = False
    # Before it compiles for a CPU, torch builds four programs with all of its vector headers to see
    # which of the processor's instructions the compiler knows: 18 s on two cores. Compilers of the
    # last eight years know them. With an older one the run falls back to eager and says so.
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    unwritable = environment.cache_obstacle()
    if device.type == "cuda":
        environment.provide_libcuda()
    obstacle = (unwritable or environment.compile_obstacle(device)) if compile else "compile=False"
    cuda_graphs = not obstacle and mode in GRAPH_MODES and device.type == "cuda"
    if cuda_graphs:  # print torch's reasons for not recording a graph
        logging.getLogger(SKIPS_LOG).addHandler(logging.StreamHandler())
    return Plan(obstacle, mode, cuda_graphs)


def compile_model(
    model: nn.Module, plan: Plan, sharded: bool = False, checkpointing: str = "none"
) -> nn.Module:
    """The model to run. By default the blocks and the layers around them are compiled in place, one
    by one. With CUDA graphs, where each graph costs a launch, the whole model is compiled. Without
    torch.compile it is `model` itself.

    All blocks share the compiled code of one, so a deep model starts just as fast. A model without
    blocks is compiled as a whole. Until `allow_dynamic`, every new shape is compiled separately,
    because code for all shapes is slow.
    """
    parts = repeated_blocks(model) if sharded else compiled_parts(model)
    for part in parts:  # undo an earlier call (there is none with fsdp, see memory.fit)
        part._compiled_call_impl = None
    if not plan.compiled:
        return model
    # Environment variables can set these. Then code that cannot be compiled would run silently,
    # evaluations would use the trial step's weights, and any mode would record CUDA graphs.
    torch._dynamo.config.suppress_errors = False
    torch._inductor.config.freezing = torch._inductor.config.triton.cudagraphs = False
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # also call hooks added later
    # Each block may use its own constants, such as its index, in training and in evaluation. Code
    # with more versions than that runs eagerly, and torch says so.
    torch._dynamo.config.recompile_limit = limit = 16 + 2 * len(parts)
    torch._dynamo.config.accumulated_recompile_limit = 16 * limit
    torch._dynamo.config.automatic_dynamic_shapes = False  # until `allow_dynamic`
    torch.compiler.set_stance("default")  # an earlier run in a notebook may have fallen back
    if sharded:  # recompute the cheapest operations; in FP8 the host is too slow to launch them
        in_float8 = any(isinstance(module, Float8Linear) for module in model.modules())
        recompute = checkpointing == "none" and not in_float8
        functorch_config.activation_memory_budget = 0.9 if recompute else 1.0
        if in_float8 and plan.mode == "default":
            launch_from_cpp(next(model.parameters()).device)
    from torch._dynamo.external_utils import wrap_inline  # takes seconds to import

    torch._inductor.config.post_grad_custom_post_pass = float32_gradients()
    if plan.cuda_graphs or not parts:
        return torch.compile(model, mode=plan.mode)
    for part in parts:
        if sharded:  # keep FSDP2's hooks, which exchange weights, outside compiled code
            part.forward = torch.compile(part.forward, mode=plan.mode)
        else:
            # without wrap_inline torch does not compile its own layers, such as nn.Embedding
            part._compiled_call_impl = torch.compile(wrap_inline(part._call_impl), mode=plan.mode)
    return model


def launch_from_cpp(device: torch.device) -> None:
    """Let compiled code launch its kernels from C++ instead of Python, which takes the host less
    time: with fsdp, FP8 at 1.5B is a quarter faster on four GPUs. It needs CUDA's headers, which
    pip's packages may lack. (Compiling a function is the only way to find out.)"""
    x = torch.ones(16, device=device, requires_grad=True)
    # for the whole process: as an option of torch.compile it fails in torch 2.11's backward passes
    torch._inductor.config.cpp_wrapper = True
    try:
        torch.compile(torch.square)(x).sum().backward()
    except Exception:
        torch._inductor.config.cpp_wrapper = False


def float32_gradients() -> Callable[[torch.fx.Graph], None]:
    """A pass for torch's compiler: matrix products on a GPU write the gradients of float32 weights
    in float32. Autocast rounds them to bfloat16 and needs another kernel to cast them back: 1% of
    a 1.5B step, 5% at 124M with eight small micro-batches (H100)."""
    # takes seconds to import
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    mm, to_dtype = torch.ops.aten.mm, torch.ops.prims.convert_element_type.default

    class Float32Gradients(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for cast in graph.find_nodes(op="call_function", target=to_dtype):
                product, dtype = cast.args
                if (
                    product.target == mm.default
                    and dtype == torch.float32
                    and product.meta["val"].dtype in (torch.bfloat16, torch.float16)
                    and product.meta["val"].is_cuda
                    and len(product.users) == 1
                    and all(user.op == "output" for user in cast.users)
                ):
                    with graph.inserting_before(product):
                        direct = graph.call_function(mm.dtype, (*product.args, dtype))
                    direct.meta = cast.meta
                    cast.replace_all_uses_with(direct)
                    graph.erase_node(cast)
                    graph.erase_node(product)

        def uuid(self) -> bytes:  # part of the key of torch's cache of compiled code
            return get_hash_for_files((__file__,))

    return Float32Gradients()


def allow_dynamic(plan: Plan) -> None:
    """Call after the trial step. Sizes and numbers that vary from now on (an expert's tokens, a
    number that decays, a counter) are compiled once for all values. A CUDA graph has only one
    shape."""
    torch._dynamo.config.automatic_dynamic_shapes = not plan.cuda_graphs
    torch._dynamo.config.allow_unspec_int_on_nn_module = not plan.cuda_graphs


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """The model's blocks and the layers around them: embeddings, norms, the loss. It skips dropout
    and linear layers, which are one operation each, and embeddings on a CPU, where compiled code
    would sum their gradients in a varying order."""
    blocks = repeated_blocks(model)
    left_out = (nn.ModuleDict, nn.Linear, nn.Dropout)
    if not next(model.parameters()).is_cuda:
        left_out += (nn.Embedding,)

    def around(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child in blocks or isinstance(child, nn.ModuleList | nn.Sequential):
                continue
            if any(m in blocks for m in child.modules()):
                yield from around(child)  # e.g. a module of your own that holds the blocks
            elif not isinstance(child, left_out):
                yield child

    return [*blocks, *around(model)] if blocks else []
