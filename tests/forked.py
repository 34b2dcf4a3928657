"""Run scripts in forked processes that have already imported torch and this project, since imports
take most of a small run's time. Tests of the startup itself use fresh processes."""

import contextlib
import gc
import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

context = multiprocessing.get_context("forkserver")
# The modules that train.py imports, and those that torch imports lazily. The project's own are only
# found if pytest starts in the repository root; otherwise they are imported later.
context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "convert", "steady.compiling",
     "steady.generate", "steady.memory", "steady.optim", "steady.recompute",
     "steady.runlog", "steady.stop"]
)  # fmt: skip


class Forked(context.Process):
    """A Process with the methods of subprocess.Popen that the tests use."""

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            os.kill(self.pid, signum)


def start(command: list[str], environment: dict[str, str], output: Path, code: str = "") -> Forked:
    """Like `python command > output 2>&1`. `code` runs first, in the same process; with an empty
    command, only `code` runs."""
    process = Forked(target=_run, args=(command, environment, output, code))
    process.start()
    return process


def seed_only_the_cpu() -> None:
    """Without a GPU, torch.manual_seed formats the whole stack, twice, for one that may come."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None


def wait_for_first_process() -> None:
    """Wait until rank 0's store listens: torch itself would wait seconds before it retries."""
    if os.environ.get("RANK", "0") != "0":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        for _ in range(3000):
            with socket.socket() as probe:
                if probe.connect_ex(address) == 0:
                    return
            time.sleep(0.01)


def _run(command: list[str], environment: dict[str, str], output: Path, code: str) -> None:
    gc.freeze()  # collections skip what the fork server has imported: a quarter of a small run
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # the fork server's streams may be something else, e.g. pytest's
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch read the variable at import
    seed_only_the_cpu()
    wait_for_first_process()
    sys.argv = command or ["-c"]
    try:
        exec(code, {})
        if command:
            runpy.run_path(command[0], run_name="__main__")
    except (Exception, KeyboardInterrupt):
        sys.excepthook(*sys.exc_info())  # multiprocessing would print its own frames too
        sys.exit(1)
