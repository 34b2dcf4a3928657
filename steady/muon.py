"""The math of Muon: momentum, orthogonalisation and row normalisation.

A few directions dominate a gradient matrix. An orthogonal update moves a weight matrix equally far
in every direction (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks").
Normalised rows move every neuron equally far (Li et al. 2025, "NorMuon").

In the query, key and value matrices, each head's rows are orthogonalised separately (Zhang et al.
2026, "When and why grouping attention heads accelerates Muon optimization").

n matrices of one shape are processed together. Orthogonalising a matrix needs all of its rows, so
each process handles some of the matrices. With ddp every process has all updates, and an all-gather
collects the results. With fsdp every process has rows of each matrix: one all-to-all trades them
for whole matrices, and another sends the rows back.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

# Applied in turn, these polynomials a x + b x^3 + c x^5 map singular values from [3e-3, 1] to
# [0.75, 1.21] (computed as in Amsel et al. 2025, "The Polar Express"). The first three tolerate
# values 2% too large: bfloat16 rounding can push a value out of their range, where it would blow
# up. A fifth polynomial would narrow the result to [0.86, 1.14], but training learns the same.
POLYNOMIALS = (
    (8.057942, -22.052186, 15.540709),
    (3.926349, -2.753793, 0.497354),
    (3.454472, -2.487546, 0.477513),
    (2.511527, -1.852448, 0.438833),
)
MARGIN = 1.02  # a matrix is divided by this times its norm, for the same reason
ROW_DECAY = 0.95  # decay of each row's running mean square
UPDATE_RMS = 0.2  # typical for AdamW, so that one learning rate serves both


def add_momentum(
    gradient: Tensor,
    buffer: Tensor,
    divisor: Tensor,
    usable: Tensor,
    momentum: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Add a gradient (n, rows, columns) to the momentum `buffer`, in place.

    divisor: divides the gradient (GradScaler's scale); usable: 1, or 0 to ignore a gradient that is
    not finite. Returns the Nesterov update in `dtype`; bfloat16 is precise enough for a direction.
    """
    gradient = (gradient.to(buffer.dtype) / divisor).nan_to_num(0.0, 0.0, 0.0)
    buffer.lerp_(gradient, usable * (1.0 - momentum))
    return gradient.lerp(buffer, momentum).to(dtype)


def scale_rows(update: Tensor, mean_square: Tensor, usable: Tensor, lr: Tensor) -> Tensor:
    """The weight change for an orthogonal update (n, rows, columns). Divides each row by the root
    of its running `mean_square` (n, rows, 1), and updates `mean_square` in place."""
    update = update.to(mean_square.dtype)
    now = update.square().mean(dim=2, keepdim=True)
    mean_square.lerp_(now, usable * (1.0 - ROW_DECAY))
    # a row that stays zero would give 0 * infinity
    return update * (usable * lr * UPDATE_RMS * mean_square.clamp(min=1e-30).rsqrt())


def orthogonalise(matrices: Tensor, head_dim: int = 0) -> Tensor:
    """Bring all singular values of the matrices (n, rows, columns) close to 1. With `head_dim`, do
    this separately for every `head_dim` rows."""
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


def orthogonalise_distributed(
    matrices: Tensor, head_dim: int = 0, whole_rows: int | None = None
) -> Tensor:
    """`orthogonalise`, with the work divided among all processes.

    Args:
        matrices: (n, rows, columns), the same on every process. With `whole_rows`, only this
            process's rows of each matrix, as FSDP2 shards them.
        head_dim: as for `orthogonalise`.
        whole_rows: the number of rows of a whole matrix.
    """
    if not dist.is_initialized():
        return orthogonalise(matrices, head_dim)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    n, rows, columns = matrices.shape
    share = math.ceil(n / world_size)  # matrices per process
    if whole_rows is None:
        own = matrices[rank * share :][:share]
        own = orthogonalise(F.pad(own, (0, 0, 0, 0, 0, share - len(own))), head_dim)
        gathered = own.new_empty((share * world_size, rows, columns))
        dist.all_gather_into_tensor(gathered, own)
        return gathered[:n]
    # every process sends its rows of a matrix to the process that handles the matrix
    most = math.ceil(whole_rows / world_size)  # rows per process; the last ones may have fewer
    sent = F.pad(matrices, (0, 0, 0, most - rows, 0, share * world_size - n))
    parts = sent.new_empty((world_size, share, most, columns))
    dist.all_to_all_single(parts, sent)
    whole = parts.transpose(0, 1).reshape(share, world_size * most, columns)
    whole = orthogonalise(whole[:, :whole_rows].contiguous(), head_dim)
    whole = F.pad(whole, (0, 0, 0, world_size * most - whole_rows))
    parts = whole.view(share, world_size, most, columns).transpose(0, 1).contiguous()
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, parts)
    return returned[:n, :rows]
