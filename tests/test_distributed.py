"""Several processes on one machine, over gloo: same numbers, same files, and faults."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import forked
import pytest
import torch
from conftest import ROOT, TINY, free_port, wait_until
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from steady import checkpoint, compiling, distributed, hardware
from steady.dataloader import TokenFile, eval_batches
from steady.distributed import Process, sum_gradients
from steady.optim import AveragedWeights, build_optimizer, clip_gradients
from steady.recompute import use_activation_checkpointing
from steady.runlog import read_metrics
from steady.stop import Saving

# Five evaluation batches do not divide evenly between two processes.
SETTINGS = [*TINY, "--gradient_accumulation_steps=4", "--eval_iters=5"]
ENVIRONMENT = os.environ | {"PYTHONUNBUFFERED": "1"}


@pytest.fixture
def launch(sums, tmp_path_factory):
    """`launch(2, out, "--key=value")` runs train.py in 2 processes and returns their outputs once
    all have ended. `differing` has one extra argument per process. `code` runs before train.py, in
    the same process."""
    running = []

    def launch_processes(n, out, *arguments, differing=None, code="", fails=False):
        port, folder = free_port(), tmp_path_factory.mktemp("outputs")
        outputs = [folder / f"{rank}.txt" for rank in range(n)]
        for rank in range(n):
            variables = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            } if n > 1 else {}  # fmt: skip
            own = [differing[rank]] if differing else []
            running.append(
                forked.start(
                    ["train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={out}", *arguments,
                     *own],
                    ENVIRONMENT | {name: str(value) for name, value in variables.items()},
                    outputs[rank], code,
                )
            )  # fmt: skip
        for process in running[-n:]:
            process.join(timeout=100)
        shown = [output.read_text() for output in outputs]
        expected = fails if isinstance(fails, list) else [int(fails)] * n
        assert [process.exitcode for process in running[-n:]] == expected, "\n".join(shown)
        return shown

    yield launch_processes
    for process in running:
        process.kill()


@pytest.fixture
def torchrun(fork, sums):
    """Start torchrun with its options and train.py's. It is forked; its workers start fresh."""
    running = []

    def start(out, *arguments, options=("--standalone", "--nproc_per_node=2")):
        command = [*options, str(ROOT / "train.py"), *SETTINGS, f"--dataset={sums}"]
        command += [f"--out_dir={out}", *map(str, arguments)]
        code = f"from torch.distributed.run import main; main({command!r})"
        running.append(fork("", code=code, **ENVIRONMENT))
        return running[-1]

    yield start
    for process in running:
        for worker in workers(process):
            os.kill(worker, signal.SIGKILL)


