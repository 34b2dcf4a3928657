"""Checks without a GPU: fake driver layouts, missing compilers, variables that disable things."""

import contextlib
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from configurator import CHOICES
from model import GPT, GPTConfig
from steady import compiling, environment, loss
from steady.compiling import Plan
from steady.distributed import Process
from steady.float8 import replace_layers
from steady.generate import sample_while_training
from steady.recompute import use_activation_checkpointing
from steady.tokenizer import CharTokenizer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (
        "TORCHDYNAMO_DISABLE",
        "TORCH_COMPILE_DISABLE",
        "CC",
        "CXX",
        "TRITON_LIBCUDA_PATH",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_f10_disabling_variable_is_reported(monkeypatch, name):
    assert environment.compile_obstacle(CPU) is None
    monkeypatch.setenv(name, "1")
    assert environment.compile_obstacle(CPU) == f"{name}=1 is set (unset it to compile)"
    monkeypatch.setenv(name, "0")
    assert environment.compile_obstacle(CPU) is None


def test_f09_no_compiler_is_one_line_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler on PATH" in environment.compile_obstacle(CPU)


def test_f09_compiler_variable_of_several_words_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    assert "CXX=ccache g++ is not an executable (it must be one word" in (
        environment.compile_obstacle(CPU)
    )


def test_f09_missing_python_header_is_one_line_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "Python.h is missing: apt install python3." in environment.compile_obstacle(CPU)


def test_f10_training_goes_on_eagerly_and_says_why(run, sums, tmp_path, monkeypatch):
    from conftest import TINY

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    shown = run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}",
                "--compile=True", "--max_iters=1")  # fmt: skip
    assert "not compiled (TORCHDYNAMO_DISABLE=1 is set" in shown


def test_f09_compiled_code_takes_the_answer_whether_kernels_run(monkeypatch):
    def cannot_be_traced():
        torch._dynamo.graph_break()
        return True

    monkeypatch.setattr(loss, "triton", loss)  # not None
    monkeypatch.setattr(loss, "_small_kernel_works", cannot_be_traced)

    @partial(torch.compile, fullgraph=True, backend="eager")
    def add_if_they_run(x):
        return x + 1 if loss.kernels_work() else x

    assert add_if_they_run(torch.zeros(())) == 1


def test_f11_gpu_too_old_for_triton_is_reported(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 0))
    found = environment.compile_obstacle(torch.device("cuda"))
    assert "compute capability 7.0, but this GPU has 6.0" in found


def maps_with(tmp_path, library):
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 123   /usr/lib/libc.so.6\n"
        f"7f02-7f03 r-xp 00000000 08:01 124   {library}\n"
    )
    return maps


def triton_finds(ldconfig: str, variables: dict) -> bool:
    """Triton's search order: its variable, then ldconfig's list, then LD_LIBRARY_PATH."""
    folders = [variables["TRITON_LIBCUDA_PATH"]] if "TRITON_LIBCUDA_PATH" in variables else []
    if not folders:
        listed = [line.split()[-1] for line in ldconfig.splitlines() if "libcuda.so.1" in line]
        folders = [os.path.dirname(path) for path in listed]
        folders = folders or variables.get("LD_LIBRARY_PATH", "").split(":")
    return any((Path(folder) / "libcuda.so.1").exists() for folder in folders if folder)


def test_f08_libcuda_is_linked_under_both_names_without_root(tmp_path, monkeypatch):
    library = tmp_path / "driver" / "libcuda.so.580.159.04"
    library.parent.mkdir()
    library.write_text("driver")
    ldconfig = "libc.so.6 (libc6,x86-64) => /usr/lib/libc.so.6\n"
    assert not triton_finds(ldconfig, {})  # without the fix: "libcuda.so cannot found"
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "")
    assert environment.provide_libcuda(maps_with(tmp_path, library)) is None
    folder = Path(os.environ["TRITON_LIBCUDA_PATH"])
    for name in ("libcuda.so", "libcuda.so.1"):
        assert (folder / name).resolve() == library
    assert triton_finds(ldconfig, {"TRITON_LIBCUDA_PATH": str(folder)})


