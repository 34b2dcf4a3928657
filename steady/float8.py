"""Matrix products in FP8, of the linear layers in the blocks: forward and both of backward.

A GPU with FP8 multiplies it at twice bfloat16's rate. e4m3, with three bits for the fraction
and values up to 448, holds inputs and weights; e5m2, with a larger range, gradients (Micikevicius
et al. 2022, "FP8 formats for deep learning"). Every tensor has one scale, by which it is divided so
that its largest value is the largest of the format (SwiGLU's gradients by a bound, see there);
weights of layers of one input share theirs. It comes from the values themselves, so that there is
nothing to save for a resume. Weights stay in float32; their FP8 copies are made anew after every
step of the optimizer.

Ada's and Hopper's FP8 kernels want both matrices contiguous along the dimension that is summed
over. y = x W^T sums over the features of x, the gradient of x over those of y, the gradient of W
over tokens: so backward transposes the weight's copy, the gradient of y, and x.

Besides the products, time goes into passes over what is multiplied: one for its maximum, one for
the cast. So layers of one input share both, and one copy of their weights: queries, keys and values
are one product in backward, gate and up too. An MLP is one function: it keeps gate and up in FP8,
and its backward writes all it needs of SwiGLU in one pass.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from steady.kernels import compiled_if_possible, runs_kernels, tl, triton

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from steady.compiling import Plan
    from steady.memory import StepShape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_WIDTH = 768  # from which on FP8 makes steps faster; 512 wide it gained nothing (H200)
MULTIPLE = 16  # FP8 kernels take matrices whose sides are multiples of this
FAST_TERMS = 2**14  # longest sum accumulated fast: so a model learned as in bfloat16 (results.md)
# Layers of model.py that are given the same input, in one call: each later one, and the first.
SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def require_float8(step: StepShape, device: torch.device) -> None:
    """Raises ValueError for a step in FP8 that `device` does not have, or that would be slower."""
    config = step.model_config
    if not step.in_float8:
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
            f"fp8=True is not known to make models narrower than n_embd={MIN_WIDTH} faster, and "
            f"this one has n_embd={config.n_embd}: use fp8=False"
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


class Group(NamedTuple):
    """The weights of layers of one input, each one's part of their copy in FP8, and its scale."""

    weights: list[Tensor]
    parts: tuple[Tensor, ...]
    scale: Tensor


