import re
import shutil

import pytest
from conftest import ROOT, TINY


def test_bench_times_the_real_training_step(start):
    process = start(
        "bench.py", *TINY, "--vocab_size=64", "--steps=3", "--warmup_steps=2", "--memory"
    )
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    values = dict(re.findall(r"^(tokens/s|ms per step|spread) +([\d.,]+)", shown, re.MULTILINE))
    tokens_per_s = float(values["tokens/s"].replace(",", ""))
    assert re.search(r"^estimate +weights [\d.]+ \+ gradients", shown, re.MULTILINE)
    assert 0.5 < tokens_per_s * float(values["ms per step"]) / 1e3 / (4 * 16) < 2


def test_bench_takes_the_vocabulary_of_the_data_set(start, sums):
    process = start("bench.py", *TINY, f"--dataset={sums}", "--steps=1", "--warmup_steps=1")
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    assert "vocabulary 13 of 64" in shown


def test_bench_passes_on_what_train_says_when_it_fails(start):
    process = start("bench.py", *TINY, "--n_head=3")
    assert process.wait() == 1
    assert "error: n_embd=32 is not divisible by n_head=3" in process.stdout.read()


@pytest.mark.parametrize("vocab_size", [-5, 10**12])
def test_bench_refuses_a_vocabulary_that_no_token_file_can_hold(run, vocab_size):
    message = f"vocab_size={vocab_size} must be at least 0 and at most 2\\*\\*32"
    with pytest.raises(ValueError, match=message):
        run("bench.py", *TINY, f"--vocab_size={vocab_size}")


def test_compare_finds_a_slower_model(start, tmp_path):
    shutil.copytree(ROOT / "steady", tmp_path / "steady")
    fast = (ROOT / "model.py").read_text(encoding="utf-8")
    slow = fast.replace(
        "T = tokens.shape[1]", "__import__('time').sleep(0.02); T = tokens.shape[1]"
    )
    assert slow != fast
    (tmp_path / "model.py").write_text(slow, encoding="utf-8")
    arguments = ["--vocab_size=64", f"--folders=.,{tmp_path}", "--rounds=4", "--steps=2"]
    process = start("dev/compare.py", *TINY, *arguments)
    shown = process.stdout.read()
    assert process.wait() == 0, shown
    difference, error = re.search(r"([+-][\d.]+) \(([\d.]+)\)$", shown, re.MULTILINE).groups()
    assert 18 < float(difference) < 40 and float(error) < 5
