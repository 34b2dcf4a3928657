"""train.py in processes that begin with torch imported, which saves half of a small run's time."""

import multiprocessing
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp"])


def start(
    arguments: list[str], environment: dict[str, str], output: Path, code: str = ""
) -> BaseProcess:
    """`python train.py arguments > output 2>&1`; `code` runs before it, in its process."""
    process = context.Process(target=_train, args=(arguments, environment, output, code))
    process.start()
    return process


def _train(arguments: list[str], environment: dict[str, str], output: Path, code: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # read when it was imported
    sys.argv = ["train.py", *arguments]
    exec(code, {})
    try:
        runpy.run_path("train.py", run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # multiprocessing would print the whole trace
        sys.exit(1)
