"""AdamW and Muon, clipping, gradients that stay in place, and the learning-rate schedules.

Any optimizer of torch's can take the place of ours.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steady import UserError, muon
from steady.distributed import (
    is_sharded,
    local_shards,
    own_part,
    shard_from_local,
    total_norm,
)
from steady.kernels import compiled_if_possible
from steady.recompute import repeated_blocks

# at first, at last, and how many steps it rises for: more than a short run has (docs/choosing.md)
MUON_MOMENTUM = 0.85, 0.95, 1500
MUON_ELEMENTS = 2**26  # in matrices that are treated at once: bounds the memory for it
IGNORE_SCALE = ("mps",)  # devices whose fused AdamW takes no notice of grad_scale and found_inf


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, which divides gradients by the clipping factor as it reads them.

    On this process's shards where parameters are sharded (FSDP2): as plain tensors, since every
    DTensor costs the host time.
    """

    def clip(self, divisor: Tensor, found_inf: Tensor) -> None:
        """Divide the gradients by `divisor` in the next step, or with found_inf 1.0 change nothing.
        (torch.amp.GradScaler uses these two attributes in the same way, and multiplies them in.)"""
        self.grad_scale, self.found_inf = divisor, found_inf

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments
            tensors[:] = local_shards(tensors)
        return has_complex


class Stack(NamedTuple):
    """n matrices of one shape, which Muon updates together; their states are slices of these."""

    parameters: list[nn.Parameter]
    momentum: Tensor  # (n, rows, columns) that this process has
    row_mean_square: Tensor  # (n, rows, 1)
    head_dim: int  # rows that are made orthogonal on their own; 0: all of a matrix


class Muon(AdamW):
    """Muon for the group that is marked `muon`, AdamW for the others (see muon.py).

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
            dtype = torch.promote_types(local[0].dtype, torch.float32)
            momentum = torch.zeros(
                (len(local), *local[0].shape), device=local[0].device, dtype=dtype
            )
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
        group, device = self.muon_group, self.stacks[0].momentum.device
        # tensors, since code compiled for numbers would be compiled again for every new one
        lr, momentum, decay = torch.tensor(
            [group["lr"], group["momentum"], group["lr"] * group["weight_decay"]],
            dtype=self.stacks[0].momentum.dtype,
        ).to(device, non_blocking=True)  # fmt: skip
        divisor, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        divisor = torch.ones_like(lr) if divisor is None else divisor
        usable = torch.ones_like(lr) if found_inf is None else 1.0 - found_inf.to(lr.dtype)
        for parameters, all_buffers, all_squares, head_dim in self.stacks:
            # a matrix without a gradient is left alone, as by torch's optimizers
            present = [i for i, p in enumerate(parameters) if p.grad is not None]
            if not present:
                continue
            buffer, mean_square = all_buffers, all_squares
            if len(present) < len(parameters):
                buffer, mean_square = all_buffers[present], all_squares[present]  # copies
            used = [parameters[i] for i in present]
            weights = local_shards([p.data for p in used])
            gradient = torch.stack(local_shards([p.grad for p in used]))
            update = self.add_momentum(gradient, buffer, divisor, usable, momentum, self.dtype)
            del gradient
            whole_rows = used[0].shape[0] if is_sharded(used[0]) else None
            update = muon.orthogonalise_together(update, head_dim, whole_rows)
            change = self.scale_rows(update, mean_square, usable, lr)
            torch._foreach_mul_(weights, 1.0 - usable * decay)
            torch._foreach_sub_(weights, change.unbind())
            if len(present) < len(parameters):
                all_buffers[present], all_squares[present] = buffer, mean_square


def stackable(
    parameters: list[nn.Parameter], head_dims: dict[nn.Parameter, int]
) -> Iterator[tuple[list[nn.Parameter], int]]:
    """Parameters of one shape, as many as Muon updates at once, and the rows of a head or 0."""
    kinds: dict[tuple[torch.Size, int], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.shape, head_dims.get(parameter, 0)), []).append(parameter)
    for (shape, head_dim), members in kinds.items():
        n = max(1, MUON_ELEMENTS // max(1, shape.numel()))
        yield from ((members[i : i + n], head_dim) for i in range(0, len(members), n))


def build_optimizer(
    model: nn.Module,
    config: dict[str, Any],
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> AdamW:
    """AdamW, or Muon for the matrices in the blocks and AdamW for the rest, as `config` (train.py's
    settings) says. Parameters with two dimensions or more decay, others (norms, scales) do not.

    compiled: whether Muon's elementwise work is compiled; dtype: of the model's matrix products.

    The state is allocated now and not at the first step, so that the memory left for a step is
    known. Raises UserError if there is nothing for Muon, or nothing to train.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    evaluates = config.get("eval_only", False)
    if not parameters and not evaluates:
        raise UserError("all parameters are frozen (requires_grad=False): nothing to train")
    uses_muon = config["optimizer"] == "muon" and not evaluates
    matrices = hidden_matrices(model) if uses_muon else []
    among = set(matrices)
    others = [p for p in parameters if p not in among]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config["weight_decay"]},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    rates = {"lr": config["learning_rate"], "betas": (config["beta1"], config["beta2"])}
    if uses_muon:
        if not matrices:
            raise UserError(
                "optimizer=muon found no matrix to train in an nn.ModuleList or nn.Sequential of "
                "the model: use --optimizer=adamw"
            )
        inner = {"params": matrices, "muon": True, "weight_decay": config["weight_decay"]}
        head_dims = {
            layer.weight: layer.head_dim
            for layer in model.modules()
            if hasattr(layer, "head_dim") and getattr(layer, "weight", None) in among
            if len(layer.weight) % layer.head_dim == 0
        }
        optimizer = Muon([inner, *groups], head_dims, compiled, dtype, **rates, fused=True)
    else:
        optimizer = AdamW(groups, **rates, fused=True)
    for parameter in others:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained two-dimensional parameters in the model's blocks, except for embeddings."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {
        p: None
        for block in repeated_blocks(model)
        for p in block.parameters()
        if p.dim() == 2 and p.requires_grad and p not in tables
    }
    return list(found)


