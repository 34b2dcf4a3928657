"""Run train.py the way a user does. Most runs share this process; signals need a separate one."""

import contextlib
import json
import logging
import os
import pty
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, skip_until

import model as model_file
from configurator import architecture_note, read_settings, resolve
from model import GPTConfig
from steady import checkpoint, compiling, dataloader, hardware, loss, memory, optim
from steady.distributed import Process
from steady.runlog import RunLog, read_metrics, training_clock
from steady.stop import Saving, resume_command


def train(run, out, data, *arguments):
    return run("train.py", *TINY, f"--dataset={data}", f"--out_dir={out}", *arguments)


def steps(out):
    return [entry for entry in read_metrics(out / "metrics.jsonl") if "loss" in entry]


def evaluations(out):
    return [entry for entry in read_metrics(out / "metrics.jsonl") if "val_loss" in entry]


def losses(out):
    return [entry["loss"] for entry in steps(out)]


# makes a run print "training" when its loop begins
ANNOUNCE = """
from steady.stop import StopRequest
asked = StopRequest.stop_requested
def announce(self):
    StopRequest.stop_requested = asked
    print("training", flush=True)
    return asked(self)
StopRequest.stop_requested = announce
"""


@contextlib.contextmanager
def interrupted_set_up(monkeypatch, signum=signal.SIGINT):
    """Runs in this context get a signal before they find the batch size that fits."""
    fit = memory.fit

    def request_and_fit(*arguments):
        signal.raise_signal(signum)
        return fit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "fit", request_and_fit)
        yield


