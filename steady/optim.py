"""AdamW, the gradients it reads, clipping, and the learning-rate schedules."""

import math
from typing import Any

from steady.distributed import all_reduce_sum, local_shards, shard_like, total_norm

import torch
from torch import Tensor, nn

IGNORE_SCALE = ("mps",)  # devices whose fused AdamW takes no notice of grad_scale and found_inf


class AdamW(torch.optim.AdamW):
    """torch's AdamW, on this process's shards where parameters are sharded (FSDP2): as plain
    tensors, since every DTensor costs the host time."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments
            tensors[:] = local_shards(tensors)
        return has_complex


def build_optimizer(
    model: nn.Module, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> AdamW:
    """Fused AdamW that decays matrices and embeddings, but no norm weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def all_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in the order of the optimizer's state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def load_moments(optimizer: torch.optim.AdamW, state: dict[str, Any]) -> None:
    """Load the moments of a checkpoint's optimizer state; the settings stay today's.

    Raises ValueError unless there are those of every parameter, in its shape.
    """
    moments = {}
    for i, parameter in enumerate(all_parameters(optimizer)):
        expected = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        try:
            values = state["state"][i]
            fits = {k: v.shape for k, v in values.items()} == expected
        except (KeyError, TypeError, AttributeError, IndexError):
            fits = False
        if not fits:
            raise ValueError(f"optimizer state of parameter {i} is missing or of another shape")
        moments[i] = {k: v if v.dim() == 0 else shard_like(v, parameter) for k, v in values.items()}
    if len(state["state"]) > len(moments):
        raise ValueError(f"optimizer state of {len(state['state'])} parameters, not {len(moments)}")
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})


class Gradients:
    """Where gradients lie, how they are summed over the processes, and how they are cleared.

    With `keep` they are allocated once, added to, and zeroed in place. CUDA graphs need that: the
    gradients that a graph's backward returns lie in memory which its next replay overwrites.
    (Marking steps or cloning activations, the usual advice, does not help.)

    The parameters are listed here, once: FSDP2 puts others into the model for a while.
    """

    def __init__(self, model: nn.Module, keep: bool, summed: bool):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.keep, self.summed, self.flat = keep, summed, None
        if keep:
            self.flatten()

    def flatten(self) -> None:
        """Move all gradients, or zeros if there are none, into one tensor, of which every .grad is
        a part then. So one exchange sums them all."""
        if self.keep and self.flat is not None:
            return
        sizes = [p.numel() for p in self.parameters]
        if self.parameters[0].grad is None:
            self.flat = torch.zeros(sum(sizes), device=self.parameters[0].device)
        else:
            self.flat = torch.cat([p.grad.flatten() for p in self.parameters])
        for parameter, part in zip(self.parameters, self.flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def sum_over_processes(self) -> None:
        """Call after a step's last micro-step. (FSDP2 sums gradients by itself.)"""
        if self.summed:
            self.flatten()
            all_reduce_sum(self.flat)

    def clear(self) -> None:
        """Make ready for the next step."""
        if self.keep:
            self.flat.zero_()
            return
        self.flat = None
        for parameter in self.parameters:
            parameter.grad = None


def allocate_state(optimizer: torch.optim.AdamW) -> None:
    """AdamW's moments now and not at the first step, so that what is left is known before it."""
    for parameter in all_parameters(optimizer):
        if parameter not in optimizer.state:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def clip_in_step(optimizer: torch.optim.AdamW, limit: float) -> Tensor:
    """Have fused AdamW's next step scale the gradients down to a norm of `limit` (0: no limit) as
    it reads them, and change nothing where they are not finite. Returns their norm (scalar)."""
    gradients = [parameter.grad for parameter in all_parameters(optimizer)]
    grad_norm = total_norm(gradients)
    divisor = (grad_norm / (limit or math.inf)).clamp(min=1.0)
    if grad_norm.device.type in IGNORE_SCALE:  # gradients that are not finite become zeros
        for gradient in gradients:
            gradient.div_(divisor).nan_to_num_(0.0, 0.0, 0.0)
    else:
        optimizer.grad_scale = divisor
        optimizer.found_inf = (~grad_norm.isfinite()).float()
    return grad_norm


def learning_rate_at(step: int, config: dict[str, Any]) -> float:
    """The learning rate of step `step`: linear warm-up, then the schedule, then `min_lr`.

    cosine: half a cosine from the end of warm-up to `lr_decay_iters` (Loshchilov and Hutter 2017).
    wsd: constant, then over the last `decay_fraction` of `lr_decay_iters` down with
    1 - sqrt(progress) (Haegele et al. 2024, "Scaling laws and compute-optimal training beyond
    fixed training durations").
    """
    peak, floor = config["learning_rate"], config["min_lr"]
    warmup, end = config["warmup_iters"], config["lr_decay_iters"]
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if not config["decay_lr"]:
        return peak
    if step >= end:
        return floor
    if config["lr_schedule"] == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (end - warmup)))
    else:
        start = max(warmup, end - round(config["decay_fraction"] * end))
        shape = 1.0 - math.sqrt((step - start) / (end - start)) if step > start else 1.0
    return floor + shape * (peak - floor)
