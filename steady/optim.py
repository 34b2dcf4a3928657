"""AdamW and Muon, the gradients they read, clipping, and the learning-rate schedules."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from steady import muon
from steady.distributed import (
    all_reduce_sum,
    is_sharded,
    local_shards,
    shard_from_local,
    shard_like,
    total_norm,
)
from steady.kernels import compiled_if_possible

import torch
from torch import Tensor, nn

# at first, at last, and how many steps it rises for: more than a short run has (docs/choosing.md)
MUON_MOMENTUM = 0.85, 0.95, 1500
MUON_BY_HEAD = "q_proj", "k_proj", "v_proj"  # whose heads are made orthogonal one by one
MUON_ELEMENTS = 2**26  # in matrices that are treated at once: bounds the memory for it
IGNORE_SCALE = ("mps",)  # devices whose fused AdamW takes no notice of grad_scale and found_inf


class AdamW(torch.optim.AdamW):
    """torch's AdamW, on this process's shards where parameters are sharded (FSDP2): as plain
    tensors, since every DTensor costs the host time."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments
            tensors[:] = local_shards(tensors)
        return has_complex


class Stack(NamedTuple):
    """n matrices of one kind, which Muon treats together; their own states are slices of these."""

    parameters: list[nn.Parameter]
    momentum: Tensor  # (n, rows, columns) that this process has
    row_mean_square: Tensor  # (n, rows, 1)
    head_dim: int  # rows that are made orthogonal on their own; 0: all of a matrix


class Muon(AdamW):
    """Muon for the groups that are marked `muon`, AdamW for the others (see muon.py).

    head_dims: of the parameters whose heads are made orthogonal one by one, the rows of a head.

    Updates are made orthogonal in bfloat16 if the model computes in bfloat16, else in float32.
    """

    @torch.no_grad()
    def __init__(
        self,
        groups: list[dict[str, Any]],
        head_dims: dict[nn.Parameter, int],
        compiled: bool,
        dtype: torch.dtype,
        **settings: Any,
    ):
        super().__init__(groups, **settings)
        self.dtype = dtype if dtype == torch.bfloat16 else torch.float32
        self.add_momentum, self.scale_rows = muon.add_momentum, muon.scale_rows
        if compiled and self.muon_group["params"][0].is_cuda:  # moves a third of the bytes
            self.add_momentum = compiled_if_possible(muon.add_momentum)
            self.scale_rows = compiled_if_possible(muon.scale_rows)
        self.stacks = []
        for parameters, head_dim in stackable(self.muon_group["params"], head_dims):
            local = local_shards(parameters)
            momentum = torch.zeros((len(local), *local[0].shape), device=local[0].device)
            # the mean square of a row of an orthogonal matrix, so the average needs no warm-up
            rows, columns = parameters[0].shape
            row = torch.full_like(momentum[:, :, :1], 1.0 / max(head_dim or rows, columns))
            self.stacks.append(Stack(parameters, momentum, row, head_dim))
            for parameter, own, own_row in zip(parameters, momentum, row, strict=True):
                self.state[parameter] = {
                    "momentum": shard_from_local(own, parameter),
                    "row_mean_square": shard_from_local(own_row, parameter[:, :1]),
                }

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        return False if group.get("muon") else super()._init_group(group, *lists)

    @property
    def muon_group(self) -> dict[str, Any]:
        return next(group for group in self.param_groups if group.get("muon"))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        if self.stacks[0].parameters[0].grad is None:  # clip_in_step has left them out
            return
        group, device = self.muon_group, self.stacks[0].momentum.device
        # tensors, since code compiled for numbers would be compiled anew for every new one
        lr, momentum, decay = torch.tensor(
            [group["lr"], group["momentum"], group["lr"] * group["weight_decay"]]
        ).to(device, non_blocking=True)  # fmt: skip
        # set by clip_in_step or GradScaler; fused AdamW reads the same two
        divisor = getattr(self, "grad_scale", None)
        divisor = torch.ones_like(lr) if divisor is None else divisor
        found_inf = getattr(self, "found_inf", None)
        usable = torch.ones_like(lr) if found_inf is None else 1.0 - found_inf
        for parameters, buffer, mean_square, head_dim in self.stacks:
            weights = local_shards([p.data for p in parameters])
            gradient = torch.stack(local_shards([p.grad for p in parameters]))
            update = self.add_momentum(gradient, buffer, divisor, usable, momentum, self.dtype)
            del gradient
            whole_rows = parameters[0].shape[0] if is_sharded(parameters[0]) else None
            update = muon.orthogonalise_together(update, head_dim, whole_rows)
            change = self.scale_rows(update, mean_square, usable, lr)
            torch._foreach_mul_(weights, 1.0 - usable * decay)
            torch._foreach_sub_(weights, change.unbind())


