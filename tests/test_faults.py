"""Faults around a run: unwritable output, errors in the middle of it, broken compilers."""

import os
import signal
import subprocess
import sys

import forked
import pytest
import torch
from conftest import ROOT, TINY, wait_until

import model as model_file
from steady import checkpoint, compiling, generate, memory, output
from steady.compiling import Plan
from steady.runlog import read_metrics

LONG = [*TINY, "--max_iters=1000000"]


@pytest.fixture
def fork(tmp_path):
    """`fork(["--key=value"], code)` runs `code` and then train.py in a forked process."""
    running = []

    def start(arguments, code=""):
        arguments = ["train.py", *arguments, f"--out_dir={tmp_path}"]
        running.append(forked.start(arguments, dict(os.environ), tmp_path / "output.txt", code))
        return running[-1]

    yield start
    for process in running:
        process.kill()


def last_step(out):
    return max((e["iter"] for e in read_metrics(out / "metrics.jsonl")), default=-1)


# Code that sets stdout and stderr before train.py starts.
STREAMS = {
    "a pipe whose reader has left": "r, w = os.pipe(); os.dup2(w, 1); os.close(r)",
    "both into that pipe": "r, w = os.pipe(); os.dup2(w, 1); os.dup2(w, 2); os.close(r)",
    "a full disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "closed": "os.close(1); os.close(2); sys.stdout = sys.stderr = None; "
    "from steady.output import open_closed_streams; open_closed_streams()",
}
BEGIN = """
import os, sys
{}
sys.stdout = sys.__stdout__ = sys.stdout and open(1, "w")
sys.stderr = sys.__stderr__ = sys.stderr and open(2, "w")
"""


@pytest.mark.parametrize("streams", STREAMS)
def test_f44_output_that_cannot_be_written_ends_no_run(fork, sums, tmp_path, streams):
    (tmp_path / "best.pt").touch()  # archiving it prints the first line
    process = fork([*LONG, f"--dataset={sums}"], BEGIN.format(STREAMS[streams]))
    wait_until(lambda: last_step(tmp_path) >= 2 or not process.is_alive())
    assert process.is_alive(), (process.exitcode, (tmp_path / "output.txt").read_text())
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 0
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter_num"] == last_step(tmp_path) + 1
    on_stderr = (tmp_path / "output.txt").read_text()
    if "whose" in streams or "full" in streams:  # stderr still works
        assert "stopped at iteration" in on_stderr and "--init_from=resume" in on_stderr


# ---- errors in the middle of a run -------------------------------------------------------------

FAIL_AT_FIFTH = """
import torch
from steady import optim
owner, name, error = {}
calls, real = [], getattr(owner, name)
def failing(*arguments, **options):
    calls.append(name)
    if len(calls) == 5:
        raise error
    return real(*arguments, **options)
setattr(owner, name, failing)
"""


def losses(out):
    return [e["loss"] for e in read_metrics(out / "metrics.jsonl") if "loss" in e]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("torch.OutOfMemoryError('CUDA out of memory.')", "error: out of memory; saved {}"),
        ("MemoryError()", "error: out of memory; saved {}"),
        ("KeyError('unforeseen')", "stopped by the error above; saved {}"),
    ],
)
def test_f47_an_error_in_mid_run_saves_and_resuming_is_exact(
    fork, run, sums, tmp_path, error, shown
):
    arguments = [*TINY, f"--dataset={sums}", "--gradient_accumulation_steps=3"]
    process = fork(arguments, FAIL_AT_FIFTH.format(f"optim, 'clip_gradients', {error}"))
    process.join(60)
    assert process.exitcode == 1
    output = (tmp_path / "output.txt").read_text()
    line = output.splitlines()[-1]
    assert line.startswith(shown.format(tmp_path / "ckpt.pt")) and "at iteration 4;" in line
    assert ("Traceback" in output) is ("unforeseen" in error)
    flags = "--batch_size=2 --gradient_accumulation_steps=6 --eval_iters=4 --init_from=resume"
    assert (flags in line) is ("unforeseen" not in error)
    run("train.py", *arguments, f"--out_dir={tmp_path}", "--init_from=resume")
    run("train.py", *arguments, f"--out_dir={tmp_path / 'whole'}")
    assert losses(tmp_path) == losses(tmp_path / "whole")


def test_f47_half_an_optimizer_step_is_not_saved(fork, sums, tmp_path):
    code = FAIL_AT_FIFTH.format("optim.AdamW, '_init_group', MemoryError()").replace("== 5", "== 9")
    process = fork([*TINY, f"--dataset={sums}", "--eval_interval=3"], code)
    process.join(60)
    line = (tmp_path / "output.txt").read_text().splitlines()[-1]
    assert process.exitcode == 1 and "was not saved: the error came in the middle of an" in line
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter_num"] == 3


SMALLEST = ["--batch_size=1"]


@pytest.mark.parametrize(
    ("more", "error", "shown"),
    [
        ([], "MemoryError()", "error: out of memory; use --batch_size=2"),
        (SMALLEST, "MemoryError()", "error: out of memory\n"),
        ([], "KeyError('unforeseen')", ""),
    ],
)
def test_f47_an_error_while_only_evaluating_leaves_the_checkpoint_alone(
    fork, run, sums, tmp_path, more, error, shown
):
    arguments = [*TINY, *more, f"--dataset={sums}"]
    run("train.py", *arguments, "--max_iters=3", f"--out_dir={tmp_path}")
    before = (tmp_path / "ckpt.pt").read_bytes()
    code = FAIL_AT_FIFTH.format(f"__import__('model').GPT, 'forward', {error}")
    process = fork([*arguments, "--init_from=resume", "--eval_only=True"], code)
    process.join(60)
    output = (tmp_path / "output.txt").read_text()
    assert process.exitcode == 1 and "saved" not in output and shown in output
    assert ("Traceback" in output) is ("unforeseen" in error)
    assert (tmp_path / "ckpt.pt").read_bytes() == before


