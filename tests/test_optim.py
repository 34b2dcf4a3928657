import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from model import GPT, GPTConfig
from steady import checkpoint, muon, optim
from steady.loss import LinearCrossEntropy
from steady.optim import (
    AveragedWeights,
    build_optimizer,
    clip_gradients,
    learning_rate_at,
    load_state,
    set_schedule,
    set_second_target,
)

CONFIG = {
    "learning_rate": 1.0,
    "min_lr": 0.1,
    "warmup_iters": 10,
    "lr_decay_iters": 110,
    "max_iters": 110,
    "decay_lr": True,
    "lr_schedule": "cosine",
    "decay_fraction": 0.2,
}


def adamw(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.1):
    settings = {"learning_rate": learning_rate, "beta1": betas[0], "beta2": betas[1]}
    return build_optimizer(model, settings | {"optimizer": "adamw", "weight_decay": weight_decay})


def test_only_matrices_and_embeddings_decay():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4, bias=True), nn.LayerNorm(4))
    optimizer = adamw(model)
    decayed, kept = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.dim() == 2 for p in decayed["params"])
    assert kept["weight_decay"] == 0.0 and all(p.dim() == 1 for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
    assert decayed["fused"]


def test_tied_weight_is_optimized_once():
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    optimizer = adamw(nn.ModuleList([embedding, head]))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


def test_cosine_warms_up_peaks_and_ends_at_the_floor():
    rates = [learning_rate_at(step, CONFIG) for step in range(130)]
    assert rates[:11] == pytest.approx([(i + 1) / 11 for i in range(11)])
    assert rates[60] == pytest.approx(0.55)
    assert rates[110:] == [0.1] * 20
    assert all(a > b for a, b in zip(rates[10:110], rates[11:111], strict=True))


def test_settings_of_the_schedule_can_be_deleted():
    config = {"learning_rate": 1.0, "max_iters": 110}
    assert [learning_rate_at(i, config) for i in (0, 55, 110)] == pytest.approx([1.0, 0.5, 0.0])
    assert optim.schedule_note(config) is None and optim.decay_start(config) is None


def test_the_schedule_ends_with_the_run_unless_told_otherwise():
    untold = CONFIG | {"lr_decay_iters": 0}
    for step in range(130):
        assert learning_rate_at(step, untold) == learning_rate_at(step, CONFIG)
        longer = learning_rate_at(step, untold | {"max_iters": 1000})
        assert longer == learning_rate_at(step, CONFIG | {"lr_decay_iters": 1000})


def test_wsd_is_stable_then_decays():
    config = CONFIG | {"lr_schedule": "wsd"}
    rates = [learning_rate_at(step, config) for step in range(130)]
    assert rates[10:89] == [1.0] * 79  # the decay takes the last 22 of 110 steps
    assert all(a > b for a, b in zip(rates[88:110], rates[89:111], strict=True))
    assert rates[88 + 11] == pytest.approx(0.1 + 0.9 * (1 - 0.5**0.5))
    assert rates[110:] == [0.1] * 20


def test_without_decay_the_rate_stays_at_its_peak():
    config = CONFIG | {"decay_lr": False}
    assert learning_rate_at(5, config) < 1.0
    assert learning_rate_at(10**6, config) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_degenerate_lengths_do_not_divide_by_zero(schedule):
    for warmup, end in ((0, 0), (0, 1), (5, 5), (10, 5)):
        config = CONFIG | {"lr_schedule": schedule, "warmup_iters": warmup, "lr_decay_iters": end}
        for fraction in (0.0, 1.0):
            config["decay_fraction"] = fraction
            assert all(0 < learning_rate_at(step, config) <= 1.0 for step in range(20))


@pytest.mark.parametrize("ignoring", [(), ("cpu",)])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(monkeypatch, ignoring):
    monkeypatch.setattr(optim, "IGNORE_FOUND_INF", ignoring)
    for gradient, moved in ((float("nan"), False), (float("inf"), False), (1.0, True)):
        layer = nn.Linear(2, 2)
        optimizer = adamw(layer, weight_decay=0.1)
        for value in (1.0, gradient):  # moments of the first step move weights too
            before = layer.weight.detach().clone()
            for p in layer.parameters():
                p.grad = torch.full_like(p, value)
            clip_gradients(optimizer, 1.0)
            optimizer.step()
        assert torch.equal(before, layer.weight) is not moved


@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("ignoring", [(), ("cpu",)])
def test_clipping_equals_torchs(monkeypatch, limit, scaled, ignoring):
    monkeypatch.setattr(optim, "IGNORE_FOUND_INF", ignoring)
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = adamw(layer)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for factor in (1.0, 100.0, 0.1):  # moments depend on how much each step was clipped
            scaler.scale(factor * layer(torch.ones(1, 8)).square().sum()).backward()
            scaler.unscale_(optimizer)
            if ours:
                clip_gradients(optimizer, limit)
            else:
                torch.nn.utils.clip_grad_norm_(layer.parameters(), limit or float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(optimizer.state[layer.weight]["exp_avg"])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("limit", [1e39, float("inf")])
def test_a_limit_may_be_beyond_all_norms(limit):
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.grad = torch.full((2, 2), 3.0)
    assert clip_gradients(adamw(layer), limit) == 6.0
    assert (layer.weight.grad == 3.0).all()


def test_gradients_that_cannot_be_changed_in_place_are_clipped():
    layer = nn.Linear(4, 4, bias=False)
    (layer.weight.grad,) = torch.autograd.grad(layer.weight.sum(), [layer.weight])  # expanded
    assert clip_gradients(adamw(layer), 2.0) == 4.0 and (layer.weight.grad == 0.5).all()
    with torch.inference_mode():  # evolution strategies
        layer.weight.grad = torch.ones(4, 4)
    assert clip_gradients(adamw(layer), 2.0) == 4.0 and (layer.weight.grad == 0.5).all()


def test_resuming_keeps_the_moments_and_takes_todays_settings():
    layer = nn.Linear(2, 2)
    old = adamw(layer)
    layer(torch.ones(1, 2)).sum().backward()
    old.step()
    new = adamw(layer, betas=(0.8, 0.99), weight_decay=0.3)
    load_state(new, old.state_dict())
    assert [g["weight_decay"] for g in new.param_groups] == [0.3, 0.0]
    assert all(g["betas"] == (0.8, 0.99) for g in new.param_groups)
    moments = [optimizer.state[layer.weight]["exp_avg"] for optimizer in (old, new)]
    assert torch.equal(*moments) and moments[0].any()


def test_resuming_restores_what_a_scheduler_has_changed():
    old, new = adamw(nn.Linear(2, 2)), adamw(nn.Linear(2, 2))
    old.param_groups[0] |= {"lr": 0.25, "initial_lr": 0.5, "my_scale": 0.9, "peak_lr": 3.0}
    load_state(new, old.state_dict())
    group = new.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["my_scale"]) == (0.25, 0.5, 0.9)
    assert group["peak_lr"] is None  # from the code, as it is now


SCHEDULE = {"learning_rate": 0.5, "min_lr": 0.0, "warmup_iters": 0, "decay_lr": True,
            "lr_decay_iters": 0, "max_iters": 10}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.optim.AdamW, optim.AdamW])
