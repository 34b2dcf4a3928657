r"""How long training takes to a given loss: train.py against a plain, tuned GPT-2.

    python dev/time_to_loss.py --data=data/openwebtext --size=124m --seeds=1337,1338 --gpus=2 \
        --baseline="65k:1.2e-3:67.1M, 32k:1.2e-3:67.1M" \
        --ours="wsd: --lr_schedule=wsd --max_iters=512; config/mine.py"
    python dev/time_to_loss.py --out=runs.jsonl

Both train on the same tokens in the same order and are evaluated on the same windows; ours is the
real train.py, with the flags given. Every run becomes a line of --out, with its whole curve
(plot.py draws them), and the table is that of all lines there: a sweep may take several calls, and
the second command above trains nothing.

Time is that of training steps alone, without compilation and evaluation. The bar is the final loss
of the baseline that ends lowest (by its mean), with the same seed; when ours reached it is
interpolated between evaluations. Checkpoints go to the folder for temporary files: TMPDIR=/dev/shm
keeps them in memory.
"""

import json
import lzma
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
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

# what is compared
data = ""  # folder with train.bin (or train.bin.xz), val.bin and meta.json
size = "124m"  # tiny, 30m, 124m or 350m, with heads as wide as in the recipe's config file
baseline = ""  # TOKENS_PER_STEP:LEARNING_RATE:TOKENS[:WARMUP_STEPS], separated by commas
ours = ""  # flags and config files of train.py, perhaps behind "NAME: "; recipes end with ";"
seeds = "1337"  # of weights and data order, separated by commas
out = "time_to_loss.jsonl"  # file that one line per run is added to
# how
micro_batch = 32  # sequences; flags in --ours may say otherwise
block_size = 1024  # tokens in a sequence
eval_interval = 50  # steps between evaluations; flags in --ours may say otherwise
eval_windows = 512  # sequences of val.bin, a multiple of the micro-batch
gpus = 1  # runs side by side, each on a GPU of its own
device = "auto"  # auto, cpu, cuda
compile = True  # torch.compile the models

configure(globals(), positional="")
ROOT = Path(__file__).parents[1]
SHAPES = {"tiny": (2, 32), "30m": (6, 384), "124m": (12, 768), "350m": (24, 1024)}  # layers, width
FACTORS = {"k": 1e3, "M": 1e6, "B": 1e9}


def number(text: str) -> float:
    """65k, 67.1M, 1.2e-3."""
    factor = FACTORS.get(text[-1:], 1)
    return float(text[:-1] if factor > 1 else text) * factor


def baseline_job(recipe: str) -> dict[str, Any]:
    """Name and flags of one of --baseline. Tokens are rounded to whole micro-batches and steps."""
    try:
        per_step, rate, total, *warmup = map(number, recipe.split(":"))
        warmup_iters = int(warmup[0]) if warmup else 100
    except ValueError:
        raise UserError(
            f"--baseline: {recipe!r} is not TOKENS_PER_STEP:LEARNING_RATE:TOKENS[:WARMUP_STEPS], "
            "such as 65k:1.2e-3:67.1M"
        ) from None
    micro_steps = max(1, round(per_step / (micro_batch * block_size)))
    flags = [
        f"--gradient_accumulation_steps={micro_steps}", f"--learning_rate={rate}",
        f"--warmup_iters={warmup_iters}",
        f"--max_iters={max(1, round(total / (micro_steps * micro_batch * block_size)))}",
    ]  # fmt: skip
    return {"kind": "baseline", "recipe": f"plain {recipe}", "flags": flags}


def our_job(recipe: str) -> dict[str, Any]:
    name, colon, flags = recipe.rpartition(": ")
    return {"kind": "ours", "recipe": name.strip() if colon else recipe, "flags": flags.split()}


