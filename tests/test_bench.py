import re

from conftest import TINY


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
