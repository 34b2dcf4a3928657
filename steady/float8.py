"""Matrix products in FP8, of the linear layers in the blocks: forward and both of backward.

A GPU that has FP8 multiplies it twice as fast as bfloat16. e4m3, with three bits for the fraction
and values up to 448, holds inputs and weights; e5m2, with a larger range, gradients (Micikevicius
et al. 2022, "FP8 formats for deep learning"). Every tensor has one scale, by which it is divided so
that its largest value is the largest of the format; it comes from the tensor itself, so that there
is nothing to save for a resume. Weights stay in float32; their FP8 copies are made anew after every
step of the optimizer.

Ada's and Hopper's FP8 kernels want both matrices contiguous along the dimension that is summed
over. y = x W^T sums over the features of x, the gradient of x over those of y, the gradient of W
over tokens: so backward transposes the weight's copy, the gradient of y, and x.

Besides the products, time goes into passes over what is multiplied: one for its maximum, one for
the cast. So layers with the same input share both, and an MLP is one function, whose backward
writes all it needs of SwiGLU in one pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steady.kernels import compiled_if_possible, runs_kernels, tl, triton

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from steady.environment import Plan
    from steady.memory import StepShape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_WIDTH = 1024  # from which on FP8 makes a step faster (H200, see docs/results.md)
MULTIPLE = 16  # FP8 kernels take matrices whose sides are multiples of this


def require_float8(step: StepShape, device: torch.device) -> None:
    """Raises ValueError for a step in FP8 that `device` does not have, or that would be slower."""
    config = step.model_config
    if not step.fp8:
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"fp8=True needs a GPU with FP8 units (Ada, Hopper, Blackwell), not {device}: "
            "use fp8=False"
        )
    if step.dtype != torch.bfloat16:
        name = str(step.dtype).removeprefix("torch.")
        raise ValueError(f"fp8=True goes with dtype=bfloat16, not {name}")
    if step.here.shards_model:
        raise ValueError("fp8=True does not work with parallel=fsdp: use parallel=ddp or fp8=False")
    if config.n_embd < MIN_WIDTH:
        raise ValueError(
            f"fp8=True makes models narrower than n_embd={MIN_WIDTH} slower, and this one has "
            f"n_embd={config.n_embd}: use fp8=False"
        )
    sizes = {
        "block_size": config.block_size,
        "n_embd": config.n_embd,
        "n_hidden": config.n_hidden,
        "n_head * head_dim": config.n_head * config.head_dim,
        "n_kv_head * head_dim": config.n_kv_head * config.head_dim,
    }
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise ValueError(f"fp8=True needs multiples of {MULTIPLE}, but {name} is {size}")


@torch.no_grad()
def use_float8(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Have the linear layers of `model`'s blocks multiply in FP8 when training; their copies of the
    weights are made now and after every step of `optimizer`. Decide before compiling."""
    blocks = [[m for m in block.modules() if isinstance(m, nn.Linear)] for block in model.blocks]
    for layer in itertools.chain(*blocks):
        layer.weight8 = torch.empty_like(layer.weight, dtype=E4M3)
        layer.weight8_scale = layer.weight.new_empty(())
    # listed once, since looking up a thousand attributes after every step would keep the host busy
    blocks = [[(m.weight, m.weight8, m.weight8_scale) for m in layers] for layers in blocks]
    weights, _, scales = zip(*itertools.chain(*blocks), strict=True)
    # Compiled, it takes half of the memory traffic. One call per weight would take the host longer;
    # one for all blocks would take long to compile. CUDA graphs hold the addresses: in place.
    write = compiled_if_possible(write_copies, dynamic=False) if plan.compiled else write_copies

    @torch.no_grad()
    def after_step(*_):
        largest = torch.stack(torch._foreach_norm(weights, math.inf))
        torch._foreach_copy_(scales, scale_for(largest, E4M3).unbind())
        for block in blocks:
            write(block)

    after_step()
    optimizer.register_step_post_hook(after_step)