def test_a_group_with_its_own_rate_keeps_it_as_its_peak(kind):
    """Such as rates that differ from layer to layer."""

    def build(factor):
        groups = [{"params": nn.Linear(2, 2).parameters(), "lr": 0.5 * factor**n} for n in range(3)]
        return kind(groups, lr=0.5)

    def rates(optimizer, step):
        assert optim.set_schedule(optimizer, step, SCHEDULE) == (0.5, 0.25)[step // 5]
        return [group["lr"] for group in optimizer.param_groups]

    old, new = build(0.1), build(0.1)
    for step in (0, 5, 5):
        expected = [(0.5, 0.25)[step // 5] * 0.1**n for n in range(3)]
        assert rates(old, step) == pytest.approx(expected)
    load_state(new, old.state_dict())
    assert rates(new, 5) == pytest.approx([0.25, 0.025, 0.0025])
    load_state(changed := build(0.2), old.state_dict())
    assert rates(changed, 5) == pytest.approx([0.25, 0.05, 0.01])  # the current code's rates
    state = old.state_dict()  # of a version without this entry
    for group in state["param_groups"]:
        del group["peak_lr"]
    load_state(older := build(1.0), state)
    assert rates(older, 5) == pytest.approx([0.25, 0.25, 0.25])
    optim.set_schedule(build(0.1), 5, SCHEDULE | {"learning_rate": 0.0})


def test_the_rate_of_another_optimizer_follows_the_schedule():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())  # with torch's default rate
    for step, rate in (0, 0.5), (5, 0.25):
        assert optim.set_schedule(optimizer, step, SCHEDULE) == rate
        assert optimizer.param_groups[0]["lr"] == rate


def test_a_groups_own_rate_may_equal_the_default():
    """torch's default of 1e-3 was taken for no rate at all."""
    groups = [{"params": nn.Linear(2, 2).parameters(), "lr": rate} for rate in (1e-3, 1e-4)]
    optimizer = torch.optim.AdamW(groups)
    for step, share in (0, 1.0), (5, 0.5):
        optim.set_schedule(optimizer, step, SCHEDULE)
        found = [group["lr"] for group in optimizer.param_groups]
        assert found == pytest.approx([share * 1e-3, share * 1e-4])
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    optim.set_schedule(optimizer, 5, SCHEDULE)
    assert optimizer.param_groups[2]["lr"] == pytest.approx(0.5 * 1e-3)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    optim.set_schedule(optimizer, 5, SCHEDULE)
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    optim.set_schedule(optimizer, 5, SCHEDULE)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_scheduler_of_torchs_keeps_its_rates():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    for step, rate in enumerate([0.5, 0.05, 0.005]):
        found = optim.set_schedule(optimizer, step, SCHEDULE)
        assert type(found) is float and found == pytest.approx(rate)
        assert optimizer.param_groups[0]["lr"].item() == pytest.approx(rate)
        optimizer.step()
        scheduler.step()


ADAMW = {
    "optimizer": "adamw",
    "learning_rate": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
}


def test_a_parameter_that_is_taken_out_of_the_groups_is_not_saved():
    model = nn.Linear(4, 4)
    optimizer = build_optimizer(model, ADAMW)
    optimizer.param_groups[0]["params"] = []
    assert [*optimizer.state_dict()["state"]] == [0]  # the bias


def test_a_parameter_frozen_under_cuda_graphs_keeps_its_values_until_it_is_freed():
    model = nn.Linear(4, 4, bias=False)
    optimizer = build_optimizer(model, ADAMW)
    values = []
    for step in range(6):
        model.weight.requires_grad_(step not in (2, 3))
        loss = model(torch.ones(1, 4)).sum() + torch.ones((), requires_grad=True)
        with optim.own_gradients(model, cuda_graphs=True):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(model.weight.detach().clone())
    same = [torch.equal(a, b) for a, b in itertools.pairwise(values)]
    assert same == [False, True, True, False, False]


def test_own_gradients_are_those_of_autograd_in_other_memory():
    """With CUDA graphs a tensor that autograd makes is overwritten (here by hand)."""
    torch.manual_seed(0)
    used, hooked, replacing, unused = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))
    model = nn.ParameterList([used, hooked, replacing, unused])
    seen = []
    hooked.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    replacing.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for set_to_none in (True, False):
        sums, x = 0.0, torch.randn(4)
        for _ in range(3):
            with optim.own_gradients(model, cuda_graphs=True):
                ((used + hooked * replacing) @ x).square().sum().backward()
                made = used.grad, hooked.grad
            sums = sums + 2 * torch.outer((used + hooked * replacing) @ x, x)
            for tensor in made:
                if tensor is not hooked.grad:  # its first gradient was copied
                    tensor.fill_(torch.nan)  # the next replay
            torch.testing.assert_close(used.grad, sums.detach())
            torch.testing.assert_close(hooked.grad, (sums * replacing).detach())
            assert torch.equal(seen[-1], hooked.grad)
        model.zero_grad(set_to_none)
    assert replacing.grad is None and unused.grad is None


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_own_gradients_keep_what_a_hook_or_an_error_leaves(cuda_graphs):
    weight, plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    model = nn.ParameterList([weight, plain])
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clamp(max=5.0)))
    for _ in range(3):
        with optim.own_gradients(model, cuda_graphs):
            (2.0 * weight + plain).sum().backward()
    with pytest.raises(ZeroDivisionError), optim.own_gradients(model, cuda_graphs):
        raise ZeroDivisionError
    assert weight.grad.tolist() == [5.0] * 4 and plain.grad.tolist() == [3.0] * 4


