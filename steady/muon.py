"""What Muon does to an update: it makes it orthogonal, so that a weight moves equally far in all
directions and not only in the few that dominate its gradient (Jordan et al. 2024, "Muon: an optimizer
for hidden layers in neural networks").

That takes whole matrices. With several processes each treats a part of them: with ddp, where every
process has all updates, the results are gathered; with fsdp, where a process has rows of every
matrix, these are exchanged for whole matrices, and back. n matrices of one shape are treated
together.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

# Odd polynomials a x + b x^3 + c x^5 that, applied one after the other, take all singular values from
# 3e-3 to 1 to within 0.86 and 1.14 (Amsel et al. 2025, "The Polar Express", five steps).
POLYNOMIALS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02  # they are made for singular values a little below 1


def orthogonalise(matrices: Tensor) -> Tensor:
    """The matrices (n, rows, columns), each with all of its singular values near 1.

    In bfloat16 on GPUs, which is exact enough for a direction; elsewhere in float32.
    """
    wide = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    norms = wide.norm(dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = (wide / (norms * MARGIN + 1e-12)).to(torch.bfloat16 if wide.is_cuda else torch.float32)
    for a, b, c in POLYNOMIALS:
        squares = x @ x.mT
        polynomial = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if wide is not matrices else x


def orthogonalise_together(matrices: Tensor, row_shards: bool) -> Tensor:
    """`orthogonalise`, with the work divided among all processes.

    Args:
        matrices: (n, rows, columns), the same on every process; or with `row_shards` this process's
            rows of each, as FSDP2 divides them.
    """
    if not dist.is_initialized():
        return orthogonalise(matrices)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    n, rows, columns = matrices.shape
    share = math.ceil(n / world_size)  # matrices that a process treats
    padded = torch.nn.functional.pad(matrices, (0, 0, 0, 0, 0, share * world_size - n))
    if not row_shards:
        own = orthogonalise(padded[rank * share :][:share]).contiguous()
        gathered = own.new_empty((share * world_size, rows, columns))
        dist.all_gather_into_tensor(gathered, own)
        return gathered[:n]
    heights = [torch.empty(1, dtype=torch.int64, device=matrices.device) for _ in range(world_size)]
    dist.all_gather(heights, torch.tensor([rows], device=matrices.device))
    sizes = [share * int(height) * columns for height in heights]
    # every process sends its rows of a matrix to the process that treats it
    received = padded.new_empty(sum(sizes))
    dist.all_to_all_single(received, padded.flatten(), sizes, [share * rows * columns] * world_size)
    parts = [part.view(share, -1, columns) for part in received.split(sizes)]
    whole = orthogonalise(torch.cat(parts, dim=1))
    back = torch.cat([part.flatten() for part in whole.split([p.shape[1] for p in parts], dim=1)])
    returned = back.new_empty(padded.numel())
    dist.all_to_all_single(returned, back, [share * rows * columns] * world_size, sizes)
    return returned.view_as(padded)[:n]
