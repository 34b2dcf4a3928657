"""The arithmetic of Muon: momentum, made orthogonal, its rows brought to one size.

A gradient's matrix is dominated by a few directions. An orthogonal update moves a weight by as much
in every direction (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"),
and with normalised rows by as much for every neuron (Li et al. 2025, "NorMuon").

Of the matrices that make queries, keys and values, each head's rows are one matrix (Zhang et al.
2026, "When and why grouping attention heads accelerates Muon optimization").

n matrices of one shape are treated together. To make one orthogonal takes the whole of it, so
several processes each treat some: with ddp, where every process has all updates, the results are
gathered; with fsdp, where each has rows of every matrix, rows are exchanged for whole matrices, and
back.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

# Polynomials a x + b x^3 + c x^5 that, applied in turn, bring singular values between 3e-3 and 1 to
# between 0.75 and 1.21 (computed as in Amsel et al. 2025, "The Polar Express"). The first three
# allow for values 2% too large: bfloat16 can round a value out of their range, and there it would
# blow up. A fifth polynomial would bring them to between 0.86 and 1.14; training learns the same.
POLYNOMIALS = (
    (8.057942, -22.052186, 15.540709),
    (3.926349, -2.753793, 0.497354),
    (3.454472, -2.487546, 0.477513),
    (2.511527, -1.852448, 0.438833),
)
MARGIN = 1.02  # a matrix is divided by this times its norm, for the same reason
ROW_MEMORY = 0.95  # of the running mean square of a row
UPDATE_RMS = 0.2  # what AdamW's updates typically have: one learning rate serves both


def add_momentum(
    gradient: Tensor,
    buffer: Tensor,
    divisor: Tensor,
    usable: Tensor,
    momentum: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Take a gradient (n, rows, columns) into the momentum `buffer`, in place.

    divisor: of the gradient; usable: 1, or 0 for a gradient that is not finite and must not count.

    Returns Nesterov's update in `dtype`; bfloat16 is exact enough for a direction.
    """
    gradient = (gradient / divisor).nan_to_num(0.0, 0.0, 0.0)
    buffer.lerp_(gradient, usable * (1.0 - momentum))
    return gradient.lerp(buffer, momentum).to(dtype)


def scale_rows(update: Tensor, mean_square: Tensor, usable: Tensor, lr: Tensor) -> Tensor:
    """The change of weights for an orthogonal update (n, rows, columns): each row is divided by the
    root of its running `mean_square` (n, rows, 1), which is brought up to date in place."""
    update = update.to(mean_square.dtype)
    now = update.square().mean(dim=2, keepdim=True)
    mean_square.lerp_(now, usable * (1.0 - ROW_MEMORY))
    # a row that stays zero must not come to 0 times infinity
    return update * (usable * lr * UPDATE_RMS * mean_square.clamp(min=1e-30).rsqrt())


def orthogonalise(matrices: Tensor, head_dim: int = 0) -> Tensor:
    """The matrices (n, rows, columns) with all of their singular values near 1, or with those of
    every `head_dim` rows near 1."""
    if head_dim:
        return orthogonalise(matrices.view(-1, head_dim, matrices.shape[2])).view(matrices.shape)
    tall = matrices.shape[1] > matrices.shape[2]
    norm = matrices.norm(dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = matrices * (1.0 / (MARGIN * norm + 1e-12)).to(matrices.dtype)
    for a, b, c in POLYNOMIALS:  # a x + b (x x^T) x + c (x x^T)^2 x, on the shorter side
        squares = x.mT @ x if tall else x @ x.mT
        factor = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        x = x @ factor if tall else factor @ x
    return x


def orthogonalise_together(
    matrices: Tensor, head_dim: int = 0, whole_rows: int | None = None
) -> Tensor:
    """`orthogonalise`, with the work divided among all processes.

    Args:
        matrices: (n, rows, columns), the same on every process; with `whole_rows` only this
            process's rows of each, as FSDP2 divides them.
        head_dim: as for `orthogonalise`.
        whole_rows: how many rows a whole matrix has.
    """
    if not dist.is_initialized():
        return orthogonalise(matrices, head_dim)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    n, rows, columns = matrices.shape
    share = math.ceil(n / world_size)  # matrices that a process treats
    if whole_rows is None:
        own = orthogonalise(padded(matrices[rank * share :][:share], share), head_dim)
        gathered = own.new_empty((share * world_size, rows, columns))
        dist.all_gather_into_tensor(gathered, own)
        return gathered[:n]
    # Every process sends its rows of a matrix to the process that treats it.
    matrices = padded(matrices, share * world_size)
    most = math.ceil(whole_rows / world_size)  # rows per process; the last ones may have fewer
    heights = [min(most, max(0, whole_rows - i * most)) for i in range(world_size)]
    theirs = [share * height * columns for height in heights]
    ours = [share * rows * columns] * world_size
    received = matrices.new_empty(sum(theirs))
    dist.all_to_all_single(received, matrices.flatten(), theirs, ours)
    parts = [part.view(share, -1, columns) for part in received.split(theirs)]
    whole = orthogonalise(torch.cat(parts, dim=1), head_dim)
    parts = whole.split([part.shape[1] for part in parts], dim=1)
    returned = matrices.new_empty(matrices.numel())
    sent = torch.cat([part.flatten() for part in parts])
    dist.all_to_all_single(returned, sent, ours, theirs)
    return returned.view_as(matrices)[:n]


def padded(matrices: Tensor, n: int) -> Tensor:
    """`matrices` and as many of zeros as make `n`."""
    missing = n - len(matrices)
    return F.pad(matrices, (0, 0, 0, 0, 0, missing)) if missing else matrices
