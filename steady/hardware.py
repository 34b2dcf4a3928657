"""Choosing and describing the hardware: device, dtype, CPU kernels, memory, peak FLOP/s."""

import contextlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from steady import UserError

MEMORY_FOR_CUDA = 0.03  # share of a GPU's memory that CUDA and its libraries need
MIN_BFLOAT16_WIDTH = 128  # of models that train faster in bfloat16 on a CPU with support for it

# Dense bf16/fp16 tensor-core peaks in TFLOP/s. The first name found in torch.cuda.get_device_name()
# counts, so longer names come first. Data centre cards: from the vendor's data sheets. Consumer
# cards, with float32 sums: "Peak BF16 Tensor TFLOPS with FP32 Accumulate" in appendix A of NVIDIA's
# architecture white papers "GA102" (30), "Ada" (40) and "RTX Blackwell" (50). That is twice the
# shaders' float32 rate, so cards missing there have twice the shader TFLOPS of their product pages.
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250,
    "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "A100": 312, "A100X": 312, "A40": 150, "A10G": 70, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121,
    "V100S": 130, "V100": 125, "T4": 65,
    "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 5070 Ti": 87.9, "RTX 5070": 61.7,
    "RTX 5060 Ti": 47.4, "RTX 5060": 38.4,
    "RTX 4090": 165.2, "RTX 4080 SUPER": 104.4, "RTX 4080": 97.5, "RTX 4070 Ti SUPER": 88.2,
    "RTX 4070 Ti": 80.2, "RTX 4070 SUPER": 71.0, "RTX 4070": 58.3, "RTX 4060 Ti": 44.1,
    "RTX 4060": 30.2,
    "RTX 3090 Ti": 80.0, "RTX 3090": 71.2, "RTX 3080 Ti": 68.2, "RTX 3080": 59.5,
    "RTX 3070 Ti": 43.5, "RTX 3070": 40.6, "RTX 3060 Ti": 32.4, "RTX 3060": 25.5,
}  # fmt: skip


def choose_device(name: str = "auto", local_rank: int | None = None) -> torch.device:
    """The device `name`, or for "auto" the best available: cuda, then mps, then cpu.

    With several processes on a machine, each gets the GPU number `local_rank`.
    Raises UserError if the name is unknown or the device is not available.
    """
    if name == "auto":
        kinds = {"cuda": torch.cuda, "mps": torch.backends.mps, "cpu": torch.cpu}
        name = next(kind for kind, backend in kinds.items() if backend.is_available())
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps"):
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:N or mps")
    if local_rank is not None and kind != "cpu":
        if index or kind == "mps":
            raise UserError(f"device={name} cannot be shared by several processes: use cuda")
        if local_rank >= (n := torch.cuda.device_count()):
            raise UserError(
                f"process {local_rank} of this machine has no GPU (there are only {n}): use "
                + ("a smaller --nproc_per_node" if n else "--device=cpu")
            )
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise UserError(
            f"device {name!r} is not usable here: {reason}; python -m torch.utils.collect_env "
            "shows what torch finds; or use --device=auto"
        ) from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # the default for calls without a device
    return device


def choose_dtype(name: str, device: torch.device, width: int = 0) -> torch.dtype:
    """The dtype to compute in. "auto" is bfloat16 or float16 on a GPU and float32 elsewhere, except
    for training on a CPU, where the model's `width` decides: a bfloat16 matmul takes a quarter of
    float32's time with Intel's AMX and half with AMD's AVX512_BF16, but longer with Intel's
    AVX512_BF16, and narrow models gain nothing. Width 0 means float32, for example for several
    processes, whose processors might differ.

    In training, weights, gradients and optimizer state are always float32.
    """
    if name == "auto":
        name = "float32"
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            name = "bfloat16" if native else "float16"
        elif device.type == "cpu" and width >= MIN_BFLOAT16_WIDTH:
            cpu = processor()
            if "amx_bf16" in cpu or "AuthenticAMD" in cpu and "avx512_bf16" in cpu:
                name = "bfloat16"
    return getattr(torch, name)