def write_copies(layers: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """For every weight, copy and scale: write the copy."""
    for weight, weight8, weight8_scale in layers:
        weight8.copy_(cast(weight, weight8_scale, E4M3))


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What to divide values up to `largest` by, so that they use all of `dtype`'s range."""
    return largest.float().clamp(min=1e-12) / torch.finfo(dtype).max


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of x (rows, columns)."""
    # each row's maximum first: compiled code finds that in the kernel that writes the row
    return scale_for(x.abs().amax(dim=1).amax(), dtype)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in FP8."""
    return (x.float() * scale.reciprocal()).to(dtype)


def float8_linears(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """x (..., in) @ weight.T (in, out) of every layer, in FP8; returns (..., out) in bfloat16.

    The weights' gradients are returned in float32.
    """
    outputs = _Float8Linears.apply(x.flatten(0, -2).bfloat16(), *tensors_of(layers))
    return tuple(y.unflatten(0, x.shape[:-1]) for y in outputs)


def float8_mlp(x: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    """down(silu(gate(x)) * up(x)) in FP8, of x (..., in); returns (..., in) in bfloat16."""
    rows = x.flatten(0, -2).bfloat16()
    return _Float8MLP.apply(rows, *tensors_of((gate, up, down))).unflatten(0, x.shape[:-1])


def tensors_of(layers: Sequence[nn.Linear]) -> list[Tensor]:
    """All weights, then all copies, then all scales."""
    names = "weight", "weight8", "weight8_scale"
    return [getattr(layer, name) for name in names for layer in layers]


class _Float8Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *tensors):
        n = len(tensors) // 3  # the weights themselves only take their gradients
        weights8, weight_scales = tensors[n : 2 * n], tensors[2 * n :]
        x_scale = scale_of(x, E4M3)
        x8 = cast(x, x_scale, E4M3)
        ctx.save_for_backward(x8, x_scale, *weights8, *weight_scales)
        pairs = zip(weights8, weight_scales, strict=True)
        return tuple(product(x8, weight8, x_scale, scale) for weight8, scale in pairs)

    @staticmethod
    def backward(ctx, *grads):
        x8, x_scale, *tensors = ctx.saved_tensors
        n, x8_t = len(grads), x8.T.contiguous()
        found = [
            gradients(grad, scale_of(grad, E5M2), x8_t, x_scale, weight8, weight_scale)
            for grad, weight8, weight_scale in zip(grads, tensors[:n], tensors[n:], strict=True)
        ]
        grads_x, grads_weight = zip(*found, strict=True)
        return sum(grads_x[1:], grads_x[0]), *grads_weight, *[None] * (2 * n)


class _Float8MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *tensors):
        gate8, up8, down8, gate_scale, up_scale, down_scale = tensors[3:]
        x_scale = scale_of(x, E4M3)
        x8 = cast(x, x_scale, E4M3)
        gate, up = product(x8, gate8, x_scale, gate_scale), product(x8, up8, x_scale, up_scale)
        hidden = F.silu(gate) * up
        # seen as rows of 1024 where the size allows it: so many a kernel compares at once
        pieces = hidden.view(-1, 1024) if hidden.numel() % 1024 == 0 else hidden
        hidden_scale = scale_of(pieces, E4M3)
        ctx.save_for_backward(x8, x_scale, gate, up, hidden_scale, *tensors[3:])
        return product(cast(hidden, hidden_scale, E4M3), down8, hidden_scale, down_scale)

    @staticmethod
    def backward(ctx, grad):
        x8, x_scale, gate, up, hidden_scale, *tensors = ctx.saved_tensors
        gate8, up8, down8, gate_scale, up_scale, down_scale = tensors
        scale = scale_of(grad, E5M2)
        grad8, grad8_t = cast_and_transpose(grad, scale, E5M2)
        grad_hidden = product(grad8, down8.T.contiguous(), scale, down_scale)
        # of gate's and up's outputs
        grad_gate, grad_up, hidden8_t, grad_gate_scale, grad_up_scale = swiglu_backward(
            gate, up, grad_hidden, hidden_scale
        )
        down_weight = product(grad8_t, hidden8_t, scale, hidden_scale, torch.float32)
        of_x = x8.T.contiguous(), x_scale
        by_gate, gate_weight = gradients(grad_gate, grad_gate_scale, *of_x, gate8, gate_scale)
        by_up, up_weight = gradients(grad_up, grad_up_scale, *of_x, up8, up_scale)
        return by_gate + by_up, gate_weight, up_weight, down_weight, *[None] * 6


def gradients(
    grad: Tensor,
    scale: Tensor,
    x8_t: Tensor,
    x_scale: Tensor,
    weight8: Tensor,
    weight_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of one product's x (in bfloat16) and weight (in float32)."""
    grad8, grad8_t = cast_and_transpose(grad, scale, E5M2)
    grad_x = product(grad8, weight8.T.contiguous(), scale, weight_scale)
    return grad_x, product(grad8_t, x8_t, scale, x_scale, torch.float32)


def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a (m, k) @ b (n, k).T, both in FP8, scaled back; returns (m, n) in `dtype`."""
    if not a.is_cuda:  # where torch's kernel takes a second for a few million products
        return (a.float() @ b.float().T * (a_scale * b_scale)).to(dtype)
    # Fast accumulation, which on Hopper has about 14 bits in place of float32, saves 2% of a step.
    return torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=True)


def cast_and_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale (rows, columns) in FP8, and its transpose."""
    if not runs_kernels(x):
        x8 = cast(x, scale, dtype)
        return x8, x8.T.contiguous()
    rows, columns = x.shape
    x8 = x.new_empty((rows, columns), dtype=dtype)
    x8_t = x.new_empty((columns, rows), dtype=dtype)
    tiles = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
    _cast_and_transpose_kernel[tiles](
        x.contiguous(), scale, x8, x8_t, rows, columns, TILE=TILE, num_warps=4
    )
    return x8, x8_t


def swiglu_backward(
    gate: Tensor, up: Tensor, grad: Tensor, hidden_scale: Tensor
) -> tuple[Tensor, ...]:
    """Backward of hidden = silu(gate) * up, all (rows, columns) in bfloat16.

    Returns the gradients of gate and up, hidden / hidden_scale in FP8 and transposed, and the
    scales that the two gradients need.
    """
    if runs_kernels(gate):
        rows, columns = gate.shape
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        hidden8_t = gate.new_empty((columns, rows), dtype=E4M3)
        tiles = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
        largest = gate.new_empty((2, tiles[0] * tiles[1]), dtype=torch.float32)
        _swiglu_backward_kernel[tiles](
            gate, up, grad, hidden_scale, grad_gate, grad_up, hidden8_t, largest, rows, columns,
            TILE=TILE, num_warps=8,
        )  # fmt: skip
        scales = (scale_for(of_tiles.amax(), E5M2) for of_tiles in largest)
        return grad_gate, grad_up, hidden8_t, *scales
    gate, up, grad = gate.float(), up.float(), grad.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    both = grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu
    hidden8_t = cast(silu * up, hidden_scale, E4M3).T.contiguous()
    scales = (scale_for(values.abs().amax(), E5M2) for values in both)
    return *(values.bfloat16() for values in both), hidden8_t, *scales


TILE = 64  # rows and columns that one program of a kernel treats

if triton is not None:
    # Compiled by torch, these two would read or write column by column, at half the speed.

    @triton.jit
    def _cast_and_transpose_kernel(x, scale, x8, x8_t, rows, columns, TILE: tl.constexpr):
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
        inside = (row < rows) & (column < columns)
        values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        values = (values * (1.0 / tl.load(scale))).to(x8.dtype.element_ty)
        tl.store(x8 + row * columns + column, values, mask=inside)
        tl.store(x8_t + column * rows + row, values, mask=inside)

    @triton.jit
    def _swiglu_backward_kernel(
        gate, up, grad, hidden_scale, grad_gate, grad_up, hidden8_t, largest, rows, columns,
        TILE: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
        inside = (row < rows) & (column < columns)
        at = row * columns + column
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        by_hidden = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(g)
        silu = g * sigmoid
        by_gate, by_up = by_hidden * u * (sigmoid + silu * (1.0 - sigmoid)), by_hidden * silu
        tl.store(grad_gate + at, by_gate.to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + at, by_up.to(grad_up.dtype.element_ty), mask=inside)
        hidden8 = (silu * u * (1.0 / tl.load(hidden_scale))).to(hidden8_t.dtype.element_ty)
        tl.store(hidden8_t + column * rows + row, hidden8, mask=inside)
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tiles = tl.num_programs(0) * tl.num_programs(1)
        tl.store(largest + tile, tl.max(tl.abs(by_gate)))
        tl.store(largest + tiles + tile, tl.max(tl.abs(by_up)))