def test_muon_calls_step_hooks_once():
    """Making any AdamW of torch's lets its class's step call the hooks too."""
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    model, called = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_embd=32, n_head=2)), []
    optimizer = build_optimizer(model, ADAMW | {"optimizer": "muon"})
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.step()
    assert called == [1]


def test_muon_trains_every_group_of_matrices_whatever_their_state():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(2))
    model = nn.ModuleDict({"blocks": model})
    config = {"optimizer": "muon", "learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95}
    optimizer = build_optimizer(model, config | {"weight_decay": 0.0})
    first, second = optimizer.muon_group["params"]
    optimizer.muon_group["params"] = [first]
    optimizer.add_param_group({**optimizer.muon_group, "params": [second], "lr": 0.05})
    old = [first.detach().clone(), second.detach().clone()]
    optimizer.state.clear()  # as some schemes do in mid-run
    first.grad = second.grad = torch.eye(4)
    optimizer.step()
    changes = [(p - before).norm().item() for p, before in zip((first, second), old, strict=True)]
    assert changes[0] > 0 and changes[1] == pytest.approx(changes[0] / 2)
    saved = copy.deepcopy(optimizer.state_dict())
    del optimizer.state[second]  # as before the first step, if its group is new
    load_state(optimizer, saved)
    assert optimizer.state[second]["momentum"].any()


@pytest.mark.parametrize("norm", [1e6, float("inf")])
def test_clipping_affects_the_next_step_only(norm):
    """A step without clipping divided or ignored its gradients as the step before had."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, clips in zip(layers, (True, False), strict=True):
        optimizer = adamw(layer, betas=(0.0, 0.0))
        if clips:
            layer.weight.grad = torch.full((2, 2), norm)
            weights = layer.weight.detach().clone()
            clip_gradients(optimizer, 1.0)
            optimizer.zero_grad()
            assert torch.equal(layer.weight, weights)
        layer.weight.grad = torch.full((2, 2), 1e-8)  # of the size of AdamW's epsilon
        optimizer.step()
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_a_scaler_works_without_unscale_after_our_zero_grad():
    layer = nn.Linear(2, 2)
    optimizer, scaler = adamw(layer), torch.amp.GradScaler("cpu")
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = layer.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(layer.weight, before)


def without_averaging(kind):
    """A block of one matrix, a model of it, and an optimizer whose moments are the last gradient's
    (Muon's: a share of it)."""
    block = nn.Linear(4, 4, bias=False)
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    config = {"learning_rate": 0.1, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0}
    return block, model, build_optimizer(model, config | {"optimizer": kind})


def require_momentum(optimizer, weight, gradient):
    """The momentum after a first step with that `gradient`."""
    muon = isinstance(optimizer, optim.Muon)
    share = 1.0 - optimizer.muon_group["momentum"] if muon else 1.0
    found = optimizer.state[weight]["momentum" if muon else "exp_avg"]
    torch.testing.assert_close(found, share * gradient)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_clipping_changes_the_gradients_themselves(kind):
    """Whatever changes them afterwards, noise for example, is not clipped."""
    block, _, optimizer = without_averaging(kind)
    block.weight.grad = torch.full((4, 4), 5.0)
    assert clip_gradients(optimizer, 2.0) == pytest.approx(20.0)
    torch.testing.assert_close(block.weight.grad, torch.full((4, 4), 0.5))
    block.weight.grad.data.add_(1.0)  # .data hides the change from autograd
    optimizer.step()
    require_momentum(optimizer, block.weight, torch.full((4, 4), 1.5))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_only_one_step_is_skipped(kind):
    """The next one was skipped too, if the gradients were zeroed in another way."""
    block, model, optimizer = without_averaging(kind)
    block.weight.grad = torch.full((4, 4), float("inf"))
    clip_gradients(optimizer, 1.0)
    optimizer.step()
    model.zero_grad()  # not the optimizer's
    block.weight.grad = torch.ones(4, 4)
    optimizer.step()
    require_momentum(optimizer, block.weight, torch.ones(4, 4))


def test_a_copied_adamw_skips_only_one_step_too():
    model = nn.Linear(4, 4)
    model, optimizer = copy.deepcopy((model, adamw(model)))
    for value in (float("inf"), 1.0):
        model.zero_grad()
        model.weight.grad = torch.full((4, 4), value)
        before = model.weight.clone()
        if value > 1.0:
            clip_gradients(optimizer, 1.0)
        optimizer.step()
        assert torch.equal(model.weight, before) == (value > 1.0)


def test_muon_maximizes_too():
    changes = []
    for maximize in (True, False):
        torch.manual_seed(0)
        block, _, optimizer = without_averaging("muon")
        optimizer.muon_group["maximize"] = maximize
        before = block.weight.detach().clone()
        block.weight.grad = torch.randn(4, 4)
        optimizer.step()
        changes.append(block.weight.detach() - before)
    assert changes[0].any()
    torch.testing.assert_close(changes[0], -changes[1])


def test_allocated_state_equals_what_the_first_step_makes():
    results = []
    for allocated in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        optimizer = adamw(layer)
        if not allocated:
            optimizer.state.clear()
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        results.append(layer.weight.detach())
    assert torch.equal(*results)


def test_f58_parameters_and_gradients_of_any_strides_are_trained_as_by_plain_torch():
    """torch's fused kernel on CPUs assumes that both have the same strides, and no gaps."""

    def make():
        return nn.ParameterList([
            nn.Parameter(torch.arange(8.0).view(4, 2)[:, 0]),
            nn.Parameter(torch.ones(1).expand(4)),
            nn.Parameter(torch.arange(6.0).view(3, 2).T),
            nn.Parameter(torch.arange(12.0).view(3, 4)),
        ])  # fmt: skip

    model, plain = make(), make()
    plain[1] = nn.Parameter(torch.ones(4))
    optimizer = adamw(model, weight_decay=0.0)
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": False}
    reference = torch.optim.AdamW(plain.parameters(), **settings)
    for step in range(3):
        for parameters in (model, plain):
            for p in parameters:
                p.grad = torch.arange(p.numel(), dtype=torch.float32).add(step).view(p.shape)
            parameters[3].grad = parameters[3].grad.T.contiguous().T  # as from autograd.grad
        clip_gradients(optimizer, 0.0)
        optimizer.step()
        reference.step()
    for p, expected in zip(model, plain, strict=True):
        torch.testing.assert_close(p.detach(), expected.detach())
    again = make()
    again.register_buffer("view", again[3].detach()[:, ::2], persistent=False)
    checkpoint.load_weights(again, model.state_dict(), Path())
    assert all(map(torch.equal, again, model)) and torch.equal(again.view, again[3][:, ::2])


def test_sparse_gradients_are_refused_by_name():
    model = nn.ModuleList([nn.Embedding(4, 2, sparse=True)])
    optimizer = adamw(model)
    model[0](torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="use nn.Embedding"):
        clip_gradients(optimizer, 1.0)


# ---- Muon -------------------------------------------------------------------------------------


def tiny(n_layer=2, **more):
    torch.manual_seed(0)
    config = {"block_size": 8, "vocab_size": 64, "n_head": 2, "n_embd": 16} | more
    return GPT(GPTConfig(n_layer=n_layer, **config))


def muon_for(model, **more):
    settings = {"optimizer": "muon", "learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95}
    return build_optimizer(model, settings | {"weight_decay": 0.0} | more)


TOKENS = torch.arange(16).view(2, 8)


def take_step(model, optimizer, step=0, limit=0.0):
    model(TOKENS, TOKENS + 1).backward()
    set_schedule(optimizer, step, CONFIG | {"learning_rate": 0.01, "warmup_iters": 0})
    clip_gradients(optimizer, limit)
    optimizer.step()
    optimizer.zero_grad()


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    model = tiny()
    matrices, embedding, norms = muon_for(model).param_groups
    assert len(matrices["params"]) == 2 * 7 and all(p.dim() == 2 for p in matrices["params"])
    assert embedding["params"] == [model.token_embedding.weight]  # the head is tied to it
    assert len(norms["params"]) == 5 and all(p.dim() == 1 for p in norms["params"])


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 24), (2, 24, 8)])
def test_orthogonal_matrices_have_the_directions_of_the_svd(shape):
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.linspace(1.0, 0.01, 8).expand(shape[0], 8)
    found = muon.orthogonalise(u * values[:, None] @ v)
    singular = torch.linalg.svdvals(found)
    assert singular.min() > 0.74 and singular.max() < 1.22
    assert torch.linalg.matrix_norm(found - u @ v, 2).max() < 0.26