def same_state(a, b):
    """Whether two checkpoints are bit for bit identical."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b


# ---- the numbers ------------------------------------------------------------------------------

GOLDEN = [
    4.09921,
    3.97129,
    3.666,
    3.37202,
    3.09037,
    2.89961,
    2.76256,
    2.64645,
    2.70862,
    2.66583,
    2.54087,
    2.57799,
    2.5068,
    2.54421,
    2.56832,
    2.58588,
    2.61225,
    2.61625,
    2.58533,
    2.5579,
]


def test_golden_loss_curve(run, sums, tmp_path):
    """20 steps, fixed seed, CPU, float32: change these numbers only on purpose."""
    train(run, tmp_path, sums, "--max_iters=20", "--dtype=float32")
    assert losses(tmp_path) == pytest.approx(GOLDEN, abs=2e-4)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.5


def test_metrics_have_the_documented_keys_in_full_precision(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=3")
    entry = steps(tmp_path)[1]
    assert list(entry) == [
        "iter", "loss", "lr", "grad_norm", "ms", "tokens_per_s", "mfu", "memory_gib",
    ]  # fmt: skip
    assert [e["iter"] for e in steps(tmp_path)] == [0, 1, 2]
    assert list(evaluations(tmp_path)[0]) == ["iter", "train_loss", "val_loss", "val_bpb"]
    assert [e["iter"] for e in evaluations(tmp_path)] == [0, 3]
    assert entry["mfu"] is None and entry["memory_gib"] is None  # unknown for a CPU
    assert entry["loss"] != round(entry["loss"], 6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulation_1x8_equals_8x1(run, sums, tmp_path, optimizer):
    for name, split in (
        ("whole", ["--batch_size=8", "--gradient_accumulation_steps=1"]),
        ("parts", ["--batch_size=1", "--gradient_accumulation_steps=8"]),
    ):
        more = ["--eval_interval=0", f"--optimizer={optimizer}"]
        train(run, tmp_path / name, sums, *split, *more)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def test_f21_logged_loss_is_the_mean_over_micro_steps(run, sums, tmp_path, monkeypatch):
    seen = []
    forward = model_file.GPT.forward

    def recording(self, tokens, targets=None, cache=None):
        out = forward(self, tokens, targets, cache)
        if self.training and tokens.any():  # the trial step's tokens are all 0
            seen.append(out.item())
        return out

    monkeypatch.setattr(model_file.GPT, "forward", recording)
    train(run, tmp_path, sums, "--gradient_accumulation_steps=4", "--max_iters=1")
    assert len(seen) == 4
    assert losses(tmp_path)[0] == pytest.approx(sum(seen) / 4, abs=1e-6)
    assert losses(tmp_path)[0] != pytest.approx(seen[-1], abs=1e-6)  # nanoGPT logs this one


def test_short_sequences_are_the_halves_of_the_same_sequences(run, sums, tmp_path, monkeypatch):
    seen, forward = [], model_file.GPT.forward

    def recording(self, tokens, targets=None, cache=None):
        if self.training:
            seen.append((tokens, targets))
        return forward(self, tokens, targets, cache)

    monkeypatch.setattr(model_file.GPT, "forward", recording)
    more = "--max_iters=4", "--lr_decay_iters=4", "--eval_interval=0"
    train(run, tmp_path / "whole", sums, *more)
    whole, seen[:] = seen[-4:], []
    train(run, tmp_path / "halves", sums, *more, "--short_sequences=0.5")
    assert [tuple(tokens.shape) for tokens, _ in seen[:-4]] == [(8, 8), (4, 16)]  # the trial step
    assert [tuple(tokens.shape) for tokens, _ in seen[-4:]] == [(8, 8)] * 2 + [(4, 16)] * 2
    for one, other in zip(whole, seen[-4:], strict=True):
        assert all(torch.equal(a, b.reshape(4, 16)) for a, b in zip(one, other, strict=True))
    seen.clear()  # without decay the schedule ends with the run
    more = "--max_iters=4", "--lr_decay_iters=2", "--decay_lr=False", "--eval_interval=0"
    train(run, tmp_path / "constant", sums, *more, "--short_sequences=0.5")
    assert [tuple(tokens.shape) for tokens, _ in seen[-4:]] == [(8, 8)] * 2 + [(4, 16)] * 2
    first, other = losses(tmp_path / "whole"), losses(tmp_path / "halves")
    assert first[0] != other[0] and first[0] == pytest.approx(other[0], abs=0.05)
    with pytest.raises(ValueError, match="short_sequences needs an even block_size, not 15"):
        train(run, tmp_path, sums, "--short_sequences=0.5", "--block_size=15")
    train(run, tmp_path, sums, "--short_sequences=0.5", "--block_size=15", "--eval_only=True")


def test_both_lengths_are_compiled_in_the_trial_step(run, sums, tmp_path, traced):
    """Without this the run would stall, or run out of memory, in the middle."""
    counts = []
    for steps in (2, 4):  # before and after the change of length
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        train(run, tmp_path, sums, "--compile=True", "--short_sequences=0.5", "--lr_decay_iters=4",
              f"--max_iters={steps}", "--eval_interval=0")  # fmt: skip
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts == [4, 4]  # block and last norm, for two lengths


def test_overfits_a_data_set_of_one_window(run, tmp_path):
    from steady.prepare import write_dataset
    from steady.tokenizer import CharTokenizer

    text = "to be, or not to "
    write_dataset(tmp_path / "data", CharTokenizer.train(text), {"train": [text], "val": [text]})
    train(run, tmp_path, tmp_path / "data", "--max_iters=200", "--lr_decay_iters=0")
    assert losses(tmp_path)[-1] < 0.01


def test_evaluation_repeats_exactly_and_does_not_disturb_training(run, sums, tmp_path):
    train(run, tmp_path / "often", sums, "--eval_interval=2", "--dropout=0.1")
    train(run, tmp_path / "never", sums, "--eval_interval=0", "--dropout=0.1")
    assert losses(tmp_path / "often") == losses(tmp_path / "never")
    assert [e["iter"] for e in evaluations(tmp_path / "often")] == [0, 2, 4, 6, 8, 10]
    first = evaluations(tmp_path / "often")[-1]
    resumed = ["--init_from=resume", "--dropout=0.1", "--eval_only=True"]
    shown = train(run, tmp_path / "often", sums, *resumed)
    assert f"train loss {first['train_loss']:7.4f} | val loss {first['val_loss']:7.4f}" in shown


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_f16_low_precision_trains_on_cpu_without_deprecated_calls(run, sums, tmp_path, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run, tmp_path / dtype, sums, f"--dtype={dtype}")
    train(run, tmp_path / "exact", sums, "--dtype=float32")
    assert losses(tmp_path / dtype) == pytest.approx(losses(tmp_path / "exact"), abs=0.1)
    with pytest.warns((FutureWarning, UserWarning)):
        torch.cuda.amp.GradScaler(enabled=True)  # as in nanoGPT


# ---- not finite -------------------------------------------------------------------------------


def poison(monkeypatch, at_call, training=True):
    """Make the `at_call`-th and all later losses of training (or of evaluation) NaN."""
    calls = []
    original = loss.linear_cross_entropy

    def poisoned(*arguments, **options):
        loss = original(*arguments, **options)
        if torch.is_grad_enabled() is training:
            calls.append(1)
            if len(calls) >= at_call:
                return loss * float("nan")
        return loss

    monkeypatch.setattr(loss, "linear_cross_entropy", poisoned)


@pytest.mark.parametrize(("training", "log_interval"), [(True, 1), (True, 4), (False, 1)])
def test_f19_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    run, sums, tmp_path, monkeypatch, training, log_interval
):
    train(run, tmp_path, sums, "--max_iters=5")
    good = (tmp_path / "ckpt.pt").read_bytes()
    poison(monkeypatch, 3, training)
    with pytest.raises(
        ValueError, match="nan at iteration .* not finite; .*ckpt.pt is kept: resume .* lower learn"
    ):
        train(
            run, tmp_path, sums, "--max_iters=12", "--init_from=resume",
            f"--log_interval={log_interval}",
        )  # fmt: skip
    assert (tmp_path / "ckpt.pt").read_bytes() == good


def test_f19_one_infinite_gradient_is_skipped_and_training_goes_on(
    run, sums, tmp_path, monkeypatch
):
    original = loss.linear_cross_entropy
    calls = []

    def explode_once(*arguments, **options):
        loss = original(*arguments, **options)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 4:
                loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    monkeypatch.setattr(loss, "linear_cross_entropy", explode_once)
    train(run, tmp_path, sums)
    assert len(calls) > 4
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    saved = checkpoint.load(tmp_path / "ckpt.pt")
    assert all(w.isfinite().all() for w in saved["model"].values())


@pytest.mark.parametrize(("dtype", "log_interval"), [("float32", 1), ("float16", 7)])
def test_f19_gradients_that_are_never_finite_are_told_once_and_end_the_run(
    run, sums, tmp_path, monkeypatch, capsys, dtype, log_interval
):
    arguments = [f"--dtype={dtype}", f"--log_interval={log_interval}", "--max_iters=300"]
    train(run, tmp_path, sums, *arguments, "--max_iters=4")
    good = checkpoint.load(tmp_path / "ckpt.pt")["model"]
    original = loss.linear_cross_entropy

    def explode(*arguments, **options):
        loss = original(*arguments, **options)
        if torch.is_grad_enabled():
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    monkeypatch.setattr(loss, "linear_cross_entropy", explode)
    with pytest.raises(ValueError, match="gradients of 10. steps in a row, .*ckpt.pt is kept: re"):
        train(run, tmp_path, sums, *arguments, "--init_from=resume", "--eval_interval=20")
    shown = capsys.readouterr().out
    assert shown.count("warning") == shown.count(" steps in a row, up to iteration ") == 1
    assert same_state(checkpoint.load(tmp_path / "ckpt.pt")["model"], good)


# ---- stop and resume --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signals", "apart"),
    [(("SIGTERM", "SIGTERM"), 0.2), (("SIGTERM", "SIGINT"), 0.2),
     (("SIGINT", "SIGTERM", "SIGTERM"), 0.0), (("SIGSTOP", "SIGHUP", "SIGINT", "SIGCONT"), 0.0)],
)  # fmt: skip
def test_f72_only_a_second_ctrl_c_kills_a_run_that_is_saving(fork, sums, tmp_path, signals, apart):
    """Nobody types SIGTERM twice: a wrapper forwards it, and the process group gets it too."""
    more = [f"--dataset={sums}", f"--out_dir={tmp_path}", "--gradient_accumulation_steps=200"]
    process = fork("train.py", *TINY, *more, "--eval_interval=0", "--max_iters=100000")
    skip_until(process, "iter      0 | loss")
    for name in signals:
        process.send_signal(getattr(signal, name))
        time.sleep(apart)
    rest = process.stdout.read()
    assert process.wait(30) == 0 and "stopped at iteration" in rest, rest
    assert "Traceback" not in rest, rest  # Python's, of signals that arrived together
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter_num"] > 0


@pytest.mark.parametrize(
    "more",
    ["--dtype=float32", "--dtype=float16", "--optimizer=muon", "--short_sequences=0.25",
     "--sampled_softmax=32"],
)  # fmt: skip
def test_f22_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(run, sums, tmp_path, more):
    more = ["--dropout=0.1", "--gradient_accumulation_steps=2", more]
    train(run, tmp_path / "whole", sums, *more)
    train(run, tmp_path / "parts", sums, *more, "--max_iters=3")
    train(run, tmp_path / "parts", sums, *more, "--max_iters=7", "--init_from=resume")
    train(run, tmp_path / "parts", sums, *more, "--init_from=resume")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    a, b = (checkpoint.load(tmp_path / name / "ckpt.pt") for name in ("whole", "parts"))
    for key in ("model", "optimizer", "scaler", "iter_num", "sequences"):
        assert same_state(a[key], b[key]), key
    assert bool(a["scaler"]) is ("--dtype=float16" in more)


def test_f22_sequences_are_not_repeated_when_the_global_batch_changes(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=3")
    train(run, tmp_path, sums, "--max_iters=5", "--init_from=resume", "--batch_size=2")
    assert checkpoint.load(tmp_path / "ckpt.pt")["sequences"] == 3 * 4 + 2 * 2


def test_one_metrics_entry_per_iteration_after_a_crash(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=5")
    with open(tmp_path / "metrics.jsonl", "a") as file:  # steps after the checkpoint, then a crash
        file.write(json.dumps(steps(tmp_path)[-1] | {"iter": 5}) + "\n" + '{"iter": 6, "lo')
    train(run, tmp_path, sums, "--max_iters=8", "--init_from=resume")
    assert [entry["iter"] for entry in steps(tmp_path)] == list(range(8))
    assert [entry["iter"] for entry in evaluations(tmp_path)] == [0, 5, 8]  # 5: first run's end


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGXCPU])
def test_f31_signal_saves_says_how_to_resume_and_resuming_is_exact(
    fork, run, sums, tmp_path, signum
):
    arguments = [*TINY, f"--dataset={sums}", "--max_iters=400", "--dropout=0.1"]
    process = fork("train.py", *arguments, f"--out_dir={tmp_path / 'parts'}")
    stop_at = random.randrange(5, 30)
    skip_until(process, f"iter {stop_at:6d} | loss")
    process.send_signal(signum)
    rest = process.stdout.read()
    assert process.wait(30) == 0, rest
    assert "--init_from=resume" in rest and "Traceback" not in rest
    saved = checkpoint.load(tmp_path / "parts" / "ckpt.pt")
    assert stop_at <= saved["iter_num"] < 400

    end = f"--max_iters={saved['iter_num'] + 5}"
    for out, more in (("parts", "--init_from=resume"), ("whole", "--init_from=scratch")):
        run("train.py", *arguments, f"--out_dir={tmp_path / out}", end, more)
    a, b = (checkpoint.load(tmp_path / name / "ckpt.pt") for name in ("parts", "whole"))
    assert same_state(a["model"], b["model"]) and same_state(a["optimizer"], b["optimizer"])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_f31_a_signal_ends_an_evaluation_which_the_resumed_run_makes_again(
    fork, run, sums, tmp_path
):
    often = [f"--dataset={sums}", "--max_iters=12", "--eval_interval=10", "--dropout=0.1"]
    process = fork("train.py", *TINY, *often, f"--out_dir={tmp_path / 'parts'}",
                   "--eval_iters=20000", "--init_from=scratch", code=ANNOUNCE)  # fmt: skip
    skip_until(process, "training")  # the first evaluation comes next
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    began, rest = time.monotonic(), process.stdout.read()
    assert process.wait(20) == 0 and "stopped at iteration 0, saved" in rest, rest
    assert time.monotonic() - began < 10 and "train loss" not in rest
    for out, more in (("parts", "--init_from=resume"), ("whole", "--init_from=scratch")):
        run("train.py", *TINY, *often, f"--out_dir={tmp_path / out}", more)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    found, expected = (evaluations(tmp_path / name) for name in ("parts", "whole"))
    assert [e["iter"] for e in found] == [0, 10, 12]
    assert [e["val_loss"] for e in found] == [e["val_loss"] for e in expected]


def test_f19_a_signal_during_an_evaluation_saves_no_ruined_weights(
    run, sums, tmp_path, monkeypatch
):
    train(run, tmp_path, sums, "--max_iters=5")
    good = (tmp_path / "ckpt.pt").read_bytes()
    eval_batches = dataloader.eval_batches

    def interrupted(*arguments):
        for n, batch in enumerate(eval_batches(*arguments)):
            if n == 1:
                signal.raise_signal(signal.SIGTERM)
            yield batch

    monkeypatch.setattr(dataloader, "eval_batches", interrupted)
    ruined = "--learning_rate=3e38", "--log_interval=1000", "--eval_interval=8"
    with pytest.raises(ValueError, match="train_loss nan .* not finite; .*ckpt.pt is kept"):
        train(run, tmp_path, sums, *ruined, "--max_iters=12", "--init_from=resume")
    assert (tmp_path / "ckpt.pt").read_bytes() == good


def test_f19_a_loss_that_is_not_finite_before_any_step_is_the_models(
    run, sums, tmp_path, monkeypatch
):
    poison(monkeypatch, 1)
    with pytest.raises(ValueError, match="nan at iteration 0: not finite; look .* in model.py's"):
        train(run, tmp_path, sums, "--eval_interval=0")


def test_f57_a_metric_of_your_own_may_be_infinite(run, sums, tmp_path, monkeypatch):
    finite = Saving.require_finite

    def with_metric(self, losses, *rest):
        return finite(self, losses | {"val_perplexity": float("inf")}, *rest)

    monkeypatch.setattr(Saving, "require_finite", with_metric)
    train(run, tmp_path, sums, "--max_iters=5")
    assert (tmp_path / "ckpt.pt").exists()


@pytest.mark.parametrize(
    ("step", "eval_interval", "error", "message"),
    [
        (9, 0, ValueError, "loss nan at iteration 9: not finite; .*ckpt.pt is kept"),
        (8, 8, SystemExit, "could not save"),  # right before an evaluation
    ],
)
def test_f19_a_signal_between_two_log_lines_saves_no_ruined_weights(
    run, sums, tmp_path, monkeypatch, step, eval_interval, error, message
):
    train(run, tmp_path, sums, "--max_iters=5")
    good = (tmp_path / "ckpt.pt").read_bytes()
    set_schedule = optim.set_schedule

    def interrupted(optimizer, iter_num, config):
        if iter_num == step:
            signal.raise_signal(signal.SIGTERM)
        return set_schedule(optimizer, iter_num, config)

    monkeypatch.setattr(optim, "set_schedule", interrupted)
    ruined = "--learning_rate=3e38", "--log_interval=1000", f"--eval_interval={eval_interval}"
    with pytest.raises(error, match=message):
        train(run, tmp_path, sums, *ruined, "--max_iters=12", "--init_from=resume")
    assert (tmp_path / "ckpt.pt").read_bytes() == good


def test_second_signal_stops_at_once(fork, sums, tmp_path):
    more = [f"--dataset={sums}", f"--out_dir={tmp_path}", "--gradient_accumulation_steps=100000"]
    process = fork("train.py", *TINY, *more, "--eval_interval=0", code=ANNOUNCE)
    skip_until(process, "training")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # still in the first step
    process.send_signal(signal.SIGINT)
    assert process.wait(10) != 0
    assert "Traceback" not in process.stdout.read()


def test_second_ctrl_c_waits_for_no_thread(fork):
    """A thread that waits for a lock may never end. The reader thread can be in that state if a
    signal interrupted the holder of the lock."""
    code = """
