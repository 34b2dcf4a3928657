import math
from functools import partial

import pytest
import torch

from memory import choose_split, describe, estimate, fit_batch, splits_to_try
from model import GPTConfig


def splits(batch_size, per_step, checkpointing="none", available=math.inf):
    needs = partial(estimate, GPTConfig(), 123_587_328)
    return splits_to_try(needs, per_step, batch_size, checkpointing, available, slack=1.1)


def test_splits_halve_and_divide_the_step_then_checkpoint():
    sizes = [(12, "none"), (6, "none"), (3, "none"), (1, "none")]
    assert splits(12, 480) == [*sizes, (1, "selective"), (1, "block")]
    assert splits(10, 70, "selective")[1:] == [
        (5, "selective"), (2, "selective"), (1, "selective"), (1, "block"),
    ]  # fmt: skip
    assert splits(1, 1, "block") == [(1, "block")]


def test_what_cannot_fit_is_not_tried():
    assert splits(64, 64, available=12.0)[0] == (32, "none")
    assert splits(64, 64, available=4.0)[0][0] < 16
    assert splits(64, 64, available=0.1) == [(1, "block")]


def test_auto_tries_every_divisor_from_the_largest_plausible_down():
    sizes = [size for size, kind in splits(None, 480, available=12.0) if kind == "none"]
    assert sizes[:4] == [32, 30, 24, 20] and sizes[-1] == 1
    assert all(480 % size == 0 for size in sizes)


def test_fit_batch_takes_the_first_that_fits_and_lets_processes_agree():
    tried = []

    def trial(size, checkpointing):
        tried.append(size)
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    assert fit_batch(trial, splits(8, 8)) == (2, "none")
    assert tried == [8, 4, 2]
    answers = iter([False, True, False])  # another process fails where this one does not
    small = [(2, "none"), (1, "none"), (1, "block")]
    assert fit_batch(lambda *_: None, small, lambda failed: not next(answers)) == (1, "none")
    assert fit_batch(trial, [(8, "none")]) is None


@pytest.mark.parametrize(("auto", "size"), [(False, 16), (True, 24)])
def test_with_fsdp_only_what_fits_by_the_estimate_is_tried(auto, size):
    needs = partial(estimate, GPTConfig(), 123_587_328)
    tried = []
    found = choose_split(
        lambda *split: tried.append(split), needs, 480, (64, "none"), 11.5, auto, fsdp=True
    )
    assert found == (size, "none") and tried == [found]

    def full(size, checkpointing):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(ValueError, match=f"with {size} sequences: use --batch_size={size // 2}"):
        choose_split(full, needs, 480, (64, "none"), 11.5, auto, fsdp=True)


def test_libraries_out_of_memory_count_and_other_errors_do_not():
    def raising(message):
        def trial(size, checkpointing):
            if size > 1:
                raise RuntimeError(message)

        return trial

    two = [(2, "none"), (1, "none")]
    assert fit_batch(raising("CUBLAS_STATUS_ALLOC_FAILED when calling"), two) == (1, "none")
    with pytest.raises(RuntimeError, match="mismatch"):
        fit_batch(raising("size mismatch"), two)


def test_estimate_counts_what_is_known_exactly_and_orders_the_rest():
    config, n = GPTConfig(), 123_587_328
    parts = estimate(config, n, 32, "none", accumulates=True)
    assert parts["optimizer"] == pytest.approx(8 * n / 2**30)
    assert parts["gradients"] == pytest.approx(4 * n / 2**30)
    assert estimate(config, n, 32, "none", accumulates=False)["gradients"] == 0
    sums = [sum(estimate(config, n, 32, kind, False).values())
            for kind in ("none", "selective", "block")]  # fmt: skip
    assert sums[0] > sums[1] > sums[2]
    assert describe({"weights": 1.0, "logits": 0.5}) == "weights 1.00 + logits 0.50 = 1.50 GiB"
    assert describe({"weights": 0.125, "logits": 0.25}) == "weights 128 + logits 256 = 384 MiB"


LARGE = GPTConfig(n_layer=48, n_head=25, n_embd=1600)


@pytest.mark.parametrize(
    ("config", "batch_size", "kind", "dtype", "compiled", "shards", "measured"),
    [  # on H200s; see dev/LOG.md
        (GPTConfig(), 32, "none", torch.bfloat16, True, 1, 11.72),
        (GPTConfig(), 64, "none", torch.bfloat16, True, 1, 21.34),
        (GPTConfig(), 64, "block", torch.bfloat16, True, 1, 5.59),
        (GPTConfig(), 64, "selective", torch.bfloat16, True, 1, 6.51),
        (GPTConfig(), 32, "none", torch.bfloat16, False, 1, 14.17),
        (GPTConfig(), 32, "block", torch.bfloat16, False, 1, 3.43),
        (GPTConfig(), 32, "selective", torch.bfloat16, False, 1, 3.97),
        (GPTConfig(), 16, "none", torch.float32, True, 1, 11.70),
        (GPTConfig(), 16, "block", torch.float32, True, 1, 3.58),
        (GPTConfig(), 16, "none", torch.float32, False, 1, 13.20),
        (GPTConfig(), 32, "none", torch.float16, True, 1, 12.85),
        (GPTConfig(), 32, "none", torch.float16, False, 1, 15.39),
        (LARGE, 8, "none", torch.bfloat16, True, 1, 39.85),
        (LARGE, 8, "none", torch.bfloat16, True, 4, 19.37),
    ],
)
def test_estimate_is_within_a_tenth_of_what_was_measured(
    config, batch_size, kind, dtype, compiled, shards, measured
):
    n_params = 1_560_000_000 if config is LARGE else 123_587_328
    parts = estimate(config, n_params, batch_size, kind, False, dtype, compiled, shards)
    assert sum(parts.values()) == pytest.approx(measured, rel=0.10)


def test_estimate_of_few_activations_is_that_of_the_end_of_a_step():
    weights = 4 * 1_560_000_000 / 2**30
    for summed, copies in ((False, 1), (True, 2)):  # of gradients
        parts = estimate(LARGE, 1_560_000_000, 1, "block", False, summed=summed)
        assert sum(parts.values()) == pytest.approx((1 + copies + 2) * weights)


def test_estimate_counts_gathered_weights():
    for gathered, measured in ((False, 19.52), (True, 22.27)):  # on H200s
        parts = estimate(LARGE, 1_560_000_000, 8, "none", False, shards=4, gathered=gathered)
        assert sum(parts.values()) == pytest.approx(measured, rel=0.03)
