"""What to compute on and how: device, number formats, kernels; and what a device says of itself."""

import contextlib
import ctypes
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from steady import UserError

MEMORY_FOR_CUDA = 0.03  # share of a GPU's memory that CUDA and its libraries need for themselves
MIN_BFLOAT16_WIDTH = 128  # of models that a CPU with instructions for it trains faster

# Dense bf16/fp16 tensor-core peaks in FLOP/s from the vendor's data sheets. The first name whose
# words are in torch.cuda.get_device_name() counts, so longer names come first.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A100X": 312e12,
    "A40": 150e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100S": 130e12,
    "V100": 125e12,
    "T4": 65e12,
}
# Consumer cards: dense, float32 sums, which their tensor cores do at twice the float32 rate of the
# shaders: "Peak BF16 Tensor TFLOPS with FP32 Accumulate" in NVIDIA's architecture white papers
# "GA102" (30), "Ada" (40) and "RTX Blackwell" (50), appendix A; cards that these leave out by twice
# the shaders' TFLOPS of their product pages.
PEAK_FLOPS |= {
    f"RTX {name}": tflops * 1e12
    for name, tflops in {
        "5090": 209.5, "5080": 112.6, "5070 Ti": 87.9, "5070": 61.7, "5060 Ti": 47.4, "5060": 38.4,
        "4090": 165.2, "4080 SUPER": 104.4, "4080": 97.5, "4070 Ti SUPER": 88.2, "4070 Ti": 80.2,
        "4070 SUPER": 71.0, "4070": 58.3, "4060 Ti": 44.1, "4060": 30.2,
        "3090 Ti": 80.0, "3090": 71.2, "3080 Ti": 68.2, "3080": 59.5, "3070 Ti": 43.5,
        "3070": 40.6, "3060 Ti": 32.4, "3060": 25.5,
    }.items()
}  # fmt: skip


def choose_device(name: str = "auto", local_rank: int | None = None) -> torch.device:
    """The device called `name`, or for "auto" the best there is: cuda, then mps, then cpu.

    One of several processes on a machine gets the GPU with the number of its `local_rank`.
    Raises UserError when the name is unknown or the device is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        else:
            name = "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps"):
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:N or mps")
    if local_rank is not None and kind != "cpu":
        if index or kind == "mps":
            raise UserError(f"device={name} cannot be shared by several processes: use cuda")
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} of this machine has no GPU, there are "
                f"{torch.cuda.device_count()}: use a smaller --nproc_per_node"
            )
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise UserError(
            f"device {name!r} is not usable here: {reason}; python -m steady.environment says "
            "more, and --device=auto takes what there is"
        ) from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # the calls that name no device mean this one
    return device


def choose_dtype(name: str, device: torch.device, width: int = 0) -> torch.dtype:
    """The dtype to compute in; "auto": bfloat16 or float16 on a GPU, float32 elsewhere, but on a
    CPU bfloat16 for training a model of that `width` where `fastest_on_cpu` says so (0: float32;
    several processes, each of which measured, might not agree).

    In training, weights, gradients and optimizer state are float32 in any case.
    """
    if name == "auto":
        name = fastest_on_cpu(width) if device.type == "cpu" else "float32"
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            name = "bfloat16" if native else "float16"
    return getattr(torch, name)


def fastest_on_cpu(width: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The dtype in which a model of that width trains fastest on this CPU: float32, or bfloat16
    where there are instructions for such products and they are fast, which is tried out: a product
    of 512 by 512 then takes a quarter of float32's time (Intel's AMX) or half of it (AMD's
    AVX512_BF16; Intel's takes longer than float32). Narrow models gain nothing.
    """
    if width < MIN_BFLOAT16_WIDTH or not re.search("amx_bf16|avx512_bf16", described(cpuinfo)):
        return "float32"
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    multiply_by_onednn(cpuinfo)  # as float32 would be trained
    torch.set_num_threads(1)  # and its own time, so that it does not matter what else is running
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, times = torch.ones(512, 512, dtype=dtype), []
        for _ in range(6):
            began = time.thread_time()
            torch.mm(a, a)
            times.append(time.thread_time() - began)
        seconds[dtype] = min(times)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    faster = seconds[torch.float32] > 1.5 * seconds[torch.bfloat16]
    return "bfloat16" if faster else "float32"


