import ast
import json
import lzma
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import TINY, wait_until

from steady.dataloader import DataLoader, DataSet, eval_batches


def test_bench_times_the_real_training_step_and_turns_compares_checkouts(
    fork, sums, tmp_path, checkouts
):
    arguments = [*TINY, f"--dataset={sums}", "--steps=3", "--warmup_steps=2"]
    process = fork("bench.py", *arguments)
    announced, _, shown = process.stdout.read().partition("\n")
    assert process.wait() == 0, shown
    assert announced == "timing 3 steps of train.py after 2"
    assert "vocabulary 13 (64 with padding)" in shown
    values = dict(re.findall(r"^(tokens/s|ms per step|spread) +([\d.,]+)", shown, re.MULTILINE))
    tokens_per_s = float(values["tokens/s"].replace(",", ""))
    assert 0.5 < tokens_per_s * float(values["ms per step"]) / 1e3 / (4 * 16) < 2

    (tmp_path / "steady").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "bench.py").write_text(f"print({shown!r})")
    nanogpt = checkouts[0].partition("=")[2]
    process = fork("dev/turns.py", *arguments, f"--folders={tmp_path},{nanogpt}", "--rounds=2",
                   f"--out={tmp_path / 'runs.jsonl'}")  # fmt: skip
    table = process.stdout.read()
    assert process.wait() == 0, table
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["folder"] for run in runs] == [str(tmp_path), nanogpt] * 2
    assert table.count("\n") == 5
    assert [run["tokens/s"] for run in runs] == [tokens_per_s, 4 * 16 / 0.020] * 2
    assert all(run["device"] == "cpu" for run in runs)
    process = fork("dev/turns.py", f"--folders={tmp_path},nowhere")
    shown = process.stdout.read()
    assert process.wait() == 1 and shown.startswith("error: --folders: 'nowhere' is not a checkout")


def test_bench_passes_on_what_train_says_when_it_fails(fork):
    process = fork("bench.py", *TINY, "--n_head=3")
    shown = process.stdout.read()
    assert process.wait() == 1
    assert "error: n_embd=32 is not divisible by n_head=3" in shown
    assert shown.endswith("\nerror: train.py ended after 0 of 16 steps, see above\n")


def test_bench_under_torchrun_is_an_error(run, monkeypatch):
    """Its training processes waited for each other's torchrun forever."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match="use --processes=N instead of torchrun"):
        run("bench.py", *TINY)


UNDER_NOHUP = """
import signal, tempfile
tempfile.tempdir = None  # TMPDIR has changed
signal.signal(signal.SIGHUP, signal.SIG_IGN)
"""


def test_a_bench_that_is_ended_leaves_nothing_behind(fork, tmp_path):
    process = fork("bench.py", *TINY, "--vocab_size=64", "--steps=1000000", TMPDIR=str(tmp_path),
                   code=UNDER_NOHUP)  # fmt: skip
    wait_until(lambda: list(tmp_path.glob("*/metrics.jsonl")))
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGHUP)
    assert process.wait(1) is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30)  # not 0, and not None
    # no temporary folder is left (torch puts its cache there too)
    assert not Path(f"/proc/{child}").exists() and not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize("vocab_size", [-5, 10**12])
def test_bench_refuses_a_vocabulary_that_no_token_file_can_hold(run, vocab_size):
    message = f"vocab_size={vocab_size} must be at least 0 and at most 4294967296"
    with pytest.raises(ValueError, match=message):
        run("bench.py", *TINY, f"--vocab_size={vocab_size}")


# Stubs of the two peers with the parts that dev/run_peer.py uses: reading data and printing.
NANOGPT = """
import os, sys, time
import numpy as np
import torch
from model import GPT  # the checkout's, not ours
options = dict(flag[2:].split("=") for flag in sys.argv[1:])
batch_size, block_size, eval_iters, accumulation, eval_interval, max_iters = (
    int(options[name]) for name in ("batch_size", "block_size", "eval_iters",
    "gradient_accumulation_steps", "eval_interval", "max_iters"))
