"""Compare the speed of several checkouts of this project, and of nanoGPT, by timing them in turns.

    git worktree add ../before HEAD~1 && git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    python dev/turns.py config/train_gpt2.py --folders=../before,.,../nanoGPT --batch_size=32

Clocks, power limits and other jobs change a GPU's speed more than most code changes do, so only
compare figures from the same call. All other flags go to each checkout's bench.py. nanoGPT's own
train.py runs with the same model size and batch, on random tokens too, without the flags that it
does not know. Each run appends a line of JSON to --out.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import steady

steady.start_script()

import json

import numpy as np
import torch

from configurator import one_line_errors, read_settings, resolve
from steady import UserError
from steady.runlog import read_metrics

# comparison
folders = "."  # checkouts, separated by commas
rounds = 2  # runs of each checkout
out = ""  # file to append a line of JSON per run to

sys.excepthook = one_line_errors
ROOT = Path(__file__).parents[1]
given = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:] if argument[:2] == "--")
if "help" in given:
    print(__doc__)
    for name, setting in read_settings(__file__).items():
        print(f"  --{name}={setting.default}  {setting.comment}")
    raise SystemExit
folders = given.pop("folders", folders).split(",")
for folder in folders:
    if not folder or not Path(folder, "train.py").exists():
        raise UserError(f"--folders: {folder!r} is not a checkout of this project or of nanoGPT")
rounds, out = int(given.pop("rounds", rounds)), given.pop("out", out)
rest = [argument for argument in sys.argv[1:] if argument[:2] != "--"]
rest += [f"--{name}={value}" for name, value in given.items()]

FIGURES = ("tokens/s", "ms per step", "spread", "peak memory", "first step")


def time_ours(folder: str) -> dict[str, Any]:
    """Run bench.py of a checkout of this project, and read its output."""
    done = subprocess.run(
        [sys.executable, "bench.py", *rest], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"bench.py in {folder} failed: {(done.stdout + done.stderr)[-2000:]}")
    found = ((n, re.search(rf"^{n} +([\d.,]+)", done.stdout, re.MULTILINE)) for n in FIGURES)
    figures = {name: float(line[1].replace(",", "")) for name, line in found if line}
    return {"device": done.stdout.partition(",")[0].removeprefix("device ")} | figures


def time_nanogpt(folder: str) -> dict[str, Any]:
    """Run nanoGPT's train.py as dev/peers.py does, with an evaluation of one batch before it."""
    bench = resolve(read_settings(ROOT / "bench.py") | read_settings(ROOT / "train.py"), rest)
    first, steps = bench["warmup_steps"], bench["steps"]
    names = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dropout", "device")
    flags = {name: bench[name] for name in (*names, "gradient_accumulation_steps", "compile")}
    if bench["dtype"] != "auto":
        flags["dtype"] = bench["dtype"]
    if flags["device"] == "auto":
        flags["device"] = "cuda"
    elif flags["device"] == "cpu":
        flags.setdefault("dtype", "float32")
    flags |= {"max_iters": first + steps, "log_interval": 1}
    flags |= {"eval_interval": 10**9, "eval_iters": 1}
    with tempfile.TemporaryDirectory() as temporary:
        vocab_size = bench["vocab_size"] or 50304
        tokens = np.random.default_rng(0).integers(0, vocab_size, 2**22, "uint16")
        for split in ("train", "val"):
            tokens.tofile(Path(temporary, f"{split}.bin"))
        meta = f'{{"vocab_size": {vocab_size}, "dtype": "uint16"}}'
        Path(temporary, "meta.json").write_text(meta, encoding="utf-8")
        out_dir, log = Path(temporary, "out"), Path(temporary, "log.txt")
        out_dir.mkdir()
        flags["out_dir"] = out_dir
        command = [sys.executable, str(ROOT / "dev/run_peer.py"), "nanogpt"]
        command += [str(Path(folder).resolve()), temporary, str(out_dir), "1337"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        began, first_step = time.perf_counter(), 0.0
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        entries: list[dict[str, Any]] = []
        while len(entries) <= first + steps and process.poll() is None:
            time.sleep(0.2)
            entries = [e for e in read_metrics(out_dir / "metrics.jsonl") if "ms" in e]
            if entries and not first_step:
                first_step = time.perf_counter() - began
        process.kill()
        process.wait()
        if len(entries) <= first + steps:
            raise UserError(f"nanoGPT in {folder} failed: {log.read_text()[-2000:]}")
    measured = entries[first : first + steps]
    ms = [entry["ms"] for entry in measured]
    median = statistics.median(ms)
    return {
        "device": "cpu" if flags["device"] == "cpu" else torch.cuda.get_device_name(),
        "tokens/s": statistics.median(entry["tokens_per_s"] for entry in measured),
        "ms per step": median, "spread": 100 * (max(ms) - min(ms)) / median,
        "peak memory": measured[-1].get("memory_gib", 0.0), "first step": first_step,
    }  # fmt: skip


print(f"{'':20}" + "".join(f"{name:>14}" for name in FIGURES), flush=True)
for _ in range(rounds):
    for folder in folders:
        found = (time_ours if Path(folder, "steady").exists() else time_nanogpt)(folder)
        print(f"{folder:20}" + "".join(f"{found.get(n, 0):14,.2f}" for n in FIGURES), flush=True)
        if out:
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps({"folder": folder, "flags": rest} | found) + "\n")
