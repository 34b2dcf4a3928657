"""AdamW, the gradients it reads, clipping, and the learning-rate schedules."""

import math
from collections.abc import Iterator
from typing import Any

from steady.distributed import (
    all_reduce_sum,
    is_sharded,
    local_shards,
    shard_like,
    total_norm,
)
from steady.muon import orthogonalise_together

import torch
from torch import Tensor, nn

ADAMW_RMS = 0.2  # root mean square of AdamW's typical update, which Muon's have too
MUON_MOMENTUM = 0.85, 0.95, 300  # from, to, in so many steps
MUON_ELEMENTS = 2**26  # in matrices that are treated at once: bounds the memory for it
IGNORE_SCALE = ("mps",)  # devices whose fused AdamW takes no notice of grad_scale and found_inf


class AdamW(torch.optim.AdamW):
    """torch's AdamW, on this process's shards where parameters are sharded (FSDP2): as plain
    tensors, since every DTensor costs the host time. Leaves out groups that are marked `muon`."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        if group.get("muon"):
            return False
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments
            tensors[:] = local_shards(tensors)
        return has_complex


class Muon(AdamW):
    """Muon for the groups that are marked `muon`, AdamW for the others (see muon.py).

    Nesterov momentum, decoupled weight decay. An update's root mean square is 0.2, as that of a
    typical update of AdamW, so that both take the same learning rates (Liu et al. 2025, "Muon is
    scalable for LLM training").
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group.get("muon"):
                for parameters in self.batches(group["params"]):
                    self.step_together(parameters, group)
        super().step()

    def batches(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Parameters of one shape, as many as may be treated at once."""
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, alike in by_shape.items():
            n = max(1, MUON_ELEMENTS // shape.numel())
            yield from (alike[i : i + n] for i in range(0, len(alike), n))

    def step_together(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """One step of n parameters of one shape."""
        lr, momentum = group["lr"], group["momentum"]
        # What clip_in_step and GradScaler ask for, as fused AdamW takes it: gradients are divided,
        # and change nothing if one is not finite.
        usable = 1.0 - getattr(self, "found_inf", 0.0)
        divisor = getattr(self, "grad_scale", 1.0)
        weights = local_shards([p.data for p in parameters])
        buffers = local_shards([self.state[p]["momentum_buffer"] for p in parameters])
        gradient = torch.stack(local_shards([p.grad for p in parameters])).div_(divisor)
        gradient.nan_to_num_(0.0, 0.0, 0.0)
        buffer = torch.stack(buffers).lerp_(gradient, usable * (1.0 - momentum))
        torch._foreach_copy_(buffers, buffer.unbind())
        update = orthogonalise_together(
            gradient.lerp_(buffer, momentum), row_shards=is_sharded(parameters[0])
        )
        size = ADAMW_RMS * math.sqrt(max(parameters[0].shape))  # its entries' is 1 / sqrt(longer)
        torch._foreach_mul_(weights, 1.0 - usable * lr * group["weight_decay"])
        torch._foreach_sub_(weights, (update.float() * (usable * lr * size)).unbind())


def build_optimizer(
    model: nn.Module, config: dict[str, Any], saved: dict[str, Any] | None = None
) -> AdamW:
    """AdamW, or Muon for the blocks' matrices and AdamW for the rest, as `config` (train.py's
    settings) says. Matrices and embeddings decay, norm weights do not.

    Args:
        saved: a checkpoint's optimizer state. Its moments are taken over, today's settings stay.

    The moments are allocated now and not at the first step, so that what memory is left is known
    before it. Raises ValueError if `saved` is another optimizer's.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decay = config["weight_decay"]
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    muon = config["optimizer"] == "muon"
    if muon:
        inner = [p for name, p in parameters.items() if name.startswith("blocks.") and p.dim() == 2]
        ids = set(map(id, inner))
        groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in ids]
        for group in groups:
            group["lr_scale"] = config["adamw_lr_scale"]
        groups.insert(0, {"params": inner, "weight_decay": decay, "muon": True})
    betas = config["beta1"], config["beta2"]
    kind = Muon if muon else AdamW
    optimizer = kind(groups, lr=config["learning_rate"], betas=betas, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group.get("muon"):
                state = {"momentum_buffer": torch.zeros_like(parameter)}
            else:
                state = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            optimizer.state[parameter] = state
    if saved:
        load_moments(optimizer, saved)
    return optimizer


def all_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in the order of the optimizer's state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def load_moments(optimizer: AdamW, saved: dict[str, Any]) -> None:
    """Load a checkpoint's optimizer state, but keep today's settings."""
    names = ["muon" if group.get("muon") else "adamw" for group in saved["param_groups"]]
    if ("muon" in names) is not isinstance(optimizer, Muon):
        raise ValueError(
            f"the checkpoint was trained with optimizer={min(names, key='muon adamw'.index)}: "
            "resume with that, since the other's state cannot be made from it"
        )
    today = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    parameters = all_parameters(optimizer)
    moments = {
        i: {k: v if v.dim() == 0 else shard_like(v, parameters[i]) for k, v in values.items()}
        for i, values in saved["state"].items()
    }
    optimizer.load_state_dict(saved | {"state": moments})
    for group, settings in zip(optimizer.param_groups, today, strict=True):
        group.update(settings)


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


def clip_in_step(optimizer: AdamW, limit: float) -> Tensor:
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


def set_schedule(optimizer: AdamW, step: int, config: dict[str, Any]) -> float:
    """Have `optimizer` use the learning rates and the momentum of step `step`; returns the first
    group's learning rate."""
    lr = learning_rate_at(step, config)
    first, last, steps = MUON_MOMENTUM
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        group["momentum"] = first + (last - first) * min(1.0, step / steps)
    return lr
