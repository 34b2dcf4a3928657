import json
import lzma
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import TINY, wait_until


def test_bench_times_the_real_training_step(fork):
    process = fork("bench.py", *TINY, "--vocab_size=64", "--steps=3", "--warmup_steps=2")
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    values = dict(re.findall(r"^(tokens/s|ms per step|spread) +([\d.,]+)", shown, re.MULTILINE))
    tokens_per_s = float(values["tokens/s"].replace(",", ""))
    assert 0.5 < tokens_per_s * float(values["ms per step"]) / 1e3 / (4 * 16) < 2


def test_bench_takes_the_vocabulary_of_the_data_set(fork, sums):
    process = fork("bench.py", *TINY, f"--dataset={sums}", "--steps=1", "--warmup_steps=1")
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    assert "vocabulary 13 (64 with padding)" in shown


def test_bench_passes_on_what_train_says_when_it_fails(fork):
    process = fork("bench.py", *TINY, "--n_head=3")
    shown = process.stdout.read()
    assert process.wait() == 1
    assert "error: n_embd=32 is not divisible by n_head=3" in shown
    assert shown.endswith("\nerror: train.py ended after 0 of 16 steps, see above\n")


UNDER_NOHUP = """
import signal, tempfile
tempfile.tempdir = None  # TMPDIR is another now
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
    # (torch makes a folder for its cache there)
    assert not Path(f"/proc/{child}").exists() and not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize("vocab_size", [-5, 10**12])
def test_bench_refuses_a_vocabulary_that_no_token_file_can_hold(run, vocab_size):
    message = f"vocab_size={vocab_size} must be at least 0 and at most 4294967296"
    with pytest.raises(ValueError, match=message):
        run("bench.py", *TINY, f"--vocab_size={vocab_size}")


def test_checkouts_are_timed_in_turns(fork, tmp_path):
    arguments = [*TINY, "--vocab_size=64", "--steps=2", "--warmup_steps=1"]
    process = fork("dev/turns.py", *arguments, "--folders=.", "--rounds=1",
                   f"--out={tmp_path / 'runs.jsonl'}")  # fmt: skip
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["folder"] for run in runs] == ["."] and shown.count("\n") == 2
    assert all(run["tokens/s"] > 0 and run["device"] == "cpu" for run in runs)


def test_time_to_loss_compares_ours_with_the_plain_baseline(fork, sums, tmp_path):
    for name in ("val.bin", "meta.json"):
        shutil.copy(sums / name, tmp_path)
    (tmp_path / "train.bin.xz").write_bytes(lzma.compress((sums / "train.bin").read_bytes()))
    process = fork(
        "dev/time_to_loss.py", f"--data={tmp_path}", "--size=tiny", "--block_size=16",
        "--micro_batch=4", "--eval_windows=8", "--eval_interval=5", "--device=cpu",
        "--compile=False", "--gpus=2", f"--out={tmp_path}/runs.jsonl", "--baseline=0.1k:1e-4:768:2",
        "--ours=wsd: --lr_schedule=wsd --warmup_iters=2 --learning_rate=1e-2 --max_iters=12 "
        "--gradient_accumulation_steps=1",
    )  # fmt: skip
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    runs = map(json.loads, (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines())
    runs = {run["kind"]: run for run in runs}
    curves = {kind: run["curve"] for kind, run in runs.items()}
    assert [e["iter"] for e in curves["baseline"]] == [0, 5, 6]
    assert [e["tokens"] for e in curves["ours"]] == [0, 5 * 64, 10 * 64, 12 * 64]
    assert curves["baseline"][-1]["tokens"] == 768
    assert "| plain 0.1k:1e-4:768:2 | 1337 | 128 | 0.0001 | 0.0M |" in shown
    assert "| wsd | 1337 | 64 | 0.01 |" in shown
    ratio = float(re.search(r"^wsd: ([\d.]+) of the baseline's time", shown, re.MULTILINE)[1])
    reached = ratio * curves["baseline"][-1]["seconds"]
    assert 0 < reached < curves["ours"][-1]["seconds"]


def test_a_comparison_that_is_ended_leaves_nothing_behind(fork, sums, tmp_path):
    process = fork(
        "dev/time_to_loss.py", f"--data={sums}", "--size=tiny", "--block_size=16",
        "--micro_batch=4", "--eval_windows=8", "--device=cpu", "--compile=False",
        f"--out={tmp_path}/runs.jsonl", "--ours=--max_iters=1000000; --max_iters=1000001",
        TMPDIR=str(tmp_path), code="import tempfile; tempfile.tempdir = None",
    )  # fmt: skip
    (metrics,) = wait_until(lambda: list(tmp_path.glob("tmp*/metrics.jsonl")))
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    (child,) = " ".join(task.read_text() for task in tasks).split()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30)  # not 0, and not None
    assert not Path(f"/proc/{child}").exists() and not metrics.exists()


def test_time_to_loss_keeps_the_width_of_heads(run, sums, monkeypatch):
    started = []

    class NotRun(subprocess.Popen):
        def __init__(self, command, **_):
            started.append(command)
            raise OSError("not run")

    monkeypatch.setattr(subprocess, "Popen", NotRun)
    for flags in ("--ours=config/train_gpt2_muon.py", "--baseline=32k:6e-4:1M"):
        with pytest.raises(OSError, match="not run"):
            run("dev/time_to_loss.py", f"--data={sums}", "--size=350m", flags)
    heads = [next(f for f in command if f.startswith("--n_head=")) for command in started]
    assert heads == ["--n_head=8", "--n_head=16"]  # 1024 wide: of 128, as in its config, and of 64


def test_time_to_loss_writes_no_curve_of_a_run_that_is_never_evaluated(run, sums, tmp_path):
    """Every later table of that file would fail on it."""
    with pytest.raises(SystemExit, match="a: evaluated 0 times, too few for a curve"):
        run(
            "dev/time_to_loss.py", f"--data={sums}", "--size=tiny", "--block_size=16",
            "--micro_batch=4", "--eval_windows=8", "--device=cpu", "--compile=False",
            f"--out={tmp_path}/runs.jsonl", "--ours=a: --max_iters=2 --eval_interval=0",
        )  # fmt: skip
    assert not (tmp_path / "runs.jsonl").exists()


def test_time_to_loss_refuses_wrong_flags_before_any_run(run):
    with pytest.raises(ValueError, match="unknown setting '--muon_rl=1'"):
        run("dev/time_to_loss.py", "--ours=--muon_rl=1")
    with pytest.raises(ValueError, match="eval_windows=512 must be a multiple of batch_size=24"):
        run("dev/time_to_loss.py", "--ours=big: --batch_size=24")
    with pytest.raises(ValueError, match="'65k' is not TOKENS_PER_STEP:LEARNING_RATE"):
        run("dev/time_to_loss.py", "--baseline=65k")


def test_time_to_loss_interpolates_between_evaluations_and_judges_by_the_best_baseline(
    run, tmp_path
):
    lines = []
    for kind, recipe, seed, points in (
        ("baseline", "quick", 1, [(0, 9.0), (10, 4.0)]),
        ("baseline", "slow", 1, [(0, 9.0), (100, 3.0)]),
        ("baseline", "slow", 2, [(0, 9.0), (100, 2.0)]),
        ("ours", "muon", 1, [(0, 9.0), (10, 5.0), (20, 1.0)]),  # 3.0 after 15 s
        ("ours", "muon", 2, [(0, 9.0), (10, 2.5), (40, 2.2)]),
    ):
        curve = [{"tokens": 64, "seconds": s, "val_loss": loss} for s, loss in points]
        lines.append(
            {"kind": kind, "recipe": recipe, "seed": seed, "size": "tiny", "data": "sums",
             "device": "cpu", "tokens_per_step": 64, "learning_rate": 1e-3, "curve": curve}
        )  # fmt: skip
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shown = run("dev/time_to_loss.py", f"--out={file}")
    assert "best baseline: slow" in shown
    assert "| muon | 1 | 64 | 0.001 | 0.0M | 20.0 | 1.0000 | 15.0 | 0.150 |" in shown
    assert "| muon | 2 | 64 | 0.001 | 0.0M | 40.0 | 2.2000 | not reached |  |" in shown
    assert "muon: 0.150 of the baseline's time, 1/6.67" in shown
