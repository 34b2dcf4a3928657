"""FP8 products: their gradients, when weights are copied, and where they are refused. The CPU has
them too, slowly; what only a GPU shows is in test_gpu.py."""

import copy
import math
from types import SimpleNamespace

from steady import float8, optim
from steady.compiling import Plan
from steady.distributed import Place
from steady.linear import Linear, side_by_side
from steady.memory import StepShape
from steady.recompute import use_activation_checkpointing

import pytest
import torch

from model import GPT, MLP, GPTConfig

EAGER = Plan("compile=False", "default", False)
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95,
         "weight_decay": 0.1}  # fmt: skip
# Rounding to a format with b bits for the fraction is off by at most 2**-(b + 1) of a value, and
# evenly spread errors by 1 / sqrt(3) of that. What is multiplied has such an error twice.
E4M3_ERROR, E5M2_ERROR = 2**-4 / 3**0.5, 2**-3 / 3**0.5
TOKENS = torch.randint(64, (2, 4, 32), generator=torch.Generator().manual_seed(0))


def small_model(**more):
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=2, n_embd=64, **more))


def in_float8(model):
    optimizer = optim.build_optimizer(model, ADAMW)
    float8.use_float8(model, optimizer, EAGER)
    return optimizer


def loss_of(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(*TOKENS)


def relative_error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def errors_of_a_layer(x, grad, use):
    """How far output and gradients of one layer are from those in float64, with FP8 or bfloat16."""
    layer = Linear(x.shape[-1], grad.shape[-1])
    torch.nn.init.normal_(layer.weight, std=0.02)
    exact_x = x.double().requires_grad_()
    exact_weight = layer.weight.detach().double().requires_grad_()
    exact = exact_x @ exact_weight.T
    exact.backward(grad.double())
    if use:
        float8.use_float8(SimpleNamespace(blocks=[layer]), torch.optim.SGD([layer.weight]), EAGER)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(grad.to(y.dtype))
    assert layer.weight.grad.dtype == torch.float32 and y.dtype == torch.bfloat16
    pairs = (y, exact), (x.grad, exact_x.grad), (layer.weight.grad, exact_weight.grad)
    return [relative_error(found.double(), right) for found, right in pairs]


def test_a_layers_gradients_have_the_errors_of_their_formats():
    """Against float64; bfloat16's errors, 0.2% to 0.3%, are below the formats' of FP8."""
    torch.manual_seed(0)
    x, grad = torch.randn(256, 128), 1e-6 * torch.randn(256, 192)
    bounds = (2**0.5 * E4M3_ERROR, *[(E4M3_ERROR**2 + E5M2_ERROR**2) ** 0.5] * 2)
    errors = errors_of_a_layer(x, grad, use=True)
    assert all(0.3 * bound < error < bound for error, bound in zip(errors, bounds, strict=True))
    in_bfloat16 = errors_of_a_layer(x, grad, use=False)
    assert max(in_bfloat16) < 0.004


def test_an_mlps_gradients_have_the_errors_of_its_products():
    """Against float64: what a gradient has been through adds up, x's three products most of all."""
    torch.manual_seed(0)
    mlp = MLP(GPTConfig(n_embd=128, n_head=2, n_hidden=320))
    for std, weight in zip((0.1, 0.02, 0.1), mlp.parameters(), strict=True):
        torch.nn.init.normal_(weight, std=std)  # gate and up differ, and so do their scales
    exact = copy.deepcopy(mlp).double()
    float8.use_float8(SimpleNamespace(blocks=[mlp]), torch.optim.SGD(mlp.parameters()), EAGER)
    x, grad = torch.randn(4, 64, 128), 1e-6 * torch.randn(4, 64, 128)
    exact_x, x = x.double().requires_grad_(), x.requires_grad_()
    exact(exact_x).backward(grad.double())
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x).backward(grad.bfloat16())
    found = [x.grad, *(p.grad for p in mlp.parameters())]
    right = [exact_x.grad, *(p.grad for p in exact.parameters())]
    errors = [relative_error(a.double(), b) for a, b in zip(found, right, strict=True)]
    assert all(0.03 < error < 0.15 for error in errors), errors


