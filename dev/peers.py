r"""Measure the time to a given loss: train.py against nanoGPT and nanochat.

    git clone https://github.com/karpathy/nanoGPT && git clone https://github.com/karpathy/nanochat
    python dev/peers.py --data=data/openwebtext --nanogpt=nanoGPT --nanochat=nanochat --gpus=2 \
        --nanogpt_runs="nanoGPT: 32k:6e-4:67.1M" --nanochat_runs="65k:67.1M, 131k:67.1M" \
        --ours="muon: config/train_gpt2_muon.py --max_iters=2048" --seeds=1337,1338
    python dev/peers.py --out=runs.jsonl

All train on the same tokens in the same order and evaluate on the same windows. The peers are
unmodified checkouts with their own schedules (dev/run_peer.py only feeds them data); ours is the
real train.py with the given flags. Every run appends a line with its whole loss curve to --out
(plot.py draws them). The table shows all lines of that file, so a sweep may take several calls, and
the second command above only prints the table.

Only training steps count towards the time, not compilation or evaluation. "first step" is the time
since the start of the process. The target is the final loss of the peer's recipe with the lowest
mean final loss: in the table that with the same seed, below it the mean of all seeds, which the
mean curve of our seeds has to reach. Times are interpolated between evaluations. Checkpoints go to
the temporary folder: TMPDIR=/dev/shm keeps them in memory.
"""

import contextlib
import itertools
import json
import lzma
import math
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import steady

steady.start_script()

import torch

from configurator import configure, read_settings, resolve
from steady import UserError
from steady.runlog import read_json_lines, read_metrics, training_clock
from steady.stop import on_signals

# runs to compare
data = ""  # folder with train.bin (or train.bin.xz), val.bin and meta.json
size = "124m"  # tiny, 30m, 124m or 350m; the head size is that of the recipe's config file
nanogpt = ""  # path to a checkout of karpathy/nanoGPT
nanogpt_runs = ""  # comma-separated: [NAME: ]TOKENS_PER_STEP:LEARNING_RATE:TOKENS[:WARMUP_STEPS]
nanochat = ""  # path to a checkout of karpathy/nanochat
nanochat_runs = ""  # comma-separated: [NAME: ]TOKENS_PER_STEP:TOKENS
ours = ""  # [NAME: ]flags and config files of train.py; separate recipes with ";"
seeds = "1337"  # for weights and data order, separated by commas
out = "peers.jsonl"  # file to append one line per run to
# setup
micro_batch = 32  # sequences per micro-batch; flags in --ours override it
block_size = 1024  # tokens in a sequence
eval_interval = 50  # steps between evaluations; flags in --ours override it
eval_windows = 512  # sequences of val.bin, a multiple of the micro-batch
gpus = 1  # run this many at a time, each on its own GPU
device = "auto"  # auto, cpu, cuda
compile = True  # torch.compile the models

configure(globals(), positional="", choices={"size": ("tiny", "30m", "124m", "350m")})
ROOT = Path(__file__).parents[1]
SHAPES = {"tiny": (2, 32), "30m": (6, 384), "124m": (12, 768), "350m": (24, 1024)}  # layers, width
FACTORS = {"k": 1e3, "M": 1e6, "B": 1e9}
SCRIPTS = {"nanogpt": "train.py", "nanochat": "scripts/base_train.py"}
EXAMPLES = {"nanogpt_runs": "32k:6e-4:67.1M", "nanochat_runs": "65k:67.1M"}
DATA, OUT_DIR, SEED = "{data}", "{out_dir}", "{seed}"  # placeholders, filled in when a run starts


def number(text: str) -> float:
    """Parse a number such as 65k, 67.1M or 1.2e-3."""
    factor = FACTORS.get(text[-1:], 1)
    value = float(text[:-1] if factor > 1 else text) * factor
    if not 0 < value < math.inf:
        raise ValueError
    return value


def numbers_of(recipe: str, flag: str, form: str) -> list[float]:
    """The numbers of one run of --nanogpt_runs or --nanochat_runs."""
    parts = recipe.split(":")
    try:
        if not form.count(":") - form.count("[") < len(parts) <= form.count(":") + 1:
            raise ValueError
        return [number(part) for part in parts]
    except ValueError:
        raise UserError(f"--{flag}: {recipe!r} is not {form}, e.g. {EXAMPLES[flag]}") from None


def name_of(run: str, kind: str = "") -> tuple[str, str]:
    """Split [NAME: ]RECIPE. Without a name, the recipe after `kind` is the name."""
    name, _, recipe = run.strip().rpartition(": ")
    return name.strip() or f"{kind} {recipe}".strip(), recipe