def workers(process) -> list[int]:
    """The IDs of torchrun's workers, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        return [int(pid) for pid in children.read_text().split()]
    except OSError:
        return []


def entries(out, key):
    return [entry[key] for entry in read_metrics(out / "metrics.jsonl") if key in entry]


def run_alone(sums, out, *arguments):
    """Run one process, as the reference for all others; returns its folder."""
    command = ["train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={out}", *arguments]
    process = forked.start(command, ENVIRONMENT, out / "output.txt")
    assert process.wait(100) == 0, (out / "output.txt").read_text()
    return out


@pytest.fixture(scope="module")
def alone(sums, tmp_path_factory):
    return run_alone(sums, tmp_path_factory.mktemp("alone"))


MUON = ["--optimizer=muon", "--learning_rate=5e-3", "--n_layer=3", "--average_weights=True",
        "--second_target=0.5", "--short_sequences=0.3", "--eval_interval=4"]  # fmt: skip


@pytest.fixture(scope="module")
def muon_alone(sums, tmp_path_factory):
    return run_alone(sums, tmp_path_factory.mktemp("muon_alone"), *MUON)


def assert_same_curve(out, alone):
    assert entries(out, "loss") == pytest.approx(entries(alone, "loss"), abs=1e-6)
    for key in ("train_loss", "val_loss"):
        assert entries(out, key) == pytest.approx(entries(alone, key), abs=1e-6)


# ---- one loss curve ---------------------------------------------------------------------------

BOTH_BLOCKS_TOGETHER = """
from steady import distributed
distributed.fsdp_groups = lambda model: [[*model.blocks], [model]]
"""


@pytest.mark.parametrize(
    ("processes", "arguments", "code"),
    [
        (4, [], ""),
        (2, ["--parallel=fsdp", "--batch_size=2", "--gradient_accumulation_steps=8",
             "--eval_iters=10", "--activation_checkpointing=block", "--sample_interval=7"],
         BOTH_BLOCKS_TOGETHER),
    ],
    ids=["ddp-4", "fsdp-2-split-checkpointed"],
)  # fmt: skip
def test_f21_f23_f26_the_loss_curve_does_not_depend_on_the_processes(
    launch, alone, tmp_path, processes, arguments, code
):
    """Fails if gradients, losses, evaluations or data are not shared between the processes."""
    first, *others = launch(processes, tmp_path, *arguments, code=code)
    assert_same_curve(tmp_path, alone)
    assert "val loss" in first and not any("loss" in shown for shown in others)


def test_fsdp_samples_in_bfloat16(launch, tmp_path):
    """The model computes in bfloat16, but its sharded weights are in float32."""
    first, _ = launch(2, tmp_path, "--parallel=fsdp", "--dtype=bfloat16", "--sample_interval=1",
                      "--max_iters=2", "--eval_interval=0")  # fmt: skip
    assert first.count("sample:") == 2 and "KV cache" not in first


@pytest.mark.parametrize(("processes", "engine"), [(2, "fsdp"), (4, "ddp")])
def test_f54_muon_makes_whole_matrices_orthogonal_however_they_are_divided(
    launch, muon_alone, tmp_path, processes, engine
):
    """Fails if a process treats its rows of a matrix as the whole matrix."""
    launch(processes, tmp_path, *MUON, f"--parallel={engine}")
    assert_same_curve(tmp_path, muon_alone)


def test_f22_muons_checkpoints_do_not_know_the_processes(launch, muon_alone, tmp_path):
    launch(2, tmp_path, *MUON, "--parallel=fsdp", "--max_iters=3")
    launch(1, tmp_path, *MUON, "--init_from=resume", "--max_iters=7")
    launch(2, tmp_path, *MUON, "--init_from=resume", "--parallel=fsdp")
    assert entries(tmp_path, "loss") == pytest.approx(entries(muon_alone, "loss"), abs=1e-6)
    ours, theirs = (  # the averaged weights' losses
        {e["iter"]: e["val_loss"] for e in read_metrics(out / "metrics.jsonl") if "val_loss" in e}
        for out in (tmp_path, muon_alone)
    )
    assert {i: ours[i] for i in theirs} == pytest.approx(theirs, abs=1e-6)


def test_f22_f28_checkpoints_do_not_know_the_processes(launch, alone, run, tmp_path):
    """2 processes with FSDP, then 1, then 2 with DDP, then 2 with FSDP: the curve of one run."""
    launch(2, tmp_path, "--parallel=fsdp", "--max_iters=3")
    launch(1, tmp_path, "--init_from=resume", "--max_iters=5")
    launch(2, tmp_path, "--init_from=resume", "--max_iters=8")
    launch(2, tmp_path, "--init_from=resume", "--parallel=fsdp")
    assert entries(tmp_path, "loss") == pytest.approx(entries(alone, "loss"), abs=1e-6)
    ours, theirs = (checkpoint.load(out / "ckpt.pt") for out in (tmp_path, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs["model"].items():
        assert type(ours["model"][name]) is torch.Tensor
        torch.testing.assert_close(ours["model"][name], tensor, atol=1e-4, rtol=1e-3)
    for i, moments in theirs["optimizer"]["state"].items():
        for name, tensor in moments.items():
            found = ours["optimizer"]["state"][i][name]
            torch.testing.assert_close(found, tensor, atol=1e-5, rtol=1e-3)
    arguments = ["--ckpt=ckpt.pt", "--num_samples=1", "--max_new_tokens=8", "--device=cpu"]
    assert run("sample.py", f"--out_dir={tmp_path}", *arguments)


PARTS_ONLY = """
from steady import distributed
real = distributed.materialize
def counted(part, device):
    real(part, device)
    print("holds", sum(p.numel() for p in part.parameters() if not hasattr(p, "full_tensor")))
distributed.materialize = counted
def refuse(state):
    raise AssertionError("gathered")
distributed.gather_full = refuse
"""


def test_f79_every_process_builds_and_saves_its_part(launch, alone, run, tmp_path):
    shown = launch(2, tmp_path, "--parallel=fsdp", "--n_layer=4", "--max_iters=4", code=PARTS_ONLY)
    launch(1, tmp_path / "one", "--n_layer=4", "--max_iters=4")
    found, expected = (
        checkpoint.load(out / "ckpt.pt", checkpoint.EVERYTHING)
        for out in (tmp_path, tmp_path / "one")
    )
    for name, weight in expected["model"].items():
        torch.testing.assert_close(found["model"][name], weight, atol=1e-5, rtol=1e-4)
    for i, state in expected["optimizer"]["state"].items():
        for key, value in state.items():
            other = found["optimizer"]["state"][i][key]
            torch.testing.assert_close(other, value, atol=1e-4, rtol=1e-2)
    size = sum(weight.numel() for weight in expected["model"].values())
    held = [int(line.split()[1]) for line in "".join(shown).splitlines() if "holds" in line]
    # one block, or everything outside of the blocks; rank 0 also compares two-layer models
    assert len(held) == 2 * 5 + 3 and sorted(held)[-2] < size / 2
    sizes = [(out / "ckpt.pt").stat().st_size for out in (tmp_path, tmp_path / "one")]
    assert abs(sizes[0] - sizes[1]) < 20_000
    assert not list(tmp_path.glob("*.tmp"))

    for name in ("by three", "failing"):
        shutil.copytree(tmp_path, tmp_path / "copies" / name, ignore=lambda *_: ["one", "copies"])
    resumed = ["--parallel=fsdp", "--n_layer=4", "--max_iters=6", "--init_from=resume"]
    launch(3, tmp_path / "copies" / "by three", *resumed, "--gradient_accumulation_steps=3")
    assert checkpoint.load(tmp_path / "copies" / "by three" / "ckpt.pt")["iter_num"] == 6
    run("convert.py", f"--out_dir={tmp_path}", f"--to={tmp_path / 'to'}")

    out = tmp_path / "copies" / "failing"
    first, _ = launch(2, out, *resumed, code=UNREADABLE, fails=[1, 0])
    assert "was not saved (the last good one is kept): rank 1: [Errno 5] Input/output" in first
    assert checkpoint.load(out / "ckpt.pt")["iter_num"] == 4
    assert not list(out.glob("*.tmp"))


WAITING = """
import threading, time
import torch.distributed as dist
sleep = time.sleep
def wait(seconds):
    if threading.current_thread() is threading.main_thread() and not dist.is_initialized():
        print("waits", seconds, flush=True)
    sleep(seconds)
