"""What must be right around torch, and what a run will use of torch.compile.

`python -m steady.environment` prints a report for bug reports; it runs without a GPU, a compiler,
or torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import logging
import math
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import textwrap
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steady import ALLOCATOR_VARIABLES

try:
    import torch
except ImportError:
    torch = None  # the report still works

if torch is not None:
    from steady.distributed import Place
    from steady.hardware import choose_device
    from steady.kernels import kernels_work

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
# the variable that chooses the compiler that torch uses, and what it looks for without it
CPU_COMPILERS = "CXX", ("g++", "clang++")
GPU_COMPILERS = "CC", ("cc", "gcc", "clang")
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


def compile_obstacle(device: torch.device) -> str | None:
    """Why torch.compile cannot work here, in one line with its remedy; None if nothing is known.

    Without this a run finds out only in its trial step, after loading.
    """
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name, "0") not in ("0", ""):
            return f"{name}={os.environ[name]} is set (unset it to compile)"
    if device.type == "mps":
        return "torch.compile is not used on mps"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 7:
            return f"Triton needs compute capability 7.0, this GPU has {major}.{minor}"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed (pip install triton)"
        problem = provide_libcuda()
        if problem:
            return problem
    variable, compilers = CPU_COMPILERS if device.type == "cpu" else GPU_COMPILERS
    if not find_compiler(variable, compilers):
        chosen = os.environ.get(variable)
        if chosen:
            return f"{variable}={chosen} is no executable (it must be one word; unset it)"
        return f"no C compiler on PATH ({', '.join(compilers)}): apt install build-essential"
    if not find_python_header():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Python.h is missing: apt install python{version}-dev"
    return None


def find_compiler(variable: str, names: tuple[str, ...]) -> str | None:
    """Path of the compiler that the environment variable, else PATH, names."""
    if os.environ.get(variable):
        return shutil.which(os.environ[variable])
    return next(filter(None, map(shutil.which, names)), None)


def find_python_header() -> Path | None:
    """Path of Python.h, which compiled kernels' launchers include."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header if header.exists() else None


def find_libcuda(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The driver library this process has loaded, wherever it lies; None without a driver."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")  # loading it does not start CUDA
    try:
        found = re.search(r"/\S*/libcuda\.so[.\d]*$", maps.read_text(), re.MULTILINE)
    except OSError:
        return None
    return Path(found.group()) if found else None


def provide_libcuda(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Make Triton find libcuda without root; returns what is wrong if that is not possible.

    Triton asks ldconfig, which on many clusters, containers and WSL does not know the driver's
    folder, then fails with "libcuda.so cannot found". It prefers TRITON_LIBCUDA_PATH, so that is
    set to a private folder with links under both names that its versions link against.
    """
    chosen = os.environ.get("TRITON_LIBCUDA_PATH")
    if chosen:
        if any((Path(chosen) / name).exists() for name in ("libcuda.so.1", "libcuda.so")):
            return None
        return f"TRITON_LIBCUDA_PATH={chosen} holds no libcuda.so (unset it)"
    library = find_libcuda(maps)
    if library is None:
        return "libcuda.so.1 is not loaded: is the NVIDIA driver installed?"
    folder = tempfile.TemporaryDirectory(prefix="libcuda-")
    _kept_until_exit.append(folder)
    for name in ("libcuda.so", "libcuda.so.1"):
        (Path(folder.name) / name).symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = folder.name
    return None


def provide_cache_folder() -> str | None:
    """Give torch another cache folder where the one that is asked for cannot be written to; returns
    what is wrong with that one."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not chosen:
        return None
    try:
        os.makedirs(chosen, exist_ok=True)
        tempfile.TemporaryFile(dir=chosen).close()
    except OSError as error:
        folder = tempfile.TemporaryDirectory(prefix="torchinductor-")
        _kept_until_exit.append(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        return f"TORCHINDUCTOR_CACHE_DIR={chosen} cannot be written to: {error.strerror}"
    return None


_kept_until_exit: list[Any] = []


def expandable_segments() -> bool:
    """Whether the CUDA allocator really uses expandable segments (allocates a few bytes to see)."""
    torch.empty(1, device="cuda")
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", False))


def report() -> list[tuple[str, str, str]]:
    """The state of everything a run depends on: (ok | warning | problem, name, finding)."""
    rows = []

    def row(name: str, finding: Any, state: str = "ok") -> None:
        rows.append((state, name, str(finding)))

    row("system", f"{platform.platform()}, {os.cpu_count()} cores")
    supported = sys.version_info >= (3, 10)
    row("python", platform.python_version() + ("" if supported else ": 3.10 or newer is needed"),
        "ok" if supported else "problem")  # fmt: skip
    on_cpu = torch is None or not torch.cuda.is_available()
    compiler = find_compiler(*(CPU_COMPILERS if on_cpu else GPU_COMPILERS))
    row("compiler", compiler or "none: torch.compile needs one (apt install build-essential)",
        "ok" if compiler else "warning")  # fmt: skip
    row("Python.h", find_python_header() or "missing: torch.compile needs it (python3-dev)",
        "ok" if find_python_header() else "warning")  # fmt: skip
    for name in ALLOCATOR_VARIABLES:
        if name in os.environ:
            row(name, os.environ[name])
    if torch is None:
        row("torch", "not installed: pip install -r requirements.txt", "problem")
        return rows
    row("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}")
    device = choose_device()
    row("device", device.type, "ok" if device.type != "cpu" else "warning")
    if device.type == "cuda":
        provide_libcuda()  # as a run does, so that kernels are tried as there
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        row("GPU", f"{torch.cuda.device_count()} x {properties.name}, compute capability "
                   f"{properties.major}.{properties.minor}")  # fmt: skip
        row("GPU memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
            "ok" if free > total / 2 else "warning")  # fmt: skip
        with contextlib.suppress(Exception):
            version = Path("/proc/driver/nvidia/version").read_text()
            row("driver", re.search(r"\d+\.\d+(\.\d+)?", version).group())
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        row("bfloat16", "native" if native else "not native: float16 is used",
            "ok" if native else "warning")  # fmt: skip
        backends = {
            "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        }
        row("attention", ", ".join(name for name, enabled in backends.items() if enabled))
        row("libcuda", find_libcuda() or "not found: install the NVIDIA driver",
            "ok" if find_libcuda() else "problem")  # fmt: skip
        row("kernels", "usable" if kernels_work() else "not usable: plain torch takes their place",
            "ok" if kernels_work() else "warning")  # fmt: skip
        used = expandable_segments()
        row("allocator", "expandable segments in use" if used else
            "expandable segments not in use: unset the allocator variables above",
            "ok" if used else "warning")  # fmt: skip
    obstacle = compile_obstacle(device)
    row("torch.compile", obstacle or "usable", "warning" if obstacle else "ok")
    return rows


if __name__ == "__main__":
    from configurator import one_line_errors

    sys.excepthook = one_line_errors
    results = report()
    for state, name, finding in results:  # narrow enough to be quoted
        line = f"{state:8} {name:24} {finding}"
        print(textwrap.fill(line, 80, subsequent_indent=" " * 9))
    sys.exit(any(state == "problem" for state, _, _ in results))