@torch.no_grad()
def use_float8(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Have the linear layers of `model`'s blocks multiply in FP8 when training; the copies of their
    weights are made now and after every step of `optimizer`. Decide before compiling. Weights must
    stay where they are from then on: what writes the copies is recorded."""
    blocks = [[share_copy(layers) for layers in layers_by_input(block)] for block in model.blocks]
    # compiled block by block: one call per weight would take longer, and all at once to compile
    write = compiled_if_possible(write_copies, dynamic=False) if plan.compiled else write_copies

    @torch.no_grad()
    def write_all(*_):
        for block in blocks:
            write(block)

    write_all()
    if not blocks[0][0].scale.is_cuda:  # in tests
        optimizer.register_step_post_hook(write_all)
        return
    if torch.cuda.get_device_capability() == (9, 0):
        # cuBLAS clears its workspace before a product; without one 1.5B takes 1% less (H200)
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
    # recorded, since the calls would take the host 16 ms, the kernels the GPU 5 (1.5B, H200)
    gc.collect()  # a kernel that is freed while another is recorded may end the recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        write_all()
    optimizer.register_step_post_hook(lambda *_: graph.replay())


def layers_by_input(block: nn.Module) -> list[list[nn.Linear]]:
    """The linear layers of `block`; those of one input are together."""
    found: dict[tuple[str, str], list[nn.Linear]] = {}
    for path, layer in block.named_modules():
        if isinstance(layer, nn.Linear):
            parent, _, name = path.rpartition(".")
            found.setdefault((parent, SAME_INPUT.get(name, name)), []).append(layer)
    return list(found.values())


def share_copy(layers: list[nn.Linear]) -> Group:
    """Give `layers` one copy for all their weights, not written yet."""
    weights = [layer.weight for layer in layers]
    sizes = [len(weight) for weight in weights]
    copy = weights[0].new_empty((sum(sizes), weights[0].shape[1]), dtype=E4M3)
    scale = weights[0].new_empty(())
    for place, layer in enumerate(layers):
        layer.weight8, layer.weight8_scale, layer.weight8_place = copy, scale, place
    return Group(weights, copy.split(sizes), scale)


def write_copies(groups: list[Group]) -> None:
    """In place, since recorded graphs hold the addresses."""
    for group in groups:
        group.scale.copy_(scale_of(E4M3, *group.weights))
        for weight, part in zip(group.weights, group.parts, strict=True):
            part.copy_(cast(weight, group.scale, E4M3))


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What to divide values by of which none is beyond `largest`, so that they fit into `dtype`."""
    return largest.float().clamp(min=1e-12) / torch.finfo(dtype).max


def scale_of(dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    """The one scale of matrices (rows, columns) that are multiplied side by side."""
    # each row's maximum first: compiled code finds that in the kernel that writes the row
    return scale_for(torch.cat([x.abs().amax(dim=1) for x in tensors]).amax(), dtype)


def maxima_of_pieces(x: Tensor) -> Tensor:
    """The largest absolute values in rows of 1024, where x (rows, columns) can be seen so: three
    matrices take 48 us, by their own rows of 4288 they take 75 (1.5B, H200)."""
    columns = 1024 if x.numel() % 1024 == 0 else x.shape[1]
    return x.view(-1, columns).abs().amax(dim=1)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in FP8."""
    return (x.float() * scale.reciprocal()).to(dtype)


def cast_for_backward(x: Tensor, scale: Tensor) -> Tensor:
    """What cast(x, scale, E4M3) is, byte for byte. Clamping changes nothing, but makes another
    expression of it, so that torch's compiler keeps two conversions: one whose result is stored as
    it is and transposed is what ptxas gets wrong (F55)."""
    largest = torch.finfo(E4M3).max
    return (x.float() * scale.reciprocal()).clamp(-largest, largest).to(E4M3)


def float8_linears(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """x (..., in) @ weight.T (in, out) of all layers of one input, in FP8; returns (..., out) in
    bfloat16, the last as a tensor of its own.

    The weights' gradients are returned in float32.
    """
    weights = [layer.weight for layer in layers]
    in_order = [layer.weight8_place for layer in layers] == [*range(len(layers))]
    together = sum(map(len, weights)) == len(layers[0].weight8)
    assert in_order and together, "layers that share a copy are called together, in its order"
    outputs = _Float8Linears.apply(rows_of(x), *copy_of(layers[0]), *weights)
    return tuple(y.unflatten(0, x.shape[:-1]) for y in outputs)


def float8_mlp(x: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    """down(silu(gate(x)) * up(x)) in FP8, of x (..., in); returns (..., in) in bfloat16."""
    weights = gate.weight, up.weight, down.weight
    y = _Float8MLP.apply(rows_of(x), *copy_of(gate), *copy_of(down), *weights)
    return y.unflatten(0, x.shape[:-1])


def rows_of(x: Tensor) -> Tensor:
    return x.flatten(0, -2).bfloat16()


def copy_of(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """The copy in which `layer`'s weight lies, and its scale."""
    return layer.weight8, layer.weight8_scale


class _Float8Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight8, weight_scale, *weights):
        ctx.sizes = [len(weight) for weight in weights]  # they themselves only take gradients
        x_scale = scale_of(E4M3, x)
        x8 = cast(x, x_scale, E4M3)
        ctx.save_for_backward(cast_for_backward(x, x_scale), x_scale, weight8, weight_scale)
        *sizes, size = ctx.sizes
        together, last = weight8.split([sum(sizes), size])
        outputs = product(x8, together, x_scale, weight_scale).split(sizes, dim=1) if sizes else ()
        return *outputs, product(x8, last, x_scale, weight_scale)

    @staticmethod
    def backward(ctx, *grads):
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        scale = scale_of(E5M2, *grads)
        grad8, grad8_t = cast_and_transpose(grads, scale)
        grad_x, grad_weight = gradients(grad8, grad8_t, scale, x8, x_scale, weight8, weight_scale)
        return grad_x, None, None, *grad_weight.split(ctx.sizes)


class _Float8MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up8, gate_up_scale, down8, down_scale, *weights):
        x_scale = scale_of(E4M3, x)
        x8 = cast(x, x_scale, E4M3)
        gate, up = (product(x8, part, x_scale, gate_up_scale) for part in gate_up8.chunk(2))
        hidden = F.silu(gate) * up
        largest = torch.stack([maxima_of_pieces(y) for y in (hidden, gate, up)]).amax(dim=1)
        hidden_scale, gate_scale, up_scale = (scale_for(y, E4M3) for y in largest)
        gate8, up8 = cast(gate, gate_scale, E4M3), cast(up, up_scale, E4M3)
        of_swiglu = gate8, gate_scale, up8, up_scale, hidden_scale
        of_x = cast_for_backward(x, x_scale), x_scale
        ctx.save_for_backward(*of_x, gate_up8, gate_up_scale, down8, down_scale, *of_swiglu)
        return product(cast(hidden, hidden_scale, E4M3), down8, hidden_scale, down_scale)

    @staticmethod
    def backward(ctx, grad):
        x8, x_scale, gate_up8, gate_up_scale, down8, down_scale, *of_swiglu = ctx.saved_tensors
        scale, hidden_scale = scale_of(E5M2, grad), of_swiglu[-1]
        grad8, grad8_t = cast_and_transpose([grad], scale)
        grad_hidden = product(grad8, down8.T.contiguous(), scale, down_scale)
        both8, both8_t, both_scale, hidden8_t = swiglu_backward(*of_swiglu, grad_hidden)
        down_weight = product(grad8_t, hidden8_t, scale, hidden_scale, torch.float32)
        grad_x, grad_weight = gradients(
            both8, both8_t, both_scale, x8, x_scale, gate_up8, gate_up_scale
        )
        return grad_x, *[None] * 4, *grad_weight.chunk(2), down_weight


