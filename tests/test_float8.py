"""FP8 matmuls: their gradients, which layers use them, and where they are refused. They also run on
a CPU, slowly; test_gpu.py has the tests that need a GPU."""

import copy
import math

import pytest
import torch
from torch import nn

from model import GPT, MLP, GPTConfig
from steady import float8, optim
from steady.distributed import Process
from steady.recompute import use_activation_checkpointing

ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95,
         "weight_decay": 0.1}  # fmt: skip
# Rounding to b fraction bits has a relative error of at most 2**-(b + 1). Its RMS is 1 / sqrt(3) of
# that if errors are uniform. A product has this error twice, once per factor.
E4M3_ERROR, E5M2_ERROR = 2**-4 / 3**0.5, 2**-3 / 3**0.5
TOKENS = torch.randint(64, (2, 4, 32), generator=torch.Generator().manual_seed(0))


def small_model(**more):
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=2, n_embd=64, **more))


def in_float8(*layers):
    """A model with a block of these layers, in which all suitable linear layers use FP8."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Sequential(*layers)])
    assert float8.replace_layers(model)
    return model


def loss_of(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(*TOKENS)


def relative_error(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def errors_of_a_layer(x, grad, use):
    """Relative errors of a layer's output and gradients against float64, in FP8 or bfloat16."""
    layer = nn.Linear(x.shape[-1], grad.shape[-1], bias=False)
    torch.nn.init.normal_(layer.weight, std=0.02)
    exact_x = x.double().requires_grad_()
    exact_weight = layer.weight.detach().double().requires_grad_()
    exact = exact_x @ exact_weight.T
    exact.backward(grad.double())
    if use:
        in_float8(layer)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(grad.to(y.dtype))
    assert layer.weight.grad.dtype == torch.float32 and y.dtype == torch.bfloat16
    pairs = (y, exact), (x.grad, exact_x.grad), (layer.weight.grad, exact_weight.grad)
    return [relative_error(found.double(), right) for found, right in pairs]


def test_a_layers_gradients_have_the_errors_of_their_formats():
    """Against float64. bfloat16's errors are 0.2% to 0.3%, below those of the FP8 formats."""
    torch.manual_seed(0)
    x, grad = torch.randn(256, 128), 1e-6 * torch.randn(256, 192)
    bounds = (2**0.5 * E4M3_ERROR, *[(E4M3_ERROR**2 + E5M2_ERROR**2) ** 0.5] * 2)
    errors = errors_of_a_layer(x, grad, use=True)
    assert all(0.3 * bound < error < bound for error, bound in zip(errors, bounds, strict=True))
    in_bfloat16 = errors_of_a_layer(x, grad, use=False)
    assert max(in_bfloat16) < 0.004


def test_an_mlps_gradients_have_the_errors_of_its_products():
    """Against float64. Errors add up in the backward pass: x's gradient passes three matmuls."""
    torch.manual_seed(0)
    mlp = MLP(GPTConfig(n_embd=128, n_head=2, n_hidden=320))
    for std, weight in zip((0.1, 0.02, 0.1), mlp.parameters(), strict=True):
        torch.nn.init.normal_(weight, std=std)  # gate and up differ, and so do their scales
    exact = copy.deepcopy(mlp).double()
    in_float8(mlp)
    x, grad = torch.randn(4, 64, 128), 1e-6 * torch.randn(4, 64, 128)
    exact_x, x = x.double().requires_grad_(), x.requires_grad_()
    exact(exact_x).backward(grad.double())
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x).backward(grad.bfloat16())
    found = [x.grad, *(p.grad for p in mlp.parameters())]
    right = [exact_x.grad, *(p.grad for p in exact.parameters())]
    errors = [relative_error(a.double(), b) for a, b in zip(found, right, strict=True)]
    assert all(0.03 < error < 0.15 for error in errors), errors


def test_layers_that_share_an_input_and_one_with_a_bias():
    torch.manual_seed(0)
    block = nn.ModuleList([nn.Linear(128, 96, bias=False), nn.Linear(128, 32), nn.Linear(128, 48)])
    exact = copy.deepcopy(block).double()
    in_float8(block)
    x = torch.randn(64, 128)
    exact_x, x = x.double().requires_grad_(), x.requires_grad_()
    outputs, right = [layer(x) for layer in block], [layer(exact_x) for layer in exact]
    grads = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(right, [grad.double() for grad in grads])
    pairs = [(x.grad, exact_x.grad), *zip(outputs, right, strict=True)]
    pairs += [(p.grad, q.grad) for p, q in zip(block.parameters(), exact.parameters(), strict=True)
              if p.dim() == 2]  # fmt: skip
    errors = [relative_error(found.double(), exact) for found, exact in pairs]
    assert all(0.02 < error < 0.09 for error in errors), errors
    assert relative_error(block[1].bias.grad.double(), exact[1].bias.grad) < 0.01