def all_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in the order of the optimizer's state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer as checkpoints name it: adamw and muon are ours, others have torch's name."""
    return type(optimizer).__name__.lower() if isinstance(optimizer, AdamW) else (
        f"torch's {type(optimizer).__name__}")  # fmt: skip


@torch.no_grad()
def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a checkpoint's optimizer state; betas, weight decay and so on stay today's, but for
    optimizers of others, whose load_state_dict takes all that was saved.

    Raises UserError if it is of another optimizer, or of other parameters.
    """
    parameters, states = all_parameters(optimizer), saved.get("state", {})
    first = states.get(0) if isinstance(states.get(0), dict) else {}
    was = saved.get("kind") or ("muon" if "momentum" in first else "adamw")
    now = kind_of(optimizer)
    if was != now and (states or "kind" in saved):
        raise UserError(f"it was trained with optimizer={was}, not {now}: continue with that one")
    if not isinstance(optimizer, AdamW):
        # with what such an optimizer keeps in its groups (a step count, perhaps)
        settings = saved.get("param_groups") or optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": states, "param_groups": settings})
        return
    for i, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        try:
            found = {name: tensor.shape for name, tensor in states[i].items()}
        except (KeyError, TypeError, AttributeError):
            found = {}
        if found != {name: tensor.shape for name, tensor in state.items()}:
            raise UserError(f"optimizer state of parameter {i} is missing or of another shape")
        for name, tensor in state.items():
            if states[i][name].dtype != tensor.dtype:
                raise UserError(f"optimizer state {name} of parameter {i} is of another dtype")
            own = local_shards([tensor])[0].copy_(own_part(states[i][name], tensor))
            if name in ("step", "exp_avg_sq") and own.numel() and not own.min() >= 0:
                raise UserError(f"optimizer state {name} of parameter {i} is negative or NaN")
    if len(states) != len(parameters):
        raise UserError(f"optimizer state of {len(states)} parameters, not {len(parameters)}")