def test_singular_values_stay_bounded_however_bfloat16_rounds():
    """Polynomials without a margin above 1 turn some of these values into 9."""
    torch.manual_seed(0)
    normal = torch.randn(400, 16, 16)
    heavy_tailed = normal * torch.randn(400, 16, 1).exp() * torch.randn(400, 1, 16).exp()
    for matrices in (normal, heavy_tailed):
        found = muon.orthogonalise(matrices.bfloat16()).float()
        assert torch.linalg.matrix_norm(found, 2).max() < 1.3


def test_a_row_that_stays_zero_stays_finite():
    """Its running mean square becomes zero where denormals are flushed to zero, as on GPUs."""
    torch.set_flush_denormal(True)
    try:
        mean_square, one = torch.full((1, 2, 1), 1e-37), torch.ones(())
        update = torch.tensor([[[1.0, -1.0], [0.0, 0.0]]])
        for _ in range(50):
            change = muon.scale_rows(update, mean_square, one, one)
        assert mean_square[0, 1] == 0 and (change[0, 1] == 0).all()
    finally:
        torch.set_flush_denormal(False)


def test_updates_are_those_of_torchs_muon(monkeypatch):
    """They match within 1e-5, with torch's coefficients, float32, no row scaling, and each head of
    queries, keys and values as a separate matrix."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # as torch's Muon
    monkeypatch.setattr(muon, "POLYNOMIALS", [(3.4445, -4.775, 2.0315)] * 5)
    monkeypatch.setattr(muon, "MARGIN", 1.0)
    monkeypatch.setattr(muon, "ROW_DECAY", 1.0)
    model = tiny(n_kv_head=1)  # heads of 8 rows
    optimizer = muon_for(model, weight_decay=0.1)

    def pieces(tensor_of):
        for name, p in model.named_parameters():
            if p.dim() == 2 and name.startswith("blocks."):
                by_head = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                yield from tensor_of(p).split(8 if by_head else len(p))

    theirs = [nn.Parameter(piece.clone()) for piece in pieces(torch.Tensor.detach)]
    assert len(theirs) == 2 * (2 + 1 + 1 + 4)
    other = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in (0, 750, 1500):
        model(TOKENS, TOKENS + 1).backward()
        for b, gradient in zip(theirs, pieces(lambda p: p.grad), strict=True):
            b.grad = gradient.clone()
        set_schedule(optimizer, step, CONFIG | {"learning_rate": 0.01, "warmup_iters": 0})
        other.param_groups[0]["lr"] = optimizer.muon_group["lr"]
        other.param_groups[0]["momentum"] = optimizer.muon_group["momentum"]
        clip_gradients(optimizer, 0.0)
        optimizer.step()
        other.step()
        optimizer.zero_grad()
    for a, b in zip(pieces(torch.Tensor.detach), theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-5)


def test_muon_multiplies_in_bfloat16_on_a_cpu_where_the_model_does(monkeypatch):
    orthogonalise, seen, moved = muon.orthogonalise, [], []

    def keep(matrices, head_dim=0):
        seen.append(matrices.dtype)
        return orthogonalise(matrices, head_dim)

    monkeypatch.setattr(muon, "orthogonalise", keep)
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny()
        settings = CONFIG | {"optimizer": "muon", "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95}
        optimizer = build_optimizer(model, settings, dtype=dtype)
        weight = model.blocks[0].mlp.up_proj.weight
        before = weight.detach().clone()
        take_step(model, optimizer)
        assert set(seen) == {dtype}
        seen.clear()
        moved.append(weight.detach() - before)
    error = ((moved[0] - moved[1]).norm() / moved[0].norm()).item()
    assert 0 < error < 0.15, error  # from the smallest singular values


def test_muon_trains_weights_of_any_dtype():
    moved, dtypes = [], (torch.float32, torch.float64, torch.bfloat16)
    for dtype in dtypes:
        model = tiny().to(dtype)
        optimizer, weight = muon_for(model), model.blocks[0].mlp.up_proj.weight
        before = weight.detach().clone()
        take_step(model, optimizer)
        moved.append(weight.detach() - before)
        wide = torch.promote_types(dtype, torch.float32)
        assert optimizer.state[weight]["momentum"].dtype == wide and moved[-1].dtype == dtype
    torch.testing.assert_close(moved[0].double(), moved[1], rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(moved[0], moved[2].float(), rtol=0.1, atol=5e-4)
    layers = (nn.Linear(4, 4, bias=False, dtype=d) for d in dtypes[:2])
    mixed = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(layer) for layer in layers)})
    momenta = [state["momentum"].dtype for state in muon_for(mixed).state.values()]
    assert momenta == [torch.float32, torch.float64]


def test_muons_updates_have_the_size_of_adamws():
    model = tiny(n_layer=1, n_embd=64, n_head=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = muon_for(model)
    for step in range(3):
        take_step(model, optimizer, step)
    for name, p in model.named_parameters():
        if p.dim() == 2 and name.startswith("blocks"):
            rms = (p - before[name]).square().mean().sqrt() / (3 * 0.01)
            assert 0.1 < rms < 0.3, name


def test_weight_decay_is_decoupled_and_only_of_matrices_and_embeddings():
    moved = []
    for decay in (0.0, 0.5):
        model = tiny()
        optimizer = muon_for(model, weight_decay=decay)
        before = model.blocks[0].mlp.up_proj.weight.detach().clone()
        take_step(model, optimizer)
        moved.append(model.blocks[0].mlp.up_proj.weight.detach())
        norm = model.final_norm.weight.detach()
    torch.testing.assert_close(moved[0] - moved[1], 0.5 * 0.01 * before)
    assert (norm > 0.9).all()


@pytest.mark.parametrize("ignoring", [(), ("cpu",)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_f19_muon_takes_no_notice_of_a_gradient_that_is_not_finite(monkeypatch, value, ignoring):
    """If any gradient is not finite, the step ignores all of them."""
    monkeypatch.setattr(optim, "IGNORE_FOUND_INF", ignoring)
    models = tiny(), tiny()
    for model, bad in zip(models, (False, True), strict=True):
        optimizer = muon_for(model, weight_decay=0.1)
        take_step(model, optimizer)
        if bad:
            model(TOKENS, TOKENS + 1).backward()
            model.blocks[0].mlp.up_proj.weight.grad[0, 0] = value
            clip_gradients(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        take_step(model, optimizer, 1)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b) or a.dim() < 2 or a.shape == (64, 16)
    assert torch.equal(*(model.blocks[1].mlp.up_proj.weight for model in models))


def test_f89_another_optimizers_groups_are_resumed():
    """Some optimizers keep a step count or an estimated learning rate in their groups."""
    parameters = list(tiny().parameters())
    optimizers = [torch.optim.SGD(parameters, lr=0.1, momentum=0.9) for _ in range(2)]
    optimizers[0].param_groups[0]["k"] = 10
    saved = checkpoint.as_saved({"optimizer": optimizers[0]})["optimizer"]
    load_state(optimizers[1], saved)
    assert optimizers[1].param_groups[0]["k"] == 10


def test_a_group_that_was_added_later_is_resumed():
    optimizers, added = [], []
    for run in range(2):
        model = tiny()
        optimizers.append(muon_for(model, optimizer="adamw"))
        added.append([torch.nn.Parameter(torch.ones(3)) for _ in range(2)])
        for parameter in added[run]:
            optimizers[run].add_param_group({"params": [parameter], "weight_decay": 0.0})
        if run == 0:
            added[0][0].grad = torch.full((3,), 2.0)  # the other one never gets a gradient
            take_step(model, optimizers[0])
    load_state(optimizers[1], checkpoint.as_saved({"optimizer": optimizers[0]})["optimizer"])
    mean, state = optimizers[0].state[added[0][0]]["exp_avg"], optimizers[1].state
    assert torch.equal(state[added[1][0]]["exp_avg"], mean) and mean.any()
    assert added[1][1] not in state


def test_muons_state_is_resumed_and_another_optimizers_is_refused():
    model = tiny()
    optimizer = muon_for(model)
    take_step(model, optimizer)
    saved = copy.deepcopy(checkpoint.as_saved({"optimizer": optimizer})["optimizer"])
    weights = copy.deepcopy(model.state_dict())
    take_step(model, optimizer, 1)
    again = tiny()
    again.load_state_dict(weights)
    resumed = muon_for(again)
    load_state(resumed, saved)
    take_step(again, resumed, 1)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    other = muon_for(tiny(), optimizer="adamw")
    with pytest.raises(ValueError, match="with optimizer=muon, not adamw"):
        load_state(other, saved)
    with pytest.raises(ValueError, match="with optimizer=adamw, not muon"):
        load_state(optimizer, checkpoint.as_saved({"optimizer": other})["optimizer"])


def test_muons_states_need_no_copies_and_may_have_them():
    """Whichever matrices are updated, and whatever has replaced their states."""
    stacked, separate = both = [muon_for(tiny()) for _ in range(2)]
    for state in separate.state.values():
        state.update({name: value.clone() for name, value in state.items()})
    for i in range(4):
        for optimizer in both:
            torch.manual_seed(i)
            for _, parameter in optim.members(optimizer):
                parameter.grad = torch.randn_like(parameter)
            matrices = optimizer.muon_group["params"]
            if i == 1:  # queries: other mean squares; output projections: other strides
                queries, outputs = optimizer.state[matrices[0]], optimizer.state[matrices[3]]
                queries["row_mean_square"] = queries["row_mean_square"] / 2
                outputs["momentum"] = outputs["momentum"].t()
            if i == 2:  # only some, and in another order
                matrices.reverse()
                matrices[0].grad = None
            stacks = optimizer.stacks(matrices)
            momenta = [[optimizer.state[p]["momentum"] for p in stack] for stack, _ in stacks]
            copied = [optim.stacked(parts) is not parts[0]._base for parts in momenta]
            if i == 0:
                assert all(copied) if optimizer is separate else not any(copied)
            optimizer.step()
    for (_, a), (_, b) in zip(*map(optim.members, both), strict=True):
        assert torch.equal(a, b)
        states = stacked.state[a], separate.state[b]
        assert all(map(torch.equal, *(state.values() for state in states)))
        if "row_mean_square" in states[0]:  # at first all rows have the same
            assert states[0]["row_mean_square"].std() > 0


def test_muon_can_be_rolled_back():
    model = tiny()
    optimizer = muon_for(model)
    take_step(model, optimizer)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    take_step(model, optimizer, 1)
    first = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    take_step(model, optimizer, 1)
    assert all(map(torch.equal, first, model.parameters()))


def test_matrices_in_several_stacks_move_as_in_one(monkeypatch):
    models = []
    for elements in (2**26, 600):
        monkeypatch.setattr(optim, "MUON_ELEMENTS", elements)
        models.append(tiny())
        optimizer = muon_for(models[-1])
        take_step(models[-1], optimizer)
    assert len(list(optimizer.stacks(optimizer.muon_group["params"]))) > 5
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_f19_an_optimizer_of_torchs_own_is_clipped_and_skips_too(kind):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.full((4,), 5.0)
    assert optim.clip_gradients(optimizer, 1.0) == pytest.approx(10.0)
    assert torch.allclose(weight.grad, torch.full((4,), 0.5))
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.tensor([1.0, torch.nan, 1.0, 1.0])
    optim.clip_gradients(optimizer, 1.0)
    optimizer.step()
    assert torch.equal(weight, before)


def test_averaged_weights_forget_the_first_steps_and_leave_the_weights_alone():
    """With an optimizer of torch's own."""
    model = tiny()
    model.final_norm.requires_grad_(False)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    averaged, expected = AveragedWeights(model, True), {}
    for step in range(100):
        take_step(model, opt, step)
        averaged.update(step + 1)
        for name, p in model.named_parameters() if step % 8 == 0 else ():
            old = expected.get(name, p.detach())
            expected[name] = old.lerp(p.detach(), min(1.0, 64 / (step + 1)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), averaged.blended():
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), 0.4 * before[name] + 0.6 * expected[name])
        assert any((p - before[name]).abs().max() > 1e-3 for name, p in model.named_parameters())
        raise KeyError  # the weights come back after an error too
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_averages_are_resumed_and_damaged_ones_refused():
    model = tiny()
    saved = copy.deepcopy(AveragedWeights(model, True).state_dict())
    for average in saved.values():
        average += 1.0
    model.requires_grad_(False)  # as in an evaluation
    before = copy.deepcopy(model.state_dict())
    for enabled, was, moved in ((True, saved, 0.6), (False, saved, 0.0), (True, None, 0.0)):
        with AveragedWeights(model, enabled, was).blended():
            for name, p in model.named_parameters():
                torch.testing.assert_close(p, before[name] + moved)
    for value in (torch.ones(3), None, torch.full((16,), float("nan"))):
        with pytest.raises(ValueError, match="average of final_norm.weight is missing"):
            AveragedWeights(model, True, saved | {"final_norm.weight": value})


