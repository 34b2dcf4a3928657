from dataclasses import replace

from steady import distributed, memory
from steady.compiling import Plan
from steady.distributed import Place
from steady.memory import Split, StepShape, describe, estimate, fit, num_params, splits_to_try

import pytest
import torch

from model import GPTConfig

COMPILED, EAGER = Plan(None, "default", False), Plan("compile=False", "default", False)
GPT2_PARAMS = 123_587_328


def gpt2_step(sequences, **more):
    options = {"dtype": torch.bfloat16, "plan": replace(COMPILED), "here": Place()} | more
    return StepShape(GPTConfig(), sequences, **options)


def splits(batch_size, sequences, checkpointing="none", limit_gib=1e9, auto=False):
    return splits_to_try(gpt2_step(sequences), Split(batch_size, checkpointing), limit_gib, auto)


def test_splits_halve_and_divide_the_step_then_checkpoint():
    sizes = [(12, "none"), (6, "none"), (3, "none"), (1, "none")]
    assert splits(12, 480) == [*sizes, (1, "selective"), (1, "block")]
    assert splits(10, 70, "selective")[1:] == [
        (5, "selective"), (2, "selective"), (1, "selective"), (1, "block"),
    ]  # fmt: skip
    assert splits(1, 1, "block") == [(1, "block")]


def test_what_cannot_fit_is_not_tried():
    assert splits(64, 64, limit_gib=13.2)[0] == (32, "none")
    assert splits(64, 64, limit_gib=4.4)[0][0] < 16
    assert splits(64, 64, limit_gib=0.11) == [(1, "block")]


def test_auto_tries_every_divisor_from_the_largest_plausible_down():
    found = splits(12, 480, limit_gib=13.2, auto=True)
    sizes = [size for size, kind in found if kind == "none"]
    assert sizes[:4] == [32, 30, 24, 20] and sizes[-1] == 1
    assert all(480 % size == 0 for size in sizes)


def runs_out_above(size, message="CUDA out of memory."):
    """A trial step that needs too much memory with more than `size` sequences."""

    def try_step(batch_size, checkpointing):
        try_step.tried.append(batch_size)
        if batch_size > size:
            raise RuntimeError(message)
        return "the model"

    try_step.tried = []
    return try_step


CPU = torch.device("cpu")


def test_the_first_split_that_fits_is_taken_and_processes_agree(monkeypatch):
    try_step = runs_out_above(2)
    found = fit(try_step, gpt2_step(8), Split(8, "none"), CPU)
    assert found.split == (2, "none") and found.model == "the model"
    assert try_step.tried == [8, 4, 2]
    assert "out of memory: going on with --batch_size=2 --grad" in found.report(gpt2_step(8))
    answers = iter([True, False, False])  # another process runs out where this one does not
    monkeypatch.setattr(distributed, "any_process", lambda failed: next(answers))
    found = fit(runs_out_above(8), gpt2_step(2), Split(2, "none"), CPU)
    assert found.split == (1, "none")


def test_nothing_fits():
    with pytest.raises(ValueError, match="even with one sequence and activation checkpointing"):
        fit(runs_out_above(0), gpt2_step(8), Split(8, "none"), CPU)


@pytest.mark.parametrize(("auto", "size"), [(False, 16), (True, 24)])
def test_with_fsdp_only_what_fits_by_the_estimate_is_tried(monkeypatch, auto, size):
    monkeypatch.setattr(memory.hardware, "available_memory_gib", lambda device: 6.6)
    monkeypatch.setattr(distributed, "keep_gathered", lambda model: None)
    step, wanted = gpt2_step(480, here=Place(0, 0, 4, "fsdp")), Split(64, "none")
    try_step = runs_out_above(1000)
    found = fit(try_step, step, wanted, CPU, auto)
    assert found.split == (size, "none") and try_step.tried == [size]
    with pytest.raises(ValueError, match=f"with {size} sequences: use --batch_size={size // 2}"):
        fit(runs_out_above(0), step, wanted, CPU, auto)