time.sleep = wait
"""


def test_f71_the_end_of_a_run_waits_for_gloos_threads(launch, tmp_path):
    """Python aborted when one of them needed its lock during the shutdown: torchrun failed."""
    for text in launch(2, tmp_path, "--max_iters=1", code=WAITING):
        assert "waits 0.1" in text
    (text,) = launch(1, tmp_path / "one", "--max_iters=1", code=WAITING)
    assert "waits" not in text


UNLIKE = """
import os, torch, model
from steady import distributed
real_init, real_process = model.GPT.init_weights, distributed.this_process
@torch.no_grad()
def init_weights(self):
    self.register_buffer("rank", torch.full((), int(os.environ["RANK"])), persistent=False)
    real_init(self)
    for name in self.initial.draws:
        self.get_submodule(name).weight.add_(0.1 * int(os.environ["RANK"]))
def this_process(*arguments):
    process = real_process(*arguments)
    dtypes = torch.float32, torch.bfloat16 if other_dtype else torch.float32
    return process._replace(dtype=dtypes[process.rank])
def shard(model, process):
    real_shard(model, process)
    assert model.rank == process.rank
real_shard, distributed.shard = distributed.shard, shard
model.GPT.init_weights, distributed.this_process = init_weights, this_process
"""


def test_unlike_gpus_start_with_equal_weights_and_need_equal_dtypes(launch, alone, tmp_path):
    """One seed gives other numbers on a GPU with another number of multiprocessors."""
    launch(2, tmp_path, code="other_dtype = False\n" + UNLIKE)
    assert entries(tmp_path, "loss") == pytest.approx(entries(alone, "loss"), abs=1e-6)
    for text in launch(2, tmp_path / "other", code="other_dtype = True\n" + UNLIKE, fails=True):
        assert "different settings: dtype is ['float32', 'bfloat16']" in text


TIED_ROW = """
import model
from torch import nn
build, forward = model.MLP.__init__, model.MLP.forward
def with_tied_row(self, config):
    build(self, config)
    self.first, self.second = (nn.Linear(config.n_embd, 1, bias=False) for _ in range(2))
    self.second.weight = self.first.weight
model.MLP.__init__ = with_tied_row
model.MLP.forward = lambda self, x: forward(self, x) + self.first(x) * self.second(x)
"""


def test_f79_a_process_without_rows_of_a_tied_weight_saves_the_others(launch, tmp_path):
    for n, out, arguments in ((2, "two", ["--parallel=fsdp"]), (1, "one", [])):
        launch(n, tmp_path / out, "--max_iters=3", *arguments, code=TIED_ROW)
    found, expected = (checkpoint.load(tmp_path / out / "ckpt.pt") for out in ("two", "one"))
    assert "blocks.0.mlp.first.weight" in found["model"]
    torch.testing.assert_close(found["model"], expected["model"], atol=1e-5, rtol=1e-4)


SEVERAL_MACHINES = """
import os, weakref
from torch.distributed.tensor import DTensor
from steady import checkpoint, distributed
distributed.on_one_machine = lambda: False
gathering, exists, whole = DTensor.full_tensor, os.path.exists, []
write_data = checkpoint.write_data
def one_at_a_time(tensor):
    whole[:] = [found for found in whole if found() is not None]
    assert not whole, "an earlier tensor is still held"
    if mode == "shared":
        raise AssertionError("gathered")
    full = gathering(tensor)
    whole.append(weakref.ref(full))
    return full
def is_here(path):
    own = mode in ("own folders", "full") and os.environ["RANK"] == "1"
    return not (own and str(path).endswith(".tmp")) and exists(path)