@pytest.mark.parametrize("gate, up", [(2.4, 100.0), (50.0, 1.0), (-1.28, 30.0)])
def test_swiglus_gradients_are_within_the_bound_that_gives_their_scale(gate, up):
    """At 2.4 the derivative of silu is the largest, 1.0998; a value beyond e5m2's range is inf."""
    gate, up, grad = (torch.full((64, 32), value) for value in (gate, up, 1e-9))
    grad[63, 31] = -1e-6
    scales = [float8.scale_of(float8.E4M3, x) for x in (gate, up, gate.abs() * up)]
    gate8, up8 = (float8.cast(x, s, float8.E4M3) for x, s in zip((gate, up), scales, strict=False))
    inputs = gate8, scales[0], up8, scales[1], scales[2], grad.bfloat16()
    grads8, grads8_t, scale, _ = float8.swiglu_backward(*inputs)
    sigmoid = gate.sigmoid()
    by_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    right = torch.cat((by_gate, grad * gate * sigmoid), dim=1)
    assert ((grads8.float() * scale - right).abs() <= 2**-3 * right.abs() + 2**-16 * scale).all()
    assert torch.equal(grads8_t.float(), grads8.float().T)


def test_layers_of_one_input_are_multiplied_together_and_only_so():
    """Queries, keys and values of different widths, with one scale for all."""
    torch.manual_seed(0)
    layers = {name: Linear(128, size) for name, size in
              {"q_proj": 96, "k_proj": 32, "v_proj": 48}.items()}  # fmt: skip
    block = torch.nn.ModuleDict(layers)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    exact = copy.deepcopy(block).double()
    float8.use_float8(SimpleNamespace(blocks=[block]), torch.optim.SGD(block.parameters()), EAGER)
    x = torch.randn(64, 128)
    exact_x, x = x.double().requires_grad_(), x.requires_grad_()
    outputs = side_by_side(x, *layers.values())
    right = [layer.weight.double() @ exact_x.T for layer in exact.values()]
    grads = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward([y.T for y in right], [grad.double() for grad in grads])
    pairs = [(x.grad, exact_x.grad), *zip(outputs, (y.T for y in right), strict=True)]
    pairs += [(p.grad, q.grad) for p, q in zip(block.parameters(), exact.parameters(), strict=True)]
    errors = [relative_error(found.double(), exact) for found, exact in pairs]
    assert all(0.02 < error < 0.09 for error in errors), errors
    for wrong in (["q_proj"], ["k_proj", "q_proj", "v_proj"]):
        with pytest.raises(AssertionError, match="together, in its order"):
            side_by_side(x, *(layers[name] for name in wrong))


def test_outliers_of_ten_thousand_give_no_nan_and_keep_the_rest():
    """One value takes the scale; what is 20,000 times smaller is rounded away, but nothing else."""
    torch.manual_seed(0)
    x, grad = torch.randn(256, 128), torch.randn(256, 192)
    x[7, 5], grad[9, 3] = 1e4, -1e4
    errors = errors_of_a_layer(x, grad, use=True)
    assert all(error < 0.1 for error in errors)  # False for NaN


def mlp_in_float8():
    torch.manual_seed(0)
    mlp = MLP(GPTConfig(n_embd=32, n_head=2, n_hidden=64))
    for weight in mlp.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    float8.use_float8(SimpleNamespace(blocks=[mlp]), torch.optim.SGD(mlp.parameters()), EAGER)
    return mlp


def test_inputs_of_zero_leave_their_gradient_as_it_is():
    errors = errors_of_a_layer(torch.zeros(16, 32), torch.randn(16, 32), use=True)
    assert errors[1] < 0.2  # of x; the others are 0 / 0 here


@pytest.mark.parametrize("zero", ["x", "grad"])
def test_zeros_give_zeros(zero):
    mlp = mlp_in_float8()
    x, grad = torch.randn(2, 2, 16, 32)
    (x if zero == "x" else grad).zero_()
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(x)
    y.backward(grad.bfloat16())
    assert zero == "grad" or not y.any()
    assert all(not weight.grad.any() for weight in mlp.parameters())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_seen_in_those_of_all_weights(value):
    """e5m2's conversions may make infinity the largest value: the scale carries it on."""
    mlp = mlp_in_float8()
    x, grad = torch.randn(2, 2, 16, 32)
    grad[1, 7, 3] = value
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x).backward(grad.bfloat16())
    assert all(not weight.grad.isfinite().any() for weight in mlp.parameters())


