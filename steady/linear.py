"""Linear layers whose weight gradients are in float32 from the matrix product on.

A GPU's matrix kernel sums in float32 what it multiplies in bfloat16. Under autocast torch rounds a
weight's gradient to bfloat16 and converts it back to float32, in which gradients are added up. Here
the kernel writes its sums as they are: more exact, and a pass over all gradients less. (Not for the
head, whose gradient loss.py adds up chunk by chunk: float32 would take longer there.)
"""

from steady.float8 import float8_linear

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """What matrix products of `tensor` run in: autocast's dtype where it is on, else its own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class Linear(nn.Linear):
    """nn.Linear without a bias: (..., in_features) to (..., out_features).

    Where `float8.use_float8` has given it an FP8 copy of its weight, training multiplies that.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        for name in ("weight8", "weight8_scale"):
            self.register_buffer(name, None, persistent=False)

    def reset_parameters(self) -> None:
        """Nothing: GPT.init_weights draws them, and drawing twice takes seconds."""

    @property
    def in_float8(self) -> bool:
        return self.training and self.weight8 is not None

    def forward(self, x: Tensor) -> Tensor:
        if self.in_float8:
            return float8_linear(x, self.weight, self.weight8, self.weight8_scale)
        return linear(x, self.weight)


def side_by_side(x: Tensor, *layers: Linear) -> tuple[Tensor, ...]:
    """The outputs of several layers for the same x (B, T, in): one product, which takes less time
    than several, except for a single token, where copying the weights for it takes longer, and in
    FP8, where every weight has a copy and a scale of its own."""
    if x.shape[1] == 1 or layers[0].in_float8:
        return tuple(layer(x) for layer in layers)
    y = linear(x, torch.cat([layer.weight for layer in layers]))
    return y.split([layer.out_features for layer in layers], dim=-1)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., in) @ weight.T (in, out) in autocast's dtype; returns (..., out)."""
    dtype = compute_dtype(x)
    if dtype == weight.dtype or not torch.is_grad_enabled():
        return F.linear(x, weight)
    return _Linear.apply(x.to(dtype), weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.dtype, weight = weight.dtype, weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows, columns = grad.flatten(0, -2).T, x.flatten(0, -2)
        if grad.is_cuda:
            grad_weight = torch.mm(rows, columns, out_dtype=ctx.dtype)
        else:
            grad_weight = (rows @ columns).to(ctx.dtype)
        return grad @ weight, grad_weight
