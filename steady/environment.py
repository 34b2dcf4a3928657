"""Checks of torch's dependencies: compilers, libcuda, the allocator."""

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch

from steady.loss import triton


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
            return f"Triton needs compute capability 7.0, but this GPU has {major}.{minor}"
        if triton is None:
            return "Triton is not installed (pip install triton)"
        if problem := provide_libcuda():
            return problem
    language, variable, compilers = "C", "CC", ("cc", "gcc", "clang")  # as torch looks for them
    if device.type == "cpu":
        language, variable, compilers = "C++", "CXX", ("g++", "clang++")
    chosen = os.environ.get(variable)
    if chosen and not shutil.which(chosen):
        return f"{variable}={chosen} is not an executable (it must be one word; unset it)"
    if not chosen and not any(map(shutil.which, compilers)):
        names = ", ".join(compilers)
        return f"no {language} compiler on PATH ({names}): apt install build-essential"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():  # compiled kernels include it
        return f"Python.h is missing: apt install python{sysconfig.get_python_version()}-dev"
    return None


def provide_libcuda(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Make Triton find libcuda without root. Returns the problem if that is not possible.

    Triton asks ldconfig, which does not know the driver's folder on many clusters, in containers
    and on WSL. Triton then fails with "libcuda.so cannot found". TRITON_LIBCUDA_PATH comes first,
    so set it to a private folder with links under both names that Triton's versions use.
    """
    if os.environ.get("TRITON_LIBCUDA_PATH"):
        return None
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")  # loading it does not start CUDA
    mapped = maps.read_text(encoding="utf-8") if maps.exists() else ""
    library = re.search(r"/\S*/libcuda\.so[.\d]*$", mapped, re.MULTILINE)
    if library is None:
        return "libcuda.so.1 is not loaded: is the NVIDIA driver installed?"
    folder = tempfile.mkdtemp(prefix="libcuda-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("libcuda.so", "libcuda.so.1"):
        (Path(folder) / name).symlink_to(library.group())
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    return None


def cache_obstacle() -> str | None:
    """If the folder in TORCHINDUCTOR_CACHE_DIR is not writable, unset the variable and return the
    problem. Even eager training needs a folder; torch's default is a temporary one."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        if chosen:
            os.makedirs(chosen, exist_ok=True)
            tempfile.TemporaryFile(dir=chosen).close()
    except OSError as error:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        return f"TORCHINDUCTOR_CACHE_DIR={chosen} cannot be written to: {error.strerror}"
    return None


def expandable_segments() -> bool:
    """Whether the CUDA allocator really uses expandable segments (allocates a few bytes)."""
    torch.empty(1, device="cuda")
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return bool(settings.get("expandable_segments", False))