def write(path, tensor, *places):
    if mode == "full":
        raise OSError(28, "No space left on device")
    kept = write_data(path, tensor, *places)
    if mode == "lost" and os.environ["RANK"] == "1":  # as if these bytes had not arrived
        write_data(path, torch.zeros_like(tensor), *places)
    return kept
DTensor.full_tensor, os.path.exists, checkpoint.write_data = one_at_a_time, is_here, write
"""


def test_f79_several_machines_save_parts_or_one_tensor_at_a_time(launch, tmp_path):
    """With a folder that they share, one that they do not, and one that loses writes."""
    options, loaded = ["--parallel=fsdp", "--max_iters=3"], {}
    for mode in ("one machine", "shared", "own folders", "lost"):
        code = f"mode = {mode!r}\n{PARTS_ONLY}{SEVERAL_MACHINES}" if loaded else ""
        launch(2, tmp_path / mode, *options, code=code)
        loaded[mode] = checkpoint.load(tmp_path / mode / "ckpt.pt", checkpoint.EVERYTHING)
        for state in (lambda saved: saved["model"], lambda saved: saved["optimizer"]["state"]):
            found, expected = state(loaded[mode]), state(loaded["one machine"])
            torch.testing.assert_close(found, expected, atol=0, rtol=0)
    resumed = ["--parallel=fsdp", "--max_iters=5", "--init_from=resume"]
    code = f"mode = 'full'\n{PARTS_ONLY}{SEVERAL_MACHINES}"
    first, _ = launch(2, tmp_path / "shared", *resumed, code=code, fails=[1, 0])
    assert first.count("was not saved (the last good one is kept): [Errno 28] ") == 3
    assert checkpoint.load(tmp_path / "shared" / "ckpt.pt")["iter_num"] == 3


UNREADABLE = """
import os
from steady import checkpoint
real = checkpoint.check_sums
def damaged(path, first=0, step=1):
    if step > 1 and first == 1:
        raise OSError(5, "Input/output error")
    return real(path, first, step)
checkpoint.check_sums = damaged
"""


def test_dropout_differs_between_processes_and_resumes_exactly(launch, tmp_path):
    for name, stops in (("whole", [8]), ("parts", [3, 8])):
        for i, stop in enumerate(stops):
            resume = [f"--init_from={'resume' if i else 'scratch'}"]
            launch(2, tmp_path / name, "--dropout=0.2", f"--max_iters={stop}", *resume)
    assert entries(tmp_path / "parts", "loss") == entries(tmp_path / "whole", "loss")


def test_f23_every_process_evaluates_equally_many_batches(sums):
    file = TokenFile(sums / "val.bin", 16, 64)
    whole = [tokens for tokens, *_ in eval_batches(file, 2, 10)]
    first, second = (list(eval_batches(file, 2, 10, Process(r, 2))) for r in (0, 1))
    assert len(whole) == 5 and len(first) == len(second) == 3
    assert torch.equal(torch.cat([b[0] for pair in zip(first, second, strict=True) for b in pair])
                       [:10], torch.cat(whole))  # fmt: skip
    assert second[-1][2] == 0 and (first[-1][1] != -1).all()


def test_f12_f59_gradients_are_exchanged_as_one_flat_tensor_and_stay_in_place(monkeypatch):
    def add_another_process(tensor):  # it has no gradient for parameters 0 and 3
        calls.append(len(tensor))
        return tensor.add_(torch.tensor([0.0, 1.0, 1.0, 0.0]) if len(calls) == 1 else 1.0)

    monkeypatch.setattr(distributed, "all_reduce_sum", add_another_process)
    calls, parameters = [], [torch.nn.Parameter(torch.zeros(n, 2)) for n in (1, 2, 3, 4)]
    for parameter in parameters[::2]:
        parameter.grad = torch.ones_like(parameter)
    before = [p.grad for p in parameters]
    sum_gradients(Process(0, 2), torch.nn.ParameterList(parameters))
    assert calls == [4, 2 + 4 + 6]  # all flags, then all gradients
    assert [p.grad is None for p in parameters] == [False, False, False, True]
    assert (parameters[0].grad == 2).all() and (parameters[1].grad == 1).all()
    assert all(p.grad is b for p, b in zip(parameters[::2], before[::2], strict=True))


def test_f59_what_only_the_optimizer_knows_is_summed_too(monkeypatch):
    """A layer outside of the model, in a group of its own: its copies drifted apart."""
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda tensor: tensor.mul_(2))
    own, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([own, other])
    own.grad, other.grad = torch.ones(2), torch.full((2,), 3.0)
    sum_gradients(Process(0, 2), torch.nn.ParameterList([own]), optimizer)
    assert own.grad.tolist() == [2, 2] and other.grad.tolist() == [6, 6]


def test_f59_all_processes_get_the_first_ones_buffers(monkeypatch):
    sent = []

    def receive(buffer, source):
        sent.append(buffer.fill_(0))

    monkeypatch.setattr(distributed.dist, "broadcast", receive)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    model[0].running_mean = torch.ones(6)[::2]  # not dense
    model.register_buffer("short", torch.ones(2, dtype=torch.int16))  # gloo cannot send this dtype
    model.register_buffer("expanded", torch.zeros(1).expand(3))
    model.register_buffer("table", torch.ones(2), persistent=False)
    sum_gradients(Process(0, 2, "fsdp"), model)
    assert len(sent) == 5 and all(buffer.dtype == torch.uint8 for buffer in sent)
    received = {name for name, buffer in model.named_buffers() if not buffer.any()}
    running = {f"0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert received == running | {"short", "expanded"}


def test_f59_a_step_in_which_no_process_has_a_gradient_changes_nothing(monkeypatch):
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda tensor: tensor)
    parameters = [torch.nn.Parameter(torch.ones(n, 2)) for n in (1, 2)]
    sum_gradients(Process(0, 2), torch.nn.ParameterList(parameters))
    assert all(p.grad is None for p in parameters)


# ---- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulation", "advice"), [(7, "use 6 or 9"), (2, "use 3"), (40, "use 39 or 42")]
)
def test_f27_accumulation_names_the_nearest_valid_values(
    run, sums, tmp_path, monkeypatch, accumulation, advice
):
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=f"must be a multiple of 3: {advice}$"):
        run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}",
            f"--gradient_accumulation_steps={accumulation}")  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_wrong_variables_without_torchrun_are_named(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="are incomplete or inconsistent: use torchrun"):
        distributed.this_process()


def test_a_wrong_port_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "x")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="at MASTER_ADDR:MASTER_PORT: invalid literal .* 'x'"):
        config = {"backend": "gloo", "gradient_accumulation_steps": 2}
        distributed.start(Process(0, 2), config)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--parallel=fsdp", "--dtype=float16"], "or parallel=ddp"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_processes_meet(
    run, sums, tmp_path, monkeypatch, arguments, answer
):
    """Later, only rank 0 would print the reason, and the others would print lost connections."""
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=answer):
        run("train.py", *TINY, f"--dataset={sums}", f"--out_dir={tmp_path}",
            "--gradient_accumulation_steps=2", *arguments)  # fmt: skip


def test_only_an_exchange_can_find_that_another_process_has_ended():
    assert distributed.is_peer_failure(RuntimeError("[gloo] Connection closed by peer"))
    assert not distributed.is_peer_failure(ValueError("no such model: Connection refused"))


def test_f12_fsdp_with_cuda_graphs_is_refused_and_the_alternatives_named():
    pair = Process(0, 2, "fsdp", dtype=torch.bfloat16)
    two = {"batch_size": 1, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match="use compile_mode=default .*, or parallel=ddp"):
        distributed.check(pair, two, cuda_graphs=True)
    distributed.check(pair, two, cuda_graphs=False)
    distributed.check(pair._replace(parallel="ddp"), two, cuda_graphs=True)


# Python waits for threads when it exits, and sometimes aborts in one of torch's.
LONG_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
"""


