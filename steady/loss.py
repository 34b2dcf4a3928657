"""Cross-entropy of a linear head without ever holding the (B * T, vocab) logits.

At batch 64 x 1024 and GPT-2's vocabulary the logits take 6.1 GiB in bfloat16, and their gradient as
much again. Here rows are taken a chunk at a time, and each chunk's gradient is computed in the
forward pass, while its logits are there: the same three matrix products as the plain way, no
recomputation, and memory for one chunk. Between the products a GPU runs one Triton kernel that
replaces logits by their gradient in place; elsewhere plain torch does the same. In FP8 (see
float8.py) a second kernel writes the gradient in that format, and transposed too.

N rows (B * T), C hidden size, V vocabulary.
"""

import math

from steady.float8 import E4M3, E5M2, MULTIPLE, cast, product, scale_of
from steady.linear import compute_dtype

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

IGNORE = -1  # targets of this value do not count
CHUNK_ELEMENTS = 2**28  # logits held at a time: 512 MiB in bfloat16
GRADIENT_SCALE = 2.0**-15  # of the gradient by logits in e5m2: from -1 to 1, and down to 5e-10


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weight8: Tensor | None = None,
    weight8_scale: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Mean of `cross_entropy(hidden @ weight.T, targets)` over the targets that are not -1.

    Args:
        hidden: (N, C). weight: (V, C). targets: (N,) int64.
        weight8, weight8_scale: the weight's FP8 copy (see `float8.write_copies`); where gradients
            are computed all three products are in FP8 then. N, C and V are multiples of 16.
        chunk_elements: logits to hold at a time; more is a little faster.

    Returns a scalar in float32 (float64 for float64 inputs); 0 if no target counts. Matrix products
    run in autocast's dtype when it is on, everything between them in float32.
    """
    dtype = compute_dtype(hidden)
    rows, vocab_size = hidden.shape[0], weight.shape[0]
    n_chunks = math.ceil(rows * vocab_size / chunk_elements)
    chunk = math.ceil(rows / n_chunks)  # chunks of one size,
    if chunk > 1024:
        chunk = math.ceil(chunk / 256) * 256  # in whole tiles of the matrix kernels
    elif weight8 is not None:
        chunk = math.ceil(chunk / MULTIPLE) * MULTIPLE
    if torch.is_grad_enabled():
        more = weight8, weight8_scale
        return _LinearCrossEntropy.apply(hidden, weight, targets, dtype, chunk, *more)
    weight = weight.to(dtype)
    parts = zip(hidden.to(dtype).split(chunk), targets.split(chunk), strict=True)
    total = sum(_losses(_log_softmax(h @ weight.T), t).sum() for h, t in parts)
    return total / _count(targets)


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits.to(_accumulator(logits.dtype)), dim=-1)  # (chunk, V)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _losses(log_probs: Tensor, targets: Tensor) -> Tensor:
    picked = log_probs.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(targets == IGNORE, 0.0, -picked)  # (chunk,)


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORE).sum().clamp(min=1)


def losses_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row of logits (n, V), and its gradient by the logits.

    The gradient, softmax - one_hot, may take the logits' place.
    """
    if logits.is_cuda and triton is not None and logits.dtype != torch.float64:
        losses, _ = _run_cross_entropy_kernel(logits, targets, in_place=True)
        return losses, logits
    log_probs = _log_softmax(logits)
    one_hot = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = log_probs.exp() - one_hot.to(log_probs.dtype)
    gradient = torch.where((targets == IGNORE)[:, None], 0.0, gradient).to(logits.dtype)
    return _losses(log_probs, targets), gradient


def losses_and_float8_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `losses_and_gradient`, with the gradient divided by GRADIENT_SCALE, in e5m2, and its
    transpose (V, n)."""
    if not logits.is_cuda or triton is None:
        losses, gradient = losses_and_gradient(logits, targets)
        gradient = cast(gradient, torch.tensor(GRADIENT_SCALE), E5M2)
        return losses, gradient, gradient.T.contiguous()
    losses, log_sums = _run_cross_entropy_kernel(logits, targets, in_place=False)
    rows, vocab_size = logits.shape
    gradient = torch.empty((rows, vocab_size), dtype=E5M2, device=logits.device)
    transposed = torch.empty((vocab_size, rows), dtype=E5M2, device=logits.device)
    _float8_gradient_kernel[triton.cdiv(rows, 64), triton.cdiv(vocab_size, 64)](
        logits, targets, log_sums, gradient, transposed, rows, vocab_size,
        IGNORE, GRADIENT_SCALE, TILE=64, num_warps=4,
    )  # fmt: skip
    return losses, gradient, transposed


def _run_cross_entropy_kernel(
    logits: Tensor, targets: Tensor, in_place: bool
) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of rows of logits, which `in_place` replaces by their gradient."""
    rows, vocab_size = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    log_sums = torch.empty_like(losses)
    block = min(8192, triton.next_power_of_2(vocab_size))
    _cross_entropy_kernel[(rows,)](
        logits, targets, losses, log_sums, vocab_size, IGNORE, in_place, BLOCK=block, num_warps=8
    )
    return losses, log_sums