def nanogpt_job(run: str) -> dict[str, Any]:
    """Round tokens to whole micro-batches and steps. nanoGPT decays to a tenth, along a cosine."""
    name, recipe = name_of(run, "nanoGPT")
    form = "TOKENS_PER_STEP:LEARNING_RATE:TOKENS[:WARMUP_STEPS]"
    per_step, rate, total, *warmup = numbers_of(recipe, "nanogpt_runs", form)
    micro_steps = max(1, round(per_step / (micro_batch * block_size)))
    iterations = whole_evaluations(total / (micro_steps * micro_batch * block_size))
    layers, width = SHAPES[size]
    flags = {
        "n_layer": layers, "n_head": max(1, width // 64), "n_embd": width,
        "block_size": block_size, "batch_size": micro_batch,
        "gradient_accumulation_steps": micro_steps, "learning_rate": rate, "min_lr": rate / 10,
        "warmup_iters": int(warmup[0]) if warmup else 100, "max_iters": iterations,
        "lr_decay_iters": iterations, "eval_interval": eval_interval,
        "eval_iters": eval_windows // micro_batch, "always_save_checkpoint": False,
        "device": hardware(), "compile": compile, "dataset": DATA, "out_dir": OUT_DIR,
    }  # fmt: skip
    if hardware() == "cpu":
        flags["dtype"] = "float32"
    flags = [f"--{name}={value}" for name, value in flags.items()]
    return {"kind": "nanogpt", "recipe": name, "flags": flags, "learning_rate": rate}


def nanochat_job(run: str) -> dict[str, Any]:
    """nanochat derives learning rates, weight decay and schedules from depth and batch size."""
    name, recipe = name_of(run, "nanochat")
    per_step, total = numbers_of(recipe, "nanochat_runs", "TOKENS_PER_STEP:TOKENS")
    tokens = micro_batch * block_size * max(1, round(per_step / (micro_batch * block_size)))
    layers, width = SHAPES[size]
    flags = {
        "depth": layers, "aspect-ratio": width // layers, "head-dim": min(128, width // 2),
        "max-seq-len": block_size, "window-pattern": "L", "device-batch-size": micro_batch,
        "total-batch-size": tokens, "num-iterations": whole_evaluations(total / tokens),
        "eval-every": eval_interval, "eval-tokens": eval_windows * block_size,
        "core-metric-every": -1, "sample-every": -1, "device-type": hardware(),
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in flags.items()]
    return {"kind": "nanochat", "recipe": name, "flags": flags}


def whole_evaluations(steps: float) -> int:
    """Round to full evaluation intervals: nanoGPT does not evaluate after a partial one."""
    return eval_interval * max(1, round(steps / eval_interval))


def hardware() -> str:
    return "cuda" if torch.cuda.is_available() and device != "cpu" else "cpu"


def our_job(run: str) -> dict[str, Any]:
    name, flags = name_of(run)
    return {"kind": "ours", "recipe": name, "flags": flags.split()}


def command_of(job: dict[str, Any]) -> list[str]:
    """A command with placeholders for seed and folders. Adds the data for the table to `job`."""
    if job["kind"] != "ours":
        given = {"nanogpt": nanogpt, "nanochat": nanochat}[job["kind"]]
        checkout = Path(given)
        if not given or not (checkout / SCRIPTS[job["kind"]]).exists():
            raise UserError(
                f"--{job['kind']}={given} is not a checkout of it: no {SCRIPTS[job['kind']]}"
            )
        job["commit"] = commit_of(checkout)
        command = [sys.executable, str(ROOT / "dev/run_peer.py"), job["kind"]]
        return [*command, str(checkout.resolve()), DATA, OUT_DIR, SEED, *job["flags"]]
    layers, width = SHAPES[size]
    command = [flag for flag in job["flags"] if not flag.startswith("-")]  # config files come first
    recipe = resolve(read_settings(ROOT / "train.py"), command)
    heads = max(1, width * recipe["n_head"] // recipe["n_embd"])  # same head size
    command += [f"--n_layer={layers}", f"--n_head={heads}", f"--n_embd={width}"]
    command += [f"--block_size={block_size}", f"--batch_size={micro_batch}"]
    command += [f"--eval_interval={eval_interval}"]
    command += [flag for flag in job["flags"] if flag.startswith("-")]
    command += [f"--device={device}", f"--compile={compile}"]
    command += ["--log_interval=1", "--always_save_checkpoint=False"]
    settings = resolve(read_settings(ROOT / "train.py"), command)
    batch_size, job["learning_rate"] = settings["batch_size"], settings["learning_rate"]
    if eval_windows % batch_size:
        raise UserError(
            f"{job['recipe']}: eval_windows={eval_windows} must be a multiple of "
            f"batch_size={batch_size}: set --eval_windows or --micro_batch"
        )
    job["commit"] = commit_of(ROOT)
    command += [f"--eval_iters={eval_windows // batch_size}"]
    command += [f"--dataset={DATA}", f"--out_dir={OUT_DIR}", f"--seed={SEED}"]
    return [sys.executable, str(ROOT / "train.py"), *command]


def commit_of(folder: Path) -> str:
    """The commit checked out in `folder`; "" if it is not a git checkout."""
    git = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        if (folder / ".git").exists():  # or git would report an enclosing checkout
            return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return ""


def run(job: dict[str, Any], command: list[str], seed: str, folder: Path) -> None:
    """Train once and append a line to --out. A failure is recorded and does not stop the others."""
    gpu = free_gpus.get()
    try:
        with tempfile.TemporaryDirectory() as own, open(Path(own, "log.txt"), "w+b") as log:
            out_dir = str(Path(own, "out"))
            Path(out_dir).mkdir()
            for name, value in ((DATA, str(folder)), (OUT_DIR, out_dir), (SEED, seed)):
                command = [part.replace(name, value) for part in command]
            metrics, began = Path(out_dir) / "metrics.jsonl", time.monotonic()
            process = subprocess.Popen(
                command, env=os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpus > 1 else {}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            running.append(process)
            while process.poll() is None and not any("loss" in e for e in read_metrics(metrics)):
                time.sleep(0.1)
            first_step = time.monotonic() - began
            process.wait()
            log.seek(0)
            shown = log.read().decode("utf-8", errors="replace")
            entries = read_metrics(metrics)
    finally:
        free_gpus.put(gpu)
    evaluations, failure = [e for e in entries if e.get("val_loss") is not None], ""
    if process.returncode:
        failure = "\n".join([job["recipe"], *shown.splitlines()[-20:]])
    elif len(evaluations) < 2:
        failure = f"{job['recipe']}: evaluated {len(evaluations)} times, too few for a curve"
    elif not math.isfinite(evaluations[-1]["val_loss"]):
        failure = f"{job['recipe']}: the loss is {evaluations[-1]['val_loss']}"
    if failure:
        failures.append(failure)
        print(f"{job['recipe']}, seed {seed}: failed", flush=True)
        return
    seconds, tokens = training_clock(entries)
    curve = [
        {"iter": e["iter"], "tokens": tokens[e["iter"]], "seconds": round(seconds[e["iter"]], 3),
         "val_loss": round(e["val_loss"], 5)}
        for e in evaluations
    ]  # fmt: skip
    cuda = torch.cuda.is_available() and device != "cpu"
    memory = [e["memory_gib"] for e in entries if e.get("memory_gib")]
    line = job | {
        "size": size, "data": Path(data).resolve().name, "seed": int(seed),
        "windows": [eval_windows, block_size],
        "first_step_s": round(first_step, 1), "memory_gib": max(memory, default=None),
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
        "tokens_per_step": tokens[1], "curve": curve,
    }  # fmt: skip
    with writing, open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    last = curve[-1]
    came_to = f"{last['val_loss']:.4f} in {last['seconds']:.1f} s of steps"
    print(f"{job['recipe']}, seed {seed}: {came_to}", flush=True)


def time_to(loss: float, curve: list[dict[str, Any]]) -> float | None:
    """Seconds of training until `curve` first reaches `loss`; None if it never does."""
    if curve[0]["val_loss"] <= loss:
        return curve[0]["seconds"]
    for before, after in zip(curve, curve[1:], strict=False):
        if after["val_loss"] <= loss:
            share = (before["val_loss"] - loss) / (before["val_loss"] - after["val_loss"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def mean_curve(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean seconds and losses of a recipe's runs, where all of them were evaluated."""
    curves = [{point["iter"]: point for point in r["curve"]} for r in runs]
    return [
        {key: statistics.mean(curve[i][key] for curve in curves) for key in ("seconds", "val_loss")}
        for i in curves[0]
        if all(i in curve for curve in curves)
    ]


def print_table(runs: list[dict[str, Any]]) -> None:
    """Print the runs of one size, corpus and device, and the ratios of their mean times."""
    by_recipe: dict[str, list[dict[str, Any]]] = {}
    for r in runs:
        by_recipe.setdefault(r["recipe"], []).append(r)
    bars: dict[str, dict[int, dict[str, Any]]] = {}  # final evaluations by recipe and seed
    for kind in dict.fromkeys(r["kind"] for r in runs if r["kind"] != "ours"):
        final = {
            recipe: statistics.mean(r["curve"][-1]["val_loss"] for r in own)
            for recipe, own in by_recipe.items()
            if own[0]["kind"] == kind
        }
        best = min(final, key=final.__getitem__)
        bars[best] = {r["seed"]: r["curve"][-1] for r in by_recipe[best]}
    print(f"\n{runs[0]['size']} on {runs[0]['data']}, {runs[0]['device']}\n")
    heads = ["recipe", "seed", "tokens per step", "tokens", "tokens/s", "memory, GiB",
             "first step, s", "steps' time, s", "val loss",
             *(f"seconds to the final loss of {best}" for best in bars)]  # fmt: skip
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for r in runs:
        last, cells = r["curve"][-1], []
        for by_seed in bars.values():
            bar = by_seed.get(r["seed"])
            seconds = time_to(bar["val_loss"], r["curve"]) if bar else None
            cells.append("" if not bar else "not reached" if seconds is None else f"{seconds:.1f}")
        memory, first = (r.get(name) or 0.0 for name in ("memory_gib", "first_step_s"))
        print(
            f"| {r['recipe']} | {r['seed']} | {r['tokens_per_step']:,} | "
            f"{last['tokens'] / 1e6:.1f}M | {last['tokens'] / max(last['seconds'], 1e-9):,.0f} | "
            f"{memory:.1f} | {first:.1f} | {last['seconds']:.1f} | {last['val_loss']:.4f} | "
            + "".join(f"{cell} | " for cell in cells).rstrip()
        )
    for recipe, best in itertools.product(by_recipe, bars):
        if by_recipe[recipe][0]["kind"] == "ours":
            curve, target = mean_curve(by_recipe[recipe]), mean_curve(by_recipe[best])[-1]
            seconds = time_to(target["val_loss"], curve)
            ratio = (seconds or curve[-1]["seconds"]) / target["seconds"]
            verb = "does not reach" if seconds is None else "reaches"
            print(
                f"\n{recipe} {verb} {target['val_loss']:.4f}, the final loss of {best}, in "
                f"{ratio:.3f} of its time (means of {len(by_recipe[recipe])} and "
                f"{len(by_recipe[best])} runs)"
            )


if eval_interval < 1 or eval_windows < 1 or eval_windows % micro_batch:
    raise UserError(
        f"eval_windows={eval_windows} must be a multiple of micro_batch={micro_batch}, and "
        f"eval_interval={eval_interval} at least 1"
    )
if not all(seed.strip().isdecimal() for seed in seeds.split(",")):
    raise UserError(f"--seeds={seeds} must be whole numbers separated by commas")
jobs = [nanogpt_job(run) for run in nanogpt_runs.split(",") if run.strip()]
jobs += [nanochat_job(run) for run in nanochat_runs.split(",") if run.strip()]
jobs += [our_job(run) for run in ours.split(";") if run.strip()]
for name, count in Counter(job["recipe"] for job in jobs).items():
    if count > 1:
        raise UserError(f"{count} recipes are named {name!r}")
commands = [command_of(job) for job in jobs]  # all first, to find wrong flags before training
if jobs:
    if not (Path(data) / "val.bin").exists():
        raise UserError(f"--data={data}: there is no data set (val.bin is missing)")
    open(out, "a").close()  # if this fails, no run is wasted
failures: list[str] = []
running: list[subprocess.Popen[str]] = []
on_signals(("SIGTERM", "SIGHUP"), signal.default_int_handler)  # same as Ctrl-C
writing, free_gpus = threading.Lock(), queue.Queue()
for i in range(gpus):
    free_gpus.put(str(i))
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(data).resolve()
    if jobs and (folder / "train.bin.xz").exists():
        for name in ("val.bin", "meta.json"):
            shutil.copy(folder / name, temporary)
        packed = lzma.open(folder / "train.bin.xz")
        with packed, open(Path(temporary, "train.bin"), "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        folder = Path(temporary)
    with ThreadPoolExecutor(gpus) as pool:
        results = [
            pool.submit(run, job, command, seed.strip(), folder)
            for job, command in zip(jobs, commands, strict=True)
            for seed in seeds.split(",")
        ]
        try:
            for result in results:
                result.result()
        except BaseException:  # e.g. Ctrl-C: cancel the runs that have not started,
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:  # and kill the running ones with their children
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise

groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
for entry in read_json_lines(Path(out)):
    same = (str(entry.get(name)) for name in ("size", "data", "device", "windows"))
    groups.setdefault(tuple(same), []).append(entry)
for group in groups.values():
    print_table(group)
if failures:
    raise SystemExit("\n".join(["", *failures]))