def test_f08_no_driver_is_reported_and_a_users_folder_is_kept(tmp_path, monkeypatch):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 123   /usr/lib/libc.so.6\n")
    assert "is the NVIDIA driver installed" in environment.provide_libcuda(maps)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    assert environment.provide_libcuda(maps) is None  # the user's choice stays


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "max_split_size_mb:128"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_f06_allocator_variable_is_set_before_torch_unless_the_user_did(user, expected):
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    clean = {key: value for key, value in os.environ.items() if key not in names}
    script = (
        "import builtins, os, sys\n"
        "original = builtins.__import__\n"
        "def watch(name, *a, **k):\n"
        "    if name == 'torch' and 'torch' not in sys.modules:\n"
        "        print(os.environ.get('PYTORCH_CUDA_ALLOC_CONF')); os._exit(0)\n"
        "    return original(name, *a, **k)\n"
        "builtins.__import__ = watch\n"
        "sys.argv = ['train.py']\n"
        "import runpy; runpy.run_path('train.py', run_name='__main__')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=clean | user, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(expected), found.stderr


def test_f05_a_mode_that_cannot_help_here_is_said_at_the_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Small GPU")
    monkeypatch.setattr(compiling.environment, "expandable_segments", lambda: False)
    gpu = Process(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert "without expandable segments" in Plan(None, "max-autotune", True).summary(gpu)
    shown = Plan(None, "reduce-overhead", False).summary(Process())
    assert "without CUDA graphs on cpu" in shown


def test_f05_f48_the_messages_that_docs_quote_are_torchs(monkeypatch):
    from torch._inductor import utils

    said = []
    small = SimpleNamespace(major=8, minor=6, multi_processor_count=30)
    monkeypatch.setattr(utils.DeviceProperties, "create", lambda device: small)
    monkeypatch.setattr(utils.log, "warning", lambda text, **more: said.append(text))
    assert not utils.is_big_gpu.__wrapped__(torch.device("cuda"))
    assert said == ["Not enough SMs to use max_autotune_gemm mode"]

    def broken(graph, inputs):
        raise OSError("no compiler")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="backend='broken' raised:"):
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(1))


# ---- F03, F04: what is compiled, and how often ------------------------------------------------


@pytest.fixture
def graphs(monkeypatch):
    """Collects the graphs that torch compiles. Kernels are skipped, since they take seconds."""
    compile, compiled = torch.compile, []

    def keep(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda f, mode, **more: compile(f, backend=keep, **more))
    torch._dynamo.reset()
    return compiled


WAYS = {"in parts": (False, False), "as one": (True, False), "sharded": (False, True)}


