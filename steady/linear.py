"""Linear layers whose weight gradients are in float32 from the matrix product on.

A GPU's matrix kernel sums in float32 what it multiplies in bfloat16. Under autocast torch rounds a
weight's gradient to bfloat16 and converts it back to float32, in which gradients are added up. Here
the kernel writes its sums as they are: more exact, and a pass over all gradients less. (Not for the
head, whose gradient loss.py adds up chunk by chunk: float32 would take longer there; and not with
parallel=fsdp, which casts weights, and so their gradients, around every block.)
"""

from collections.abc import Sequence

from steady.float8 import float8_linears

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """What matrix products of `tensor` run in: autocast's dtype where it is on, else its own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class Linear(nn.Linear):
    """nn.Linear without a bias: (B, T, in_features) to (B, T, out_features).

    Where `float8.use_float8` has given it an FP8 copy of its weight, perhaps together with those of
    other layers of the same input, training multiplies that.
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
        return side_by_side(x, self)[0]


def side_by_side(x: Tensor, *layers: Linear) -> tuple[Tensor, ...]:
    """The outputs of several layers for the same x (B, T, in). All but the last are one product,
    which takes less time than several, except for a single token, where joining the weights takes
    longer. The last (attention's values) is a tensor of its own: attention keeps it for backward,
    and a slice would keep all that it was cut from."""
    if layers[0].in_float8:
        return float8_linears(x, *layers)
    *weights, last = [layer.weight for layer in layers]
    if x.shape[1] == 1:
        together = [linear(x, weight)[0] for weight in weights]
    else:
        together = linear(x, *weights) if weights else ()
    return *together, *linear(x, last)


def linear(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x (..., in) @ weight.T (in, out) in autocast's dtype for each weight; returns (..., out)."""
    dtype = compute_dtype(x)
    if torch.is_grad_enabled() and dtype.itemsize < 4:
        return _Linear.apply(x.to(dtype), *weights)
    return F.linear(x, joined(weights)).split([len(weight) for weight in weights], dim=-1)


def joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


class _Linear(torch.autograd.Function):
    """Forward is one product for all weights, backward one for each. One for all would need the
    gradients of the outputs side by side, and torch's compiler computes what it writes so under
    masks: 240 us a layer of 124M for queries and keys, where the bytes need 47 (H200)."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.dtype, ctx.sizes = weights[0].dtype, [len(weight) for weight in weights]
        weight = joined(weights).to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight).split(ctx.sizes, dim=-1)

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors
        inputs, grads_x, grads_weight = x.flatten(0, -2), [], []
        if not x.is_cuda and len(grads) > 1:  # there joining takes less than a second product
            grad = torch.cat(grads, dim=-1)
            grad_weight = grad.flatten(0, -2).T @ inputs
            return grad @ weight, *grad_weight.to(ctx.dtype).split(ctx.sizes)
        for grad, part in zip(grads, weight.split(ctx.sizes), strict=True):
            grads_x.append(grad @ part)
            grad_t = grad.flatten(0, -2).T
            if grad.is_cuda and ctx.dtype != grad.dtype:
                grads_weight.append(torch.mm(grad_t, inputs, out_dtype=ctx.dtype))
            else:
                grads_weight.append((grad_t @ inputs).to(ctx.dtype))
        return sum(grads_x[1:], grads_x[0]), *grads_weight
