from steady.linear import Linear, linear

import pytest
import torch
from torch.nn import functional as F


def one_of(function):
    return lambda *arguments: function(*arguments)[0]


def gradients(function, x, weight, dtype=torch.bfloat16):
    """Output, and gradients by x and weight, of the sum of squares under autocast, if any."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        y = function(x, weight)
    y.float().square().sum().backward()
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_it_is_linear_under_autocast(dtype, shape, input_dtype):
    torch.manual_seed(0)
    case = torch.randn(shape).to(input_dtype), torch.randn(6, 8)
    expected = gradients(F.linear, *case, dtype)
    for found, right in zip(gradients(one_of(linear), *case, dtype), expected, strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype, tolerance", [(None, 1e-6), (torch.bfloat16, 0.01)])
def test_several_layers_of_one_input_are_as_each_alone(dtype, tolerance):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 8), torch.randn(10, 8)
    found = gradients(lambda x, w: torch.cat(linear(x, w[:6], w[6:]), dim=-1), x, weight, dtype)
    each = gradients(
        lambda x, w: torch.cat([F.linear(x, w[:6]), F.linear(x, w[6:])], dim=-1), x, weight, dtype
    )
    for ours, torchs in zip(found, each, strict=True):
        assert (ours - torchs).norm() < tolerance * torchs.norm()


def test_without_autocast_it_is_exact_twice_over():
    x, *two = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for weights in two[:1], two:
        assert torch.autograd.gradcheck(linear, (x, *weights))
        assert torch.autograd.gradgradcheck(linear, (x, *weights))


def test_sampling_converts_every_weight_once():
    """autocast keeps converted weights; the layer of its own, used in training, would not."""
    layer, converted = Linear(4, 4), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0] is layer.weight:
                converted.append(1)
            return function(*args, **kwargs or {})

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Watch():
        for _ in range(3):
            layer(torch.ones(1, 4))
    assert len(converted) == 1