def compiled_model(way, kind="none", **config):
    shape = {"block_size": 8, "vocab_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**shape | config))
    cuda_graphs, sharded = WAYS[way]
    use_activation_checkpointing(model, kind)
    plan = Plan(None, "default", cuda_graphs)
    return model, compiling.compile_model(model, plan, sharded, kind)


@pytest.mark.parametrize(("way", "pieces"), [("in parts", 3), ("as one", 1), ("sharded", 1)])
def test_f04_no_code_is_compiled_for_all_shapes(graphs, way, pieces):
    """Dynamic shapes would be slow, and CUDA graphs would still be recorded for every shape."""
    _, function = compiled_model(way)
    for rows in (2, 3, 4):
        tokens = torch.zeros(rows, 8, dtype=torch.int64)
        function(tokens, tokens.clone())
    assert len(graphs) == 3 * pieces


def test_compiled_code_on_a_cpu_adds_the_embeddings_gradients_in_one_order():
    """The embedding stays eager on a CPU: compiled code adds up its gradient in a random order of
    threads, so a resumed run would differ in the last digit."""
    model, _ = compiled_model("in parts")
    assert model.token_embedding._compiled_call_impl is None
    assert model.blocks[0]._compiled_call_impl and model.final_norm._compiled_call_impl


@pytest.mark.parametrize(
    ("device", "function", "expected"),
    [
        ("cuda", lambda x, w: (x.T @ w).float(), "direct"),
        ("cpu", lambda x, w: (x.T @ w).float(), "cast"),  # has no such product
        ("cuda", lambda x, w: (x.T @ w).float() + 1.0, "cast"),  # would move more bytes
        ("cuda", lambda x, w: ((x.T @ w).float(), (x.T @ w).float()), "direct"),
        ("cuda", lambda x, w: (lambda y: (y.float(), y))(x.T @ w), "cast"),
        ("cuda", lambda x, w: (x.double().T @ w.double()).float(), "cast"),
    ],
)
def test_matrix_products_write_gradients_in_float32(device, function, expected):
    with FakeTensorMode():
        x, w = (torch.empty(8, n, device=device, dtype=torch.bfloat16) for n in (4, 16))
        traced = make_fx(function, {torch.ops.aten._to_copy.default: to_copy})(x, w)
        before = [y.dtype for y in pytree.tree_leaves(traced(x, w))]
        compiling.float32_gradients()(traced.graph)
        traced.recompile()
        assert [y.dtype for y in pytree.tree_leaves(traced(x, w))] == before
    traced.graph.lint()
    products = {node.target for node in traced.graph.nodes if "mm" in str(node.target)}
    mm = torch.ops.aten.mm
    assert products == {mm.dtype if expected == "direct" else mm.default}


def to_copy(x, *, dtype):
    """The decomposition of a cast that torch's compiler uses."""
    return torch.ops.prims.convert_element_type(x, dtype)


def test_layers_of_torchs_own_are_compiled_too(graphs, monkeypatch):
    """`nn.Embedding.compile()` has no effect. (On a GPU the embedding is one of the parts.)"""
    monkeypatch.setattr(compiling, "compiled_parts", lambda model: [model.token_embedding])
    model, _ = compiled_model("in parts")
    model.token_embedding(torch.zeros(2, 8, dtype=torch.int64))
    assert len(graphs) == 1


@pytest.mark.parametrize("way", ["in parts", "sharded"])
def test_f03_a_sample_compiles_nothing_where_parts_are_compiled_in_place(graphs, way):
    model, function = compiled_model(way)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    function(tokens, tokens.clone()).backward()
    before = len(graphs)
    data = SimpleNamespace(tokenizer=CharTokenizer("0123456789").meta())
    windows = lambda starts: np.zeros((len(starts), 9), np.int64)  # noqa: E731
    file = SimpleNamespace(n_tokens=9, block_size=8, windows=windows)
    sample_while_training(model, data, file, contextlib.nullcontext(), seed=1)
    function(tokens, tokens.clone()).backward()
    assert len(graphs) == before


@pytest.mark.parametrize("kind", CHOICES["activation_checkpointing"])
@pytest.mark.parametrize(("way", "pieces"), [("in parts", 3), ("sharded", 1)])
def test_f53_code_for_one_part_serves_all(graphs, way, pieces, kind):
    _, function = compiled_model(way, kind, n_layer=12)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    function(tokens, tokens.clone()).backward()
    assert len(graphs) == pieces


@pytest.mark.parametrize(("in_float8", "budget"), [(False, 0.9), (True, 1.0)])
def test_fsdp_recomputes_nothing_in_fp8(monkeypatch, in_float8, budget):
    """Recomputing takes so many small FP8 kernels that the host cannot keep up: 1.5B on four H100s
    trained at 0.71 of one GPU's rate each."""
    functorch_config = torch._functorch.config
    monkeypatch.setattr(functorch_config, "activation_memory_budget", 0.5)
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=2, n_head=2, n_embd=32))
    if in_float8:
        assert replace_layers(model)
    monkeypatch.setattr(compiling, "launch_from_cpp", lambda device: None)  # has its own test
    compiling.compile_model(model, Plan(None, "default", False), sharded=True)
    assert functorch_config.activation_memory_budget == budget


@pytest.mark.parametrize("compiler_works", [True, False])
def test_fsdp_launches_fp8_kernels_from_cpp_if_it_can(monkeypatch, tmp_path, compiler_works):
    """From Python the host was too slow for 4,700 kernels per step: 1.5B on four H200s trained at
    0.68 of one GPU's rate each, and at 0.84 with launches from C++."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else nothing is compiled
    torch._dynamo.reset()
    patched = {"cpp_wrapper": False}  # restored at the end; monkeypatch would delete cpp.cxx
    if compiler_works:  # for 15 s: only test_gpu.py waits for it
        monkeypatch.setattr(torch, "compile", lambda function, mode=None: function)
    else:
        patched["cpp.cxx"] = None, str(tmp_path / "missing")
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=2, n_head=2, n_embd=32))
    replace_layers(model)
    with torch._inductor.config.patch(patched):
        compiling.compile_model(model, Plan(None, "default", False), sharded=True)
        assert torch._inductor.config.cpp_wrapper == compiler_works


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch only runs compiler tests on x86")
def test_f53_torch_is_spared_its_tests_of_the_compiler():
    script = (
        "import torch\nfrom steady import compiling\n"
        "compiling.plan(False, '', torch.device('cpu'))\n"
        "from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list\n"
        "VecISA.check_build = lambda self, code: print(code) or True\n"
        "print([str(isa) for isa in valid_vec_isa_list()])\n"
    )
    clean = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_VEC_ISA_OK"}
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=clean, capture_output=True, text=True
    )
    assert "'avx2'" in found.stdout, found.stderr  # still among the supported kinds
    assert "ATen" not in found.stdout  # no test program with vector headers was built


def test_f53_a_second_try_forgets_what_the_first_compiled(graphs):
    model, _ = compiled_model("in parts")
    assert compiling.compile_model(model, Plan("compile=False", "", False)) is model
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model(tokens, tokens.clone())
    assert graphs == []
