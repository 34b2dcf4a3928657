"""Check that several processes train like one, and that a run survives the death of a process.

    python dev/several.py --data=data/openwebtext
    python dev/several.py --data=data/shakespeare_char --device=cpu --processes=2

Trains a small model with AdamW and with Muon on 1, 2, 4, ... processes for 30 steps and prints how
much the losses differ. Then it kills one process in the middle of a run, with and without
`--max-restarts`, and prints how long it takes until all have ended, how long until training
resumes, and how much the loss curve differs from that of an undisturbed run.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import steady

steady.start_script()

from configurator import configure
from steady.runlog import read_metrics

data = ""  # folder of a data set
processes = 4  # the largest number of processes; the smaller runs use 1, 2, 4, ...
device = "cuda"  # cuda, cpu

configure(globals(), positional="")
ROOT = Path(__file__).parents[1]
SMALL = [
    "--n_layer=4", "--n_head=4", "--n_embd=256", "--block_size=256", "--batch_size=8",
    f"--gradient_accumulation_steps={processes}", "--warmup_iters=5", "--eval_iters=4",
    "--log_interval=1", f"--device={device}", f"--compile={device == 'cuda'}",
    f"--dtype={'bfloat16' if device == 'cuda' else 'float32'}",
]  # fmt: skip
OPTIMIZERS = {
    "adamw": ["--optimizer=adamw", "--learning_rate=1e-3"],
    "muon": ["--optimizer=muon", "--learning_rate=3e-3"],
}
LONG = [*OPTIMIZERS["adamw"], "--max_iters=300", "--eval_interval=50"]


def start(name: str, n: int, *arguments: str, restarts: int = 0) -> subprocess.Popen:
    """Start train.py under torchrun with `n` processes; NAME.txt gets the output."""
    out = folder / name
    command = ["--standalone", f"--nproc_per_node={n}", f"--max-restarts={restarts}"]
    command += [str(ROOT / "train.py"), f"--dataset={Path(data).resolve()}", f"--out_dir={out}"]
    with open(f"{out}.txt", "w", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command, *SMALL, *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def losses(name: str) -> dict[int, float]:
    """The loss of every iteration so far; the later one if an iteration ran twice."""
    entries = read_metrics(folder / name / "metrics.jsonl")
    return {e["iter"]: e["loss"] for e in entries if e.get("loss") is not None}


def finish(name: str, process: subprocess.Popen) -> dict[int, float]:
    if process.wait():
        raise SystemExit((folder / f"{name}.txt").read_text(encoding="utf-8")[-3000:])
    return losses(name)


def kill_one(process: subprocess.Popen, name: str, after: int) -> tuple[float, list[int]]:
    """Kill the last process of a run once it has passed iteration `after`. Returns the time and
    the IDs of all processes."""
    while max(losses(name), default=0) < after:
        if process.poll() is not None:
            finish(name, process)
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    numbers = [int(number) for file in children for number in file.read_text().split()]
    os.kill(numbers[-1], signal.SIGKILL)
    return time.monotonic(), numbers


def furthest(a: dict[int, float], b: dict[int, float]) -> str:
    if a.keys() != b.keys():
        return f"different iterations: {len(a)} and {len(b)}"
    return f"{max(abs(a[i] - b[i]) for i in a):.6f} at most, over {len(a)} iterations"


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    counts = [n for n in (1, 2, 4, 8) if n <= processes]
    for optimizer, flags in OPTIMIZERS.items():
        short = [*flags, "--max_iters=30", "--eval_interval=0"]
        names = {n: f"{optimizer}-{n}" for n in counts}
        curves = {n: finish(name, start(name, n, *short)) for n, name in names.items()}
        for n in counts[1:]:
            found = furthest(curves[1], curves[n])
            print(f"{optimizer}, {n} processes vs. 1: losses differ by {found}", flush=True)
    killed = start("killed", processes, *LONG)
    moment, numbers = kill_one(killed, "killed", after=60)
    status = killed.wait()
    left = [number for number in numbers if Path(f"/proc/{number}").exists()]
    seconds = time.monotonic() - moment
    print(f"one of {processes} killed: all ended after {seconds:.1f} s, status {status}, "
          f"{len(left)} left", flush=True)  # fmt: skip
    restarted = start("restarted", processes, *LONG, restarts=1)
    moment, _ = kill_one(restarted, "restarted", after=160)
    reached = max(losses("restarted"))
    while max(losses("restarted")) <= reached and restarted.poll() is None:
        time.sleep(0.1)
    seconds = time.monotonic() - moment
    print(f"with --max-restarts=1: past iteration {reached} after {seconds:.1f} s", flush=True)
    again = finish("restarted", restarted)
    whole = finish("whole", start("whole", processes, *LONG))
    print(f"its losses differ from an undisturbed run's by {furthest(again, whole)}")