def test_weights_are_copied_once_per_step_and_saved_nowhere():
    model = small_model()
    plain, names = small_model(), set(model.state_dict())
    optimizer = in_float8(model)
    assert set(model.state_dict()) == names
    layer = model.blocks[1].mlp.down_proj
    before = layer.weight8.clone()
    loss_of(model).backward()
    loss_of(model).backward()
    with torch.no_grad():
        layer.weight.mul_(2.0)  # unseen: the copy is made after the optimizer's step
    assert torch.equal(layer.weight8.float(), before.float())
    optimizer.step()
    copied = layer.weight8.float() * layer.weight8_scale
    assert relative_error(copied, layer.weight) < 0.05
    assert not torch.equal(layer.weight8.float(), before.float())
    # what is not training is computed as without FP8
    plain.load_state_dict(model.state_dict())
    assert torch.equal(loss_of(model.eval()), loss_of(plain.eval()))


@pytest.mark.parametrize("kind", ["none", "selective", "block"])
def test_training_in_float8_follows_bfloat16(kind):
    from steady.recompute import use_activation_checkpointing

    curves = []
    for use in (False, True):
        model = small_model()
        optimizer = in_float8(model) if use else optim.build_optimizer(model, ADAMW)
        use_activation_checkpointing(model, kind)
        curves.append([])
        for _ in range(30):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curves[-1].append(loss.item())
    bfloat16, fp8 = curves
    assert bfloat16[-1] < bfloat16[0] - 1.0
    assert max(abs(a - b) for a, b in zip(bfloat16, fp8, strict=True)) < 0.1
    assert fp8 != bfloat16


@pytest.mark.parametrize("kind", ["none", "selective", "block"])
def test_f55_no_conversion_is_used_both_as_it_is_and_transposed(kind):
    """Not in what torch's compiler is given: which of it shares a kernel, only a GPU shows."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs, model = [], small_model()
    in_float8(model)
    use_activation_checkpointing(model, kind)

    def keep(module, inputs):
        graphs.append(module.graph)
        return module

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    run = torch.compile(model.run_blocks, backend=backend, dynamic=False)
    x = torch.randn(4, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        run(x, (model.rope_cos, model.rope_sin)).sum().backward()
    assert len(graphs) == 2  # forward and backward
    uses = [
        {"permute" in str(user.target) for user in node.users}
        for node in (node for graph in graphs for node in graph.nodes)
        if "copy" in str(node.target) and node.meta["val"].dtype == float8.E4M3
    ]
    assert {True} in uses and {False} in uses and {True, False} not in uses


@pytest.mark.parametrize(
    "device, capability, more, message",
    [
        ("cpu", None, {}, r"needs a GPU with FP8 units \(Ada, Hopper, Blackwell\), not cpu"),
        ("cuda", (8, 0), {}, "needs a GPU with FP8 units"),
        ("cuda", (9, 0), {"dtype": torch.float16}, "goes with dtype=bfloat16, not float16"),
        ("cuda", (9, 0), {"here": Place(0, 0, 2, "fsdp")}, "not work with parallel=fsdp: use"),
        ("cuda", (9, 0), {"config": {"n_head": 8, "n_embd": 512}}, "narrower than n_embd=768"),
        ("cuda", (9, 0), {"config": {"block_size": 1000}}, "but block_size is 1000"),
        ("cuda", (9, 0), {"config": {"n_hidden": 2056}}, "multiples of 16, but n_hidden is 2056"),
    ],
)
def test_where_it_cannot_be_had_it_is_refused_by_name(
    monkeypatch, device, capability, more, message
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    good = {"dtype": torch.bfloat16, "here": Place(0, 0, 2, "ddp")}
    sizes = {"n_layer": 1, "n_head": 8, "n_embd": 1024}

    def require(config, fp8=True, **more):
        step = StepShape(GPTConfig(**sizes | config), 8, plan=EAGER, fp8=fp8, **good | more)
        float8.require_float8(step, torch.device(device))

    config = more.pop("config", {})
    require(config, fp8=False, **more)
    if capability == (9, 0):
        require({})
    with pytest.raises(ValueError, match=message):
        require(config, **more)