if triton is not None:

    @triton.jit
    def _cross_entropy_kernel(
        logits, targets, losses, log_sums, vocab_size,
        IGNORE: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program per row: a pass for the log-sum-exp, a pass that overwrites the logits."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * vocab_size
        target = tl.load(targets + row)
        counts = target != IGNORE
        picked = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
        largest, total = -float("inf"), 0.0  # running maximum, and sum of exp(x - maximum)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            x = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
            new_largest = tl.maximum(largest, tl.max(x, axis=0))
            total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), axis=0)
            largest = new_largest
        log_sum = largest + tl.log(total)
        tl.store(losses + row, tl.where(counts, log_sum - picked, 0.0))
        tl.store(log_sums + row, log_sum)
        if IN_PLACE:
            for start in range(0, vocab_size, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                inside = columns < vocab_size
                x = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
                gradient = tl.exp(x - log_sum) - tl.where(columns == target, 1.0, 0.0)
                gradient = tl.where(counts, gradient, 0.0)
                tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=inside)

    @triton.jit
    def _float8_gradient_kernel(
        logits, targets, log_sums, gradient, transposed, rows, vocab_size,
        IGNORE: tl.constexpr, SCALE: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """One program per tile, which it writes twice."""
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]).to(tl.int64)
        inside = (row < rows) & (column < vocab_size)
        target = tl.load(targets + row, mask=row < rows, other=IGNORE)
        log_sum = tl.load(log_sums + row, mask=row < rows, other=0.0)
        x = tl.load(logits + row * vocab_size + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.exp(x - log_sum) - tl.where(column == target, 1.0, 0.0)
        values = tl.where(target != IGNORE, values / SCALE, 0.0).to(gradient.dtype.element_ty)
        tl.store(gradient + row * vocab_size + column, values, mask=inside)
        tl.store(transposed + column * rows + row, values, mask=inside)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, dtype, chunk, weight8, weight8_scale):
        treat, weights = _treat_chunk, (weight.to(dtype),)
        if weight8 is not None:
            treat, weights = _treat_chunk8, (weight8, weight8.T.contiguous(), weight8_scale)
        total, grad_weight, grad_hidden = 0.0, None, []
        for h, t in zip(hidden.to(dtype).split(chunk), targets.split(chunk), strict=True):
            losses, for_hidden, for_weight = treat(h, t, *weights)
            total = total + losses.sum()
            grad_hidden.append(for_hidden)
            if grad_weight is None:
                grad_weight = for_weight.to(_accumulator(dtype))
            else:
                grad_weight += for_weight
        count = _count(targets)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_weight, count)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / count

    @staticmethod
    def backward(ctx, grad_loss):
        # The division by the count waits until here, where it meets GradScaler's factor: on its own
        # it would make small gradients underflow in float16.
        grad_hidden, grad_weight, count = ctx.saved_tensors
        scale = grad_loss / count
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            (grad_hidden.to(grad_weight.dtype) * scale).to(hidden_dtype),
            (grad_weight * scale).to(weight_dtype),
            *[None] * 5,
        )


def _treat_chunk(hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Losses of some rows, and their gradients by these rows and by the weight."""
    losses, grad = losses_and_gradient(hidden @ weight.T, targets)
    return losses, grad @ weight, grad.T @ hidden


def _treat_chunk8(
    hidden: Tensor, targets: Tensor, weight8: Tensor, weight8_t: Tensor, weight8_scale: Tensor
) -> tuple[Tensor, ...]:
    """As `_treat_chunk`, in FP8."""
    scale = scale_of(hidden, E4M3)
    hidden8 = cast(hidden, scale, E4M3)
    logits = product(hidden8, weight8, scale, weight8_scale)
    losses, grad8, grad8_t = losses_and_float8_gradient(logits, targets)
    grad_scale = torch.full_like(scale, GRADIENT_SCALE)
    grad_hidden = product(grad8, weight8_t, grad_scale, weight8_scale)
    return losses, grad_hidden, product(grad8_t, hidden8.T.contiguous(), grad_scale, scale)
