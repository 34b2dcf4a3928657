"""What must be right around torch: allocator, device, dtype, and whether torch.compile can work.

Import it before CUDA starts: importing it sets the allocator variable. `python environment.py`
prints a report for bug reports; it runs without a GPU, a compiler, or torch.
"""

import contextlib
import ctypes
import ctypes.util
import math
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Without expandable segments a card fills with cached blocks of sizes no longer needed. This name
# is read by every torch version so far (the newer PYTORCH_ALLOC_CONF only from 2.10 on), and only
# before CUDA's first allocation. What the user set stays.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

try:
    import torch
except ImportError:
    torch = None  # the report still works

if torch is not None:
    import torch._functorch.config as functorch_config

    # Our loss is a custom autograd function; by default torch caches no graph that holds one, and
    # every start would trace and partition anew (13 s instead of 4 for GPT-2 on an H200).
    if hasattr(functorch_config, "autograd_cache_allow_custom_autograd_functions"):
        functorch_config.autograd_cache_allow_custom_autograd_functions = True

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # those that record CUDA graphs
DTYPES = ("float32", "bfloat16", "float16")

# Dense bf16/fp16 tensor-core peaks in FLOP/s from the vendor's data sheets. The first name that is
# part of torch.cuda.get_device_name() counts, so longer names come first.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 150e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def choose_device(name: str = "auto", local_rank: int | None = None) -> "torch.device":
    """The device called `name`, or for "auto" the best there is: cuda, then mps, then cpu.

    One of several processes on a machine gets the GPU with the number of its `local_rank`.
    Raises ValueError when the name is unknown or the device is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        else:
            name = "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps"):
        raise ValueError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:N or mps")
    if local_rank is not None and kind != "cpu":
        if index or kind == "mps":
            raise ValueError(f"device={name} cannot be shared by several processes: use cuda")
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {local_rank} of this machine has no GPU, there are "
                f"{torch.cuda.device_count()}: use a smaller --nproc_per_node"
            )
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(f"device {name!r} is not usable here: {reason}") from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # the calls that name no device mean this one
    return device


def choose_dtype(name: str, device: "torch.device") -> "torch.dtype":
    """The dtype to compute in; "auto": bfloat16 or float16 on a GPU, float32 elsewhere.

    Weights, gradients and optimizer state are float32 in any case.
    """
    if name == "auto":
        name = "float32"
        if device.type == "cuda":
            name = (
                "bfloat16"
                if torch.cuda.is_bf16_supported(including_emulation=False)
                else ("float16")
            )
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return getattr(torch, name)


def autocast(device: "torch.device", dtype: "torch.dtype") -> contextlib.AbstractContextManager:
    """The context to run forward passes in."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def peak_flops(device: "torch.device", dtype: "torch.dtype") -> float | None:
    """The device's peak FLOP/s for matrix products in `dtype`, or None where it is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory_gib(device: "torch.device") -> float | None:
    """Most GPU memory allocated so far, in GiB; None on devices without that counter."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def available_memory_gib(device: "torch.device") -> float:
    """GPU memory a step may take: what is free and what this process has, less 3% for CUDA;
    infinity on other devices."""
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction() * total
    return 0.97 * min(limit, free + torch.cuda.memory_reserved(device)) / 2**30


def read_later(*scalars: "torch.Tensor") -> Callable[[], list[float]]:
    """Start copying scalars from the device; the function returned gives their values. It waits for
    what computes them, but not for what the device has been given to do since."""
    numbers = torch.stack(scalars)
    if not numbers.is_cuda:
        return numbers.tolist
    copied, done = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record()

    def read() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return read


def keep_freed_memory() -> None:
    """Let the C library keep what tensors on the CPU free: glibc gives large blocks back to the
    system after a step, and the next one faults them in again, page by page (4% of a small model's
    step). Other C libraries stay as they are."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, and the largest it takes
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def use_onednn(width: int, block_size: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Compute float32 products by oneDNN where torch's choice, MKL, uses half of the processor: on
    AMD with AVX-512 (190 against 400 GFLOP/s on two cores of a Zen 5; narrow models gain nothing).
    Returns whether it does.

    The setting permits rounding to bfloat16, which oneDNN does on processors with units for such
    products; whether it does here is tried out.
    """
    with contextlib.suppress(OSError):
        amd = "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")
        if width >= 64 and amd and torch.backends.cpu.get_cpu_capability() == "AVX512":
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("medium")
            if products_are_exact():
                # the fused attention kernel multiplies small blocks, for which oneDNN is slow
                torch.backends.cuda.enable_flash_sdp(block_size > 256)  # it means CPUs as well
                return True
            torch.set_float32_matmul_precision(before)
    return False


def products_are_exact() -> bool:
    """Whether a float32 product on the CPU keeps more than bfloat16's digits."""
    a = torch.full((512, 512), 1 + 2**-12)  # 1.0 in bfloat16
    return bool(((a @ a).mean() - 512.25).abs() < 0.01)


def cudnn_attention(device: "torch.device", dtype: "torch.dtype", head_dim: int) -> bool:
    """Whether cuDNN's attention is the fastest here: on Hopper and newer, in half precision
    (measured on an H200, see dev/LOG.md)."""
    return (
        device.type == "cuda"
        and dtype != torch.float32
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and head_dim % 8 == 0
        and head_dim <= 128
    )


def summary(
    device: "torch.device", dtype: "torch.dtype", obstacle: str | None, compile_mode: str
) -> str:
    """What a run will use, in one line, with what was asked for but cannot be had."""
    compiled = f"not compiled ({obstacle})" if obstacle else f"compiled ({compile_mode})"
    name = str(device)
    if device.type == "cuda":
        name = f"{device} ({torch.cuda.get_device_name(device)})"
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        if not obstacle and compile_mode.startswith("max-autotune") and processors < 68:
            compiled += f", but not autotuned: {processors} multiprocessors, 68 are needed"
        if not expandable_segments():
            compiled += ", without expandable segments"
    elif not obstacle and compile_mode in GRAPH_MODES:
        compiled += f", without CUDA graphs on {device.type}"
    return f"device {name}, dtype {str(dtype).removeprefix('torch.')}, {compiled}"


def compile_obstacle(device: "torch.device") -> str | None:
    """Why torch.compile cannot work here, in one line with its remedy; None if nothing is known.

    Without it a run would die at its first step, after minutes of loading.
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
    variable, compilers = ("CXX", ("g++", "clang++")) if device.type == "cpu" else (
        "CC", ("cc", "gcc", "clang")
    )  # fmt: skip
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
    compiler = find_compiler("CC", ("cc", "gcc", "clang"))
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
        used = expandable_segments()
        row("allocator", "expandable segments in use" if used else
            "expandable segments not in use: unset the allocator variables above",
            "ok" if used else "warning")  # fmt: skip
    obstacle = compile_obstacle(device)
    row("torch.compile", obstacle or "usable", "warning" if obstacle else "ok")
    return rows


if __name__ == "__main__":
    results = report()
    for state, name, finding in results:
        print(f"{state:8} {name:24} {finding}")
    sys.exit(any(state == "problem" for state, _, _ in results))