def test_weights_come_back_if_the_blend_itself_fails():
    model = tiny()
    averaged = AveragedWeights(model, True)
    before = copy.deepcopy(model.state_dict())
    first, *_, last = averaged.averages
    averaged.averages[first] += 1.0
    averaged.averages[last] = torch.zeros(3)
    with pytest.raises(RuntimeError), averaged.blended():
        pass
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_the_second_targets_weight_falls_to_zero_by_mid_run_in_the_same_tensor():
    model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=1, n_embd=8))
    config = CONFIG | {"second_target": 0.5, "max_iters": 100, "lr_decay_iters": 0}
    config["eval_only"] = False
    set_second_target(model, 0, config | {"second_target": 0.0})
    assert model.cross_entropy.share == 0.0
    shares, places = [], set()
    for step in (0, 25, 50, 99):
        set_second_target(model, step, config)
        shares.append(model.cross_entropy.share.item())
        places.add(model.cross_entropy.share.data_ptr())
    assert shares == pytest.approx([0.5 / 1.5, 0.25 / 1.25, 0.0, 0.0])
    assert len(places) == 1  # CUDA graphs read it there
    with pytest.raises(ValueError, match="use --second_target=0"):
        set_second_target(nn.Linear(2, 2), 0, config)
    set_second_target(nn.Linear(2, 2), 0, config | {"eval_only": True})


