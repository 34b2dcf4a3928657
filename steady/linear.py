"""Linear layers whose weight gradients are in float32 from the matrix product on.

A GPU's matrix kernel sums in float32 what it multiplies in bfloat16. Under autocast torch rounds a
weight's gradient to bfloat16 and converts it back to float32, in which gradients are added up. Here
the kernel writes its sums as they are: more exact, and a pass over all gradients less.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """What matrix products of `tensor` run in: autocast's dtype where it is on, else its own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class Linear(nn.Linear):
    """nn.Linear without a bias: (..., in_features) to (..., out_features)."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: GPT.init_weights draws them, and drawing twice takes seconds."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


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