def test_outliers_of_ten_thousand_give_no_nan_and_keep_the_rest():
    """One outlier sets the scale. Only values 20,000 times smaller are rounded away."""
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
    in_float8(mlp)
    return mlp


def test_inputs_of_zero_leave_their_gradient_as_it_is():
    errors = errors_of_a_layer(torch.zeros(16, 32), torch.randn(16, 32), use=True)
    assert errors[1] < 0.2  # for x; the others are 0 / 0 here


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


def test_no_rows_give_no_rows():
    """An expert may get no tokens."""
    mlp = mlp_in_float8()
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(torch.zeros(0, 32))
    y.sum().backward()
    assert y.shape == (0, 32) and not mlp.down_proj.weight.grad.any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_seen_in_those_of_all_weights(value):
    """Conversion to e5m2 may clamp infinity to the largest value, so the scale must carry it."""
    mlp = mlp_in_float8()
    x, grad = torch.randn(2, 2, 16, 32)
    grad[1, 7, 3] = value
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x).backward(grad.bfloat16())
    assert all(not weight.grad.isfinite().any() for weight in mlp.parameters())


def test_layers_keep_their_parameters_hooks_and_names_and_evaluate_as_before():
    model, plain = small_model(), small_model()
    weight, seen = model.blocks[1].mlp.down_proj.weight, []
    model.blocks[1].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    names = float8.replace_layers(model)
    assert len(names) == 14 and "lm_head" not in names
    assert model.blocks[1].mlp.down_proj.weight is weight
    assert model.blocks[0].attention.q_proj.head_dim == 32
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not torch.equal(loss_of(model), loss_of(plain)) and seen
    assert torch.equal(loss_of(model.eval()), loss_of(plain.eval()))


def test_layers_that_do_not_fit_or_are_not_known_stay_as_they_are():
    class Own(nn.Linear):
        pass

    block = nn.ModuleDict({"odd": nn.Linear(64, 40), "own": Own(64, 64), "conv": nn.Conv1d(4, 4, 1),
                           "even": nn.Linear(64, 48)})  # fmt: skip
    in_float8(block)
    kinds = {name: type(layer) for name, layer in block.items()}
    assert kinds == {"odd": nn.Linear, "own": Own, "conv": nn.Conv1d, "even": float8.Float8Linear}
    x = torch.randn(10, 64)  # not a multiple of 16 rows
    assert torch.equal(block["even"](x), nn.functional.linear(x, *block["even"].parameters()))


def test_second_derivatives_are_refused():
    layer = nn.Linear(32, 32, bias=False)
    in_float8(layer)
    x = torch.randn(16, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("kind", ["none", "selective"])
def test_training_in_float8_follows_bfloat16(kind):
    from steady.recompute import use_activation_checkpointing

    curves = []
    for use in (False, True):
        model = small_model()
        if use:
            float8.replace_layers(model)
        optimizer = optim.build_optimizer(model, ADAMW)
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


@pytest.mark.parametrize("kind", ["none", "selective"])
def test_f55_no_conversion_is_used_both_as_it_is_and_transposed(kind):
    """Checks the graphs before fusion. Only a GPU shows which operations share a kernel."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs, model = [], small_model()
    float8.replace_layers(model)
    use_activation_checkpointing(model, kind)

    def keep(module, inputs):
        graphs.append(module.graph)
        return module

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    run = torch.compile(model.blocks[0], backend=backend, dynamic=False)
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
    "device, capability, dtype, sizes, message",
    [
        ("cpu", None, torch.bfloat16, {}, r"needs a GPU with FP8 units \(Ada, .*\), not cpu"),
        ("cuda", (8, 0), torch.bfloat16, {}, "needs a GPU with FP8 units"),
        ("cuda", (9, 0), torch.float16, {}, "needs dtype=bfloat16, not float16"),
        ("cuda", (9, 0), torch.bfloat16, {"n_embd": 40, "n_hidden": 72}, "found no nn.Linear"),
    ],
)
def test_where_it_cannot_be_had_it_is_refused_by_name(
    monkeypatch, device, capability, dtype, sizes, message
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    model = GPT(GPTConfig(**{"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 64} | sizes))
    process = Process(device=torch.device(device), dtype=dtype)
    if capability == (9, 0):
        good = process._replace(dtype=torch.bfloat16)
        assert float8.use_float8(small_model(), good)
    with pytest.raises(ValueError, match=message):
        float8.use_float8(model, process)
