"""Scripts in processes that begin with torch and this project imported: most of a small run's time
is that. What a script does until then is tested in processes that start with nothing."""

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

context = multiprocessing.get_context("forkserver")
# What train.py imports, and what torch imports when it is first used. (Those of the project are
# found in the folder that the tests are started in; what is not found is imported later.)
context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "convert", "steady.compiling",
     "steady.generate", "steady.memory", "steady.optim", "steady.profiler", "steady.recompute",
     "steady.runlog", "steady.stop"]
)  # fmt: skip


class Forked(context.Process):
    """With the methods of a subprocess.Popen that tests use."""

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, signum)


def start(command: list[str], environment: dict[str, str], output: Path, code: str = "") -> Forked:
    """`python command > output 2>&1`; `code` runs before it, in its process. Without a command it
    is all that runs."""
    process = Forked(target=_run, args=(command, environment, output, code))
    process.start()
    return process


def wait_for_first_process() -> None:
    """Wait for the store of the first of several processes: torch tries again after seconds."""
    if os.environ.get("RANK", "0") != "0":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        for _ in range(3000):
            with socket.socket() as probe:
                if probe.connect_ex(address) == 0:
                    return
            time.sleep(0.01)


def _run(command: list[str], environment: dict[str, str], output: Path, code: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # the server's own may be of another kind
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # read when it was imported
    wait_for_first_process()
    sys.argv = command or ["-c"]
    try:
        exec(code, {})
        if command:
            runpy.run_path(command[0], run_name="__main__")
    except (Exception, KeyboardInterrupt):
        sys.excepthook(*sys.exc_info())  # multiprocessing would print the whole trace
        sys.exit(1)