def test_different_settings_are_detected_and_end_all_processes_at_once(launch, tmp_path):
    differing = ["--learning_rate=0.1", "--learning_rate=0.2"]
    shown = launch(2, tmp_path, differing=differing, code=LONG_THREAD, fails=True)
    for i, text in enumerate(shown):
        assert "error: the processes have different settings: learning_rate is [0.1, 0.2]" in text
        assert ("rank 1: error" in text) == (i == 1)
        assert "Traceback" not in text


KNOWN_PEAK = """
from steady import hardware
hardware.peak_flops = lambda device, dtype, devices: devices * 1e12
"""


@pytest.mark.parametrize(
    ("name", "start"), [("val.bin", "scratch"), ("ckpt.pt", "resume"), ("best.pt", "FOLDER")]
)
def test_files_that_differ_between_machines_are_refused(launch, alone, tmp_path, name, start):
    """The mean loss of two models, or of two texts, looked like any other."""
    shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
    code = f"""
import os
from steady import dataloader, distributed
original = distributed.crc_of_start
own = lambda path: original(path) + int(os.environ["RANK"]) * (path.name == "{name}")
distributed.crc_of_start = dataloader.crc_of_start = own
dataloader.read_meta = lambda folder, read=dataloader.read_meta: read(folder) | dict(begins=dict())
"""
    start = alone if start == "FOLDER" else start
    shown = launch(2, tmp_path, f"--init_from={start}", "--max_iters=3", code=code, fails=True)
    assert re.search(r"error: .*differs between machines: copy", shown[0])


def test_f45_a_folder_in_use_ends_all_processes_and_one_says_so(launch, tmp_path):
    hold = "import sys; from pathlib import Path; from steady import folder; "
    hold += "folder.claim(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as other:
        other.stdout.readline()
        first, second = launch(2, tmp_path, fails=True)
        other.stdin.close()
    assert re.fullmatch(r".*error: another process is writing to .*: stop it first.*\n", first)
    assert second == ""


