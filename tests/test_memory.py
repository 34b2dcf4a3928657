from dataclasses import replace

import pytest
import torch

from steady import distributed, hardware
from steady.compiling import Plan, compile_model
from steady.distributed import Process
from steady.memory import batch_sizes, fit, require_room, rough_gib, undone

EAGER = Plan("compile=False", "default", False)
GPT2 = {"n_layer": 12, "n_embd": 768, "vocab_size": 50304, "block_size": 1024, "eval_only": False,
        "average_weights": False, "activation_checkpointing": "none"}  # fmt: skip


def settings(batch_size, accumulation, **more):
    asked = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    return GPT2 | asked | {"eval_iters": 2} | more


def fit_alone(trial, batch_size, accumulation=1, process=Process(), **more):  # noqa: B008
    return fit(trial, settings(batch_size, accumulation, **more), process, replace(EAGER))


def test_micro_batches_halve_and_divide_the_batch():
    assert batch_sizes(12, 480) == [12, 6, 3, 1]
    assert batch_sizes(10, 70) == [10, 5, 2, 1]
    assert batch_sizes(1, 1) == [1]


def runs_out_above(size, message="CUDA out of memory."):
    """A trial step that runs out of memory with more than `size` sequences."""

    def trial(batch_size):
        trial.tried.append(batch_size)
        if batch_size > size:
            raise RuntimeError(message)
        return torch.nn.Linear(1, 1)

    trial.tried = []
    return trial


def test_the_first_split_that_fits_is_taken_and_processes_agree(monkeypatch):
    trial = runs_out_above(2)
    found = fit_alone(trial, 8)
    assert found.batch_size == 2
    assert trial.tried == [8, 4, 2]
    assert "out of memory: going on with --batch_size=2 --gradient_accumulation_steps=4 " in (
        found.report
    )
    assert "--eval_iters=8," in found.report  # the same number of sequences
    assert "--batch_size=1 --gradient_accumulation_steps=8" in found.memory_flags
    answers = iter([True, False, False])  # another process runs out of memory, this one does not
    monkeypatch.setattr(distributed, "any_process", lambda failed: next(answers))
    assert fit_alone(runs_out_above(8), 2).batch_size == 1


def test_nothing_fits():
    with pytest.raises(ValueError, match="out of memory: use --activation_checkpointing=block"):
        fit_alone(runs_out_above(0), 8)


def test_with_fsdp_only_what_fits_by_the_estimate_is_tried(monkeypatch):
    monkeypatch.setattr(hardware, "available_memory_gib", lambda device: 12.8)
    monkeypatch.setattr(distributed, "gather_objects", lambda process, value: [value])
    keep = "set_reshard_after_forward"  # of a sharded model
    monkeypatch.setattr(torch.nn.Linear, keep, lambda *_: None, raising=False)
    process = Process(0, 4, "fsdp", dtype=torch.bfloat16)
    trial = runs_out_above(1000)
    found = fit_alone(trial, 64, 120, process)
    assert trial.tried == [16] and found.batch_size == 16
    with pytest.raises(ValueError, match="a smaller block_size, batch_size"):
        fit_alone(runs_out_above(0), 64, 120, process)


def test_libraries_out_of_memory_count_and_other_errors_do_not():
    library = runs_out_above(1, "CUBLAS_STATUS_ALLOC_FAILED when calling")
    assert fit_alone(library, 2).batch_size == 1
    with pytest.raises(RuntimeError, match="mismatch"):
        fit_alone(runs_out_above(1, "size mismatch"), 2)


def test_f57_an_error_in_compiled_code_is_raised_by_the_same_step_uncompiled():
    plan, tried = Plan(None, "default", False), []

    def trial(batch_size):
        tried.append(plan.compiled)
        if plan.compiled:
            raise torch._dynamo.exc.Unsupported("the compiler's words for it")
        raise ValueError("too many values to unpack (expected 2)")

    def broken(graph, inputs):
        raise OSError("no compiler")

    with pytest.raises(ValueError, match="too many values"):
        fit(trial, settings(2, 1), Process(), plan)
    assert torch.compile(torch.neg, backend=broken)(torch.ones(())) == -1.0  # eager, too
    assert tried == [True, False]
    compile_model(torch.nn.Linear(1, 1), Plan(None, "default", False))  # of a run that comes later
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="no compiler"):
        torch.compile(torch.neg, backend=broken)(torch.ones(()))