def test_libraries_out_of_memory_count_and_other_errors_do_not():
    two = Split(2, "none")
    library = runs_out_above(1, "CUBLAS_STATUS_ALLOC_FAILED when calling")
    assert fit(library, gpt2_step(2), two, CPU).split == (1, "none")
    with pytest.raises(RuntimeError, match="mismatch"):
        fit(runs_out_above(1, "size mismatch"), gpt2_step(2), two, CPU)


def test_estimate_counts_what_is_known_exactly_and_orders_the_rest():
    parts = estimate(gpt2_step(64), 32, "none")  # accumulates
    assert parts["optimizer"] == pytest.approx(8 * GPT2_PARAMS / 2**30)
    assert parts["gradients"] == pytest.approx(4 * GPT2_PARAMS / 2**30)
    assert estimate(gpt2_step(32), 32, "none")["gradients"] == 0
    graphs = gpt2_step(32, plan=Plan(None, "reduce-overhead", True))
    assert estimate(graphs, 32, "none")["gradients"] == parts["gradients"]
    sums = [sum(estimate(gpt2_step(32), 32, kind).values())
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
    plan, here = COMPILED if compiled else EAGER, Place(0, 0, shards, "fsdp")
    step = StepShape(config, batch_size, dtype, plan, here)
    parts = estimate(step, batch_size, kind)
    assert sum(parts.values()) == pytest.approx(measured, rel=0.10)


def test_estimate_knows_fp8():
    for batch_size, measured in ((8, 29.89), (16, 40.53)):  # on an H200
        step = StepShape(LARGE, batch_size, torch.bfloat16, COMPILED, Place(), fp8=True)
        parts = estimate(step, batch_size, "none")
        assert sum(parts.values()) == pytest.approx(measured, rel=0.05)


def test_estimate_of_a_steps_end_has_the_copies_in_fp8():
    shape = (LARGE, 1, torch.bfloat16, COMPILED, Place())
    without, fp8 = (
        sum(estimate(StepShape(*shape, fp8=use), 1, "block").values()) for use in (False, True)
    )
    matrices = num_params(LARGE) - LARGE.vocab_size * LARGE.n_embd
    assert fp8 - without == pytest.approx(matrices / 2**30)


def test_estimate_counts_one_moment_of_the_matrices_with_muon():
    parts = estimate(gpt2_step(32, muon=True), 32, "none")
    matrices = GPT2_PARAMS - 50304 * 768
    assert parts["optimizer"] == pytest.approx((8 * GPT2_PARAMS - 4 * matrices) / 2**30)


def large_step(batch_size, here):
    return StepShape(LARGE, batch_size, torch.bfloat16, COMPILED, here)


def test_estimate_of_few_activations_is_that_of_the_end_of_a_step():
    weights = 4 * num_params(LARGE) / 2**30
    for here, copies in ((Place(), 1), (Place(0, 0, 2, "ddp"), 2)):  # of gradients
        parts = estimate(large_step(1, here), 1, "block")
        assert sum(parts.values()) == pytest.approx((1 + copies + 2) * weights)


def test_estimate_counts_gathered_weights():
    step = large_step(8, Place(0, 0, 4, "fsdp"))
    for gathered, measured in ((False, 19.52), (True, 22.27)):  # on H200s
        parts = estimate(step, 8, "none", gathered)
        assert sum(parts.values()) == pytest.approx(measured, rel=0.03)


def test_evaluating_takes_weights_alone_and_with_fsdp_their_copies_too():
    eight = Place(0, 0, 8, "fsdp")
    whole, step = gpt2_step(8, eval_only=True), gpt2_step(8, eval_only=True, here=eight)
    assert estimate(whole, 8, "none").keys() == {"weights", "activations", "logits"}
    assert estimate(whole, 8, "none")["weights"] == pytest.approx(4 * GPT2_PARAMS / 2**30, rel=0.1)
    divided = estimate(step, 8, "none")["weights"]
    gathered = estimate(step, 8, "none", gathered=True)["weights"]
    in_blocks = GPT2_PARAMS - 50304 * 768
    assert gathered == pytest.approx((GPT2_PARAMS / 2 + 2 * in_blocks) / 2**30, rel=0.01)
    assert divided < gathered