def test_f20_mfu_counts_every_process(launch, tmp_path):
    launch(2, tmp_path, "--max_iters=2", code=KNOWN_PEAK)
    config = GPTConfig(**checkpoint.load(tmp_path / "ckpt.pt")["model_config"])
    entry = read_metrics(tmp_path / "metrics.jsonl")[-2]
    flops = entry["tokens_per_s"] * GPT(config).flops_per_token()
    assert entry["mfu"] == pytest.approx(flops / 2e12)


# Rank 1 runs out of memory with more than one sequence.
ONE_RUNS_OUT = """
import os, torch
import model
forward = model.GPT.forward
def limited(self, tokens, targets=None, cache=None):
    if os.environ["RANK"] == "1" and self.training and len(tokens) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    return forward(self, tokens, targets, cache)
model.GPT.forward = limited
"""


def test_f15_one_process_out_of_memory_makes_all_split_further(launch, alone, tmp_path):
    first, _ = launch(2, tmp_path, code=ONE_RUNS_OUT)
    assert "going on with --batch_size=1 --gradient_accumulation_steps=16" in first
    assert_same_curve(tmp_path, alone)


# Rank 1 does not have enough memory left for a micro-batch of 4.
ONE_HAS_LITTLE = """
import os
from steady import distributed, hardware
hardware.available_memory_gib = lambda device: (1.0, 0.0008)[int(os.environ["RANK"])]
from torch.distributed.fsdp import FSDPModule
keep = FSDPModule.set_reshard_after_forward
FSDPModule.set_reshard_after_forward = lambda *args: (print("keeps gathered weights"), keep(*args))
"""


def test_f47_an_error_in_one_process_ends_all_and_is_saved(launch, tmp_path):
    code = """
import os
from steady import optim
calls, real = [], optim.clip_gradients
def failing(*arguments):
    calls.append(1)
    if len(calls) == 5 and os.environ["RANK"] == "1":
        raise MemoryError
    return real(*arguments)
optim.clip_gradients = failing
"""
    first, second = launch(2, tmp_path, code=code, fails=True)
    assert f"rank 1: error: out of memory; saved {tmp_path / 'ckpt.pt'} at iteration 4" in second
    assert "--batch_size=2 --gradient_accumulation_steps=8" in second
    assert "another process has ended or hangs" in first and "Traceback" not in first
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter_num"] == 4


def test_files_that_a_process_writes_are_complete_at_its_end(fork, tmp_path):
    """A student's log of each process was empty: os._exit flushes nothing."""
    path = tmp_path / "log.csv"
    code = f"import gc; from steady import distributed; file = open({str(path)!r}, 'a')\n"
    process = fork("", code=code + "gc.freeze(); file.write('row'); distributed.exit_now(3)")
    process.wait(30)
    assert process.poll() == 3 and path.read_text() == "row"


def test_saving_after_the_end_needs_no_process_group():
    """For example merged LoRA weights: the other processes have left."""
    distributed.set_timeout()


def test_f79_a_process_that_hangs_ends_the_run_in_minutes(launch, tmp_path):
    """Uses a timeout of about a second. Rank 1 hangs until rank 0 has saved, at most for 30 s."""
    code = f"""
import os, time
from pathlib import Path
from steady import distributed, optim
distributed.TIMEOUT_MINUTES = 0.02
real, calls = optim.clip_gradients, []
def hanging(*arguments):
    calls.append(1)
    if len(calls) < 3 or os.environ["RANK"] == "0":
        return real(*arguments)
    for _ in range(300):
        time.sleep(0.1)
        if Path({str(tmp_path / "ckpt.pt")!r}).exists():
            print("the other one has gone on")
            os._exit(1)
    os._exit(2)
optim.clip_gradients = hanging
"""
    first, second = launch(2, tmp_path, code=code, fails=True)
    assert "another process has ended or hangs" in first and "Traceback" not in first
    assert "the other one has gone on" in second
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter_num"] == 2


def test_f48_all_processes_give_up_compiling_together(launch, alone, tmp_path):
    code = """
import os, torch
def compiled(model, **options):
    if os.environ["RANK"] == "0":
        return model
    raise torch._dynamo.exc.TorchDynamoException("no compiler today")
torch.compile = compiled
"""
    first, _ = launch(2, tmp_path, "--compile=True", code=code)
    reason = "because compiling fails here: it failed in another process"
    assert f"not compiled (--compile=False skips compiling), {reason}" in first
    assert_same_curve(tmp_path, alone)


def test_f15_with_fsdp_all_processes_split_by_the_estimate(launch, alone, tmp_path):
    shown = launch(2, tmp_path, "--parallel=fsdp", code=ONE_HAS_LITTLE)
    assert "going on with --batch_size=2 --gradient_accumulation_steps=8" in shown[0]
    assert "keeps gathered" not in shown[0] + shown[1]
    assert_same_curve(tmp_path, alone)