def command_of(job: dict[str, Any]) -> list[str]:
    """The command of a run, but for its seed and folders; adds its learning rate to `job`."""
    script = ROOT / ("train.py" if job["kind"] == "ours" else "dev/baseline.py")
    layers, width = SHAPES[size]
    command = [flag for flag in job["flags"] if not flag.startswith("-")]  # config files come first
    recipe = resolve(read_settings(script), command)
    heads = max(1, width * recipe["n_head"] // recipe["n_embd"])  # as wide as in its config file
    command += [f"--n_layer={layers}", f"--n_head={heads}", f"--n_embd={width}"]
    command += [f"--block_size={block_size}", f"--batch_size={micro_batch}"]
    command += [f"--eval_interval={eval_interval}"]
    command += [flag for flag in job["flags"] if flag.startswith("-")]
    command += [f"--device={device}", f"--compile={compile}"]
    if job["kind"] == "ours":
        command += ["--log_interval=1", "--always_save_checkpoint=False"]
    settings = resolve(read_settings(script), command)
    batch_size, job["learning_rate"] = settings["batch_size"], settings["learning_rate"]
    if batch_size == "auto" or eval_windows % batch_size:
        raise UserError(
            f"{job['recipe']}: eval_windows={eval_windows} must be a multiple of "
            f"batch_size={batch_size}: set --eval_windows or --micro_batch"
        )
    return [sys.executable, str(script), *command, f"--eval_iters={eval_windows // batch_size}"]


def run(job: dict[str, Any], command: list[str], seed: str, folder: Path) -> None:
    """Train once and add the run's line to --out; a failure is noted, and the others go on."""
    gpu = free_gpus.get()
    try:
        with tempfile.TemporaryDirectory() as out_dir:
            process = subprocess.Popen(
                [*command, f"--dataset={folder}", f"--out_dir={out_dir}", f"--seed={seed}"],
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpus > 1 else {}),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
            running.append(process)
            shown = process.communicate()[0]
            entries = read_metrics(Path(out_dir) / "metrics.jsonl")
    finally:
        free_gpus.put(gpu)
    evaluations, failure = [e for e in entries if e.get("val_loss") is not None], ""
    if process.returncode:
        failure = "\n".join([job["recipe"], *shown.splitlines()[-20:]])
    elif len(evaluations) < 2:
        failure = f"{job['recipe']}: evaluated {len(evaluations)} times, too few for a curve"
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
    line = job | {
        "size": size, "data": Path(data).resolve().name, "seed": int(seed),
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
        "tokens_per_step": tokens[1], "curve": curve,
    }  # fmt: skip
    with writing, open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    last = curve[-1]
    came_to = f"{last['val_loss']:.4f} in {last['seconds']:.1f} s of steps"
    print(f"{job['recipe']}, seed {seed}: {came_to}", flush=True)


def time_to(loss: float, curve: list[dict[str, Any]]) -> float | None:
    """Seconds of steps until `curve` first reaches `loss`; None if it never does."""
    for before, after in zip(curve, curve[1:], strict=False):
        if after["val_loss"] <= loss:
            share = (before["val_loss"] - loss) / (before["val_loss"] - after["val_loss"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def print_table(runs: list[dict[str, Any]]) -> None:
    """The table of runs of one size, one corpus and one device, and what it comes to."""
    final: dict[str, list[float]] = {}
    for r in runs:
        if r["kind"] == "baseline":
            final.setdefault(r["recipe"], []).append(r["curve"][-1]["val_loss"])
    best = min(final, key=lambda recipe: statistics.mean(final[recipe]), default=None)
    bars = {r["seed"]: r["curve"][-1] for r in runs if r["recipe"] == best}
    print(f"\n{runs[0]['size']} on {runs[0]['data']}, {runs[0]['device']}; best baseline: {best}\n")
    print("| recipe | seed | tokens a step | learning rate | tokens | steps' time, s | val loss |"
          " time to the baseline's loss, s | ratio |")  # fmt: skip
    print("|---" * 9 + "|")
    ratios: dict[str, list[float]] = {}
    for r in runs:
        last, bar = r["curve"][-1], bars.get(r["seed"])
        reached, ratio = "", ""
        if r["kind"] == "ours" and bar:
            seconds = time_to(bar["val_loss"], r["curve"])
            reached = "not reached" if seconds is None else f"{seconds:.1f}"
            if seconds is not None:
                ratio = f"{seconds / bar['seconds']:.3f}"
                ratios.setdefault(r["recipe"], []).append(seconds / bar["seconds"])
        print(
            f"| {r['recipe']} | {r['seed']} | {r['tokens_per_step']:,} | {r['learning_rate']:g} | "
            f"{last['tokens'] / 1e6:.1f}M | {last['seconds']:.1f} | {last['val_loss']:.4f} | "
            f"{reached} | {ratio} |"
        )
    for recipe, values in ratios.items():
        shown = ", ".join(f"{value:.3f}" for value in values)
        print(f"\n{recipe}: {shown} of the baseline's time, 1/{1 / statistics.mean(values):.2f}")


jobs = [baseline_job(recipe.strip()) for recipe in baseline.split(",") if recipe.strip()]
jobs += [our_job(recipe.strip()) for recipe in ours.split(";") if recipe.strip()]
commands = [command_of(job) for job in jobs]  # all of them first: a wrong flag costs no time so
failures: list[str] = []
running: list[subprocess.Popen[str]] = []
on_signals(("SIGTERM", "SIGHUP"), signal.default_int_handler)  # as Ctrl-C
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
        except BaseException:  # Ctrl-C, perhaps: what waits for its turn must not start now,
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:  # and what runs must not go on
                process.kill()
            raise

groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
for entry in read_json_lines(Path(out)):
    groups.setdefault((entry["size"], entry["data"], entry["device"]), []).append(entry)
for group in groups.values():
    print_table(group)
if failures:
    raise SystemExit("\n".join(["", *failures]))
