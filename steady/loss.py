"""Cross-entropy of a linear head that never holds all (B * T, vocab) logits.

With batch 64 x 1024 and GPT-2's vocabulary, the logits and their gradient take 6.1 GiB each in
bfloat16. So this works on one chunk of rows at a time, and computes the chunk's gradient in the
forward pass, while its logits are in memory. On a GPU, a Triton kernel overwrites them with it.

N: rows (B * T). C: hidden size. V: vocabulary size.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steady import UserError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

CHUNK_ELEMENTS = 2**28  # logits held at a time: 512 MiB in bfloat16


def kernels_work() -> bool:
    """Whether Triton kernels run on this GPU. Tries a small one, once."""
    return triton is not None and _small_kernel_works()


# torch.compile calls it instead of tracing it (assume_constant_result would import the compiler)
kernels_work._dynamo_marked_constant = True


@functools.cache
def _small_kernel_works() -> bool:
    try:
        x = torch.zeros(1, device="cuda")
        _add_one_kernel[(1,)](x)
        return x.item() == 1.0
    except Exception:  # compilers raise all kinds of errors
        return False


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype for matmuls of `tensor`: autocast's dtype if it is on, else the tensor's."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_elements: int = CHUNK_ELEMENTS,
    share: Tensor | float = 0.0,
) -> Tensor:
    """Mean of `cross_entropy(hidden @ weight.T, targets)`; negative targets are ignored.

    Args:
        hidden: (N, C). weight: (V, C). targets: (N,) or (B, T) int64.
        chunk_elements: logits to hold at a time; more is a little faster.
        share: with gradients enabled, a token's loss is (1 - share) times the cross-entropy of its
            target plus share times that of the next target in its sequence, if there is one.

    Returns a scalar in float32 (float64 for float64 inputs); 0 if all targets are ignored. Matmuls
    run in autocast's dtype if it is on, and everything between them in float32.
    """
    if targets.dim() < 2 and isinstance(share, Tensor):
        raise ValueError("second_target needs targets of shape (B, T), not flattened")
    dtype = compute_dtype(hidden)
    n_chunks = math.ceil(len(hidden) * len(weight) / chunk_elements)
    most = 2**14 if dtype == torch.float16 else len(hidden)  # a sum of more rows may overflow
    chunk = min(most, math.ceil(len(hidden) / n_chunks))
    if chunk > 1024:  # whole matmul tiles; the last chunk may be smaller
        chunk = math.ceil(chunk / 256) * 256
    if torch.is_grad_enabled():
        targets = targets.reshape(len(targets), -1)  # (N,): sequences of one token
        second = F.pad(targets[:, 1:], (0, 1), value=-1)  # the last token has none
        shares = torch.where((targets < 0) | (second < 0), 0.0, share)
        second = torch.where(shares > 0, second, targets)
        rows = (x.reshape(len(hidden)) for x in (targets, second, shares))
        return _LinearCrossEntropy.apply(hidden, weight, dtype, chunk, *rows)
    targets, weight = targets.reshape(len(hidden)), weight.to(dtype)
    parts = zip(hidden.to(dtype).split(chunk), targets.split(chunk), strict=True)
    total = sum(_losses(_log_softmax(F.linear(h, weight)), t).sum() for h, t in parts)
    return total / _count(targets)


class LinearCrossEntropy(nn.Module):
    """The mean of `cross_entropy(head(hidden), targets)` as a layer, so that it is compiled like
    the model's other layers. Only a plain nn.Linear saves the memory of the logits."""

    def __init__(self):
        super().__init__()
        self.share: Tensor | float = 0.0  # optim.set_second_target changes it
        self.sampler: nn.Module | None = None  # of sampled_softmax (steady/sampled.py)

    def forward(self, hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
        hooks = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
        edited = "forward" in vars(head) or any(getattr(head, name) for name in hooks)
        if type(head).forward is nn.Linear.forward and not edited:
            weight, bias = head.weight, head.bias
            if self.sampler is not None and self.training and torch.is_grad_enabled():
                weight, bias, targets = self.sampler(weight, bias, targets)
            if bias is not None:  # it becomes 8 features of value 1, with an eighth each
                hidden, weight = F.pad(hidden, (0, 8), value=1.0), F.pad(weight, (0, 8))
                weight[:, -8:] = bias[:, None] / 8
            return linear_cross_entropy(hidden, weight, targets, share=self.share)
        if isinstance(self.share, Tensor) or self.sampler is not None:
            name = "second_target" if self.sampler is None else "sampled_softmax"
            raise UserError(f"{name} needs a plain nn.Linear as lm_head: use 0 for another")
        losses = _losses(_log_softmax(head(hidden)), targets.reshape(len(hidden)))
        return losses.sum() / _count(targets)


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _losses(log_probs: Tensor, targets: Tensor) -> Tensor:
    picked = log_probs.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(targets < 0, 0.0, -picked)  # (chunk,)


def _count(targets: Tensor) -> Tensor:
    return (targets >= 0).sum().clamp(min=1)


def losses_and_gradient(
    logits: Tensor, targets: Tensor, second: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each row of logits (n, V), and its gradient with respect to the logits, which may
    overwrite them: softmax - (1 - share) one_hot(target) - share one_hot(second)."""
    if logits.is_cuda and kernels_work() and logits.dtype != torch.float64:
        losses = torch.empty(logits.shape[0], device=logits.device, dtype=torch.float32)
        block = min(8192, triton.next_power_of_2(logits.shape[1]))
        _cross_entropy_kernel[(logits.shape[0],)](
            logits, targets, second, shares, losses, logits.shape[1], BLOCK=block, num_warps=16
        )
        return losses, logits
    log_probs = _log_softmax(logits)
    shares = shares.to(log_probs.dtype)
    losses = torch.lerp(_losses(log_probs, targets), _losses(log_probs, second), shares)
    gradient = log_probs.exp_()  # in place
    for ids, share in ((targets, 1.0 - shares), (second, shares)):
        gradient.scatter_add_(1, ids.clamp(min=0)[:, None], -share[:, None])
    return losses, gradient.masked_fill_(targets[:, None] < 0, 0.0).to(logits.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """total = beta total + a @ b. On a GPU the matmul adds, so that no product is stored."""
    if total.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b) if beta else total.copy_(a @ b)


if not hasattr(torch.ops.steady, "add_product"):  # an operator: else torch.compile copies `total`
    torch.library.custom_op("steady::add_product", add_product, mutates_args=("total",))


if triton is not None:

    @triton.jit
    def _add_one_kernel(x):
        tl.store(x, tl.load(x) + 1.0)

    @triton.jit
    def _cross_entropy_kernel(
        logits, targets, seconds, shares, losses, vocab_size, BLOCK: tl.constexpr
    ):
        """One program per row: one pass for the log-sum-exp, one that overwrites the logits. The
        first asks the cache to keep the row, so that the second need not read it from memory."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * vocab_size
        target = tl.load(targets + row)
        counts = target >= 0
        second, share = tl.load(seconds + row), tl.load(shares + row)
        x_target = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
        x_second = tl.load(logits + second, mask=counts, other=0.0).to(tl.float32)
        largest, total = -float("inf"), 0.0  # running maximum, and sum of exp(x - maximum)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            x = tl.load(
                logits + columns, mask=inside, other=-float("inf"), eviction_policy="evict_last"
            ).to(tl.float32)
            new_largest = tl.maximum(largest, tl.max(x, axis=0))
            total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), axis=0)
            largest = new_largest
        log_sum = largest + tl.log(total)
        picked = x_target + share * (x_second - x_target)
        tl.store(losses + row, tl.where(counts, log_sum - picked, 0.0))
        log_sum = tl.where(counts, log_sum, float("inf"))  # a gradient of 0 for ignored targets
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocab_size
            x = tl.load(logits + columns, mask=inside, eviction_policy="evict_first").to(tl.float32)
            x = tl.exp(x - log_sum)
            tl.store(logits + columns, x, mask=inside, eviction_policy="evict_first")
        tl.debug_barrier()  # these two come after the softmax
        share = tl.where(second == target, 0.0, share)
        tl.store(logits + second, tl.exp(x_second - log_sum) - share, mask=counts)
        tl.debug_barrier()
        tl.store(logits + target, tl.exp(x_target - log_sum) - (1.0 - share), mask=counts)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, dtype, chunk, targets, second, shares):
        cast_weight, total, grad_hidden = weight.to(dtype), 0.0, []
        several, wide = chunk < len(hidden), torch.promote_types(dtype, torch.float32)
        grad_weight = torch.empty_like(weight, dtype=wide) if several else None
        add = torch.ops.steady.add_product if torch.compiler.is_compiling() else add_product
        columns = (hidden.to(dtype), targets, second, shares)
        for h, *t in zip(*(column.split(chunk) for column in columns), strict=True):
            losses, grad = losses_and_gradient(F.linear(h, cast_weight), *t)
            total = total + losses.sum()
            grad_hidden.append(grad @ cast_weight)
            if several:
                add(grad_weight, grad.T, h, float(len(grad_hidden) > 1))
            else:  # a single chunk needs no float32 sum
                grad_weight = grad.T @ h
            del grad  # or eager mode would hold two chunks at a time
        count = _count(targets)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_weight, count)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / count

    @staticmethod
    def backward(ctx, grad_loss):
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():  # create_graph=True
            raise NotImplementedError(
                "this loss has no second derivatives: use F.cross_entropy(self.lm_head(x), ...)"
            )
        # Divide by the count only here, together with GradScaler's factor: by itself the division
        # would make small float16 gradients underflow.
        grad_hidden, grad_weight, count = ctx.saved_tensors
        scale = grad_loss / count
        wide = torch.promote_types(grad_hidden.dtype, torch.float32)
        grad_hidden = (grad_hidden.to(wide) * scale).to(ctx.dtypes[0])
        grad_weight = (grad_weight.to(wide) * scale).to(ctx.dtypes[1])
        return grad_hidden, grad_weight, None, None, None, None, None
