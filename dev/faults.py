"""Kill, stop and mislead train.py and sample.py at random, and see that nothing is lost.

    make faults
    python dev/faults.py --kills=200 --stops=100 --fuzz=3000

kills: SIGKILL at a random moment; what is there is resumed, again and again, until the run is
through. Its losses and weights must be bit for bit those of a run that was left alone.
stops: the same with SIGINT, SIGTERM and SIGHUP, alone, in a pipe to tee that dies of the same
signal, under nohup, and under torchrun. Such a run must end with status 0 and have saved.
fuzz: wrong command lines, config files, environment variables, checkpoints, metadata and token
files. Each must be refused in one line that names its culprit, or run through; never a traceback,
a signal, or more than a minute.

Prints tried and failed per kind, and the command of each failure; exits with 1 if there is any.
"""

import json
import multiprocessing
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from steady import checkpoint
from steady.prepare import split_text, write_dataset
from steady.runlog import read_metrics
from steady.tokenizer import CharTokenizer

import torch

from configurator import configure, read_settings

# how often
kills = 12  # runs killed by SIGKILL
stops = 8  # runs stopped by a signal
fuzz = 120  # wrong inputs
seed = 1  # of what is tried
limit_seconds = 60  # that a wrong input may take
keep = False  # keep the folder of every failure

configure(globals(), positional="")

ROOT = Path(__file__).parents[1]
ITERATIONS = 60
TINY = ["--batch_size=2", "--gradient_accumulation_steps=2", "--block_size=16", "--n_layer=2",
        "--n_head=2", "--n_embd=32", "--eval_interval=5", "--eval_iters=2", "--compile=False",
        "--device=cpu", f"--max_iters={ITERATIONS}", "--lr_decay_iters=60"]  # fmt: skip
draw = random.Random(seed)
tried, failed = Counter(), Counter()


# Most of a short run's time is the import of torch: processes that have it are forked.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch._dynamo"])
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def start(command: list[str], folder: Path) -> multiprocessing.process.BaseProcess:
    """`command` in `folder`, with its output in `folder`/log."""
    process = context.Process(target=in_child, args=(command, folder))
    process.start()
    return process