import threading, time
from steady.distributed import Process
from steady.stop import StopRequest
locked = threading.Lock()
locked.acquire()
threading.Thread(target=locked.acquire).start()
StopRequest(Process()).training = True
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
    process = fork("", code=code)
    skip_until(process, "ready")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert process.wait(5) == -signal.SIGINT


def test_ctrl_c_leaves_worker_processes_to_the_run(fork):
    """A terminal sends Ctrl-C to the workers of torch's DataLoader, too. If one died of it, the run
    ended with torch's "DataLoader worker exited unexpectedly"."""
    code = """
import os, signal, sys
from steady.distributed import Process
from steady.stop import StopRequest
request = StopRequest(Process())
worker = os.fork()
if not worker:
    signal.raise_signal(signal.SIGINT)
    os._exit(0)
status = os.waitpid(worker, 0)[1]
sys.exit(status != 0 or request.received)
"""
    assert fork("", code=code).wait(60) == 0


def test_ctrl_c_before_training_ends_the_run_at_once(run, sums, tmp_path, monkeypatch):
    """There is nothing to save, and compiling or splitting a batch can take minutes. (In a shell's
    background a process ignores SIGINT, and the first process of a container has no defaults.)"""
    for default in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, default)
        with interrupted_set_up(monkeypatch), pytest.raises(KeyboardInterrupt):
            train(run, tmp_path, sums)
        assert not steps(tmp_path) and not (tmp_path / "ckpt.pt").exists()
    with interrupted_set_up(monkeypatch, signal.SIGTERM), pytest.raises(SystemExit) as ended:
        train(run, tmp_path, sums)
    assert ended.value.code == 128 + signal.SIGTERM


def test_first_signal_stops_what_saves_nothing(fork, sums, tmp_path):
    more = [f"--dataset={sums}", f"--out_dir={tmp_path}", "--eval_iters=100000"]
    process = fork("train.py", *TINY, *more, "--eval_only=True")
    skip_until(process, "settings")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) != 0
    rest = process.stdout.read()
    assert "Traceback" not in rest and "saving" not in rest


def test_f31_final_checkpoint_without_any_evaluation(run, sums, tmp_path):
    train(run, tmp_path, sums, "--eval_interval=0", "--max_iters=3")
    assert checkpoint.load(tmp_path / "ckpt.pt")["iter_num"] == 3