class StaticGradients:
    """Gradients that stay in place from step to step, as CUDA graphs need (F01): the gradients that
    a graph's backward returns lie in memory which its next replay overwrites. (Marking steps or
    cloning activations, the usual advice, does not help.)

    A parameter that never gets a gradient keeps None. One that has had a gradient keeps a tensor,
    zero in steps without one.
    """

    def __init__(self, parameters: list[nn.Parameter], enabled: bool):
        self.parameters = parameters if enabled else []
        self.kept: dict[nn.Parameter, Tensor] = {}

    def keep(self) -> None:
        """Call after every backward pass."""
        for parameter in self.parameters:
            gradient, own = parameter.grad, self.kept.get(parameter)
            if gradient is None or gradient is own:
                continue
            if own is None:
                own = self.kept[parameter] = gradient.clone()
            else:  # somebody has called zero_grad(), which sets gradients to None
                own.copy_(gradient)
            parameter.grad = own


@torch.no_grad()
def clip_gradients(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    """Scale the gradients down to a norm of `limit` (0: no limit); where they are not finite, let
    the next step change nothing. Returns the norm before (scalar).

    Our optimizers do both as they read the gradients. For others, gradients are scaled here, or
    removed, since a parameter without a gradient is left alone.
    """
    parameters = all_parameters(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    grad_norm = total_norm(gradients)
    divisor = (grad_norm / (limit or math.inf)).clamp(min=1.0)
    found_inf = (~grad_norm.isfinite()).float()
    if isinstance(optimizer, AdamW) and grad_norm.device.type not in IGNORE_SCALE:
        optimizer.clip(divisor.float(), found_inf)  # float64 models too
        return grad_norm
    for gradient in gradients:
        gradient.div_(divisor)
    if found_inf:  # waits for the device
        optimizer.zero_grad()
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


def schedule_note(config: dict[str, Any]) -> str | None:
    """A line for a schedule that does not fit its run: the rate does not reach its peak, does not
    come down to its end, or comes down long before the end. None if it fits."""
    peak, floor, warmup = (config[k] for k in ("learning_rate", "min_lr", "warmup_iters"))
    iterations, end = config["max_iters"], config["lr_decay_iters"]
    if not 0 < iterations or peak == floor:
        return None
    if warmup >= iterations:
        reached = learning_rate_at(iterations - 1, config) / peak
        return (
            f"note: warm-up takes {warmup} iterations, and the run has {iterations}: the learning "
            f"rate ends at {reached:.0%} of its peak; use --warmup_iters={iterations // 20}"
        )
    if not config["decay_lr"] or not end:
        return None
    if end <= warmup:
        return (
            f"note: lr_decay_iters={end} is no later than the end of warm-up: the learning rate "
            f"rises until iteration {warmup}, then it is min_lr={floor}"
        )
    if end < iterations:
        return (
            f"note: the learning rate stays at min_lr={floor} from iteration {end} to "
            f"{iterations}; --lr_decay_iters=0 makes the schedule as long as the run"
        )
    if end > iterations:
        last = learning_rate_at(iterations, config)
        return (
            f"note: lr_decay_iters={end} is later than the run's end: the learning rate ends at "
            f"{last:.2e}, not at min_lr={floor}; --lr_decay_iters=0 makes the schedule as long as "
            "the run"
        )
    return None


def decay_start(config: dict[str, Any]) -> int | None:
    """The step at which wsd's decay begins: a run can be prolonged from a state that is no later.
    None for schedules that always fall, or never."""
    if config["lr_schedule"] != "wsd" or not config["decay_lr"]:
        return None
    end = config["lr_decay_iters"] or config["max_iters"]
    return max(config["warmup_iters"], end - round(config["decay_fraction"] * end))


def set_schedule(optimizer: torch.optim.Optimizer, step: int, config: dict[str, Any]) -> float:
    """Set `optimizer`'s learning rate, and Muon's momentum, for step `step`; returns the rate."""
    lr = learning_rate_at(step, config)
    first, last, steps = MUON_MOMENTUM
    for group in optimizer.param_groups:
        group["lr"] = lr
        if group.get("muon"):
            group["momentum"] = first + (last - first) * min(1.0, step / steps)
    return lr
