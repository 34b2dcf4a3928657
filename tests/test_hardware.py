"""The choice of device, dtype and kernels, as far as it can be tested on a CPU."""

import types

import pytest
import torch

from model import GPT, GPTConfig
from steady import hardware

CPU = torch.device("cpu")


def test_device_and_dtype_are_chosen_and_can_be_overridden(monkeypatch):
    assert hardware.choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device 'cuda' is not usable here"):
            hardware.choose_device("cuda")
    assert hardware.choose_dtype("auto", CPU) == torch.float32
    assert hardware.choose_dtype("bfloat16", CPU) == torch.bfloat16
    gpu = torch.device("cuda")
    for native, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda n=native, **_: n)
        assert hardware.choose_dtype("auto", gpu) == expected


@pytest.mark.parametrize(
    ("flags", "width", "dtype"),
    [
        ("GenuineIntel avx512f amx_bf16", 128, "bfloat16"),
        ("GenuineIntel avx512f amx_bf16", 64, "float32"),  # too narrow to be faster
        ("AuthenticAMD avx512f avx512_bf16", 128, "bfloat16"),
        ("GenuineIntel avx512f avx512_bf16", 128, "float32"),  # slower than float32
        ("GenuineIntel avx512f", 128, "float32"),  # no bfloat16 instructions
        ("", 128, "float32"),  # not Linux
    ],
)
def test_cpus_compute_in_bfloat16_where_that_is_known_to_be_fast(monkeypatch, flags, width, dtype):
    monkeypatch.setattr(hardware, "processor", lambda: flags)
    assert hardware.choose_dtype("auto", CPU, width) == getattr(torch, dtype)


def test_f20_mfu_only_where_the_peak_is_known(monkeypatch):
    gpu = types.SimpleNamespace(type="cuda")
    for name, expected in (
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2e12),
        ("NVIDIA GeForce RTX 4070 SUPER", 71.0e12),
        ("NVIDIA GeForce RTX 5070 Ti", 87.9e12),
        ("NVIDIA GeForce RTX 5060 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", 80.0e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GeForce GTX 1080", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert hardware.peak_flops(gpu, torch.bfloat16) == expected
    assert hardware.peak_flops(gpu, torch.float32) is None
    assert hardware.peak_flops(torch.device("cpu"), torch.bfloat16) is None


def set_processor(monkeypatch, vendor, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(hardware, "processor", lambda: f"vendor_id\t: {vendor}\n")


@pytest.mark.parametrize(
    ("vendor", "capability", "width", "used"),
    [
        ("AuthenticAMD", "AVX512", 128, True),
        ("AuthenticAMD amx_bf16", "AVX512", 128, False),  # would round to bfloat16
        ("AuthenticAMD", "AVX512", 32, False),
        ("AuthenticAMD", "AVX2", 128, False),
        ("GenuineIntel", "AVX512", 128, False),
    ],
)
def test_onednn_multiplies_only_where_it_is_faster_and_exact(
    monkeypatch, vendor, capability, width, used
):
    set_processor(monkeypatch, vendor, capability)
    assert hardware.use_onednn(CPU, torch.float32, width, 64) is used
    assert torch.get_float32_matmul_precision() == ("medium" if used else "highest")
    assert torch.backends.cuda.flash_sdp_enabled() is not used


def test_onednn_is_not_used_where_the_processor_is_not_known(monkeypatch):
    monkeypatch.setattr(hardware, "processor", lambda: "")
    assert hardware.use_onednn(CPU, torch.float32, 128, 64) is False


def test_long_contexts_keep_the_fused_attention(monkeypatch):
    set_processor(monkeypatch, "AuthenticAMD", "AVX512")
    assert hardware.use_onednn(CPU, torch.float32, 128, 1024)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_model_trained_through_onednn_keeps_float32s_accuracy():
    if not hardware.use_onednn(CPU, torch.float32, 128, 64):
        pytest.skip("oneDNN is not used on this CPU")
    tokens = torch.randint(64, (2, 12, 64))
    found = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = GPT(GPTConfig(block_size=64, vocab_size=64, n_layer=2, n_head=4, n_embd=128))
        loss = model.to(dtype)(*tokens)
        loss.backward()
        found[dtype] = [loss.detach().double()] + [p.grad.double() for p in model.parameters()]
    for a, b in zip(*found.values(), strict=True):
        assert (a - b).norm() < 3e-6 * b.norm()


@pytest.mark.parametrize(
    ("described", "limits", "found"),
    [
        ("0::/\n", {"memory.max": "5000\n"}, [5000]),  # in a container
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7/memory.max": "7000\n",
         "slurm/job_7/step_0/memory.max": "max\n", "memory.max": "max\n"}, [7000]),
        ("5:cpu:/a\n4:hugetlb,memory:/docker/x/y\n",
         {"memory/memory.limit_in_bytes": "9000", "memory/docker/x/memory.limit_in_bytes": "8000",
          "memory/docker/x/y/memory.limit_in_bytes": "8500"}, [8000, 8500, 9000]),
        ("4:memory:/docker/elsewhere\n", {"memory/memory.limit_in_bytes": "9000"}, [9000]),
        ("4:memory:/job\n3:pids:/system\n", {"memory/job/memory.limit_in_bytes": "8000",
         "memory/system/memory.limit_in_bytes": "1000"}, [8000]),  # of another group
        ("bad\n", {"memory.max": "5000"}, [5000]),
        ("", {}, []),
    ],
)  # fmt: skip
def test_memory_limits_of_all_groups_around_this_process_count(tmp_path, described, limits, found):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(described)
    for name, limit in limits.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit)
    assert sorted({*hardware.cgroup_limits(tmp_path)}) == found


@pytest.mark.parametrize("n", ["x", "0"])
def test_a_strange_local_world_size(monkeypatch, n):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", n)
    assert hardware.available_memory_gib(torch.device("cpu")) > 0


def test_limits_of_a_root_group_and_of_groups_with_names_of_any_bytes(tmp_path):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("5\n")
    assert hardware.cgroup_limits(tmp_path) == [5]
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/\xff\n")
    assert 5 in hardware.cgroup_limits(tmp_path)