def test_an_evaluation_leaves_no_gathered_weights(launch, tmp_path):
    """Without the fix, code in the loop that reads or changes the weights gets copies of them."""
    code = (
        ONE_HAS_LITTLE.replace("0.0008", "1.0")
        + """
import sys
from model import GPT
from steady import runlog
forward, evaluation, gathered = GPT.forward, runlog.RunLog.evaluation, []
def all_sharded(model):
    return all(distributed.is_sharded(p) for p in model.parameters())
def watched(self, *inputs):
    out = forward(self, *inputs)
    if not self.training:
        gathered.append(not all_sharded(self))
    return out
def look(self, *arguments):
    assert gathered and all(gathered)
    assert all_sharded(sys._getframe(1).f_globals["raw_model"])
    print("looked")
    evaluation(self, *arguments)
GPT.forward, runlog.RunLog.evaluation = watched, look
"""
    )
    shown = launch(2, tmp_path, "--parallel=fsdp", "--eval_interval=4", code=code)
    assert all("looked" in text for text in shown)


def test_f21_fsdp_keeps_gathered_weights_where_there_is_room(launch, alone, tmp_path):
    plenty = ONE_HAS_LITTLE.replace("0.0008", "1.0")
    shown = launch(2, tmp_path, "--parallel=fsdp", code=plenty)
    assert all("keeps gathered" in text for text in shown)
    assert_same_curve(tmp_path, alone)


@pytest.fixture
def divided():
    """A model of 8 blocks, sharded over two processes, one of which is fake."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=8, n_head=2, n_embd=16))
    distributed.shard(model, Process(0, 2, "fsdp"))
    yield model
    torch.distributed.destroy_process_group()


def test_blocks_are_exchanged_two_at_a_time_and_kept_weights_once(divided):
    tokens, gathers = torch.zeros(1, 8, dtype=torch.int64), []
    for _ in range(2):
        divided(tokens, tokens).backward()
        with torch.profiler.profile() as profile:
            divided(tokens, tokens).backward()
        events = [e for e in profile.key_averages() if "FSDP::all_gather (blocks" in e.key]
        gathers.append(sum(event.count for event in events))
        divided.set_reshard_after_forward(False)
    assert gathers == [8, 4]  # four pairs of blocks, forward and backward


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from torch's own imports
def test_divided_blocks_compile_with_selective_checkpointing(divided, monkeypatch):
    """torch fails if its own recomputation is combined with ours."""

    def graphs_only(function, mode):  # compiling kernels takes 10 s longer
        return torch_compile(function, backend="aot_eager_decomp_partition")

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", graphs_only)
    use_activation_checkpointing(divided, "selective")
    plan = compiling.Plan(None, "default", False)
    compiling.compile_model(divided, plan, sharded=True, checkpointing="selective")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    divided(tokens, tokens).backward()
    assert all(p.grad is not None for p in divided.parameters())


def test_gathered_averages_do_not_outlive_the_evaluation(divided):
    """Without the fix the next step trains with the averaged weights."""
    averages = AveragedWeights(divided, True)
    divided.set_reshard_after_forward(False)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with torch.no_grad():
        divided(tokens, tokens)
        with averages.blended():
            assert all(map(distributed.is_sharded, divided.parameters()))
            divided(tokens, tokens)
            assert not all(map(distributed.is_sharded, divided.parameters()))
    assert all(map(distributed.is_sharded, divided.parameters()))


@pytest.mark.parametrize(
    ("n_layer", "millions", "together"), [(48, 30.8, 4), (32, 202, 1), (12, 7.1, 3), (2, 0.1, 1)]
)
def test_large_blocks_are_exchanged_alone(n_layer, millions, together):
    size = int(1e6 * millions)
    blocks = [torch.nn.Linear(1, size, bias=False, device="meta") for _ in range(n_layer)]
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)})
    assert len(distributed.fsdp_groups(model)[0]) == together


class SeesDTensors(TorchDispatchMode):
    seen = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            self.seen += (function,)
        return function(*args, **(kwargs or {}))


def test_clipping_and_stepping_divided_parameters_is_free_of_dtensors(divided):
    """An operation on DTensors costs about 10 microseconds of host time per tensor."""
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    settings = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
    settings["optimizer"] = "adamw"
    optimizer = build_optimizer(divided, settings)
    divided(tokens, tokens).backward()
    parameter = divided.blocks[0].mlp.gate_proj.weight
    before, gradient = (t.to_local().detach().clone() for t in (parameter, parameter.grad))
    with SeesDTensors() as mode:
        clip_gradients(optimizer, 0.0)
        optimizer.step()
    assert not mode.seen
    step = 1e-2 * gradient / (gradient.abs() + 1e-8)  # AdamW's first step
    torch.testing.assert_close(parameter.to_local(), before * (1 - 1e-3) - step)
    assert optimizer.state[parameter]["exp_avg"].to_local().abs().sum() > 0


def test_torchs_own_clipping_works_with_divided_parameters(divided):
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    divided(tokens, tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(divided.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    skipped = Saving.count_skipped(types.SimpleNamespace(skipped=0.0, steps=0), norm)
    numbers = hardware.to_host_async(torch.ones(()), norm, skipped)()
    assert numbers[0] == 1.0 and numbers[1] > 0 and numbers[2] == 0.0
    assert hardware.to_host_async(torch.ones(()), 0.5)() == [1.0, 0.5]


LONG = ["--max_iters=100000", "--eval_interval=10", "--eval_iters=1"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_f31_the_end_of_torchrun_saves_once(torchrun, launch, tmp_path, signum):
    """SIGUSR1 kills torchrun, and its workers must notice."""
    process = torchrun(tmp_path, *LONG, "--max_iters=2000")
    wait_until(lambda: len(entries(tmp_path, "loss")) > 20)
    process.send_signal(signum)
    shown = process.stdout.read()
    process.wait(60)
    assert shown.count("stopping and saving\n") == (signum == signal.SIGTERM)
    (iteration,) = re.findall(r"stopped at iteration (\d+), saved", shown)
    assert "torchrun --standalone --nproc_per_node=2" in shown and "--init_from=resume" in shown
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter_num"] == int(iteration)
    assert max(entries(tmp_path, "iter")) == int(iteration) - 1


TERMINATES_ITSELF = """
import os, signal
from steady import dataloader
real = dataloader.eval_batches
def terminating(*arguments):
    for i, batch in enumerate(real(*arguments)):
        if i == 50:
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch
dataloader.eval_batches = terminating
"""


def test_f31_a_signal_ends_an_evaluation_on_all_processes(launch, tmp_path):
    more = ("--eval_iters=20000", "--parallel=fsdp")  # it evaluates before the first iteration
    shown, _ = launch(2, tmp_path, *more, code=TERMINATES_ITSELF)
    assert "stopped at iteration 0, saved" in shown and "train loss" not in shown, shown


CLOCK = """
import time
out_dir = {out!r} + "/run-" + str(time.time_ns())
wandb_run_name = "ft-" + str(time.time_ns())
"""


def test_f71_f73_a_dead_process_ends_the_run_and_a_restart_resumes_it(torchrun, tmp_path):
    """The config names out_dir by rank 0's clock, and the restart must find the same folder."""
    (tmp_path / "clock.py").write_text(CLOCK.format(out=str(tmp_path / "runs")))
    process = torchrun(
        "", tmp_path / "clock.py", *LONG,
        options=("--standalone", "--nproc_per_node=2", "--max-restarts=1"),
    )  # fmt: skip
    (saved,) = wait_until(lambda: list(tmp_path.glob("runs/*/ckpt.pt")))
    os.kill(workers(process)[1], signal.SIGKILL)
    seen = max(entries(saved.parent, "iter"))
    wait_until(lambda: max(entries(saved.parent, "iter"), default=0) > seen + 10)  # it resumed
    os.kill(workers(process)[0], signal.SIGKILL)
    began = time.monotonic()
    shown = process.stdout.read()
    assert process.wait(60) != 0 and time.monotonic() - began < 60
    assert "init_from=resume" in shown and f"resuming from {saved} at iteration" in shown
    assert list((tmp_path / "runs").iterdir()) == [saved.parent]
    assert checkpoint.load(saved)["iter_num"] > seen
    iterations = [e["iter"] for e in read_metrics(saved.parent / "metrics.jsonl") if "loss" in e]
    assert iterations == list(range(len(iterations)))  # exactly one entry per iteration


