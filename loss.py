"""Cross-entropy of a linear head without ever holding the (B * T, vocab) logits.

At batch 64 x 1024 and GPT-2's vocabulary the logits take 6.1 GiB in bfloat16, and their gradient as
much again. Here rows are taken a chunk at a time, and each chunk's gradient is computed in the
forward pass, while its logits are there: the same three matrix products as the plain way, no
recomputation, and memory for one chunk. It is plain torch, which torch.compile fuses.

N rows (B * T), C hidden size, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -1  # targets of this value do not count
CHUNK_ELEMENTS = 2**28  # logits held at a time: 512 MiB in bfloat16


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """Mean of `cross_entropy(hidden @ weight.T, targets)` over the targets that are not -1.

    Args:
        hidden: (N, C). weight: (V, C). targets: (N,) int64.
        chunk_elements: logits to hold at a time; more is a little faster.

    Returns a scalar in float32 (float64 for float64 inputs); 0 if no target counts. Matrix products
    run in autocast's dtype when it is on, everything between them in float32.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = hidden.dtype
    chunk = max(1, chunk_elements // weight.shape[0])
    if chunk > 1024:
        chunk -= chunk % 1024  # whole tiles of the matrix kernels
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden, weight, targets, dtype, chunk)
    weight = weight.to(dtype)
    rows = zip(hidden.to(dtype).split(chunk), targets.split(chunk), strict=True)
    total = sum(_losses(_log_softmax(h, weight), t).sum() for h, t in rows)
    return total / _count(targets)


def _log_softmax(hidden: Tensor, weight: Tensor) -> Tensor:
    logits = hidden @ weight.T  # (chunk, V)
    return F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def _losses(log_probs: Tensor, targets: Tensor) -> Tensor:
    picked = log_probs.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(targets == IGNORE, 0.0, -picked)  # (chunk,)


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORE).sum().clamp(min=1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, dtype, chunk):
        cast_weight = weight.to(dtype)
        vocabulary = torch.arange(weight.shape[0], device=weight.device)
        total, grad_weight, grad_hidden = 0.0, 0.0, []
        for h, t in zip(hidden.to(dtype).split(chunk), targets.split(chunk), strict=True):
            log_probs = _log_softmax(h, cast_weight)
            total = total + _losses(log_probs, t).sum()
            # d loss / d logits = softmax - one_hot. The division by the count waits for backward,
            # where it meets GradScaler's factor: on its own it would underflow in float16.
            grad = log_probs.exp() - (vocabulary == t[:, None]).to(log_probs.dtype)
            grad = torch.where((t == IGNORE)[:, None], 0.0, grad).to(dtype)  # (chunk, V)
            grad_hidden.append(grad @ cast_weight)
            grad_weight = grad_weight + (grad.T @ h).to(log_probs.dtype)
        count = _count(targets)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_weight, count)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / count

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight, count = ctx.saved_tensors
        scale = grad_loss / count
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            (grad_hidden.to(grad_weight.dtype) * scale).to(hidden_dtype),
            (grad_weight * scale).to(weight_dtype),
            None,
            None,
            None,
        )