def gradients(
    grad8: Tensor,
    grad8_t: Tensor,
    scale: Tensor,
    x8: Tensor,
    x_scale: Tensor,
    weight8: Tensor,
    weight_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of x (in bfloat16) and of the weights (in float32) of layers of one input, from
    those of their outputs, side by side and transposed, which have one scale."""
    grad_x = product(grad8, weight8.T.contiguous(), scale, weight_scale)
    return grad_x, product(grad8_t, x8.T.contiguous(), scale, x_scale, torch.float32)


def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a (m, k) @ b (n, k).T, both in FP8, scaled back; returns (m, n) in `dtype`."""
    if not a.is_cuda:  # where torch's kernel takes a second for a few million products
        return (a.float() @ b.float().T * (a_scale * b_scale)).to(dtype)
    # Fast accumulation saves 2% of a step of 1.5B. On Hopper it keeps 14 bits of the sum so far, to
    # which a small value then adds nothing: too few for sums over many tokens (F56).
    fast = a.shape[1] <= FAST_TERMS
    return torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


def cast_and_transpose(grads: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (rows, columns) side by side, divided by `scale`, in e5m2, and their transpose."""
    rows, width = len(grads[0]), sum(x.shape[1] for x in grads)
    if not runs_kernels(grads[0]):
        x8 = cast(torch.cat(list(grads), dim=1), scale, E5M2)
        return x8, x8.T.contiguous()
    x8 = grads[0].new_empty((rows, width), dtype=E5M2)
    x8_t = grads[0].new_empty((width, rows), dtype=E5M2)
    first = 0
    for x in grads:
        columns = x.shape[1]
        tiles = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
        _cast_and_transpose_kernel[tiles](
            x.contiguous(), scale, x8, x8_t, rows, columns, first, width, TILE=TILE, num_warps=4
        )
        first += columns
    return x8, x8_t


def swiglu_backward(
    gate8: Tensor,
    gate_scale: Tensor,
    up8: Tensor,
    up_scale: Tensor,
    hidden_scale: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of hidden = silu(gate) * up, all (rows, columns).

    Takes gate and up in FP8, the scale that hidden had, and hidden's gradient in bfloat16. Returns
    the gradients of gate and up in FP8, side by side (rows, 2 columns) and transposed, their scale,
    and hidden in FP8 and transposed. The scale comes from a bound, since a maximum would be known
    only after all of them: |silu(x)| <= |x|, and its derivative is below 1.1. It is usually a few
    times the maximum, hundreds of times where outliers do not meet. That does no harm: e5m2 has all
    of its precision down to 1e-9 of the bound, less below, and below 1.3e-10 all becomes 0.
    """
    rows, columns = gate8.shape
    bound = maxima_of_pieces(grad).amax().float() * torch.finfo(E4M3).max
    scale = scale_for(bound * torch.maximum(gate_scale, 1.1 * up_scale), E5M2)
    if runs_kernels(gate8):
        grads8 = gate8.new_empty((rows, 2 * columns), dtype=E5M2)
        grads8_t = gate8.new_empty((2 * columns, rows), dtype=E5M2)
        hidden8_t = gate8.new_empty((columns, rows))
        tiles = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
        _swiglu_backward_kernel[tiles](
            gate8, gate_scale, up8, up_scale, hidden_scale, grad, scale, grads8, grads8_t,
            hidden8_t, rows, columns, TILE=TILE, num_warps=8,
        )  # fmt: skip
        return grads8, grads8_t, scale, hidden8_t
    gate, up, grad = gate8.float() * gate_scale, up8.float() * up_scale, grad.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    grads = torch.cat((grad * up * (sigmoid + silu * (1.0 - sigmoid)), grad * silu), dim=1)
    # rounding gate and up can make their product larger than the value that has set its scale
    largest = hidden_scale * torch.finfo(E4M3).max
    hidden = (silu * up).clamp(-largest, largest)
    grads8 = cast(grads, scale, E5M2)
    hidden8_t = cast(hidden, hidden_scale, E4M3).T.contiguous()
    return grads8, grads8.T.contiguous(), scale, hidden8_t


TILE = 64  # rows and columns that one program of a kernel treats

if triton is not None:

    @triton.jit
    def _to_e5m2(x):
        """x in e5m2, four values in a register, as PTX converts them: what Triton's own conversion
        returns must not be stored as it is and transposed (F55)."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [x], dtype=tl.float8e5, is_pure=True, pack=4,
        )  # fmt: skip

    # Compiled by torch, these two would read or write column by column, at half the speed.

    @triton.jit
    def _cast_and_transpose_kernel(
        x, scale, x8, x8_t, rows, columns, first, width, TILE: tl.constexpr
    ):
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
        inside = (row < rows) & (column < columns)
        values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        values = _to_e5m2(values * (1.0 / tl.load(scale)))
        column += first
        tl.store(x8 + row * width + column, values, mask=inside)
        tl.store(x8_t + column * rows + row, values, mask=inside)

    @triton.jit
    def _swiglu_backward_kernel(
        gate8, gate_scale, up8, up_scale, hidden_scale, grad, scale, grads8, grads8_t, hidden8_t,
        rows, columns, TILE: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
        inside = (row < rows) & (column < columns)
        at = row * columns + column
        g = tl.load(gate8 + at, mask=inside, other=0.0).to(tl.float32) * tl.load(gate_scale)
        u = tl.load(up8 + at, mask=inside, other=0.0).to(tl.float32) * tl.load(up_scale)
        by_hidden = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        by_hidden *= 1.0 / tl.load(scale)
        sigmoid = tl.sigmoid(g)
        silu = g * sigmoid
        by_gate = _to_e5m2(by_hidden * u * (sigmoid + silu * (1.0 - sigmoid)))
        by_up = _to_e5m2(by_hidden * silu)
        left = row * 2 * columns + column
        tl.store(grads8 + left, by_gate, mask=inside)
        tl.store(grads8 + left + columns, by_up, mask=inside)
        tl.store(grads8_t + column * rows + row, by_gate, mask=inside)
        tl.store(grads8_t + (columns + column) * rows + row, by_up, mask=inside)
        hidden = silu * u * (1.0 / tl.load(hidden_scale))
        hidden8 = tl.clamp(hidden, -448.0, 448.0).to(hidden8_t.dtype.element_ty)  # e4m3's largest
        # stored once, so F55 does not concern it
        tl.store(hidden8_t + column * rows + row, hidden8, mask=inside)