def stackable(
    parameters: list[nn.Parameter], head_dims: dict[nn.Parameter, int]
) -> Iterator[tuple[list[nn.Parameter], int]]:
    """Parameters of one shape, as many as Muon treats at once, and the rows of a head or 0."""
    kinds: dict[tuple[torch.Size, int], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.shape, head_dims.get(parameter, 0)), []).append(parameter)
    for (shape, head_dim), alike in kinds.items():
        n = max(1, MUON_ELEMENTS // shape.numel())
        yield from ((alike[i : i + n], head_dim) for i in range(0, len(alike), n))


def build_optimizer(
    model: nn.Module,
    config: dict[str, Any],
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> AdamW:
    """AdamW, or Muon for the blocks' matrices and AdamW for the rest, as `config` (train.py's
    settings) says. Matrices and embeddings decay, norm weights do not.

    compiled: whether Muon's elementwise work is compiled; dtype: what the model computes in.

    The state is allocated now and not at the first step, so that what memory is left is known
    before it.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [name for name, p in named.items() if p.dim() == 2 and name.startswith("blocks.")]
    if config["optimizer"] == "adamw":
        matrices = []
    others = [p for name, p in named.items() if name not in matrices]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config["weight_decay"]},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    rates = {"lr": config["learning_rate"], "betas": (config["beta1"], config["beta2"])}
    if matrices:
        inner = {"params": [named[name] for name in matrices], "muon": True}
        groups.insert(0, inner | {"weight_decay": config["weight_decay"]})
        of_heads = [p for name, p in named.items() if name.split(".")[-2] in MUON_BY_HEAD]
        head_dims = dict.fromkeys(of_heads, model.config.head_dim)
        optimizer = Muon(groups, head_dims, compiled, dtype, **rates, fused=True)
    else:
        optimizer = AdamW(groups, **rates, fused=True)
    for parameter in others:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def all_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in the order of the optimizer's state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def load_state(optimizer: AdamW, saved: dict[str, Any]) -> None:
    """Copy a checkpoint's optimizer state; betas, weight decay and so on stay today's.

    Raises ValueError if it is another optimizer's, or other parameters'.
    """
    parameters, states = all_parameters(optimizer), saved.get("state", {})
    first = states.get(0) if isinstance(states.get(0), dict) else {}
    was = "muon" if "momentum" in first else "adamw"
    now = "muon" if isinstance(optimizer, Muon) else "adamw"
    if first and was != now:
        raise ValueError(f"it was trained with optimizer={was}: go on with --optimizer={was}")
    for i, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        try:
            found = {name: tensor.shape for name, tensor in states[i].items()}
        except (KeyError, TypeError, AttributeError):
            found = {}
        if found != {name: tensor.shape for name, tensor in state.items()}:
            raise ValueError(f"optimizer state of parameter {i} is missing or of another shape")
        for name, tensor in state.items():
            tensor.copy_(shard_like(states[i][name], tensor))
    if len(states) != len(parameters):
        raise ValueError(f"optimizer state of {len(states)} parameters, not {len(parameters)}")


class Gradients:
    """Where gradients lie, how they are summed over the processes, and how they are cleared.

    Kept gradients are parts of one tensor, allocated once and cleared with zeros; the layers in
    linear.py add to them as they multiply. CUDA graphs need that: the gradients that a graph's
    backward returns lie in memory which its next replay overwrites. (Marking steps or cloning
    activations, the usual advice, does not help.)

    The parameters are listed once, here: FSDP2 swaps those of the model during a step.
    """

    def __init__(self, model: nn.Module, summed: bool, keep: bool = False):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.adding = [layer for layer in model.modules() if hasattr(layer, "adds_to_grad")]
        self.device = next(model.parameters()).device
        self.summed, self.kept, self.flat = summed, False, None
        self.keep(keep)

    def keep(self, keep: bool) -> None:
        """Whether gradients are kept from now on; decide before compiling."""
        if keep == self.kept:
            return
        self.kept = False  # until there is memory for them
        self.clear()
        if keep:
            self.join()
            if self.device.type == "cuda":  # or CUDA graphs would add to copies
                for part in self.parts:
                    torch._dynamo.mark_static_address(part)
        for layer in self.adding:
            layer.adds_to_grad = keep
        self.kept = keep

    def join(self) -> None:
        """Move all gradients, or zeros if there are none, into one tensor, of which every .grad is
        a part then."""
        sizes = [p.numel() for p in self.parameters]
        found = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        self.flat = torch.cat(found) if found else torch.zeros(sum(sizes), device=self.device)
        parts = zip(self.parameters, self.flat.split(sizes), strict=True)
        # .data, or autograd would take a change of one part for a change of all
        self.parts = [part.view_as(parameter).data for parameter, part in parts]
        self.attach()

    def attach(self) -> None:
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            parameter.grad = part

    def flatten(self) -> None:
        """Where processes sum gradients, have them in one tensor: one exchange sums them all."""
        if self.summed and not self.kept:
            self.join()

    def sum_over_processes(self) -> None:
        """Call after a step's last micro-step. (FSDP2 sums gradients by itself.)"""
        self.flatten()
        if self.summed:
            all_reduce_sum(self.flat)

    def clear(self) -> None:
        """Make ready for the next step."""
        if self.kept:
            self.flat.zero_()
            self.attach()  # if somebody has called optimizer.zero_grad(), which sets them to None
            return
        self.flat = self.parts = None
        for parameter in self.parameters:
            parameter.grad = None


def clip_in_step(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    """Have fused AdamW's next step scale the gradients down to a norm of `limit` (0: no limit) as
    it reads them, and change nothing where they are not finite; `optimizer.skipped` becomes the
    number of such steps in a row. Another optimizer's are scaled now, or taken away. Returns the
    gradients' norm (scalar)."""
    gradients = [parameter.grad for parameter in all_parameters(optimizer)]
    grad_norm = total_norm(gradients)
    divisor = (grad_norm / (limit or math.inf)).clamp(min=1.0)
    found_inf = (~grad_norm.isfinite()).float()
    optimizer.skipped = (getattr(optimizer, "skipped", 0) + 1) * found_inf
    if grad_norm.device.type in IGNORE_SCALE or not isinstance(optimizer, AdamW):
        for gradient in gradients:
            gradient.div_(divisor)
        if found_inf:  # waits for the device
            optimizer.zero_grad()  # without gradients a step changes nothing
    else:
        optimizer.grad_scale = divisor
        optimizer.found_inf = found_inf
    return grad_norm


def learning_rate_at(step: int, config: dict[str, Any]) -> float:
    """The learning rate of step `step`: linear warm-up, then the schedule, then `min_lr`.

    The schedule ends at `lr_decay_iters`, or at `max_iters` if that is 0.

    cosine: half a cosine from the end of warm-up to the end (Loshchilov and Hutter 2017).
    wsd: constant, then over the last `decay_fraction` of all steps down with 1 - sqrt(progress)
    (Haegele et al. 2024, "Scaling laws and compute-optimal training beyond fixed training
    durations").
    """
    peak, floor = config["learning_rate"], config["min_lr"]
    warmup, end = config["warmup_iters"], config["lr_decay_iters"] or config["max_iters"]
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if not config["decay_lr"]:
        return peak
    if step >= end:
        return floor
    if config["lr_schedule"] == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (end - warmup)))
    else:
        start = decay_start(config)
        assert start is not None, "a schedule without a formula here"
        shape = 1.0 - math.sqrt((step - start) / (end - start)) if step > start else 1.0
    return floor + shape * (peak - floor)


def decay_start(config: dict[str, Any]) -> int | None:
    """The step at which wsd's decay begins: a run can be prolonged from a state that is no later.
    None for schedules that always fall, or never."""
    if config["lr_schedule"] != "wsd" or not config["decay_lr"]:
        return None
    end = config["lr_decay_iters"] or config["max_iters"]
    return max(config["warmup_iters"], end - round(config["decay_fraction"] * end))


def set_schedule(optimizer: AdamW, step: int, config: dict[str, Any]) -> float:
    """Have `optimizer` use step `step`'s momentum and learning rate, which is returned."""
    lr = learning_rate_at(step, config)
    first, last, steps = MUON_MOMENTUM
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["momentum"] = first + (last - first) * min(1.0, step / steps)
    return lr
