"""AdamW and Muon, clipping, gradients for CUDA graphs, averaged weights, schedules, second targets.

Most torch optimizers can replace ours.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from steady import UserError, distributed, muon
from steady.distributed import is_sharded, local_rows, local_shards, own_memory, reshard
from steady.loss import LinearCrossEntropy
from steady.recompute import repeated_blocks

# initial value, final value, and warm-up steps (a short run has fewer; docs/choosing.md)
MUON_MOMENTUM = 0.85, 0.95, 1500
MUON_ELEMENTS = 2**26  # matrix elements per batched update: limits its memory
# Averaged weights: after n iterations the first one's weight has fallen as n^-8, so the average
# reaches back over about the last eighth (Karras et al. 2023, "Analyzing and improving the training
# dynamics of diffusion models"). It is updated every 8 iterations. AVERAGE_SHARE: its share in the
# blend.
AVERAGE_POWER, AVERAGE_INTERVAL, AVERAGE_SHARE = 8, 8, 0.6
IGNORE_FOUND_INF = ("mps",)  # devices whose fused AdamW ignores found_inf


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW. If `found_inf` is 1.0, the next step changes nothing. It is a scalar on
    the device, so that the host need not wait. GradScaler sets it too; `zero_grad` removes it.

    It updates sharded parameters (FSDP2) through this process's shards, as plain tensors, since
    every DTensor costs the host time.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        vars(self).pop("found_inf", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # not super().step(), which may call step hooks again
        loss = inspect.unwrap(torch.optim.AdamW.step)(self, closure)
        self.found_inf = None  # not deleted: GradScaler does that
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        own_memory(self.param_groups[-1]["params"])  # the fused kernel needs it

    def state_dict(self) -> dict[str, Any]:
        """As in torch, but without parameters that you have removed from the groups."""
        for parameter in self.state.keys() - {p for _, p in members(self)}:
            del self.state[parameter]
        return super().state_dict()

    def initial_state(self, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter of `group` before its first step, as torch makes it."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments
            tensors[:] = local_shards(tensors)
        weights, gradients = lists[:2]
        for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if weight.stride() != gradient.stride():  # you have set one with other strides: on
                # a CPU the fused kernel would pair the wrong elements
                gradients[i] = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
        return has_complex


class Muon(AdamW):
    """Muon for the group marked `muon`, AdamW for the others (see muon.py).

    head_dims: rows per head, for the parameters whose heads are orthogonalised separately.

    Updates are orthogonalised in bfloat16 if the model computes in bfloat16, else in float32.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        head_dims: dict[nn.Parameter, int],
        compiled: bool,
        dtype: torch.dtype,
        **settings: Any,
    ):
        super().__init__(groups, **settings)
        self.head_dims = head_dims
        self.muon_group["momentum"] = MUON_MOMENTUM[1]  # set_schedule changes it
        self.dtype = dtype if dtype == torch.bfloat16 else torch.float32
        self.add_momentum, self.scale_rows = muon.add_momentum, muon.scale_rows
        if compiled and self.muon_group["params"][0].is_cuda:  # a third of the memory traffic
            self.add_momentum = torch.compile(muon.add_momentum, dynamic=True)
            self.scale_rows = torch.compile(muon.scale_rows, dynamic=True)

    def initial_state(self, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
        if not group.get("muon"):
            return super().initial_state(group, parameter)
        wide = torch.promote_types(parameter.dtype, torch.float32)
        momentum = torch.zeros_like(parameter, dtype=wide)
        # start with the value for an orthogonal matrix, so the average needs no warm-up
        rows, columns = parameter.shape
        start = 1.0 / max(self.head_dims.get(parameter, rows), columns)
        return {"momentum": momentum, "row_mean_square": torch.full_like(momentum[:, :1], start)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in torch's Optimizer; AdamW's looks for a "step" in every state."""
        torch.optim.Optimizer.__setstate__(self, state)

    def stacks(self, parameters: list[nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], int]]:
        """Yield lists of parameters to update together (one shape and dtype), each with its rows
        per head, or 0."""
        kinds: dict[tuple[torch.Size, torch.dtype, int], list[nn.Parameter]] = {}
        for p in parameters:
            kinds.setdefault((p.shape, p.dtype, self.head_dims.get(p, 0)), []).append(p)
        for (shape, _, head_dim), same in kinds.items():
            n = max(1, MUON_ELEMENTS // max(1, shape.numel()))
            yield from ((same[i : i + n], head_dim) for i in range(0, len(same), n))

    def stack_momenta(self) -> None:
        """Keep the momenta of matrices that are updated together in one tensor, so that updates
        need not copy them."""
        whole = [p for p in self.muon_group["params"] if not is_sharded(p)]
        for parameters, _ in self.stacks(whole):
            momenta = torch.stack([self.state[p]["momentum"] for p in parameters])
            for parameter, momentum in zip(parameters, momenta, strict=True):
                self.state[parameter]["momentum"] = momentum

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """torch's AdamW.step calls this, and then updates the parameters in the lists. For a group
        of matrices the lists stay empty: this updates the matrices itself."""
        if not group.get("muon"):
            return super()._init_group(group, *lists)
        # skip those without a gradient, as torch's optimizers do
        used = [p for p in group["params"] if p.grad is not None]
        if not used:
            return False
        for parameter in used:
            if "momentum" not in self.state[parameter]:  # a new one, or you have cleared the state
                self.state[parameter] = self.initial_state(group, parameter)
        buffers = self.state[used[0]]["momentum"]
        # Tensors, because every new Python number would recompile the code. The device fills them,
        # because a copy from the host would wait for the backward pass.
        lr, momentum, decay = (
            torch.full((), value, dtype=buffers.dtype, device=buffers.device)
            for value in (group["lr"], group["momentum"], group["lr"] * group["weight_decay"])
        )
        divisor, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        divisor = torch.ones_like(lr) if divisor is None else divisor
        usable = torch.ones_like(lr) if found_inf is None else 1.0 - found_inf.to(lr.dtype)
        for parameters, head_dim in self.stacks(used):
            weights = local_shards([p.data for p in parameters])
            gradient = torch.stack(local_shards([p.grad for p in parameters]))
            gradient = -gradient if group["maximize"] else gradient
            momenta = local_shards([self.state[p]["momentum"] for p in parameters])
            mean_squares = local_shards([self.state[p]["row_mean_square"] for p in parameters])
            buffer, mean_square = stacked(momenta), torch.stack(mean_squares)
            update = self.add_momentum(gradient, buffer, divisor, usable, momentum, self.dtype)
            del gradient
            whole_rows = parameters[0].shape[0] if is_sharded(parameters[0]) else None
            update = muon.orthogonalise_distributed(update, head_dim, whole_rows)
            change = self.scale_rows(update, mean_square, usable, lr)
            torch._foreach_mul_(weights, 1.0 - usable * decay)
            torch._foreach_sub_(weights, change.unbind())
            torch._foreach_copy_(mean_squares, mean_square.unbind())
            if buffer is not momenta[0]._base:  # it is a copy
                torch._foreach_copy_(momenta, buffer.unbind())
        return False

    @property
    def muon_group(self) -> dict[str, Any]:
        return next(group for group in self.param_groups if group.get("muon"))


def stacked(tensors: list[Tensor]) -> Tensor:
    """The tensor (n, ...) that consists of `tensors`, in this order; a copy if there is none."""
    whole = tensors[0]._base
    if whole is not None and whole.dim() == tensors[0].dim() + 1:
        own, slices = ([(t.data_ptr(), t.shape, t.stride()) for t in x] for x in (tensors, whole))
        if own == slices:
            return whole
    return torch.stack(tensors)


def build_optimizer(
    model: nn.Module,
    config: dict[str, Any],
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> AdamW:
    """AdamW, or Muon for the matrices in the blocks and AdamW for the rest. `config`: train.py's
    settings. Parameters with two or more dimensions get weight decay; norms and scales do not.

    compiled: whether to compile Muon's elementwise work; dtype: the dtype of the model's matmuls.

    Allocates the state now and not at the first step, so that the memory left for a step is known.
    Raises UserError if there is nothing for Muon, or nothing to train.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters and not config.get("eval_only"):
        raise UserError("all parameters are frozen (requires_grad=False): nothing to train")
    if any(p.is_complex() for p in parameters):
        raise UserError("complex parameters: use torch.view_as_real, or another optimizer")
    uses_muon = config.get("optimizer") == "muon" and bool(parameters)  # none in an evaluation
    matrices = hidden_matrices(model) if uses_muon else []
    among = set(matrices)
    others = [p for p in parameters if p not in among]
    decay = config.get("weight_decay", 0.0)
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = config.get("beta1", 0.9), config.get("beta2", 0.95)
    rates = {"lr": config["learning_rate"], "betas": betas}
    if uses_muon:
        if not matrices:
            raise UserError(
                "optimizer=muon found no matrix to train in an nn.ModuleList or nn.Sequential of "
                "the model: use --optimizer=adamw"
            )
        inner = {"params": matrices, "muon": True, "weight_decay": decay}
        head_dims = {
            layer.weight: layer.head_dim
            for layer in model.modules()
            if hasattr(layer, "head_dim") and getattr(layer, "weight", None) in among
            if len(layer.weight) % layer.head_dim == 0
        }
        optimizer = Muon([inner, *groups], head_dims, compiled, dtype, **rates, fused=True)
    else:
        optimizer = AdamW(groups, **rates, fused=True)
    for group, parameter in members(optimizer):
        optimizer.state[parameter] = optimizer.initial_state(group, parameter)
    if uses_muon:
        optimizer.stack_momenta()
    return optimizer


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable two-dimensional parameters in the model's blocks, except for embeddings."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    found = dict.fromkeys(p for block in repeated_blocks(model) for p in block.parameters())
    return [p for p in found if p.dim() == 2 and p.requires_grad and p not in tables]


def members(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], nn.Parameter]]:
    """All parameters, each with its group, in the order of the optimizer's state."""
    return [(group, p) for group in optimizer.param_groups for p in group["params"]]


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's name in checkpoints: adamw or muon for ours, torch's name for others."""
    name = type(optimizer).__name__
    return name.lower() if isinstance(optimizer, AdamW) else f"torch's {name}"


@torch.no_grad()
def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a checkpoint's optimizer state. Ours keep the current betas, weight decay and so on, but
    get the saved learning rates, momentum and values that you added to the groups. For other
    optimizers, load_state_dict restores everything that was saved. (The peaks of groups with rates
    of their own always come from this run's code.)

    Raises UserError if the state belongs to another optimizer or to other parameters.
    """
    was, now = saved.get("kind"), optimizer_name(optimizer)
    if isinstance(was, str) and was != now:
        raise UserError(f"it was trained with optimizer={was}, not {now}: continue with {was}")
    note_own_rates(optimizer)
    if not isinstance(optimizer, AdamW):
        peaks = [group["peak_lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict({key: value for key, value in saved.items() if key != "kind"})
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["peak_lr"] = peak  # from this run's code
        return
    states, groups = saved.get("state", {}), saved.get("param_groups", [])
    well_formed = isinstance(states, dict) and isinstance(groups, list)
    if not well_formed or not all(isinstance(group, dict) for group in groups):
        raise UserError("its optimizer state is malformed")
    for i, (group, parameter) in enumerate(members(optimizer)):
        if parameter not in optimizer.state and i in states:  # of a group that you added
            optimizer.state[parameter] = optimizer.initial_state(group, parameter)
        state = optimizer.state.get(parameter, {})
        try:
            found = {name: (tensor.shape, tensor.dtype) for name, tensor in states[i].items()}
        except (KeyError, TypeError, AttributeError):
            found = {}
        if found != {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}:
            raise UserError(
                f"optimizer state of parameter {i} is missing or has the wrong shape or dtype"
            )
        for name, tensor in state.items():
            own = local_shards([tensor])[0].copy_(local_rows(states[i][name], tensor))
            if name in ("step", "exp_avg_sq") and own.numel() and not own.min() >= 0:
                raise UserError(f"optimizer state {name} of parameter {i} is negative or NaN")
    own = {*optimizer.defaults, "params", "muon", "peak_lr"} - {"lr"}  # from this run's code
    for group, old in zip(optimizer.param_groups, groups, strict=False):
        group |= {name: value for name, value in old.items() if name not in own}  # a scheduler's
    expected = sum(parameter in optimizer.state for _, parameter in members(optimizer))
    if len(states) != expected:
        raise UserError(
            f"optimizer state for {len(states)} parameters, not {expected}: if you add parameter "
            "groups during training, add them before start.load_optimizer too"
        )


@contextlib.contextmanager
def own_gradients(model: nn.Module, cuda_graphs: bool) -> Iterator[None]:
    """Run a backward pass in this `with` block. If it is a CUDA graph, its gradients are in memory
    that the next replay overwrites (F01), so add them to the earlier ones, or copy them, at the end
    of the block. (The usual advice, marking steps or cloning activations, does not help.)

    Until then each `.grad` is set aside, so that one kernel can add many gradients. Parameters
    with a post-accumulate hook are left to autograd.
    """
    if not cuda_graphs:
        yield
        return
    earlier = {p: p.grad for p in model.parameters()}
    set_aside = [p for p in earlier if not p._post_accumulate_grad_hooks]
    for p in set_aside:
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            new = {p: p.grad for p in earlier if p.grad is not None and p.grad is not earlier[p]}
            more = [p for p in set_aside if p in new and earlier[p] is not None]
            if more:
                torch._foreach_add_([earlier[p] for p in more], [new.pop(p) for p in more])
            if new:  # there is no _foreach_clone
                earlier |= zip(new, torch._foreach_mul([*new.values()], 1.0), strict=True)
            for p in (*new, *set_aside):
                p.grad = earlier[p]


class AveragedWeights:
    """A running average of the weights. Evaluated weights are a blend of it and of the current
    ones. In long runs they are better than either, because the average removes noise that remains
    after the learning rate has decayed.

    Buffers and frozen parameters are not averaged. saved: the averages from a checkpoint, which an
    evaluation's frozen parameters use too. Without it they start with the current weights. Raises
    UserError if they do not fit the model.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, enabled: bool, saved: dict[str, Tensor] | None = None):
        self.model, saved = model, saved or {}
        named = dict(model.named_parameters()) if enabled else {}
        self.parameters = {n: p for n, p in named.items() if p.requires_grad or n in saved}
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}
        for name, average in (self.averages if saved else {}).items():
            value, own = saved.get(name), local_shards([average])[0]
            fits = isinstance(value, Tensor) and value.shape == average.shape
            if not fits or not own.copy_(local_rows(value, average)).sum().isfinite():
                raise UserError(
                    f"the average of {name} is missing, does not fit or is not finite: use "
                    "--average_weights=False"
                )

    def state_dict(self) -> dict[str, Tensor]:
        return self.averages

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Call after every optimizer step. steps: the number of steps so far."""
        if self.averages and (steps - 1) % AVERAGE_INTERVAL == 0:
            rate = min(1.0, AVERAGE_POWER * AVERAGE_INTERVAL / steps)
            torch._foreach_lerp_(*self.shards(), rate)

    def shards(self) -> tuple[list[Tensor], list[Tensor]]:
        """This process's parts of the averages and of the weights."""
        averages = local_shards(list(self.averages.values()))
        return averages, local_shards([p.data for p in self.parameters.values()])

    @contextlib.contextmanager
    def blended(self) -> Iterator[None]:
        """In the `with` block the model has the blended weights, if averages are enabled."""
        if not self.averages:
            yield
            return
        averages, weights = self.shards()
        current = [weight.clone() for weight in weights]
        try:
            reshard(self.model)  # with fsdp: drop gathered copies of the old weights
            torch._foreach_lerp_(weights, averages, AVERAGE_SHARE)
            yield
        finally:
            reshard(self.model)
            torch._foreach_copy_(weights, current)


@torch.no_grad()
def clip_gradients(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    """Scale the gradients to a norm of at most `limit` (0: no limit). If they are not finite, the
    next step changes nothing. Returns the norm before clipping (scalar).

    Our optimizers skip such a step by themselves. For others, this function removes the gradients.
    """
    parameters = [p for _, p in members(optimizer)]
    for parameter in parameters:
        gradient = parameter.grad  # torch.autograd.grad may expand it
        if gradient is not None and (gradient.is_inference() or 0 in gradient.stride()):
            parameter.grad = gradient.clone()
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    if any(gradient.is_sparse for gradient in gradients):
        raise UserError("sparse gradients cannot be clipped: use nn.Embedding(..., sparse=False)")
    shards = local_shards(gradients)
    grad_norm = nn.utils.get_total_norm(shards)
    if is_sharded(gradients[0]):
        grad_norm = distributed.all_reduce_sum(grad_norm.square()).sqrt()
    if limit:
        factor = (limit / grad_norm).clamp(max=1.0)
        for device in {shard.device for shard in shards}:
            own = [shard for shard in shards if shard.device == device]
            torch._foreach_mul_(own, factor.to(device))
    found_inf = (~grad_norm.isfinite()).float()
    if isinstance(optimizer, AdamW) and grad_norm.device.type not in IGNORE_FOUND_INF:
        optimizer.found_inf = found_inf
    elif found_inf:  # waits for the device
        optimizer.zero_grad()
    return grad_norm


def schedule_end(config: dict[str, Any]) -> int:
    """The step at which the schedule ends: `lr_decay_iters`, or `max_iters` if that is 0 or the
    rate does not decay."""
    return config.get("decay_lr", True) and config.get("lr_decay_iters") or config["max_iters"]


def learning_rate_at(step: int, config: dict[str, Any]) -> float:
    """The learning rate at step `step`: linear warm-up, then the schedule, then `min_lr`.

    cosine: half a cosine from the end of warm-up to the end (Loshchilov and Hutter 2017).
    wsd: constant, then a decay as 1 - sqrt(progress) over the last `decay_fraction` of all steps
    (Haegele et al. 2024, "Scaling laws and compute-optimal training beyond fixed training
    durations").
    """
    peak, floor = config["learning_rate"], config.get("min_lr", 0.0)
    warmup, end = config.get("warmup_iters", 0), schedule_end(config)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if not config.get("decay_lr", True):
        return peak
    if step >= end:
        return floor
    if config.get("lr_schedule", "cosine") == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (end - warmup)))
    else:
        start = decay_start(config)
        assert start is not None, "this schedule has no formula here"
        shape = 1.0 - math.sqrt((step - start) / (end - start)) if step > start else 1.0
    return floor + shape * (peak - floor)


def schedule_note(config: dict[str, Any]) -> str | None:
    """A one-line note if the schedule does not fit the run: the learning rate never reaches its
    peak, never reaches min_lr, or reaches it before the run ends. None if it fits."""
    peak, iterations, end = config["learning_rate"], config["max_iters"], schedule_end(config)
    warmup = config.get("warmup_iters", 0)
    if not iterations or peak in (0, config.get("min_lr")) or warmup < end == iterations:
        return None
    last = learning_rate_at(iterations - 1, config)
    shorter = warmup if warmup < iterations else iterations // 20
    flags = [f"--warmup_iters={shorter}"] * (shorter != warmup)
    flags += ["--lr_decay_iters=0"] * (end != iterations)
    why = f"warm-up ends at iteration {warmup} and the schedule at {end}, but the run at"
    if warmup >= iterations:
        why = f"warm-up takes {warmup} iterations, but the run ends at"
    share = f"{last / peak:.0%}" if last >= 0.01 * peak else f"{last / peak:.1%}"
    note = f"note: {why} {iterations}: the learning rate ends at {share} of its peak; use "
    return note + " ".join(flags)


def decay_start(config: dict[str, Any]) -> int | None:
    """The step at which wsd's decay begins. Runs can be extended from checkpoints up to that step.
    None for schedules that decay all the time, or never."""
    if config.get("lr_schedule") != "wsd" or not config.get("decay_lr", True):
        return None
    end = schedule_end(config)
    return max(config.get("warmup_iters", 0), end - round(config["decay_fraction"] * end))


def set_schedule(optimizer: torch.optim.Optimizer, step: int, config: dict[str, Any]) -> float:
    """Set the learning rate and Muon's momentum for step `step`; returns the learning rate. If a
    group has its own rate, that rate is its peak. If one of torch's schedulers is attached, rates
    stay as it sets them."""
    lr, peak = learning_rate_at(step, config), config["learning_rate"]
    note_own_rates(optimizer)
    first, last, steps = MUON_MOMENTUM
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    for group in optimizer.param_groups:
        own = group["peak_lr"]
        if not scheduled:
            group["lr"] = lr if own is None or not peak else lr * own / peak
        if group.get("muon"):
            group["momentum"] = first + (last - first) * min(1.0, step / steps)
    return float(optimizer.param_groups[0]["lr"]) if scheduled else lr


def note_own_rates(optimizer: torch.optim.Optimizer) -> None:
    """If a group's rate differs from the optimizer's default, store all groups' rates as their
    peaks, before a schedule or a resume changes them. (One that equals the default may be meant.)
    """
    default = getattr(optimizer, "defaults", {}).get("lr")
    rates = [group.get("peak_lr", group.get("lr")) for group in optimizer.param_groups]
    own = default is not None and any(rate not in (None, default) for rate in rates)
    for group in optimizer.param_groups:
        group.setdefault("peak_lr", group.get("lr") if own else None)


def loss_layers(model: nn.Module, setting: str) -> list[LinearCrossEntropy]:
    """The model's LinearCrossEntropy layers, which apply `setting`. Raises UserError if there are
    none. A layer that the model never calls has no effect."""
    layers = [layer for layer in model.modules() if isinstance(layer, LinearCrossEntropy)]
    if not layers:
        raise UserError(
            f"{setting} works through model.py's self.cross_entropy, which this model does not "
            f"have: use --{setting}=0"
        )
    return layers


def set_second_target(model: nn.Module, step: int, config: dict[str, Any]) -> None:
    """Train on the token after next too, as a second target of the same logits. Its weight relative
    to the first target falls from config["second_target"] to 0 over the first half of the
    schedule. (As in modded-nanogpt's record of December 2025; Gloeckle et al. 2024, "Better &
    faster large language models via multi-token prediction", use a head for each token.)

    Call before every step.
    """
    if not config.get("second_target") or config.get("eval_only"):
        return
    progress = step / max(1, schedule_end(config))
    weight = config["second_target"] * max(0.0, 1.0 - 2.0 * progress)
    for layer in loss_layers(model, "second_target"):
        if not isinstance(layer.share, Tensor):
            layer.share = torch.zeros((), device=next(model.parameters()).device)
        layer.share.fill_(weight / (1.0 + weight))  # in place, as CUDA graphs need