# ---- a broken compiler -------------------------------------------------------------------------


def failing_compiler(monkeypatch, reason="no compiler today"):
    def compiled(model, **options):
        raise torch._dynamo.exc.TorchDynamoException(reason)

    monkeypatch.setattr(torch, "compile", compiled)


def test_f48_what_cannot_be_compiled_is_trained_uncompiled(run, sums, tmp_path, monkeypatch):
    arguments = [*TINY, f"--dataset={sums}", "--max_iters=3"]
    run("train.py", *arguments, f"--out_dir={tmp_path / 'eager'}")
    failing_compiler(monkeypatch, "line one\nline two")
    shown = run("train.py", *arguments, "--compile=True", f"--out_dir={tmp_path / 'broken'}")
    warning = (
        "warning: not compiled (--compile=False skips compiling), because compiling fails here: "
    )
    assert f"{warning}TorchDynamoException: line one\nline two\n" in shown
    assert losses(tmp_path / "broken") == losses(tmp_path / "eager")


def test_f48_an_error_of_the_model_is_not_the_compilers(run, sums, tmp_path, monkeypatch):
    def broken(self, *arguments):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(model_file.GPT, "forward", broken)
    failing_compiler(monkeypatch)
    with pytest.raises(RuntimeError, match="shapes cannot"):
        run("train.py", *TINY, f"--dataset={sums}", "--compile=True", f"--out_dir={tmp_path}")


def test_f48_suppressed_errors_of_the_compiler_are_seen(monkeypatch):
    with torch._dynamo.config.patch(suppress_errors=True):
        compiling.compile_model(torch.nn.Linear(1, 1), Plan(None, "default", True))
        assert not torch._dynamo.config.suppress_errors


def test_evaluations_use_the_current_weights_whatever_the_environment_says():
    """TORCHINDUCTOR_FREEZING=1 made the weights constants of the compiled code."""
    layer, x = torch.nn.Linear(2, 1), torch.ones(1, 2)
    with torch._inductor.config.patch({"freezing": True, "triton.cudagraphs": True}):
        compiled = compiling.compile_model(layer, Plan(None, "default", False))
        assert not torch._inductor.config.triton.cudagraphs
        with torch.no_grad():
            before = compiled(x).clone()
            layer.weight += 1.0
            torch.testing.assert_close(compiled(x), before + 2.0)


def test_f48_a_cache_folder_that_cannot_be_written_is_replaced(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/cache")
    plan = compiling.plan(True, "default", torch.device("cpu"))
    assert plan.obstacle == (
        "TORCHINDUCTOR_CACHE_DIR=/dev/null/cache cannot be written to: Not a directory"
    )
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ  # torch uses its default folder


# ---- too little memory -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["DefaultCPUAllocator: can't allocate memory: you tried", "not enough memory: you"]
)
def test_f50_cpus_have_other_words_for_out_of_memory(words):
    assert memory.is_out_of_memory(RuntimeError(words)) and memory.is_out_of_memory(MemoryError())
    assert not memory.is_out_of_memory(RuntimeError("size mismatch"))


def test_f50_samples_beyond_all_memory_are_refused():
    config, cpu = model_file.GPTConfig(), torch.device("cpu")
    generate.require_room(config, 1, 5, 500, torch.float32, cpu)
    for n, new in ((10**6, 500), (10, 2**31 - 1)):
        with pytest.raises(ValueError, match=f"num_samples={n} .* GiB, but cpu has .* GiB"):
            generate.require_room(config, n, 5, new, torch.float32, cpu)


# ---- before the start --------------------------------------------------------------------------


def test_an_old_torch_is_named_before_anything_fails(tmp_path):
    (tmp_path / "torch-2.4.1.dist-info").mkdir()
    (tmp_path / "torch-2.4.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.4.1\n")
    (tmp_path / "torch.py").write_text("raise ImportError('too old for this Python')\n")
    found = subprocess.run(
        [sys.executable, "train.py"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert found.returncode == 1
    assert found.stderr == "error: torch 2.4.1 is too old: pip install -U 'torch>=2.11'\n"


@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_ctrl_c_while_torch_is_imported_leaves_in_silence(tmp_path, script):
    (tmp_path / "torch.py").write_text(
        "print('importing', flush=True)\nimport time\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "" and process.returncode == -signal.SIGINT


def test_f44_closed_streams_are_opened(tmp_path):
    """Otherwise the first file opened would receive everything that is printed."""
    script = (
        "import steady, sys\nsteady.start_script()\n"
        "from configurator import configure\nconfigure(globals())\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "print('lost', flush=True); print('lost', file=sys.stderr, flush=True)\n"
        "sys.exit(file.fileno() < 3)\n"
    )
    (tmp_path / "script.py").write_text(script)
    command = f"{sys.executable} {tmp_path / 'script.py'} <&- >&- 2>&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and (tmp_path / "file").read_text() == ""


def test_a_progress_bar_in_a_log_file_ends_with_a_line_feed(monkeypatch, capsys):
    import tqdm

    bar = tqdm.tqdm
    monkeypatch.setattr(tqdm, "tqdm", lambda *items, **kw: bar(*items, **kw | {"delay": 0}))
    assert [*output.waiting(range(3), 3, "reading")] == [0, 1, 2]
    assert capsys.readouterr().err.endswith("]\n")