def test_f24_eval_only_on_a_resumed_run_does_not_train(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=3")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    shown = train(run, tmp_path, sums, "--init_from=resume", "--eval_only=True")
    assert f"val loss {evaluations(tmp_path)[-1]['val_loss']:7.4f}" in shown
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_evaluating_needs_no_room_for_training(run, sums, tmp_path, monkeypatch):
    """6.3M parameters need 25 MB for evaluation, but 100 MB or more for training."""
    wide = ["--n_layer=2", "--n_head=4", "--n_kv_head=4", "--n_embd=512"]
    monkeypatch.setattr(hardware, "available_memory_gib", lambda device: 0.06)
    with pytest.raises(ValueError, match="takes about .* to train with one sequence"):
        train(run, tmp_path, sums, *wide)
    assert "val loss" in train(run, tmp_path, sums, *wide, "--eval_only=True", "--fp8=True")


def overfitting_data(folder):
    """The training text does not help to predict the validation text."""
    from steady.prepare import write_dataset
    from steady.tokenizer import CharTokenizer

    splits = {"train": ["abcdefgh" * 50], "val": ["hgfedcba" * 50]}
    write_dataset(folder, CharTokenizer.train("abcdefgh"), splits)
    return folder


@pytest.mark.parametrize("always", [True, False])
def test_f25_best_validation_loss_stays_the_best(run, tmp_path, always):
    data = overfitting_data(tmp_path / "data")
    out = tmp_path / "out"
    train(
        run, out, data, "--eval_interval=2", "--max_iters=30", "--warmup_iters=10",
        f"--always_save_checkpoint={always}",
    )  # fmt: skip
    values = [entry["val_loss"] for entry in evaluations(out)]
    assert values[-1] > min(values) + 0.1  # it did overfit
    last = checkpoint.load(out / "ckpt.pt")
    assert last["best_val_loss"] == min(values[1:])  # untrained weights are not saved
    assert last["iter_num"] == 30
    best = checkpoint.load(out / "best.pt")
    assert best["best_val_loss"] == min(values[1:])
    assert "optimizer" not in best


def test_f25_a_best_loss_that_was_not_saved_is_discarded(run, tmp_path, monkeypatch):
    save, refused = checkpoint.save, []

    def full_for_a_while(path, content, *more):
        if path.name == "best.pt" and 4 <= content["iter_num"] < 8:
            refused.append(content["best_val_loss"])
            raise OSError("No space left on device")
        save(path, content, *more)

    monkeypatch.setattr(checkpoint, "save", full_for_a_while)
    data = overfitting_data(tmp_path / "data")
    arguments = "--eval_interval=1", "--max_iters=12", "--learning_rate=1e-2"
    shown = train(run, tmp_path / "out", data, *arguments)
    values = [entry["val_loss"] for entry in evaluations(tmp_path / "out")]
    best = checkpoint.load(tmp_path / "out" / "best.pt")
    saved = [value for i, value in enumerate(values) if i > 0 and not 4 <= i < 8]
    assert refused and "best.pt was not saved (the last good one is kept): No space" in shown
    assert best["best_val_loss"] == values[best["iter_num"]] == min(saved)
    assert checkpoint.load(tmp_path / "out" / "ckpt.pt")["best_val_loss"] == min(saved)


def test_a_run_whose_last_save_fails_ends_with_an_error(run, sums, tmp_path, monkeypatch):
    def full(path, content, *more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(SystemExit, match="could not save the checkpoint of iteration 5"):
        train(run, tmp_path, sums, "--max_iters=5", "--eval_interval=2")


def test_f45_a_checkpoint_of_another_run_is_not_taken_for_ones_own(
    run, sums, tmp_path, monkeypatch, other_run
):
    """It is in the folder's place, and at the same iteration."""
    train(run, tmp_path / "other", sums, "--max_iters=3", "--seed=2")
    out, set_schedule = tmp_path / "out", optim.set_schedule

    def replace_folder(opt, iter_num, config):
        if iter_num == 2:
            out.rename(tmp_path / "moved")
            (tmp_path / "other").rename(out)
            other_run(out)
        return set_schedule(opt, iter_num, config)

    monkeypatch.setattr(optim, "set_schedule", replace_folder)
    with pytest.raises(SystemExit, match="could not save the checkpoint of iteration 3"):
        train(run, out, sums, "--max_iters=3", "--eval_interval=0", "--log_interval=9")


def test_a_clock_that_stands_still_ends_no_run(run, sums, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    assert "finished at iteration 3" in train(run, tmp_path, sums, "--max_iters=3")


def test_the_way_on_names_a_folder_that_the_config_computes(tmp_path, monkeypatch):
    file = tmp_path / "timed.py"
    file.write_text("import time\nout_dir = f'run-{time.time()}'\n")
    monkeypatch.setattr(sys, "argv", ["train.py", str(file)])
    assert resume_command(Path("run-17.5")).endswith("--out_dir=run-17.5 --init_from=resume")


def copy_to_change(data, other):
    """A copy of a data set whose meta.json lacks the checks of its tokens (F80)."""
    shutil.copytree(data, other)
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != "begins"}))