def in_child(command: list[str], folder: Path) -> None:
    os.chdir(folder)
    with open("log", "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(QUIET)
    torch.set_num_threads(1)
    sys.argv, sys.path[0] = command[1:], str(ROOT)
    try:
        runpy.run_path(command[1], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def fail(kind: str, command: list[str], why: str, folder: Path) -> None:
    failed[kind] += 1
    print(f"FAILED {kind}: {why}\n  {shlex.join(map(str, command))}", flush=True)
    if keep:
        kept = shutil.copytree(folder, tempfile.mkdtemp(prefix="fault-"), dirs_exist_ok=True)
        print(f"  {kept}")


def train_command(data: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *TINY, f"--dataset={data}",
            f"--out_dir={out}", *more]  # fmt: skip


def same(a: object, b: object) -> bool:
    """Whether two checkpoints hold bit for bit the same."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def losses(out: Path) -> list[float]:
    return [e["loss"] for e in read_metrics(out / "metrics.jsonl") if "loss" in e]


def compare(kind: str, out: Path, whole: Path, command: list[str]) -> None:
    """Whether a run that was interrupted has ended as the one that was left alone."""
    ours, theirs = (checkpoint.load(path / "ckpt.pt") for path in (out, whole))
    if losses(out) != losses(whole):
        fail(kind, command, "another loss curve", out)
    elif not same(ours["model"], theirs["model"]) or not same(
        ours["optimizer"]["state"], theirs["optimizer"]["state"]
    ):
        fail(kind, command, "other weights", out)


def interrupt(kind: str, data: Path, whole: Path, seconds: float) -> None:
    """Start, interrupt and resume a run until it is through."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    out, log = folder / "out", folder / "log"
    signum = draw.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    signum = signal.SIGKILL if kind == "kill" else signum
    for _ in range(8):
        command = train_command(data, out)
        command += ["--init_from=resume"] if (out / "ckpt.pt").exists() else []
        if kind in ("kill", "stop"):
            process = start(command, folder)
            ended = lambda: not process.is_alive()  # noqa: B023, E731
            send = lambda signum: os.kill(process.pid, signum)  # noqa: B023, E731
        else:
            if "torchrun" in kind:
                command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            line = shlex.join(["nohup", *command] if "nohup" in kind else command)
            line += f" 2>&1 | tee {folder / 'tee'}" if "tee" in kind else ""
            line = f"trap : INT TERM HUP; {line}"  # bash itself stays until all have ended
            with log.open("w") as file:
                process = subprocess.Popen(
                    ["bash", "-c", line], stdout=file, stderr=file,
                    cwd=ROOT, start_new_session=True, env=os.environ | QUIET,
                )  # fmt: skip
            ended = lambda: process.poll() is not None  # noqa: B023, E731
            send = lambda signum: os.killpg(process.pid, signum)  # noqa: B023, E731
            # the time to import torch and to meet is not worth a signal
            while not ended() and not losses(out):
                time.sleep(0.05)
        end = time.monotonic() + draw.uniform(0.0, 1.0) * seconds
        while not ended() and time.monotonic() < end:
            time.sleep(0.005)
        training, was_there = bool(losses(out)), (out / "ckpt.pt").exists()
        if not ended():
            send(signum)  # also to tee, as a terminal does
        end = time.monotonic() + 60
        while not ended() and time.monotonic() < end:
            time.sleep(0.005)
        if not ended():
            send(signal.SIGKILL)
            return fail(kind, command, f"still there a minute after {signum.name}", folder)
        if kind == "stop" and training and process.exitcode:
            return fail(kind, command, f"status {process.exitcode} at {signum.name}", folder)
        text = log.read_text(errors="replace") if log.exists() else ""
        if "Traceback" in text and "torchrun" not in kind:
            return fail(kind, command, f"a traceback after {signum.name}", folder)
        if not (out / "ckpt.pt").exists():
            if was_there or training and kind != "kill":
                return fail(kind, command, f"no checkpoint after {signum.name}", folder)
            continue
        try:
            reached = checkpoint.load(out / "ckpt.pt")["iter_num"]
        except ValueError as error:
            return fail(kind, command, str(error), folder)
        last = max(e["iter"] for e in read_metrics(out / "metrics.jsonl") if "loss" in e)
        if kind != "kill" and training and reached != last + 1:
            return fail(kind, command, f"saved {reached} of {last + 1} at {signum.name}", folder)
        if reached == ITERATIONS:
            break
    command = train_command(data, out)
    command += ["--init_from=resume"] if (out / "ckpt.pt").exists() else []
    process = start(command, folder)
    process.join()
    if process.exitcode:
        fail(kind, command, log.read_text(), folder)
    elif "torchrun" not in kind:  # whose sums are rounded in another order
        compare(kind, out, whole, command)
    shutil.rmtree(folder)


# ---- wrong inputs ------------------------------------------------------------------------------

VALUES = ["", "0", "-1", "1", "3", "nan", "inf", "-inf", "1e308", "1e-308", "x", "None", "True",
          "auto", "none", "block", "a b", "ü", "\n", "\udcff", "/dev/null", "/proc/1/mem", "[]",
          str(2**31), str(2**63), "9" * 5000, "0x10", "1_0", "reduce-overhead", "'"]  # fmt: skip
STATEMENTS = ["import sys; sys.exit(0)", "1/0", "x = ", "exit()",
              "seed = 10**5000", "batch_size = None", "n_layer = [1]", "learning_rate = 10**400",
              "out_dir = 'a\\nb'", "while True: break", "def f(): return f()\n_ = f()", "lr = 1",
              "\ufeffseed = 1", "import torch", "n_embd = 10**18", "batch_size = 2.0"]  # fmt: skip
VARIABLES = {
    "RANK": ["x", "-1", "5"],
    "WORLD_SIZE": ["0", "2", "x"],
    "LOCAL_RANK": ["x", "7"],
    "MASTER_PORT": ["x", "-1", "99999"],
    "TORCHELASTIC_RESTART_COUNT": ["x", "1", "-1"],
    "LOCAL_WORLD_SIZE": ["x"],
    "CXX": ["/bin/false", "g++ -O2", "nowhere"],
    "TORCHINDUCTOR_CACHE_DIR": ["/dev/null/x", ""],
    "TORCHDYNAMO_DISABLE": ["1", "x"],
    "TORCHDYNAMO_SUPPRESS_ERRORS": ["1"],
    "PYTORCH_CUDA_ALLOC_CONF": ["nonsense", "expandable_segments:False"],
    "PYTHONIOENCODING": ["ascii", "latin-1"],
    "LC_ALL": ["C", "nowhere"],
    "HOME": ["/nowhere", ""],
    "TMPDIR": ["/nowhere"],
    "COLUMNS": ["x", "0"],
}


def damage(path: Path) -> str:
    """Damage a file in some way; returns which."""
    content = bytearray(path.read_bytes())
    way = draw.choice(["flip", "cut", "empty", "zeros", "append", "noise", "remove", "folder"])
    if way == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif way == "cut":
        del content[draw.randrange(len(content)) :]
    elif way == "empty":
        content.clear()
    elif way == "zeros":
        start = draw.randrange(len(content))
        content[start : start + 64] = bytes(len(content[start : start + 64]))
    elif way == "append":
        content += draw.randbytes(draw.randrange(1, 9))
    elif way == "noise":
        content = draw.randbytes(len(content))
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way != "remove":
        path.write_bytes(content)
    return way


def mislead(kind: str, data: Path, whole: Path) -> None:
    """Try one wrong input."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    out, variables, more = folder / "out", {}, ["--max_iters=2"]
    shutil.copytree(data, folder / "data")
    command = train_command(folder / "data", out, *more)
    if kind == "command line":
        script = draw.choice(["train.py", "train.py", "sample.py"])
        names = list(read_settings(ROOT / script))
        chosen = [
            draw.choice(["--{}={}", "--{}={}", "--{}={}", "--{} {}", "-{}={}", "{}={}"]).format(
                draw.choice([*names, *names, "mode", "lr"]), draw.choice(VALUES)
            )
            for _ in range(draw.randrange(1, 3))
        ]
        chosen = [c for c in chosen if "max_iters" not in c]  # the only one that may be long
        if script == "sample.py":
            command = [sys.executable, str(ROOT / script), f"--out_dir={whole}", "--device=cpu",
                       "--max_new_tokens=5", "--num_samples=2"]  # fmt: skip
        command += [part.replace("\0", "") for c in chosen for part in c.split(" ", 1)]
    elif kind == "config file":
        file = folder / "config.py"
        text = "\n".join(draw.choices(STATEMENTS, k=draw.randrange(1, 3)))
        file.write_bytes(text.encode(draw.choice(["utf-8", "utf-16", "utf-8", "utf-8"])))
        command.insert(2, str(file))
    elif kind == "environment":
        for name in draw.sample(list(VARIABLES), k=draw.randrange(1, 3)):
            variables[name] = draw.choice(VARIABLES[name])
        command += [f"--compile={any(n.startswith(('CXX', 'TORCHDYN')) for n in variables)}"]
    elif kind == "checkpoint":
        shutil.copytree(whole, out)
        damage(out / "ckpt.pt")
        command += ["--init_from=resume", f"--max_iters={ITERATIONS + 1}"]
    elif kind == "metadata":
        file = folder / "data" / "meta.json"
        if draw.random() < 0.5:
            damage(file)
        else:
            meta = json.loads(file.read_text())
            values = [None, -1, 0, 10**12, "", "object", "int8", [], {}, [1], 1.5, True, "ü" * 99]
            meta[draw.choice(list(meta))] = draw.choice(values)
            file.write_text(json.dumps(draw.choice([meta, meta, meta, [meta], 1, None])))
    elif kind == "token file":
        damage(folder / "data" / draw.choice(["train.bin", "val.bin"]))
    shown, status = [*(f"{k}={v}" for k, v in variables.items()), *command], None
    if variables:  # which torch reads when it is imported
        environment = os.environ | QUIET | variables
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    else:
        process = start(command, folder)
        process.join(limit_seconds)
        status = process.exitcode
        process.kill()
    if status is None:
        problem = f"still there after {limit_seconds} s"
    else:
        problem = verdict(status, (folder / "log").read_text(errors="replace"))
    if kind == "checkpoint" and status == 0 and not problem:
        # it was accepted: then it must have been what was saved
        ours, theirs = (checkpoint.load(path / "ckpt.pt") for path in (out, whole))
        if ours["iter_num"] != ITERATIONS + 1 or losses(out)[:ITERATIONS] != losses(whole):
            problem = "a damaged checkpoint was resumed"
        elif not same(after_one_more(data, whole), ours["model"]):
            problem = "a damaged checkpoint was resumed: other weights"
    if problem:
        fail(kind, shown, problem, folder)
    shutil.rmtree(folder)


def after_one_more(data: Path, whole: Path) -> dict[str, torch.Tensor]:
    """The weights that one more step makes of the run that was left alone."""
    out = whole.parent / "one more"
    if not out.exists():
        shutil.copytree(whole, out)
        more = ("--init_from=resume", f"--max_iters={ITERATIONS + 1}")
        subprocess.run(train_command(data, out, *more), check=True, capture_output=True)
    return checkpoint.load(out / "ckpt.pt")["model"]


def verdict(status: int, shown: str) -> str:
    """What is wrong with how a script ended; "" if nothing is."""
    if "Traceback" in shown:
        return "a traceback: " + shown.strip().splitlines()[-1][:200]
    if status < 0:
        return f"signal {-status}"
    errors = [line for line in shown.splitlines() if re.match(r"(rank \S+: )?error: ", line)]
    if status and len(errors) != 1:
        return f"status {status} with {len(errors)} lines of error"
    if status and len(errors[0]) > 1500:
        return f"an error of {len(errors[0])} characters"
    return ""


def main() -> None:
    text = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(20))
    with tempfile.TemporaryDirectory() as folder:
        data, whole = Path(folder, "data"), Path(folder, "whole")
        data.mkdir()
        write_dataset(data, CharTokenizer.train(text), split_text(text))
        seconds = 0.0
        for out in (Path(folder, "warm up"), whole):
            began = time.monotonic()
            process = start(train_command(data, out), Path(folder))
            process.join()
            seconds = time.monotonic() - began
        if process.exitcode:
            sys.exit(Path(folder, "log").read_text())
        print(f"seed {seed}; a run takes {seconds:.1f} s", flush=True)
        ways = ["stop", "stop in a pipe to tee", "stop under nohup", "stop under torchrun"]
        wrong = ["command line", "config file", "environment", "checkpoint", "metadata",
                 "token file"]  # fmt: skip
        for _ in range(kills):
            tried["kill"] += 1
            interrupt("kill", data, whole, seconds)
        for n in range(stops):
            tried[ways[n % 4]] += 1
            interrupt(ways[n % 4], data, whole, seconds)
        for n in range(fuzz):
            tried[wrong[n % 6]] += 1
            mislead(wrong[n % 6], data, whole)
    for kind, count in tried.items():
        print(f"{kind:24} tried {count:5}  failed {failed[kind]:5}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