MUON = {"optimizer": "muon", "learning_rate": 0.1, "weight_decay": 0.1}


def with_blocks(*blocks):
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)
    return model


def test_empty_matrices_are_no_obstacle():
    model = with_blocks(nn.Linear(4, 0, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = optim.build_optimizer(model, MUON)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = model.blocks[1].weight.clone()
    optimizer.step()
    assert not torch.equal(model.blocks[1].weight, before)
    parameters = nn.ParameterList([torch.zeros(0, 4), torch.zeros(2)])
    optimizer = optim.build_optimizer(parameters, {"learning_rate": 0.1})
    optim.load_state(optimizer, optimizer.state_dict())


def test_heads_that_do_not_divide_the_rows_are_not_separated():
    model = with_blocks(nn.Linear(4, 6, bias=False))
    model.blocks[0].head_dim = 4
    optimizer = optim.build_optimizer(model, MUON)
    model.blocks[0].weight.grad = torch.randn(6, 4)
    optimizer.step()


def test_a_frozen_model_is_evaluated_with_muons_settings():
    model = with_blocks(nn.Linear(4, 4)).requires_grad_(False)
    optim.build_optimizer(model, MUON | {"eval_only": True})


def test_a_group_that_this_run_adds_needs_nothing_saved():
    parameters = nn.ParameterList([torch.zeros(2)])
    optimizer = optim.build_optimizer(parameters, {"learning_rate": 0.1})
    saved = optimizer.state_dict()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    optim.load_state(optimizer, saved)


def test_edges_of_schedules():
    late = {"learning_rate": 1.0, "max_iters": 10, "warmup_iters": 9, "lr_schedule": "wsd",
            "decay_fraction": 0.5}  # fmt: skip
    assert optim.decay_start(late) == 9 and optim.learning_rate_at(9, late) == 1.0
    none = {"learning_rate": 0.1, "max_iters": 0, "lr_decay_iters": 20, "warmup_iters": 0}
    assert optim.schedule_note(none) is None
    model = nn.ParameterList([torch.zeros(1)])
    model.cross_entropy = LinearCrossEntropy()
    optim.set_second_target(model, 0, {"second_target": 0.5, "max_iters": 0})