def test_other_training_text_is_noted_and_half_of_it_refused(run, sums, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    train(run, out, sums, "--max_iters=3")
    copy_to_change(sums, other)
    tokens = np.fromfile(other / "train.bin", dtype="<u2")
    tokens[::-1].tofile(other / "train.bin")
    shown = train(run, out, other, "--max_iters=6", "--init_from=resume")
    assert "note: train.bin has changed since the checkpoint: the run trains" in shown
    tokens[: len(tokens) // 2].tofile(other / "train.bin")
    with pytest.raises(ValueError, match="train.bin does not belong .* or is an incomplete copy:"):
        train(run, out, other, "--max_iters=6")


def test_f25_other_data_resets_the_best_loss(run, sums, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    train(run, out, sums, "--learning_rate=1e-2")
    copy_to_change(sums, other)
    tokens = np.fromfile(other / "val.bin", dtype="<u2")
    np.random.default_rng(0).permutation(tokens).tofile(other / "val.bin")  # harder to predict
    arguments = "--init_from=resume", "--eval_interval=10"
    assert "note: val.bin" not in train(run, out, sums, *arguments, "--max_iters=40")
    before = checkpoint.load(out / "best.pt")
    shown = train(run, out, other, *arguments, "--max_iters=60")
    after = checkpoint.load(out / "best.pt")
    assert "note: val.bin, or eval_iters x batch_size, has changed since the checkpoint" in shown
    assert after["best_val_loss"] > before["best_val_loss"]
    assert after["best_val_loss"] == min(e["val_loss"] for e in evaluations(out)[-2:])


@pytest.fixture
def as_one(monkeypatch):
    """Compile the model as one piece, as for CUDA graphs."""
    plan = compiling.Plan(None, "default", cuda_graphs=True)
    monkeypatch.setattr(compiling, "plan", lambda *asked: plan)


def test_f28_compiled_model_is_saved_under_plain_names(run, sums, tmp_path, monkeypatch, as_one):
    compile = torch.compile
    wrapped = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def eager_backend(model, mode=None, dynamic=None):
        wrapped.append(compile(model, backend="eager"))
        return wrapped[-1]

    monkeypatch.setattr(torch, "compile", eager_backend)
    train(run, tmp_path, sums, "--compile=True", "--max_iters=2")
    names = list(checkpoint.load(tmp_path / "ckpt.pt")["model"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # training and evaluation
    assert wrapped and not [n for n in names if "_orig_mod" in n or "module." in n]
    assert any("_orig_mod" in name for name in wrapped[0].state_dict())  # the wrapper's own names


def test_f07_every_batch_goes_through_the_compiled_model(run, sums, tmp_path, monkeypatch, as_one):
    """Eager evaluation would allocate blocks of sizes that compiled training cannot reuse."""

    class Compiled(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, *arguments):
            through.append(self.model.training)
            return self.model(*arguments)

    def watched(self, tokens, targets=None, cache=None):
        run_at_all.append(self.training)
        return forward(self, tokens, targets, cache)

    through, run_at_all, forward = [], [], model_file.GPT.forward
    monkeypatch.setattr(torch, "compile", lambda model, **options: Compiled(model))
    monkeypatch.setattr(model_file.GPT, "forward", watched)
    train(run, tmp_path, sums, "--compile=True", "--max_iters=2")
    assert through == run_at_all
    assert set(through) == {True, False}


def test_new_run_moves_the_old_one_aside(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=2")
    old = (tmp_path / "ckpt.pt").read_bytes()
    assert "previous" in train(run, tmp_path, sums, "--max_iters=1")
    assert (tmp_path / "previous" / "ckpt.pt").read_bytes() == old


def test_failed_save_keeps_training_and_is_reported_at_the_end(run, sums, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(SystemExit, match="could not save the checkpoint of iteration 10"):
        train(run, tmp_path, sums, "--eval_interval=5")
    assert len(losses(tmp_path)) == 10


# ---- wandb ------------------------------------------------------------------------------------


def test_wandb_failure_never_stops_training(run, sums, tmp_path, monkeypatch):
    def broken(**arguments):
        raise RuntimeError("no account")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=broken))
    shown = train(run, tmp_path, sums, "--wandb_log=True", "--max_iters=2")
    assert "wandb did not start (RuntimeError: no account)" in shown
    assert len(losses(tmp_path)) == 2


def test_wandb_failing_at_its_end_is_a_warning(run, sums, tmp_path, monkeypatch):
    def finish():
        raise RuntimeError("connection lost")

    wandb = types.SimpleNamespace(id="1", log=lambda *entry, **step: None, finish=finish)
    wandb.init = lambda **arguments: wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    shown = train(run, tmp_path, sums, "--wandb_log=True", "--max_iters=2")
    assert "wandb failed to finish (RuntimeError: connection lost)" in shown
    assert "finished at iteration 2" in shown


def test_wandb_takes_entries_without_an_iteration(tmp_path, capsys):
    config = {name: s.default for name, s in read_settings(ROOT / "train.py").items()}
    log, steps = RunLog(tmp_path, config, 0), []
    log.wandb = types.SimpleNamespace(log=lambda entry, step: steps.append(step))
    for entry in ({"a": 1.0}, {"iter": 3, "a": 2.0}):
        log.write(entry)
    assert steps == [None, 3] and "wandb" not in capsys.readouterr().out


def test_wandb_gets_every_entry_and_a_resumed_run_is_the_same_run(run, sums, tmp_path, monkeypatch):
    started, logged = [], []

    def init(**arguments):
        started.append(arguments)
        return types.SimpleNamespace(
            id="abc123", log=lambda entry, step: logged.append(step), finish=lambda: None
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    train(run, tmp_path, sums, "--wandb_log=True", "--max_iters=2", "--eval_interval=0")
    train(
        run, tmp_path, sums, "--wandb_log=True", "--max_iters=3", "--eval_interval=0",
        "--init_from=resume",
    )  # fmt: skip
    assert logged == [0, 1, 2]
    assert [arguments["id"] for arguments in started] == [None, "abc123"]
    assert started[0]["config"]["n_layer"] == 2


def test_a_lost_terminal_is_like_sigterm(fork, sums, tmp_path):
    terminal, ours = pty.openpty()
    code = f"""
import fcntl, os, termios
os.setsid()
terminal = os.open({os.ttyname(ours)!r}, os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for stream in range(3):
    os.dup2(terminal, stream)
os.close(terminal)
"""
    arguments = [*TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--max_iters=100000"]
    process = fork("train.py", *arguments, code=code)
    assert process.stdout.read() == ""  # it has switched to the terminal, so we can close ours
    os.close(ours)
    shown = b""
    while b"iter      5" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    while process.poll() is None:  # the shell forwards it, and the kernel sends another
        process.send_signal(signal.SIGHUP)
        time.sleep(0.005)
    assert process.wait(60) == 0
    reached = checkpoint.load(tmp_path / "ckpt.pt")["iter_num"]
    assert 5 < reached < 100000
    assert steps(tmp_path)[-1]["iter"] == reached - 1


def test_a_full_disk_costs_metrics_but_not_the_run(run, sums, tmp_path, monkeypatch):
    calls = []

    def cut_short(path, mode, **options):
        calls.append(path)
        if 3 <= len(calls) < 6:
            with open(path, mode, **options) as file:
                file.write('{"iter": 2, "lo')
            raise OSError(28, "No space left on device")
        return open(path, mode, **options)

    monkeypatch.setattr("steady.runlog.open", cut_short, raising=False)
    shown = train(run, tmp_path, sums)
    assert shown.count("is incomplete: [Errno 28] No space left") == 1
    assert "finished at iteration 10" in shown
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert entries[-1]["iter"] == 10 and len(entries) == len(calls) - 3  # only those are lost


def test_the_command_for_samples_can_be_copied(run, sums, tmp_path):
    out = tmp_path / "a folder"
    command = train(run, out, sums, "--max_iters=1").splitlines()[-1]
    assert shlex.split(command) == ["python", str(ROOT / "sample.py"), f"--out_dir={out}"]


def test_a_sample_from_weights_that_overflowed_ends_in_one_line(run, sums, tmp_path):
    with pytest.raises(ValueError, match="loss nan at iteration .* not finite"):
        train(run, tmp_path, sums, "--learning_rate=1e10", "--sample_interval=1")


# ---- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--fp8=True", "fp8=True needs a GPU with FP8 units"),
        ("--device=tpu", "unknown device 'tpu': use auto, cpu, cuda"),
        ("--dtype=int8", "unknown dtype='int8': use auto, float32"),
        ("--lr_schedule=linear", "unknown lr_schedule='linear': use cosine, wsd"),
        ("--compile_mode=fast", "unknown compile_mode='fast': use default, reduce-overhead"),
        ("--activation_checkpointing=all", "unknown activation_checkpointing=.all.: use none"),
        ("--init_from=nowhere", "nowhere is neither a folder nor available"),
        ("--n_head=3", "n_embd=32 is not divisible by n_head=3"),
        ("--n_kv_head=3", "n_head=2 is not divisible by n_kv_head=3"),
        ("--n_embd=34", "head_dim=.* is odd"),
        ("--block_size=100000", "but block_size=100000 needs at least 100001"),
        ("--vocab_size=5", "token id .* but the model's vocabulary has 5"),
        ("--batch_size=0", r"batch_size=0 must be at least 1"),
        ("--gradient_accumulation_steps=0", r"gradient_accumulation_steps=0 must be at least 1"),
        ("--grad_clip=-1", r"grad_clip=-1.0 must be at least 0"),
        ("--learning_rate=nan", r"learning_rate=nan must be at least 0 and finite"),
        ("--beta2=1", r"beta2=1.0 must be at least 0 and below 1"),
        ("--seed=99999999999999999999", r"seed=99999999999999999999 must be a 64-bit integer"),
        ("--n_hidden=-1", "n_hidden=-1 must be at least 0 and at most 1000000"),
        ("--n_kv_head=-1", "n_kv_head=-1 must be at least 0 and at most 1000000"),
        ("--n_layer=9223372036854775808", "n_layer=.* must be at least 1 and at most 10000"),
        ("--rope_theta=0", "rope_theta=0.0 must be above 0 and finite$"),
        ("--out_dir=/dev/null/out", "Not a directory: '/dev/null/out'"),
        ("--dataset=nowhere", "no data set at .*nowhere"),
        ("--init_from=resume", "no checkpoint at .*ckpt.pt: train first"),
        ("--lerning_rate=1", "did you mean 'learning_rate'"),
        (
            "--n_layer=10000 --n_embd=100000",
            "a model of n_layer=10000, n_embd=100000, .* takes about .*, but cpu has .* GiB: use",
        ),
    ],
)
def test_bad_input_is_one_clear_line(run, sums, tmp_path, argument, message):
    with pytest.raises((ValueError, OSError), match=message) as error:
        train(run, tmp_path, sums, *argument.split())
    assert "\n" not in str(error.value)


def test_resume_with_another_architecture_names_the_differing_keys(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=1")
    with pytest.raises(ValueError, match=r"n_layer \(checkpoint 2, now 3\), n_embd"):
        train(run, tmp_path, sums, "--init_from=resume", "--n_layer=3", "--n_embd=64")


def test_resume_with_another_alphabet_is_refused(run, sums, tmp_path):
    from steady.prepare import write_dataset
    from steady.tokenizer import CharTokenizer

    train(run, tmp_path, sums, "--max_iters=1")
    splits = {"train": ["abcdefghijkl" * 50], "val": ["abcdefghijkl" * 50]}
    write_dataset(tmp_path / "data", CharTokenizer.train("abcdefghijkl"), splits)
    with pytest.raises(ValueError, match="the data set has a different tokenizer"):
        train(run, tmp_path, tmp_path / "data", "--init_from=resume")


def test_one_line_and_exit_code_in_a_process_of_its_own(start, tmp_path):
    process = start("train.py", "--dataset=shakespeare_chars", f"--out_dir={tmp_path / 'out'}")
    shown = process.stdout.read()
    assert process.wait() == 1
    assert not (tmp_path / "out").exists()
    assert shown.count("\n") == 1 and shown.startswith("error: no data set at")


def test_nanogpt_bin_files_without_meta_work(run, tmp_path):
    import numpy as np

    for name in ("train.bin", "val.bin"):
        (np.arange(5000) % 50257).astype(np.uint16).tofile(tmp_path / name)
    shown = train(run, tmp_path / "out", tmp_path, "--max_iters=1")
    assert "vocabulary 50304 (" in shown


# ---- the settings -----------------------------------------------------------------------------


def test_the_log_names_what_differs_from_the_defaults_and_the_checkpoint_has_all(
    run, sums, tmp_path
):
    shown = train(run, tmp_path, sums, "--max_iters=1", "--n_embd=768")
    config = checkpoint.load(tmp_path / "ckpt.pt")["config"]
    defaults = read_settings(ROOT / "train.py")
    assert config.keys() == defaults.keys() and config["learning_rate"] == 1e-2
    line = shown[shown.index("settings that") :].replace("\n  ", " ").splitlines()[0]
    named = dict(part.split("=", 1) for part in line.partition(": ")[2].split(", "))
    assert named.items() >= {"learning_rate": "0.01", "n_layer": "2"}.items()
    for key, value in named.items():
        assert str(config[key]) == value != str(defaults[key].default)
    assert "n_embd" not in named  # passed, but equal to the default
    assert not {"n_kv_head", "n_hidden", "vocab_size"} & named.keys()  # derived, not set


def test_f25_other_windows_reset_the_best_loss(run, sums, tmp_path):
    """A lower loss on a few easy windows is not progress."""
    train(run, tmp_path, sums, "--max_iters=10", "--eval_interval=10")
    resume = "--init_from=resume", "--max_iters=20", "--eval_interval=10"
    shown = train(run, tmp_path, sums, *resume, "--eval_iters=1")
    assert "note: val.bin, or eval_iters x batch_size, has changed" in shown
    only = "--eval_only=True", "--eval_iters=3"
    assert "best so far" not in train(run, tmp_path, sums, *resume, *only)
    same = "--batch_size=2", "--gradient_accumulation_steps=2", "--max_iters=30"
    assert "note: val.bin" not in train(run, tmp_path, sums, *resume, *same)


def test_f22_a_run_is_prolonged_from_before_its_decay(run, sums, tmp_path):
    """Resuming from before_decay.pt gives the same curve as a longer run."""
    wsd = "--lr_schedule=wsd", "--decay_fraction=0.5", "--lr_decay_iters=0", "--warmup_iters=0"
    longer = "--init_from=resume", "--max_iters=12"
    train(run, tmp_path / "whole", sums, *wsd, "--max_iters=12")
    train(run, tmp_path / "parts", sums, *wsd, "--max_iters=8")
    checkpoints = tmp_path / "parts"
    assert checkpoint.load(checkpoints / "before_decay.pt")["iter_num"] == 4
    shutil.copytree(checkpoints, tmp_path / "late")
    train(run, tmp_path / "late", sums, *wsd, "--init_from=resume", "--max_iters=20")
    stable = tmp_path / "late" / "before_decay.pt"
    assert checkpoint.load(stable)["iter_num"] == 4  # not 10, where the longer decay begins
    best = (checkpoints / "best.pt").read_bytes()
    shutil.copy(checkpoints / "before_decay.pt", checkpoints / "ckpt.pt")
    train(run, checkpoints, sums, *wsd, *longer)
    assert checkpoint.load(checkpoints / "before_decay.pt")["iter_num"] == 6  # from the longer run
    assert (checkpoints / "previous" / "best.pt").read_bytes() == best
    assert losses(checkpoints) == losses(tmp_path / "whole")
    train(run, tmp_path / "late", sums, "--max_iters=1")  # another run archives it
    assert checkpoint.load(tmp_path / "late" / "previous" / "before_decay.pt")["iter_num"] == 4


def test_f22_resuming_in_another_dtype_or_order_prints_a_note(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=2", "--dtype=float32", "--seed=3")
    order = "note: seed has changed from 3 to 4: --seed=3 keeps the old one"
    note = "note: dtype has changed from float32 to bfloat16: --dtype=float32 keeps the old one"
    resume = "--init_from=resume", "--max_iters=3"
    shown = train(run, tmp_path, sums, *resume, "--dtype=float32", "--seed=3")
    assert note not in shown and order not in shown
    shown = train(run, tmp_path, sums, *resume, "--dtype=bfloat16", "--seed=4")
    assert note in shown and order in shown


def test_a_state_before_the_decay_is_of_the_run_that_goes_on(run, sums, tmp_path):
    wsd = "--lr_schedule=wsd", "--decay_fraction=0.5", "--lr_decay_iters=8", "--warmup_iters=0"
    train(run, tmp_path, sums, *wsd, "--max_iters=3")
    early = (tmp_path / "ckpt.pt").read_bytes()
    resume = "--init_from=resume", "--max_iters=8"
    train(run, tmp_path, sums, *wsd, *resume)
    (tmp_path / "ckpt.pt").write_bytes(early)  # as after a crash
    train(run, tmp_path, sums, *wsd, *resume, "--learning_rate=1e-3")
    rates = [
        checkpoint.load(folder / "before_decay.pt")["config"]["learning_rate"]
        for folder in (tmp_path, tmp_path / "previous")
    ]
    assert rates == [1e-3, 1e-2]


def test_f25_a_mistake_that_is_stopped_at_once_changes_no_checkpoint(
    run, sums, tmp_path, monkeypatch
):
    """Other windows reset the best loss, but the old best.pt is kept in previous/."""
    train(run, tmp_path, sums, "--max_iters=10", "--eval_interval=10")
    ckpt, best = ((tmp_path / name).read_bytes() for name in ("ckpt.pt", "best.pt"))
    resume = "--init_from=resume", "--max_iters=20", "--eval_interval=10"
    with interrupted_set_up(monkeypatch), pytest.raises(KeyboardInterrupt):
        train(run, tmp_path, sums, *resume, "--eval_iters=1")
    assert (tmp_path / "ckpt.pt").read_bytes() == ckpt
    assert (tmp_path / "previous" / "best.pt").read_bytes() == best
    shown = train(run, tmp_path, sums, *resume, "--learning_rate=3.0")
    assert "note: val.bin" not in shown and "best.pt is missing" in shown
    assert checkpoint.load(tmp_path / "best.pt")["iter_num"] == 10  # the best one since then


def test_a_best_pt_of_another_run_does_not_count_as_this_ones(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=10", "--eval_interval=5")
    best = checkpoint.load(tmp_path / "best.pt")
    checkpoint.save(tmp_path / "best.pt", best | {"best_val_loss": 9.0})
    shown = train(run, tmp_path, sums, "--init_from=resume", "--max_iters=11", "--eval_interval=0")
    assert "best val loss" not in shown and not (tmp_path / "best.pt").exists()
    assert checkpoint.load(tmp_path / "previous" / "best.pt")["best_val_loss"] == 9.0


def test_a_best_loss_without_its_weights_is_discarded(run, sums, tmp_path):
    """After a kill between saving best.pt and ckpt.pt, best.pt is from a step that runs again."""
    arguments = "--eval_interval=10", "--learning_rate=1e-3"
    train(run, tmp_path, sums, *arguments, "--max_iters=10")
    before = (tmp_path / "ckpt.pt").read_bytes()
    train(run, tmp_path, sums, *arguments, "--max_iters=20", "--init_from=resume")
    (tmp_path / "ckpt.pt").write_bytes(before)
    assert checkpoint.load(tmp_path / "best.pt")["iter_num"] == 20
    worse = "--learning_rate=3.0", "--min_lr=3.0", "--max_iters=15"
    shown = train(run, tmp_path, sums, "--eval_interval=5", *worse, "--init_from=resume")
    assert "note: moved best.pt to" in shown and "note: the checkpoint" not in shown
    assert checkpoint.load(tmp_path / "best.pt")["iter_num"] == 10  # best since the resume
    shown = train(run, tmp_path, sums, "--max_iters=15", "--init_from=resume")
    assert "note: the checkpoint is at iteration 15: nothing is left" in shown


def test_the_last_evaluation_stays_in_a_run_that_goes_on_without_any(run, sums, tmp_path):
    train(run, tmp_path, sums, "--max_iters=7", "--eval_interval=5")
    resume = "--init_from=resume", "--eval_interval=0"
    for more in ("--max_iters=7", "--max_iters=9"):
        train(run, tmp_path, sums, *resume, more)
        assert [entry["iter"] for entry in evaluations(tmp_path)] == [0, 5, 7]


def test_a_data_set_is_a_folder_in_data_or_a_path(run, sums, tmp_path, monkeypatch):
    monkeypatch.chdir(sums.parent)
    for path in (sums.name, f"./{sums.name}", str(sums)):
        train(run, tmp_path, path, "--max_iters=1")
    shutil.copytree(sums, tmp_path / "text")  # data/text has no train.bin
    monkeypatch.chdir(tmp_path)
    train(run, tmp_path, "text", "--max_iters=1")
    with pytest.raises(ValueError, match=r"no data set at .*data/nowhere \(train.bin is missing"):
        train(run, tmp_path, "nowhere", "--max_iters=1")


def test_the_end_says_how_much_was_seen_and_where_the_best_is(run, sums, tmp_path):
    shown = train(run, tmp_path, sums, "--eval_interval=5")
    best = checkpoint.load(tmp_path / "best.pt")["best_val_loss"]
    assert "640 tokens seen, this run took 0:00:" in shown  # 10 steps of 4 x 16
    assert f"best val loss {best:.4f} in {tmp_path / 'best.pt'}\n" in shown
    shown = train(run, tmp_path, sums, "--init_from=resume", "--max_iters=15")
    assert "960 tokens seen" in shown and "best.pt" in shown


def test_the_bar_shows_loss_time_left_and_memory(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    config = {"eval_only": False, "eval_interval": 0, "max_iters": 10, "wandb_log": False}
    log = RunLog(tmp_path, config, 0)
    monkeypatch.setattr(hardware, "peak_memory_gib", lambda device: 11.66)
    log.start_clock(0, 64, 1000, Process())
    log.step(0, 2.5, 1e-3, 1.0)
    bar = str(log.bar)
    log.close()
    assert "loss 2.5000, 11.7 GiB" in bar and "1/10 [" in bar and "<" in bar


@pytest.mark.parametrize("log_interval", [1, 5, 20])
def test_f20_only_training_steps_are_timed(log_interval, monkeypatch, capsys, tmp_path):
    """An evaluation discarded the time of the steps between it and the last log line. A save of
    yours between a step and its log line does not count either."""
    config = {"eval_only": False, "eval_interval": 20, "max_iters": 101, "wandb_log": False}
    log, now = RunLog(tmp_path, config, 0), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    log.start_clock(0, 64, 1000, Process())

    def save():
        with log.paused():
            now[0] += 1000.0

    for i in range(101):
        if i % 20 == 0:
            with log.paused():
                now[0] += 50.0
                log.evaluation({"iter": i, "val_loss": 2.0}, False)
                save()
                now[0] += 300.0
        now[0] += 0.04 if i % 20 == 0 else 0.1  # an evaluation waits for the last step's optimizer
        save()
        now[0] += 0.02
        if i % log_interval == 0:
            log.step(i, 2.5, 1e-3, 1.0)
    log.close()
    entries = read_metrics(tmp_path / "metrics.jsonl")
    counts = [e["ms"] * (log_interval if e["iter"] else 1) for e in entries if "ms" in e]
    assert sum(counts) == pytest.approx(95 * 120.0 + 6 * 60.0)
    assert training_clock(entries)[0][-1] == pytest.approx(101 * 0.12, rel=0.04)
    assert capsys.readouterr().out.count("|  50.0 s") == 6


def test_metrics_may_be_tensors(tmp_path):
    config = {"eval_only": False, "eval_interval": 0, "max_iters": 10, "wandb_log": False}
    log = RunLog(tmp_path, config, 0)
    log.write({"iter": 0, "mine": torch.tensor(0.5), "bad": torch.tensor(float("inf"))})
    log.write({"iter": 1, "several": torch.ones(2)})
    log.close()
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert entries[0] == {"iter": 0, "mine": 0.5, "bad": None}
    assert entries[1] == {"iter": 1, "several": [1.0, 1.0]}


def test_graphs_that_were_skipped_are_counted_and_their_reason_is_shown(monkeypatch, capsys):
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    monkeypatch.setattr(compiling.environment, "compile_obstacle", lambda device: None)
    monkeypatch.setattr(compiling.environment, "provide_libcuda", lambda: None)
    monkeypatch.setattr(logging.getLogger(compiling.SKIPS_LOG), "handlers", [])
    counters = torch._dynamo.utils.counters["inductor"]
    monkeypatch.setitem(counters, "cudagraph_skips", 0)
    compiling.plan(True, "reduce-overhead", torch.device("cuda"))
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a CPU tensor (x)\nat ...")
    assert counters["cudagraph_skips"] == 1
    assert "skipping cudagraphs due to a CPU tensor (x)" in capsys.readouterr().err


def test_flags_that_a_model_of_given_weights_does_not_follow_are_named(monkeypatch, tmp_path):
    script = ROOT / "train.py"
    monkeypatch.chdir(tmp_path)
    Path("layers.py").write_text("n_layer = 5")
    settings = read_settings(script)
    config = {name: setting.default for name, setting in settings.items()}
    config |= {"n_layer": 2, "dropout": 0.5}
    for arguments, named in (
        (["--n_layer=5"], "--n_layer=5 (it is 2)"),
        (["--n_layer=2", "--vocab_size=0", "--max_iters=600000"], None),
        (["layers.py"], "--n_layer=5 (it is 2)"),
        (["--n_layer=2", "--dropout=0"], "--dropout=0.0 (it is 0.5)"),
        ([], None),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        note = architecture_note(resolve(settings, arguments), config, GPTConfig)
        assert note is None if named is None else note.endswith(f"on this model: {named}")


def test_a_schedule_shorter_than_the_run_prints_a_note(run, sums, tmp_path):
    shown = train(run, tmp_path / "short", sums, "--max_iters=4", "--lr_decay_iters=3")
    assert "and the schedule at 3, but the run at 4: the learning rate ends at" in shown
    fits = "--max_iters=4", "--lr_decay_iters=0"
    assert "note:" not in train(run, tmp_path / "as_long", sums, *fits)
    wrong = "--max_iters=4", "--lr_decay_iters=1", "--warmup_iters=3"
    assert "note: warm-up ends at iteration 3 and the schedule at 1, but" in train(
        run, tmp_path / "w", sums, *wrong
    )


# ---- watching and debugging -------------------------------------------------------------------


def test_samples_in_training_do_not_change_the_loss_curve(run, sums, tmp_path):
    shown = train(run, tmp_path / "with", sums, "--sample_interval=3", "--dropout=0.1")
    train(run, tmp_path / "without", sums, "--dropout=0.1")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert [line[:22] for line in shown.splitlines() if "sample:" in line] == [
        f"iter {i:6d} | sample: " for i in (3, 6, 9)
    ]


@pytest.mark.parametrize("kind", ["selective", "block"])
def test_activation_checkpointing_leaves_the_loss_curve_as_it_is(run, sums, tmp_path, kind):
    for name in (kind, "none"):
        train(run, tmp_path / name, sums, f"--activation_checkpointing={name}", "--dropout=0.1")
    assert losses(tmp_path / kind) == losses(tmp_path / "none")


# ---- out of memory ----------------------------------------------------------------------------


def small_card(monkeypatch, sequences):
    """A fake GPU: training steps with more than `sequences` sequences run out of memory."""
    forward = model_file.GPT.forward

    def limited(self, tokens, targets=None, cache=None):
        out = forward(self, tokens, targets, cache)
        if self.training and len(tokens) > sequences:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return out

    monkeypatch.setattr(model_file.GPT, "forward", limited)


@pytest.mark.parametrize(("sequences", "split"), [(8, 8), (5, 4), (2, 2), (1, 1)])
def test_f15_out_of_memory_is_answered_by_a_finer_split(
    run, sums, tmp_path, monkeypatch, sequences, split
):
    arguments = ["--batch_size=8", "--gradient_accumulation_steps=2", "--max_iters=5"]
    train(run, tmp_path / "large", sums, *arguments)
    small_card(monkeypatch, sequences)
    shown = train(run, tmp_path / "small", sums, *arguments)
    flags = f"--batch_size={split} --gradient_accumulation_steps={16 // split}"
    assert (f"out of memory: going on with {flags}" in shown) is (split < 8)
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "large"), abs=1e-5)
    values = [[e["val_loss"] for e in evaluations(tmp_path / name)] for name in ("small", "large")]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert checkpoint.load(tmp_path / "small" / "ckpt.pt")["sequences"] == 5 * 16


def test_f15_a_failed_attempt_leaves_no_trace_in_the_random_numbers(
    run, sums, tmp_path, monkeypatch
):
    more = ["--dropout=0.2", "--max_iters=5"]
    split = ["--batch_size=4", "--gradient_accumulation_steps=4"]
    train(run, tmp_path / "chosen", sums, *more, *split)
    small_card(monkeypatch, sequences=4)
    train(run, tmp_path / "found", sums, *more, "--batch_size=8", "--gradient_accumulation_steps=2")
    assert losses(tmp_path / "found") == losses(tmp_path / "chosen")


def test_f07_an_evaluation_that_does_not_fit_is_found_before_the_first_step(
    run, sums, tmp_path, monkeypatch
):
    forward = model_file.GPT.forward

    def limited(self, tokens, targets=None, cache=None):
        if not self.training and len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return forward(self, tokens, targets, cache)

    monkeypatch.setattr(model_file.GPT, "forward", limited)
    shown = train(run, tmp_path, sums, "--max_iters=2")
    assert "out of memory: going on with --batch_size=2" in shown


def test_f04_a_finer_split_leaves_no_shorter_last_batch(run, sums, tmp_path, monkeypatch):
    """A shorter batch would be compiled and recorded as a CUDA graph for its own shape. The
    evaluation loss must still be that of the 5 sequences."""
    five = ["--batch_size=5", "--gradient_accumulation_steps=2", "--eval_iters=1", "--max_iters=2"]
    train(run, tmp_path / "whole", sums, *five)
    small_card(monkeypatch, sequences=2)
    forward, sizes = model_file.GPT.forward, set()

    def watched(self, tokens, targets=None, cache=None):
        sizes.add(len(tokens))
        return forward(self, tokens, targets, cache)

    monkeypatch.setattr(model_file.GPT, "forward", watched)
    train(run, tmp_path / "split", sums, *five)
    assert sizes == {5, 2}  # the trial that did not fit, and all others
    whole, split = (evaluations(tmp_path / name)[-1] for name in ("whole", "split"))
    assert split == pytest.approx(whole, abs=1e-6)


def test_f15_nothing_fits_says_what_to_use(run, sums, tmp_path, monkeypatch):
    small_card(monkeypatch, sequences=0)
    with pytest.raises(ValueError, match="out of memory: use --activation_checkpointing=block"):
        train(run, tmp_path, sums)


def test_other_errors_of_a_step_are_not_taken_for_memory(run, sums, tmp_path, monkeypatch):
    def broken(self, *arguments):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(model_file.GPT, "forward", broken)
    with pytest.raises(RuntimeError, match="shapes cannot"):
        train(run, tmp_path, sums)


# ---- packages ---------------------------------------------------------------------------------

BARE = """
import importlib.metadata, re, runpy, sys
from importlib.machinery import PathFinder
allowed, waiting = {"numpy"}, ["torch"]  # requirements of torch and numpy
while waiting:
    name = waiting.pop()
    if name not in allowed:
        allowed.add(name)
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [re.match(r"[\\w-]+", n).group() for n in needed if "extra" not in n]
modules = {m for m, names in importlib.metadata.packages_distributions().items()
           if not {n.lower().replace("_", "-") for n in names}
           & {n.lower().replace("_", "-") for n in allowed}}
class Bare:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in modules:
            return PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
for name in ("tqdm", "wandb", "datasets", "tiktoken", "safetensors", "tokenizers", "transformers"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} is not out of reach")
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_missing_package_is_one_line():
    """For example if the environment is not activated."""
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('train.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: this Python ({sys.executable}) has no torch: activate")
    assert done.stderr.count("\n") == 1


def test_training_needs_torch_and_numpy_only(sums, tmp_path):
    """Hides all installed packages except torch, numpy and their requirements."""
    arguments = [*TINY, f"--dataset={sums}", f"--out_dir={tmp_path}", "--sample_interval=5"]
    done = subprocess.run(
        [sys.executable, "-c", BARE, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished at iteration 10" in done.stdout