def processor() -> str:
    """Linux's description of the processor; empty on other systems."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def peak_flops(device: torch.device, dtype: torch.dtype, devices: int = 1) -> float | None:
    """The peak FLOP/s of several devices together, for matmuls in `dtype`; None if unknown."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    for key, peak in PEAK_TFLOPS.items():
        if re.search(rf"\b{key}\b(?! (Laptop|D|Ti|SUPER)\b)", name):  # those are other GPUs
            return devices * peak * 1e12
    return None


def peak_memory_gib(device: torch.device) -> float | None:
    """Peak GPU memory allocated so far, in GiB; None on devices without that counter."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def available_memory_gib(device: torch.device) -> float:
    """Memory that a step of this process can use, in GiB. On a GPU: free memory plus this
    process's, minus CUDA's needs. Else: this process's share of the free memory of the machine and
    its container, with swap; infinity if unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        limit = torch.cuda.get_per_process_memory_fraction() * total
        return (1 - MEMORY_FOR_CUDA) * min(limit, free + torch.cuda.memory_reserved(device)) / 2**30
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError, AttributeError):  # total (not on Windows)
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, KeyError, ValueError):  # free (only on Linux)
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
        found.append(1024 * (kib["MemAvailable"] + kib["SwapFree"]))
    found += cgroup_limits()
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    return min(found) / 2**30 / max(1, int(processes) if processes.isdecimal() else 1)


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """The limits on this process's memory in bytes: of its container, its batch job (SLURM,
    systemd), and of all groups around them (Linux's cgroups, version 1 or 2)."""
    lines, found = ["0::/", "0:memory:/"], []
    with contextlib.suppress(OSError):
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
        lines += text.splitlines()
    for line in lines:
        _, kinds, place = [*line.split(":", 2), "", ""][:3]
        if kinds and "memory" not in kinds.split(","):
            continue
        name = "memory.limit_in_bytes" if kinds else "memory.max"
        group = root / "sys/fs/cgroup" / ("memory" if kinds else "") / place.lstrip("/")
        for folder in (group, *group.parents[: len(Path(place).parts) - 1]):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                found.append(int((folder / name).read_text(encoding="utf-8")))
    return found


def to_host_async(*scalars: Tensor | float) -> Callable[[], list[float]]:
    """Start copying scalars from the device and return a function that gives their values. It waits
    for the kernels that compute them, but not for kernels launched later. (Some may be numbers, or
    DTensors from torch's own functions.)"""
    device = next((s.device for s in scalars if isinstance(s, Tensor)), None)
    whole = (getattr(s, "full_tensor", lambda s=s: s)() for s in scalars)
    numbers = torch.stack([torch.as_tensor(s, device=device) for s in whole])
    if not numbers.is_cuda:
        return numbers.tolist
    copied, done = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record()

    def read() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return read


def prepare(device: torch.device, dtype: torch.dtype, width: int, block_size: int) -> None:
    """Set up torch to train a model of this width and context on `device`."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for matmuls that stay in float32
    use_onednn(device, dtype, width, block_size)


def use_onednn(device: torch.device, dtype: torch.dtype, width: int, block_size: int) -> bool:
    """Set how a CPU multiplies and attends. Returns whether oneDNN runs the float32 matmuls.

    On AMD with AVX-512, torch's default, MKL, is half as fast as oneDNN (190 against 400 GFLOP/s on
    two cores of a Zen 5). The setting permits rounding to bfloat16, which oneDNN does only with
    AMX. Narrow models gain nothing.

    In bfloat16, and with oneDNN, the fused attention kernel is slow for short contexts, so
    attention then runs unfused, in float32. The fused kernel multiplies small blocks, which is slow
    in oneDNN, and takes up to five times as long in bfloat16.
    """
    if device.type != "cpu":
        return False
    suitable = "AuthenticAMD" in processor() and "amx" not in processor()
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and width >= 64
    multiplies = dtype == torch.float32 and suitable and wide
    if multiplies:
        torch.set_float32_matmul_precision("medium")
    short = block_size <= (512 if dtype == torch.bfloat16 else 256 if multiplies else 0)
    torch.backends.cuda.enable_flash_sdp(not short)  # this setting applies to CPUs too
    return multiplies
