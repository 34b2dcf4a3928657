"""Checks of what torch depends on: compilers, libcuda, the allocator.

`python -m steady.environment` prints a report for bug reports. It works without a GPU, a compiler
or torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from steady import ALLOCATOR_VARIABLES, start_script

if __name__ == "__main__":
    start_script()  # before importing torch, like a training run

try:
    import torch
except ImportError:
    torch = None  # the report still works

if torch is not None:
    from steady.hardware import choose_device
    from steady.kernels import kernels_work

# the environment variable with torch's compiler, and the compilers that torch tries without it
CPU_COMPILERS = "CXX", ("g++", "clang++")
GPU_COMPILERS = "CC", ("cc", "gcc", "clang")


def compile_obstacle(device: torch.device) -> str | None:
    """Why torch.compile cannot work here, in one line with its remedy; None if no reason is known.

    Without this check a run would only find out in its trial step, after loading.
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
            return f"{variable}={chosen} is not an executable (it must be one word; unset it)"
        return f"no C compiler on PATH ({', '.join(compilers)}): apt install build-essential"
    if not find_python_header():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Python.h is missing: apt install python{version}-dev"
    return None


def find_compiler(variable: str, names: tuple[str, ...]) -> str | None:
    """Path of the compiler: the one in the environment variable, else the first of `names`."""
    if os.environ.get(variable):
        return shutil.which(os.environ[variable])
    return next(filter(None, map(shutil.which, names)), None)


def find_python_header() -> Path | None:
    """Path of Python.h, which the launchers of compiled kernels include."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return header if header.exists() else None


def find_libcuda(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The path of the driver library that this process has loaded; None without a driver."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")  # loading it does not start CUDA
    try:
        found = re.search(r"/\S*/libcuda\.so[.\d]*$", maps.read_text(), re.MULTILINE)
    except OSError:
        return None
    return Path(found.group()) if found else None


def provide_libcuda(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Make Triton find libcuda without root. Returns the problem if that is not possible.

    Triton asks ldconfig, which does not know the driver's folder on many clusters, in containers
    and on WSL. Triton then fails with "libcuda.so cannot found". TRITON_LIBCUDA_PATH comes first,
    so set it to a private folder with links under both names that Triton's versions use.
    """
    chosen = os.environ.get("TRITON_LIBCUDA_PATH")
    if chosen:
        if any((Path(chosen) / name).exists() for name in ("libcuda.so.1", "libcuda.so")):
            return None
        return f"TRITON_LIBCUDA_PATH={chosen} has no libcuda.so (unset it)"
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
    """Give torch a temporary cache folder if the one in TORCHINDUCTOR_CACHE_DIR is not writable.
    Returns the problem with that one."""
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
    """Whether the CUDA allocator really uses expandable segments (allocates a few bytes)."""
    torch.empty(1, device="cuda")
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", False))


def driver_version() -> str | None:
    """The version of NVIDIA's driver, from Linux."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        return re.search(r"\d+\.\d+(\.\d+)?", text).group()
    except (OSError, AttributeError):
        return None


def report() -> list[tuple[str, str, str]]:
    """Rows on everything a run depends on: (ok | warning | problem, name, finding)."""
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
    row("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not included'}")
    device = choose_device()
    row("device", "cpu: torch finds no GPU" if device.type == "cpu" else device.type,
        "warning" if device.type == "cpu" else "ok")  # fmt: skip
    if device.type == "cpu" and torch.version.cuda:
        row("driver", f"{driver_version() or 'none'}: this torch needs a driver for CUDA "
            f"{torch.version.cuda} or newer", "warning")  # fmt: skip
    if device.type == "cuda":
        provide_libcuda()  # test kernels under the same conditions as a run
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        row("GPU", f"{torch.cuda.device_count()} x {properties.name}, compute capability "
                   f"{properties.major}.{properties.minor}")  # fmt: skip
        row("GPU memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
            "ok" if free > total / 2 else "warning")  # fmt: skip
        row("driver", driver_version() or "unknown version")
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        row("bfloat16", "native" if native else "not native: float16 is used",
            "ok" if native else "warning")  # fmt: skip
        backends = {
            "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        }
        row("attention", ", ".join(name for name, enabled in backends.items() if enabled))
        libcuda = find_libcuda()
        row("libcuda", libcuda or "not found: install the NVIDIA driver",
            "ok" if libcuda else "problem")  # fmt: skip
        row("custom kernels", "usable" if kernels_work() else "not usable: plain torch is used",
            "ok" if kernels_work() else "warning")  # fmt: skip
        used = expandable_segments()
        row("allocator", "expandable segments in use" if used else
            "expandable segments not in use: unset the allocator variables above",
            "ok" if used else "warning")  # fmt: skip
    obstacle = compile_obstacle(device)
    row("torch.compile", obstacle or "usable", "warning" if obstacle else "ok")
    return rows


if __name__ == "__main__":
    from configurator import configure

    configure(globals(), positional="")
    results = report()
    for state, name, finding in results:  # narrow enough to quote
        line = f"{state:8} {name:24} {finding}"
        print(textwrap.fill(line, 80, subsequent_indent=" " * 9))
    sys.exit(any(state == "problem" for state, _, _ in results))
