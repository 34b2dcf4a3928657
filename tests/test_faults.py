"""Faults around a run: output that cannot be written, errors in mid-run, broken compilers."""

import os
import signal
import time

from steady import checkpoint
from steady.runlog import read_metrics

import forked
import pytest
from conftest import TINY

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
LONG = [*TINY, "--max_iters=1000000"]


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def fork(tmp_path):
    """`fork(["--key=value"], code)`: train.py in a process that ran `code` first."""
    running = []

    def start(arguments, code=""):
        arguments = [*arguments, f"--out_dir={tmp_path}"]
        running.append(forked.start(arguments, ENVIRONMENT, tmp_path / "output.txt", code))
        return running[-1]

    yield start
    for process in running:
        process.kill()


def last_step(out):
    return max((e["iter"] for e in read_metrics(out / "metrics.jsonl")), default=-1)


# What stdout and stderr are before train.py begins, in a process of its own.
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
    process = fork([*LONG, f"--dataset={sums}"], BEGIN.format(STREAMS[streams]))
    wait_until(lambda: last_step(tmp_path) >= 2 or not process.is_alive())
    assert process.is_alive(), (process.exitcode, (tmp_path / "output.txt").read_text())
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 0
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter_num"] == last_step(tmp_path) + 1
    on_stderr = (tmp_path / "output.txt").read_text()
    if "whose" in streams or "full" in streams:  # stderr is still there to say how to go on
        assert "stopped at iteration" in on_stderr and "--init_from=resume" in on_stderr
