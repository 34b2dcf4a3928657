"""Linear layers whose weight gradients are in float32 from the matrix product on.

A GPU's matrix kernel sums in float32 what it multiplies in bfloat16. Under autocast torch rounds a
weight's gradient to bfloat16 and converts it back to float32, in which gradients are added up. Here
the kernel writes its sums as they are: more exact, and a pass over all gradients less. (Not for the
head, whose gradient loss.py adds up chunk by chunk: float32 would take longer there; and not with
parallel=fsdp, which casts weights, and so their gradients, around every block.)

Where gradients stay in place from micro-step to micro-step (`keep` of optim.Gradients), backward
adds to them itself and returns none: for autograd to add them would take a pass over all of them,
the product can begin with the sum so far.
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
        self.adds_to_grad = False  # set by optim.Gradients

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
    groups = [[layer] for layer in layers] if x.shape[1] == 1 else [layers[:-1], layers[-1:]]
    outputs = []
    for group in filter(None, groups):
        outputs += linear(x, *[layer.weight for layer in group], sums=gradient_sums(group))
    return tuple(outputs)


def gradient_sums(layers: Sequence[nn.Module]) -> list[Tensor]:
    """What the backward pass of `layers` adds their weights' gradients to; nothing where it returns
    them, which is where they are not kept, or somebody has set them to None."""
    kept = all(layer.adds_to_grad and layer.weight.grad is not None for layer in layers)
    return [layer.weight.grad for layer in layers] if kept and torch.is_grad_enabled() else []


def linear(x: Tensor, *weights: Tensor, sums: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """x (..., in) @ weight.T (in, out) in autocast's dtype for each weight; returns (..., out).

    sums: what backward adds the weights' gradients to, instead of returning them, unless products
    are in float32.
    """
    dtype = compute_dtype(x)
    if torch.is_grad_enabled() and dtype.itemsize < 4:
        return _Linear.apply(x.to(dtype), len(weights), *weights, *sums)
    return F.linear(x, joined(weights)).split([len(weight) for weight in weights], dim=-1)


def joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


class _Linear(torch.autograd.Function):
    """Forward is one product for all weights, backward one for each. One for all would need the
    gradients of the outputs side by side, and torch's compiler computes what it writes so under
    masks: 240 us a layer of 124M for queries and keys, where the bytes need 47 (H200)."""

    @staticmethod
    def forward(ctx, x, n, *tensors):
        weights, ctx.sums = tensors[:n], tensors[n:]  # not saved: they change before backward
        ctx.dtype, ctx.sizes = weights[0].dtype, [len(weight) for weight in weights]
        weight = joined(weights).to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight).split(ctx.sizes, dim=-1)

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors
        inputs, grads_x, grads_weight = x.flatten(0, -2), [], []
        join = len(grads) > 1 and not x.is_cuda  # where that takes less than a second product
        if join and not ctx.sums:
            grad = torch.cat(grads, dim=-1)
            grad_weight = grad.flatten(0, -2).T @ inputs
            return grad @ weight, None, *grad_weight.to(ctx.dtype).split(ctx.sizes)
        for i, (grad, part) in enumerate(zip(grads, weight.split(ctx.sizes), strict=True)):
            grads_x.append(grad @ part)
            grad_t = grad.flatten(0, -2).T
            if ctx.sums:
                torch.ops.steady.add_product(ctx.sums[i], grad_t, inputs)
                grads_weight.append(None)
            elif grad.is_cuda and ctx.dtype != grad.dtype:
                grads_weight.append(torch.mm(grad_t, inputs, out_dtype=ctx.dtype))
            else:
                grads_weight.append((grad_t @ inputs).to(ctx.dtype))
        return sum(grads_x[1:], grads_x[0]), None, *grads_weight, *[None] * len(ctx.sums)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in total's dtype from the product's sums on."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += (a @ b).to(total.dtype)


# An operator of its own, since torch's compiler would write a product and an addition.
if not hasattr(torch.ops.steady, "add_product"):  # dev/compare.py imports this file several times
    operators = torch.library.Library("steady", "FRAGMENT")
    operators.define("add_product(Tensor(a!) total, Tensor a, Tensor b) -> ()")
    operators.impl("add_product", add_product, "CompositeExplicitAutograd")
    torch.library.register_fake("steady::add_product", lambda *_: None, lib=operators)


class Embedding(nn.Embedding):
    """nn.Embedding whose backward pass may add to the gradient that is there, row by row."""

    adds_to_grad = False  # set by optim.Gradients

    def forward(self, tokens: Tensor) -> Tensor:
        if sums := gradient_sums([self]):
            return _Embedding.apply(tokens, self.weight, *sums)
        return super().forward(tokens)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight, total):
        ctx.save_for_backward(tokens)
        ctx.total = total
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        ctx.total.index_add_(0, tokens.flatten(), grad.flatten(0, -2).to(ctx.total.dtype))
        return None, None, None