def described(cpuinfo: Path) -> str:
    """What Linux says of the processor; nothing on other systems."""
    try:
        return cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return ""


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """The context to run forward passes in."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def peak_flops(device: torch.device, dtype: torch.dtype, devices: int = 1) -> float | None:
    """The peak FLOP/s for matrix products in `dtype` of so many such devices, or None where it is
    not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    for key, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{key}\b(?! (Laptop|D|Ti|SUPER)\b)", name):  # those are other GPUs
            return devices * peak
    return None


def peak_memory_gib(device: torch.device) -> float | None:
    """Most GPU memory allocated so far, in GiB; None on devices without that counter."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def total_memory_gib(device: torch.device) -> float | None:
    """The memory of the GPU, in GiB; None on devices that do not say."""
    return torch.cuda.mem_get_info(device)[1] / 2**30 if device.type == "cuda" else None


def available_memory_gib(device: torch.device) -> float:
    """GPU memory a step may take: what is free and what this process has, less what CUDA needs;
    infinity on other devices."""
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction() * total
    return (1 - MEMORY_FOR_CUDA) * min(limit, free + torch.cuda.memory_reserved(device)) / 2**30


def machine_memory_gib(device: torch.device) -> float:
    """What a process can have at most, in GiB: `available_memory_gib` of a GPU, else what the
    machine and its container have free, swap included; infinity where that is not known."""
    of_gpu = available_memory_gib(device)
    if of_gpu < math.inf:
        return of_gpu
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError, AttributeError):  # all there is (not on Windows)
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, KeyError, ValueError):  # Linux, where more is known
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
        found.append(1024 * (kib["MemAvailable"] + kib["SwapFree"]))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(Path("/sys/fs/cgroup", name).read_text(encoding="utf-8")))
    return min(found) / 2**30


def to_host_async(*scalars: Tensor) -> Callable[[], list[float]]:
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


def prepare(device: torch.device, dtype: torch.dtype, width: int, block_size: int) -> None:
    """Set torch and the C library up for training a model of that width and context on `device`."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32
    if device.type == "cpu":
        keep_freed_memory()
        use_onednn(device, dtype, width, block_size)


def keep_freed_memory() -> None:
    """Let the C library keep what tensors on the CPU free: glibc gives large blocks back to the
    system after a step, and the next one faults them in again, page by page (4% of a small model's
    step). Other C libraries stay as they are."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, and the largest it takes
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def use_onednn(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    block_size: int,
    cpuinfo: Path = Path("/proc/cpuinfo"),
) -> bool:
    """Compute float32 products on a CPU by oneDNN where that is faster (narrow models gain nothing)
    and exact. Returns whether it does.

    Where short contexts are slow in the fused attention kernel, attention is computed step by step,
    in float32: that kernel multiplies small blocks, for which oneDNN is slow, and bfloat16 takes up
    to five times as long.
    """
    if device.type != "cpu":
        return False
    multiplies = dtype == torch.float32 and width >= 64 and multiply_by_onednn(cpuinfo)
    short = block_size <= (512 if dtype == torch.bfloat16 else 256 if multiplies else 0)
    torch.backends.cuda.enable_flash_sdp(not short)  # this setting applies to CPUs too
    return multiplies


def multiply_by_onednn(cpuinfo: Path) -> bool:
    """Have oneDNN compute float32 products where torch's choice, MKL, uses half of the processor:
    on AMD with AVX-512 (190 against 400 GFLOP/s on two cores of a Zen 5). Returns whether it does.

    The setting permits rounding to bfloat16, which oneDNN does on processors with AMX; whether it
    does here is tried out.
    """
    amd = "AuthenticAMD" in described(cpuinfo)
    if not amd or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    if products_are_exact():
        return True
    torch.set_float32_matmul_precision(before)
    return False


def products_are_exact() -> bool:
    """Whether a float32 product on the CPU keeps more than bfloat16's digits."""
    a = torch.full((512, 512), 1 + 2**-12)  # 1.0 in bfloat16
    return bool(((a @ a).mean() - 512.25).abs() < 0.01)
