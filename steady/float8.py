"""FP8 matmuls in the blocks' linear layers: the forward one and the two of the backward pass.

FP8 matmuls run at twice bfloat16's rate. Inputs and weights use e4m3, which has three bits for the
fraction and values up to 448. Gradients use e5m2, which has a larger range (Micikevicius et al.
2022, "FP8 formats for deep learning"). Every tensor is divided by one scale, which maps its largest
value to the format's largest. The scale comes from the current values, so a checkpoint need not
save it. Weights stay in float32 and are cast in every forward pass.

The FP8 kernels of Ada and Hopper need both matrices contiguous along the dimension of the sum.
y = x W^T sums over the features of x, the gradient of x over those of y, and the gradient of W over
tokens. So the backward pass transposes the weight, the gradient of y, and x. torch's compiler does
the casts, and fuses those of layers that share an input.
"""

import os

import torch
from torch import Tensor, nn

from steady import UserError
from steady.distributed import Process
from steady.loss import kernels_work, tl, triton
from steady.recompute import repeated_blocks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # FP8 kernels need matrix sizes that are multiples of this
FAST_TERMS = 2**14  # longest sum with fast accumulation: trains like bfloat16 (docs/results.md)
TILE = 64  # rows and columns of a kernel's program


def use_float8(model: nn.Module, process: Process) -> list[str]:
    """Let the `nn.Linear` layers in the model's blocks train with FP8 matmuls, if their sizes are
    multiples of 16. Other layers stay as they are. Call this before compiling.

    Returns the names of the layers. Raises UserError if the device or dtype does not support FP8,
    or if there is no such layer.
    """
    device, dtype = process.device, str(process.dtype).removeprefix("torch.")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f"fp8=True needs a GPU with FP8 units (Ada, Hopper, Blackwell), not {device}: "
            "use fp8=False"
        )
    if process.dtype != torch.bfloat16:
        raise UserError(f"fp8=True needs dtype=bfloat16, not {dtype}")
    if torch.cuda.get_device_capability(device) == (9, 0):
        # cuBLAS clears its workspace before each matmul; 1.5B is 1% faster without one (H200)
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
    names = replace_layers(model)
    if not names:
        raise UserError(
            f"fp8=True found no nn.Linear in the blocks whose sizes are multiples of "
            f"{MULTIPLE}: use fp8=False"
        )
    return names


def replace_layers(model: nn.Module) -> list[str]:
    """Turn every suitable nn.Linear in the blocks into a Float8Linear, in place. It keeps its
    parameters, hooks and attributes. Returns the names of the layers."""
    inside = {module for block in repeated_blocks(model) for module in block.modules()}
    names = []
    for name, layer in model.named_modules():
        fits = type(layer) is nn.Linear and not any(n % MULTIPLE for n in layer.weight.shape)
        if fits and layer in inside:
            layer.__class__ = Float8Linear
            names.append(name)
    return names


class Float8Linear(nn.Linear):
    """nn.Linear with FP8 matmuls in training; evaluation uses the float32 weights."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if not self.training or not torch.is_grad_enabled() or not rows or rows % MULTIPLE:
            return super().forward(x)
        y = _Float8Matmul.apply(x.flatten(0, -2).bfloat16(), self.weight)
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Float8Matmul(torch.autograd.Function):
    """x (rows, in) @ weight.T (in, out) in bfloat16; the weight's gradient has its dtype."""

    @staticmethod
    def forward(ctx, x, weight):
        x_scale, weight_scale = scale_of(x, E4M3), scale_of(weight, E4M3)
        weight8 = cast(weight, weight_scale, E4M3)
        ctx.save_for_backward(
            cast_for_backward(x, x_scale), x_scale,
            cast_for_backward(weight, weight_scale), weight_scale,
        )  # fmt: skip
        ctx.dtype = weight.dtype
        return product(cast(x, x_scale, E4M3), weight8, x_scale, weight_scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        scale = scale_of(grad, E5M2)
        grad8, grad8_t = cast_and_transpose(grad, scale)
        grad_x = product(grad8, weight8.T.contiguous(), scale, weight_scale)
        return grad_x, product(grad8_t, x8.T.contiguous(), scale, x_scale, ctx.dtype)


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale by which to divide x (rows, columns) to fit into `dtype` (scalar, float32)."""
    # each row's maximum first: the kernel that writes the row can compute it
    return x.abs().amax(dim=1).amax().float().clamp(min=1e-12) / torch.finfo(dtype).max


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in FP8."""
    return (x.float() * scale.reciprocal()).to(dtype)


def cast_for_backward(x: Tensor, scale: Tensor) -> Tensor:
    """The same bytes as cast(x, scale, E4M3). The clamp changes no value, but it makes a different
    expression, so that torch's compiler keeps two conversions: ptxas before 13.3 miscompiles a
    conversion whose result is stored both plain and transposed (F55)."""
    largest = torch.finfo(E4M3).max
    return (x.float() * scale.reciprocal()).clamp(-largest, largest).to(E4M3)


def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a (m, k) @ b (n, k).T, both in FP8, scaled back; returns (m, n) in `dtype`."""
    if not a.is_cuda:  # torch's CPU kernel takes a second for a few million multiplications
        return (a.float() @ b.float().T * (a_scale * b_scale)).to(dtype)
    # Fast accumulation saves 2% of a 1.5B step. On Hopper it keeps 14 bits of the running sum, so
    # small values get lost: too few bits for sums over many tokens (F56).
    fast = a.shape[1] <= FAST_TERMS
    return torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


def cast_and_transpose(grad: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient (rows, columns) divided by `scale`, in e5m2, and its transpose (columns, rows)."""
    if not (grad.is_cuda and kernels_work()):
        grad8 = cast(grad, scale, E5M2)
        return grad8, grad8.T.contiguous()
    rows, columns = grad.shape
    grad8 = grad.new_empty((rows, columns), dtype=E5M2)
    grad8_t = grad.new_empty((columns, rows), dtype=E5M2)
    tiles = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
    _cast_and_transpose_kernel[tiles](
        grad.contiguous(), scale, grad8, grad8_t, rows, columns, TILE=TILE, num_warps=4
    )
    return grad8, grad8_t


if triton is not None:

    @triton.jit
    def _to_e5m2(x):
        """x in e5m2, four values per register, converted in PTX: the result of Triton's own
        conversion must not be stored both plain and transposed (F55)."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [x], dtype=tl.float8e5, is_pure=True, pack=4,
        )  # fmt: skip

    # torch.compile's version would write column by column, at half the speed.
    @triton.jit
    def _cast_and_transpose_kernel(x, scale, x8, x8_t, rows, columns, TILE: tl.constexpr):
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
        inside = (row < rows) & (column < columns)
        values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        values = _to_e5m2(values * (1.0 / tl.load(scale)))
        tl.store(x8 + row * columns + column, values, mask=inside)
        tl.store(x8_t + column * rows + row, values, mask=inside)