data_dir, seen = os.path.join("data", options["dataset"]), []
torch.manual_seed(1337)
def get_batch(split):
    data = np.memmap(os.path.join(data_dir, split + ".bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    return split, [data[i : i + block_size].tolist() for i in starts]
def estimate_loss():
    for split in ("train", "val"):
        for _ in range(eval_iters):
            batch = get_batch(split)
            if split == "val":
                seen.append(batch)
batch, step = get_batch("train"), 0
while step <= max_iters:
    if step % eval_interval == 0:
        estimate_loss()
        print(f"step {step}: train loss 9.0, val loss {3.05 - step / 10:.4f}")
        torch.save(seen, os.path.join(options["out_dir"], "ckpt.pt"))
        print("x" * 200000)  # more than fits into a pipe
    for _ in range(accumulation):
        seen.append(batch)
        batch = get_batch("train")
    print(f"iter {step}: loss {torch.rand(()).item():.4f}, time 20.00ms, mfu 1.00%")
    step += 1
open("seen.txt", "w").write(repr(seen))
"""
NANOCHAT = """
import argparse
import wandb
from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit as for_val
from nanochat.dataloader import (
    tokenizing_distributed_data_loader_with_state_bos_bestfit as for_train)
from nanochat.tokenizer import get_tokenizer, get_token_bytes
from nanochat.checkpoint_manager import save_checkpoint, load_checkpoint
from nanochat.loss_eval import evaluate_bpb
from nanochat.engine import Engine
from scripts.base_eval import evaluate_core
parser = argparse.ArgumentParser()
for name in ("depth", "aspect-ratio", "head-dim", "max-seq-len", "device-batch-size", "eval-every",
             "total-batch-size", "num-iterations", "eval-tokens", "core-metric-every",
             "sample-every"):
    parser.add_argument("--" + name, type=int)
for name in ("window-pattern", "device-type"):
    parser.add_argument("--" + name)
args, seen = parser.parse_args(), []
tokenizer = get_tokenizer()
B, T = args.device_batch_size, args.max_seq_len
train = for_train(tokenizer, B, T, split="train", device="cpu", resume_state_dict=None)
x, y, state = next(train)
class Mean:
    def __call__(self, x, y):
        seen.append(("val", x.tolist()))
        return x.double().mean()
for step in range(args.num_iterations + 1):
    if step % args.eval_every == 0:
        steps = args.eval_tokens // (B * T)
        bpb = evaluate_bpb(Mean(), for_val(tokenizer, B, T, split="val", device="cpu"), steps, None)
        print(f"Step {step:05d} | Validation bpb: {bpb:.6f}")
    if step == args.num_iterations:
        break
    for _ in range(args.total_batch_size // (B * T)):
        seen.append(("train", x.tolist()))
        x, y, state = next(train)
    print(f"step {step:05d}/9 (1%) | loss: 1.5 | lrm: 1.00 | dt: 10.00ms | tok/sec: 9")
seen.append(("vocabulary", tokenizer.get_vocab_size()))
open("seen.txt", "w").write(repr(seen))
"""


@pytest.fixture
def checkouts(tmp_path):
    for path, text in (("nanogpt/train.py", NANOGPT), ("nanogpt/model.py", "GPT = 1"),
                       ("nanochat/scripts/base_train.py", NANOCHAT),
                       ("nanochat/nanochat/__init__.py", "")):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return [f"--{name}={tmp_path / name}" for name in ("nanogpt", "nanochat")]


SMALL = ["--size=tiny", "--block_size=16", "--micro_batch=4", "--eval_windows=8",
         "--eval_interval=5", "--device=cpu", "--compile=False"]  # fmt: skip


def test_peers_train_on_the_same_windows_in_the_same_order(fork, sums, tmp_path, checkouts):
    for name in ("val.bin", "meta.json"):
        shutil.copy(sums / name, tmp_path)
    (tmp_path / "train.bin.xz").write_bytes(lzma.compress((sums / "train.bin").read_bytes()))
    process = fork(
        "dev/peers.py", f"--data={tmp_path}", *SMALL, *checkouts, f"--out={tmp_path}/runs.jsonl",
        "--nanogpt_runs=0.1k:1e-4:0.8k:2", "--nanochat_runs=chat: 0.1k:0.6k", "--gpus=2",
        "--ours=wsd: --lr_schedule=wsd --warmup_iters=2 --learning_rate=1e-2 --max_iters=12 "
        "--gradient_accumulation_steps=1",
    )  # fmt: skip
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    runs = map(json.loads, (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines())
    curves = {run["kind"]: run["curve"] for run in runs}
    assert [e["tokens"] for e in curves["nanogpt"]] == [0, 640]
    assert [e["seconds"] for e in curves["nanogpt"]] == [0, 5 * 0.02]
    assert [e["val_loss"] for e in curves["nanogpt"]] == [3.05, 2.55]
    assert [(e["tokens"], e["seconds"]) for e in curves["nanochat"]] == [(0, 0), (640, 5 * 0.01)]
    assert [e["tokens"] for e in curves["ours"]] == [0, 5 * 64, 10 * 64, 12 * 64]
    train, val = DataSet(str(sums)).open(16, 64)
    ours = DataLoader(train, batch_size=4, accumulation=2, seed=1337).micro_batches(0)
    windows = [next(ours)[0].tolist() for _ in range(10)]
    evaluated = [tokens.tolist() for tokens, *_ in eval_batches(val, 4, 8)]
    for name in ("nanogpt", "nanochat"):
        seen = ast.literal_eval((tmp_path / name / "seen.txt").read_text())
        trained = [batch for batch in seen if batch[0] == "train"]
        assert [batch[1] for batch in trained[:10]] == windows
        looked_at = [batch for batch in seen if batch[0] == "val"]
        assert [batch[1] for batch in looked_at[:2]] == evaluated
    assert seen[-1] == ("vocabulary", 13)
    assert "| nanoGPT 0.1k:1e-4:0.8k:2 | 1337 | 128 | 0.0M | 6,400 | 0.0 |" in shown
    assert "| chat | 1337 | 128 |" in shown
    assert re.search(r"wsd (does not reach|reaches) \S+, the final loss of nanoGPT 0.1k", shown)


def test_a_comparison_that_is_ended_leaves_nothing_behind(fork, sums, tmp_path):
    process = fork(
        "dev/peers.py", f"--data={sums}", *SMALL, f"--out={tmp_path}/runs.jsonl",
        "--ours=--max_iters=1000000; --max_iters=1000001",
        TMPDIR=str(tmp_path), code="import tempfile; tempfile.tempdir = None",
    )  # fmt: skip
    (metrics,) = wait_until(lambda: list(tmp_path.glob("tmp*/out/metrics.jsonl")))
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    (child,) = " ".join(task.read_text() for task in tasks).split()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30)  # not 0, and not None
    assert not Path(f"/proc/{child}").exists() and not metrics.exists()


def test_peers_have_heads_as_wide_as_in_their_recipes(run, sums, monkeypatch, tmp_path, checkouts):
    started = []

    class NotRun(subprocess.Popen):
        def __init__(self, command, **_):
            started.append(command)
            raise OSError("not run")

    monkeypatch.setattr(subprocess, "Popen", NotRun)
    for flags in ("--ours=config/train_gpt2_muon.py", "--nanogpt_runs=32k:6e-4:1M"):
        with pytest.raises(OSError, match="not run"):
            run("dev/peers.py", f"--data={sums}", f"--out={tmp_path}/runs.jsonl", "--size=350m",
                flags, *checkouts)  # fmt: skip
    heads = [flag for command in started for flag in command if flag.startswith("--n_head=")]
    assert heads == ["--n_head=8", "--n_head=16"]  # width 1024, head size 128 (its config's) and 64


def test_peers_writes_no_curve_of_a_run_that_is_never_evaluated(run, sums, monkeypatch, tmp_path):
    """An entry without a curve would break every later table of that file."""

    class EndsAtOnce(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(command if command[0] == "git" else ["true"], **options)

    monkeypatch.setattr(subprocess, "Popen", EndsAtOnce)
    with pytest.raises(SystemExit, match="a: evaluated 0 times, too few for a curve"):
        run("dev/peers.py", f"--data={sums}", *SMALL, f"--out={tmp_path}/runs.jsonl",
            "--ours=a: --max_iters=2")  # fmt: skip
    assert not (tmp_path / "runs.jsonl").read_text()


def test_peers_refuses_wrong_flags_before_any_run(run):
    for flag, message in (
        ("--ours=--muon_rl=1", "unknown setting '--muon_rl=1'"),
        ("--ours=big: --batch_size=24", "eval_windows=512 must be a multiple of batch_size=24"),
        ("--nanogpt_runs=65k", "'65k' is not TOKENS_PER_STEP:LEARNING_RATE"),
        ("--nanochat_runs=65k:1M:3", "'65k:1M:3' is not TOKENS_PER_STEP:TOKENS, e.g. 65k"),
        ("--nanogpt_runs=65k:nan:1M", "'65k:nan:1M' is not TOKENS_PER_STEP"),
        ("--nanogpt_runs=65k:1e-3:1M", "--nanogpt= is not a checkout of it: no train.py"),
        ("--eval_windows=40", "eval_windows=40 must be a multiple of micro_batch=32"),
        ("--seeds=1,x", "--seeds=1,x must be whole numbers"),
        ("--ours=--max_iters=1", "there is no data set"),
        ("--nanochat_runs=65k:1M", "is not a checkout of it: no scripts/base_train.py"),
    ):
        with pytest.raises(ValueError, match=message):
            run("dev/peers.py", flag, "--nanochat=nowhere")


def test_peers_interpolates_between_evaluations_and_takes_each_peers_best(run, tmp_path):
    lines = []
    for kind, recipe, seed, points in (
        ("nanogpt", "quick", 1, [(0, 9.0), (10, 4.0)]),
        ("nanogpt", "slow", 1, [(0, 9.0), (100, 3.0)]),
        ("nanogpt", "slow", 2, [(0, 9.0), (100, 2.0)]),
        ("nanochat", "d2", 1, [(0, 9.0), (30, 1.0)]),
        ("ours", "muon", 1, [(0, 9.0), (10, 5.0), (20, 1.0)]),  # reaches 3.0 after 15 s
        ("ours", "muon", 2, [(0, 9.0), (10, 2.5), (40, 2.2)]),
        ("ours", "late", 1, [(0, 9.0), (80, 4.0)]),
    ):
        curve = [
            {"iter": i, "tokens": 64, "seconds": s, "val_loss": loss}
            for i, (s, loss) in enumerate(points)
        ]
        lines.append(
            {"kind": kind, "recipe": recipe, "seed": seed, "size": "tiny", "data": "sums",
             "device": "cpu", "tokens_per_step": 64, "first_step_s": 2.5, "curve": curve}
        )  # fmt: skip
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shown = run("dev/peers.py", f"--out={file}")
    assert "| seconds to the final loss of slow | seconds to the final loss of d2 |" in shown
    assert "of quick |" not in shown
    assert "| muon | 1 | 64 | 0.0M | 3 | 0.0 | 2.5 | 20.0 | 1.0000 | 15.0 | 20.0 |" in shown
    assert "| muon | 2 | 64 | 0.0M | 2 | 0.0 | 2.5 | 40.0 | 2.2000 | not reached |  |" in shown
    # the means of both seeds: slow ends at 2.5 after 100 s; muon is at 3.75 after 10 s and at 1.6
    # after 30 s, so at 2.5 after 21.6 s
    assert (
        "muon reaches 2.5000, the final loss of slow, in 0.216 of its time (means of 2 and 2 runs)"
    ) in shown
    assert "muon does not reach 1.0000, the final loss of d2, in 1.000 of its time" in shown
    assert "late does not reach 2.5000, the final loss of slow, in 0.800 of its time" in shown