DIES_ONCE = """
import os as _os
if _os.environ.get("RANK", "0") == "0" and not _os.path.exists("{flag}"):
    open("{flag}", "w").close()
    _os._exit(1)
"""


def test_f71_a_restart_takes_no_older_run_for_its_own(torchrun, run, sums, tmp_path):
    """torchrun's default run ID is "none", and the first worker dies before it saves anything."""
    out, config = tmp_path / "out", tmp_path / "config.py"
    run("train.py", *SETTINGS, f"--dataset={sums}", f"--out_dir={out}", "--max_iters=2")
    config.write_text(DIES_ONCE.format(flag=tmp_path / "died"))
    options = ["--nnodes=1", "--nproc_per_node=1", "--max-restarts=1",
               f"--master_port={free_port()}"]  # fmt: skip
    process = torchrun(out, config, "--max_iters=2", options=options)
    shown = process.stdout.read()
    assert process.wait(60) == 0, shown
    assert (tmp_path / "died").exists() and (out / "previous" / "ckpt.pt").exists()
    assert shown.count("| loss") == 2 and "init_from=resume" not in shown


def test_two_nodes_train_as_one(torchrun, alone, tmp_path):
    """Runs the README's commands for two machines, both on this one."""
    port = free_port()
    nodes = [
        torchrun(
            tmp_path,
            options=("--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1",
                     "--master_addr=127.0.0.1", f"--master_port={port}"),
        )
        for node in (0, 1)
    ]  # fmt: skip
    for node in nodes:
        shown = node.stdout.read()
        assert node.wait(60) == 0, shown
    assert_same_curve(tmp_path, alone)