@pytest.mark.parametrize(
    ("sizes", "batch_size", "measured"),
    [  # measured on H200s in bfloat16 (dev/LOG.md)
        ({}, 32, 11.72),
        ({}, 64, 21.34),
        ({"n_layer": 48, "n_embd": 1600}, 8, 39.85),
        ({"n_layer": 24, "n_embd": 1024}, 16, 16.0),
    ],
)
def test_the_rough_estimate_is_within_a_third_of_what_was_measured(sizes, batch_size, measured):
    process = Process(dtype=torch.bfloat16)
    found = rough_gib(GPT2 | sizes, batch_size, process)
    assert found == pytest.approx(measured, rel=0.34)


def test_fsdp_divides_the_estimates_weights_and_evaluating_takes_a_quarter():
    one, four = (Process(0, n, "fsdp", dtype=torch.bfloat16) for n in (1, 4))
    whole, divided = (rough_gib(GPT2, 0, process) for process in (one, four))
    assert divided == whole / 4
    assert rough_gib(GPT2 | {"eval_only": True}, 0, one) == whole / 4
    assert rough_gib({"d_model": 768}, 1, one) == 0  # settings that you have renamed
    assert rough_gib(GPT2 | {"average_weights": True}, 0, one) == whole * 1.5


def test_a_model_much_too_large_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(hardware, "available_memory_gib", lambda device: 1.0)
    require_room(GPT2 | {"n_layer": 1}, Process())
    with pytest.raises(ValueError, match=r"n_layer=48.* takes about .* but cpu has 1.0 GiB"):
        require_room(GPT2 | {"n_layer": 48}, Process())


def test_a_cpu_tries_no_batch_that_takes_all_of_its_memory_by_the_estimate(monkeypatch):
    """GPT-2 with 16 sequences took 14.2 GiB on a CPU (11.4 by the estimate). Linux kills what takes
    more memory than there is."""
    monkeypatch.setattr(hardware, "available_memory_gib", lambda device: 14.0)
    trial = runs_out_above(1000)
    found = fit_alone(trial, 16)
    assert found.batch_size == 8 and trial.tried == [8]
    assert "too little memory (estimated): going on with --batch_size=8" in found.report


def test_processes_on_one_machine_share_its_memory(monkeypatch):
    one = hardware.available_memory_gib(torch.device("cpu"))
    for text, n in (("4", 4), ("x", 1), ("0", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        found = hardware.available_memory_gib(torch.device("cpu"))
        assert found == pytest.approx(one / n, rel=0.2)


def test_f50_a_batch_beyond_all_memory_is_split_by_arithmetic(monkeypatch):
    monkeypatch.setattr(hardware, "available_memory_gib", lambda device: 8.0)
    trial = runs_out_above(10**6)
    assert 1 < fit_alone(trial, 10**6, 10**6).batch_size < 16 and len(trial.tried) == 1
    monkeypatch.setattr(hardware, "available_memory_gib", lambda device: 1.0)
    with pytest.raises(ValueError, match=r"too little memory \(estimated\): use"):
        fit_alone(None, 10**6, 10**6)


def test_the_trial_leaves_no_gradients_outside_the_model():
    # a learned weight of a loss had the trial's gradient in its first step
    layer, outside = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1))
    kept = torch.nn.Parameter(torch.ones(1))
    kept.grad = torch.ones(1)
    with undone(layer, torch.optim.SGD(layer.parameters())):
        (layer(torch.ones(1)) * outside + kept).sum().backward()
        assert outside.grad is not None
    assert outside.grad is None and layer.weight.grad is None and kept.grad is not None


def test_the_trial_leaves_empty_buffers_as_they_were():
    """A running load that is None until the first batch began with the trial's zeros."""
    layer = torch.nn.Sequential(torch.jit.script(torch.nn.SiLU()))
    layer.append(torch.nn.Linear(1, 1))
    layer.register_buffer("running", None)
    optimizer = torch.optim.SGD(layer.parameters())
    with undone(layer, optimizer):
        layer.running = torch.ones(1)
    assert layer.running is None
