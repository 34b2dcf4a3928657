"""Matrix products in FP8, of the linear layers in the blocks: forward and both of backward.

A GPU that has FP8 multiplies it twice as fast as bfloat16. e4m3, with three bits for the fraction
and values up to 448, holds inputs and weights; e5m2, with a larger range, gradients (Micikevicius
et al. 2022, "FP8 formats for deep learning"). Every tensor has one scale, by which it is divided so
that its largest value is the largest of the format; it comes from the tensor itself, so that there
is nothing to save for a resume. Weights stay in float32; their FP8 copies are made anew after every
step of the optimizer.

Ada's and Hopper's FP8 kernels want both matrices contiguous along the dimension that is summed
over. Forward sums over the inputs, the input's gradient over the outputs, the weight's over the
tokens: so backward transposes the weight's copy, the gradient and the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steady.environment import Plan
from steady.kernels import runs_kernels, tl, triton
from steady.optim import AdamW, compiled_if_possible

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
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
def use_float8(model: nn.Module, optimizer: AdamW, plan: Plan) -> None:
    """Have the linear layers of `model`'s blocks multiply in FP8 when training; their copies of the
    weights are made now and after every step of `optimizer`. Decide before compiling."""
    blocks = []
    for block in model.blocks:
        layers = [module for module in block.modules() if isinstance(module, nn.Linear)]
        for layer in layers:
            layer.weight8 = torch.empty_like(layer.weight, dtype=E4M3)
            layer.weight8_scale = layer.weight.new_empty(())
        blocks.append([(layer.weight, layer.weight8, layer.weight8_scale) for layer in layers])
    # Compiled, it takes half of the memory traffic. One call per weight would take the host longer;
    # one for all blocks would take long to compile. CUDA graphs hold the addresses: in place.
    write = compiled_if_possible(write_copies, dynamic=False) if plan.compiled else write_copies

    @torch.no_grad()
    def after_step(*_):
        for weights_and_copies in blocks:
            write(weights_and_copies)

    after_step()
    optimizer.register_step_post_hook(after_step)


def write_copies(weights_and_copies: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Of every weight, write the FP8 copy and its scale."""
    for weight, weight8, weight8_scale in weights_and_copies:
        scale = scale_of(weight, E4M3)
        weight8_scale.copy_(scale)
        weight8.copy_(cast(weight, scale, E4M3))


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What to divide `x` (rows, columns) by, so that it uses all of `dtype`'s range (scalar)."""
    # first of each row: compiled code does that inside the kernel that writes the row
    largest = x.abs().amax(dim=1).amax().float()
    return largest.clamp(min=1e-12) / torch.finfo(dtype).max


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in FP8."""
    return (x.float() * scale.reciprocal()).to(dtype)


def float8_linear(x: Tensor, weight: Tensor, weight8: Tensor, weight8_scale: Tensor) -> Tensor:
    """x (..., in) @ weight.T (in, out) in FP8; returns (..., out) in bfloat16.

    weight8, weight8_scale: see `write_copies`. The weight's gradient is returned in float32.
    """
    rows = x.flatten(0, -2).bfloat16()
    return _Float8Linear.apply(rows, weight, weight8, weight8_scale).unflatten(0, x.shape[:-1])


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, weight8, weight8_scale):
        scale = scale_of(x, E4M3)
        x8 = cast(x, scale, E4M3)
        ctx.save_for_backward(x8, scale, weight8, weight8_scale)
        return product(x8, weight8, scale, weight8_scale)

    @staticmethod
    def backward(ctx, grad):
        x8, x_scale, weight8, weight8_scale = ctx.saved_tensors
        scale = scale_of(grad, E5M2)
        grad8, grad8_t = cast_and_transpose(grad, scale, E5M2)
        grad_x = product(grad8, weight8.T.contiguous(), scale, weight8_scale)
        grad_weight = product(grad8_t, x8.T.contiguous(), scale, x_scale, torch.float32)
        return grad_x, grad_weight, None, None


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
    return _cast_and_transpose(x.contiguous(), scale, dtype)


if triton is not None:

    @torch.library.triton_op("steady::cast_and_transpose", mutates_args={})
    def _cast_and_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One kernel that writes both: torch's compiler reads x twice for that."""
        rows, columns = x.shape
        x8 = torch.empty((rows, columns), dtype=dtype, device=x.device)
        x8_t = torch.empty((columns, rows), dtype=dtype, device=x.device)
        tiles = triton.cdiv(rows, 64), triton.cdiv(columns, 64)
        torch.library.wrap_triton(_cast_and_transpose_kernel)[tiles](
            x, scale, x8, x8_t, rows, columns, TILE=64, num_warps=4
        )
        return x8, x8_t

    @triton.jit
    def _cast_and_transpose_kernel(x, scale, x8, x8_t, rows, columns, TILE: tl.constexpr):
        """One program per tile."""
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
        inside = (row < rows) & (column < columns)
        values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        values = (values * (1.0 / tl.load(scale))).to(x8.dtype.element_ty)
        tl.store(x8 + row * columns + column, values, mask=inside)
        tl.store(x8_t + column * rows + row, values, mask=inside)
