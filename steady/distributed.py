"""Several processes, one per GPU, as torchrun starts them: their ranks and what they exchange.

All processes call these functions at the same points. A process on its own pays nothing for them.

ddp: every process holds the whole model; after the last micro-step its gradients are copied into
one flat tensor and summed by one all-reduce. So the model stays one compiled graph, CUDA graphs
keep working, and nothing is exchanged before (DistributedDataParallel cuts the graph into buckets).
fsdp: PyTorch's FSDP2; every process holds its share of weights, gradients and optimizer state.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from steady import UserError
from steady.hardware import autocast, choose_device, choose_dtype
from steady.recompute import repeated_blocks

NAMES = ("out_dir", "wandb_project", "wandb_run_name")  # settings that change no computation
PARAMS_PER_EXCHANGE = 2**27  # at most, with fsdp, unless a single block has more


MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


class Process(NamedTuple):
    """This process: its place among all, its device, and the dtype of its matrix products."""

    rank: int = 0
    local_rank: int = 0  # among those on this machine
    world_size: int = 1
    parallel: str = "ddp"
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32

    @property
    def master(self) -> bool:
        """Whether this is the process that prints and saves."""
        return self.rank == 0

    @property
    def sums_gradients(self) -> bool:
        """ddp: every process has the whole model and adds up all processes' gradients."""
        return self.world_size > 1 and self.parallel == "ddp"

    @property
    def shards_model(self) -> bool:
        """fsdp: every process has a part of every weight."""
        return self.world_size > 1 and self.parallel == "fsdp"

    @property
    def build_device(self) -> torch.device:
        """Where to build the model: with fsdp on the meta device, see `shard`."""
        return torch.device("meta") if self.shards_model else self.device

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context to run forward passes in."""
        return autocast(self.device, self.dtype)


ALONE = Process()


def restarts() -> int:
    """How often torchrun has restarted the processes."""
    found = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not found.isdecimal():
        raise UserError(f"TORCHELASTIC_RESTART_COUNT={found} is no number: unset it")
    return int(found)


@functools.cache
def launch() -> str:
    """A token of this command under this torchrun, the same after restarts; "" without torchrun.
    (torchrun's own ID is "none" or what the user gives, and process IDs repeat in containers.)"""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    agent = str(os.getppid())
    with contextlib.suppress(OSError):  # when torchrun itself was started
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
        agent += f" {started} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return first_in_launch("launch", agent if not has_store() else secrets.token_hex(16))


def has_store() -> bool:
    """Whether torchrun keeps a store over restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def first_in_launch(key: str, value: str) -> str:
    """The first `value` that a process of this torchrun had for `key` with this command, before
    restarts too: the store of torchrun's agent keeps it. Without one it is this value."""
    if not has_store():
        return value
    key += "/" + hashlib.sha256(repr(sys.argv).encode()).hexdigest()  # one may run several commands
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        return store.compare_set(f"steady/{key}", "", value).decode()
    except RuntimeError:  # no store, no restart that could ask for it
        return value


def on_one_machine() -> bool:
    """Whether torchrun has started all of the processes on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")


def peer_has_ended(error: BaseException) -> bool:
    """Whether an exchange failed because another process is gone or hangs: its connection was
    closed, reset or refused, or nothing came. torch says so by a RuntimeError; the hub's errors
    speak of connections too."""
    return (
        isinstance(error, RuntimeError) and re.search("onnection|imed out", str(error)) is not None
    )


def this_process(
    parallel: str = "ddp", device: str = "cpu", dtype: str = "float32", width: int = 0
) -> Process:
    """This process by torchrun's variables, with the device and dtype that the settings ask for.

    width: of the model, which decides what dtype=auto means on a CPU.

    Raises UserError when the variables are incomplete or contradict each other.
    """
    require_torchrun()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    try:
        rank, local_rank, world_size = (
            int(found.get(name, alone)) for name, alone in zip(names, (0, 0, 1), strict=True)
        )
        complete = len(found) in (0, 3) and 0 <= rank < world_size and 0 <= local_rank
    except ValueError:
        complete = False
    if not complete:
        shown = ", ".join(f"{name}={found.get(name, '(not set)')}" for name in names)
        raise UserError(
            f"{shown} do not describe a process: start several with torchrun, or unset them for one"
        )
    # several processes, each of which measures, might not agree on a CPU's dtype
    chosen = choose_device(device, local_rank if world_size > 1 else None)
    computed = choose_dtype(dtype, chosen, width if world_size == 1 else 0)
    return Process(rank, local_rank, world_size, parallel, chosen, computed)


def require_torchrun() -> None:
    """Raises UserError where srun or mpirun have started several processes without torchrun: each
    would train the same run (F77)."""
    tasks = {
        "srun": os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS", "1"),
        "mpirun": next((os.environ[name] for name in MPI_SIZES if name in os.environ), "1"),
    }
    in_step = "SLURM_STEP_ID" in os.environ or os.environ.get("SLURM_PROCID", "0") != "0"
    for starter, number in tasks.items():
        if "RANK" in os.environ or not number.isdecimal() or int(number) < 2:
            continue
        if starter == "srun" and not in_step:
            continue  # the script of a batch job itself, which is one process
        nodes = os.environ.get("SLURM_NNODES", "1")
        command = f"torchrun --standalone --nproc_per_node={number}"
        if nodes not in ("", "1"):
            command = (
                "srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --nproc_per_node=GPUS "
                "--rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=FIRST_NODE:29500"
            )
        raise UserError(
            f"{starter} has started {number} processes of this script, and each would train the "
            f"same run: start it with {command} {os.path.basename(sys.argv[0])} ..."
        )


def check(process: Process, config: dict[str, Any], cuda_graphs: bool) -> None:
    """Raises UserError for what several processes cannot do."""
    world_size, steps = process.world_size, config["gradient_accumulation_steps"]
    if steps % world_size:
        below = steps // world_size * world_size
        choices = [str(n) for n in (below, below + world_size) if n]
        size, rest = divmod(config["batch_size"] * steps, below + world_size)
        if not rest:
            choices[-1] += f" (with batch_size={size} for the same global batch)"
        raise UserError(
            f"gradient_accumulation_steps={steps} counts the micro-batches of all {world_size} "
            f"processes, so it must be a multiple of {world_size}: use " + " or ".join(choices)
        )
    if process.shards_model and (cuda_graphs or process.dtype == torch.float16):
        raise UserError(
            "parallel=fsdp exchanges weights inside a step, which CUDA graphs and float16's loss "
            "scaling do not allow: use compile_mode=default (or max-autotune-no-cudagraphs) and "
            "dtype=bfloat16, or parallel=ddp"
        )


def start(process: Process, config: dict[str, Any], cuda_graphs: bool = False) -> None:
    """Join the other processes, if there are any, and check that all have the same settings. What
    are only NAMES, which a config file may compute from the clock, is the first process's
    everywhere, and what it was before a restart of the launch (F73)."""
    check(process, config, cuda_graphs)  # before they meet, so that each prints its own error
    rank, world_size, backend = process.rank, process.world_size, config["backend"]
    if process.master:
        names = json.dumps({name: config[name] for name in NAMES if name in config})
        config |= json.loads(first_in_launch("names", names))
    if world_size == 1:
        return
    port = os.environ.get("MASTER_PORT", "0")
    if not (port.isdecimal() and int(port) < 2**16):
        raise UserError(f"MASTER_PORT={port} is no port: use a number below 65536")
    if backend == "auto":
        backend = "nccl" if process.device.type == "cuda" else "gloo"
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"  # small values are exchanged without waiting for the GPU
    try:
        store, _, _ = next(rendezvous("env://"))
        if has_store():
            store = dist.PrefixStore(meet(store, process), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot join {world_size} processes with {backend}: {reason}") from None
    show_error = sys.excepthook

    def show_error_and_exit(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if peer_has_ended(error):
            print(f"rank {rank}: error: another process has ended or hangs", file=sys.stderr)
        else:
            show_error(kind, error, trace)
        exit_now(1)

    sys.excepthook = show_error_and_exit
    configs = gather_objects(process, config)
    names = {name: configs[0][name] for name in NAMES if name in config}
    config |= names
    configs = [c | names for c in configs]
    differing = [key for key in config if any(c.get(key) != config[key] for c in configs)]
    if differing:
        listed = "; ".join(f"{key} is {[c.get(key) for c in configs]}" for key in differing)
        raise UserError(f"the processes have different settings: {listed}")


def meet(store: dist.Store, process: Process) -> str:
    """A prefix for the keys of these processes in torchrun's store, which is kept over restarts:
    without one they would meet at the addresses of the dead. (torchrun tells processes how often
    they were restarted, but every machine counts on its own.)

    The first process publishes a token; the others sign it, each with a number of its own, until
    their numbers come back. So none takes the token of processes that have ended.
    """
    mine, others = secrets.token_hex(8), range(1, process.world_size)
    if process.master:
        store.set("steady/token", mine)
        signed = {str(rank): store.get(f"steady/{mine}/{rank}").decode() for rank in others}
        store.set(f"steady/{mine}", json.dumps(signed))
        return mine
    end = time.monotonic() + 1800
    while time.monotonic() < end:
        token = store.get("steady/token").decode()
        store.set(f"steady/{token}/{process.rank}", mine)
        for _ in range(50):
            if store.check([f"steady/{token}"]):
                if json.loads(store.get(f"steady/{token}")).get(str(process.rank)) == mine:
                    return token
            if store.get("steady/token").decode() != token:
                break
            time.sleep(0.02)
    raise RuntimeError("the first process does not answer")


def on_rank0_first(process: Process, action: Callable[[], Any]) -> Any:
    """The result of `action()`, which the first process alone runs, on every process. If it raises
    an error about a file or a UserError, the others end without a message."""
    error, result = None, [None]
    try:
        if process.master:
            result = [action()]
    except (OSError, UserError) as found:
        error = found
    failed = any_process(error is not None)
    if error is not None:
        raise error
    if failed:
        exit_now(1)
    if process.world_size > 1:
        dist.broadcast_object_list(result)
    return result[0]


def all_or_none(process: Process, action: Callable[[], Any]) -> Any:
    """The result of `action()`, which every process runs; if it fails on one, it fails on all."""
    error, result = None, None
    try:
        result = action()
    except Exception as found:
        error = found
    mine = error and (getattr(error, "errno", None), getattr(error, "strerror", None) or str(error))
    errors = gather_objects(process, mine)
    for rank, message in enumerate(errors):
        if message is not None:
            raise error or OSError(message[0], f"rank {rank}: {message[1]}")
    return result


def gather_objects(process: Process, value: Any) -> list[Any]:
    """The values of all processes, on every one."""
    if process.world_size == 1:
        return [value]
    values: list[Any] = [None] * process.world_size
    dist.all_gather_object(values, value)
    return values


def launcher() -> list[str]:
    """The beginning of the command that started this process."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return ["python"]
    local = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    if local != str(world_size):
        return ["torchrun", "..."]
    return ["torchrun", "--standalone", f"--nproc_per_node={local}"]


def stop(process: Process) -> None:
    """Leave the other processes; all but the first end here."""
    if dist.is_initialized():
        dist.barrier()  # none leaves while another still waits for it
        dist.destroy_process_group()
    if not process.master:
        exit_now()


def exit_now(status: int = 0) -> None:
    """End a process that has nothing more to say. Python's orderly end may meet a thread of torch's
    that is still finishing, and then aborts ("terminate called without an active exception")."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """`tensor` after it is replaced, in place, by its sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def all_reduce_min(value: float) -> float:
    """The smallest `value` of any process."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return float(found)


HANGING = 5.0  # minutes without an answer after which a process hangs


def limit_waiting(process: Process, minutes: float | None = None) -> None:
    """Let exchanges fail that take longer, so that a process that hangs ends the run. Before the
    training loop torch's own limits apply: 10 minutes with NCCL, 30 with gloo."""
    if process.world_size > 1:
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes or HANGING))


def any_process(flag: bool) -> bool:
    """Whether `flag` is true on any process."""
    return all_reduce_min(0.0 if flag else 1.0) == 0.0


@torch.no_grad()
def flatten_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """All gradients in one new tensor, zeros for missing ones, and at its end for each parameter
    whether it has one (1.0 or 0.0)."""
    device = parameters[0].device
    parts = [
        torch.zeros(p.numel(), device=device) if p.grad is None else p.grad.flatten()
        for p in parameters
    ]
    present = torch.tensor([float(p.grad is not None) for p in parameters]).to(device)
    return torch.cat([*parts, present])


@torch.no_grad()
def sum_gradients(process: Process, parameters: Sequence[nn.Parameter], in_place: bool) -> None:
    """With ddp, replace gradients by their sums over all processes, in one exchange.

    A parameter without a gradient keeps None if no process has one for it, so that the optimizer
    leaves it alone. in_place: keep the tensors that hold the gradients, as CUDA graphs need.
    """
    if not process.sums_gradients or not parameters:
        return
    flat = flatten_gradients(parameters)
    dist.all_reduce(flat)
    sizes = [p.numel() for p in parameters]
    *sums, counts = flat.split([*sizes, len(sizes)])
    missing = any(p.grad is None for p in parameters)
    present = (counts > 0).tolist() if missing else [True] * len(sizes)  # tolist waits for a GPU
    for parameter, total, is_present in zip(parameters, sums, present, strict=True):
        total = total.view_as(parameter).to(parameter.dtype)
        if in_place and parameter.grad is not None:
            parameter.grad.copy_(total)
        elif is_present:
            parameter.grad = total


def blocks_per_exchange(n_layer: int, block_params: int) -> int:
    """How many blocks fsdp exchanges at once. An exchange costs the host as much time for small
    blocks as for large ones, and small ones keep a GPU busy for less. Four exchanges at least are
    left, if there are four blocks: they overlap with computation."""
    return max(1, min(PARAMS_PER_EXCHANGE // max(1, block_params), n_layer // 4))


def shard(model: nn.Module, process: Process) -> None:
    """With fsdp, divide `model`, which is on the meta device, among all processes, a few blocks at
    a time, in place (FSDP2). These get their initial values just before, so that no process ever
    holds the whole model.

    Products and a micro-batch's gradients are in the process's dtype, and gradients are summed in
    float32. Raises UserError that names parameters without dimensions, which FSDP2 cannot divide,
    and what has values of which only the model's code knows.
    """
    if not process.shards_model:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars:
        raise UserError(
            f"parallel=fsdp cannot divide {', '.join(scalars)}: parameters without dimensions; "
            "give them the shape (1,), or use parallel=ddp"
        )
    groups = exchange_groups(model)
    on_rank0_first(process, lambda: require_initial_values(model, groups))
    policy = MixedPrecisionPolicy(
        param_dtype=None if process.dtype == torch.float32 else process.dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the rotary tables stay in float32
    )
    mesh = init_device_mesh(process.device.type, (process.world_size,))
    for modules in with_values(model, groups, process.device):
        fully_shard(modules, mesh=mesh, mp_policy=policy)
        modules[0].set_gradient_divide_factor(1.0)  # a sum: losses are divided already
        modules[0].set_force_sum_reduction_for_comms(True)  # gloo has no other
    garbage = [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point() and bool(local_shards([tensor])[0].isnan().any())
    ]  # fmt: skip
    if garbage:
        raise UserError(f"parallel=fsdp: no initial values for {', '.join(garbage)}; {REMEDY}")


REMEDY = "set them in a reset_parameters() of their module, or use parallel=ddp"


def exchange_groups(model: nn.Module) -> list[list[nn.Module]]:
    """The modules that fsdp exchanges together: a few blocks at a time, at last all else."""
    blocks = repeated_blocks(model)
    largest = max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0)
    n = blocks_per_exchange(len(blocks), largest)
    return [*(blocks[i : i + n] for i in range(0, len(blocks), n)), [model]]


def with_values(
    model: nn.Module, groups: list[list[nn.Module]], device: torch.device
) -> Iterator[list[nn.Module]]:
    """The `groups` of a model on the meta device, one after the other, as soon as their tensors
    are on `device` with their initial values."""
    undrawn = list(getattr(model, "draws", ()))
    for modules in groups:
        for module in modules:
            materialize(module, device)
        for name in [name for name in undrawn if not model.get_parameter(name).is_meta]:
            model.draw(name)
            undrawn.remove(name)
        yield modules


def require_initial_values(model: nn.Module, groups: list[list[nn.Module]]) -> None:
    """Raises UserError that names the tensors of a model on the meta device which groups share, or
    which would not get the values that the model's code gives them.

    What code does on the meta device leaves no trace there. So a model of the same kind with two
    layers is built as without fsdp, with two seeds, and as with it. What does not depend on the
    seed must be equal; what does must be drawn by `model.draw`, or have the same mean and standard
    deviation.
    """
    group_of = {id(module): i for i, modules in enumerate(groups[:-1]) for module in modules}
    places = {f"{name}.": group_of[id(module)]
              for name, module in model.named_modules(remove_duplicate=False)
              if id(module) in group_of}  # fmt: skip
    used: dict[int, dict[int, str]] = {}  # by parameter: a name of it in each group
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = next((i for place, i in places.items() if name.startswith(place)), -1)
        used.setdefault(id(parameter), {})[group] = name
    shared = [" and ".join(names.values()) for names in used.values() if len(names) > 1]
    if shared:
        raise UserError(f"parallel=fsdp cannot share {'; '.join(shared[:5])}: use parallel=ddp")

    config = model.config
    if is_dataclass(config) and hasattr(config, "n_layer"):
        config = replace(config, n_layer=min(2, config.n_layer))
    built = []
    with torch.random.fork_rng(devices=[]):
        for seed, device in ((1, "cpu"), (2, "cpu"), (1, "meta")):
            torch.manual_seed(seed)
            with torch.device(device):
                built.append(type(model)(config))
        for _ in with_values(built[2], exchange_groups(built[2]), torch.device("cpu")):
            pass
    one, other, ours = (
        dict([*found.named_parameters(), *found.named_buffers()]) for found in built
    )
    unknown = [
        name for name in ours
        if not are_alike(ours[name], one[name], other[name], name in getattr(model, "draws", ()))
    ]  # fmt: skip
    if unknown:
        raise UserError(
            f"parallel=fsdp does not know the initial values of {', '.join(unknown[:5])}; {REMEDY}"
        )


@torch.no_grad()
def are_alike(found: Tensor, one: Tensor, other: Tensor, drawn: bool) -> bool:
    """Whether initial values are those of two seeds, or for values that depend on the seed and are
    not `drawn` by the model, whether they are spread alike."""
    if drawn or torch.equal(one, other):
        return torch.equal(found, one)
    if found.shape != one.shape or one.numel() < 2:
        return found.shape == one.shape
    both = torch.stack([one, other]).float()
    tolerance = (0.05 + 5 / math.sqrt(one.numel())) * both.std()
    means, stds = found.float().mean() - both.mean(), found.float().std() - both.std()
    return bool(means.abs() <= tolerance and stds.abs() <= tolerance)


@torch.no_grad()
def materialize(part: nn.Module, device: torch.device) -> None:
    """Create the tensors of a part of a model that are on the meta device, on `device`, with the
    values that their modules' reset_parameters() give, else NaN. Tied ones stay tied."""

    def create(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        value = float("nan") if tensor.is_floating_point() else 0
        return torch.full_like(tensor, value, device=device)

    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((module, name))
    keep = [p for p in part.parameters()]  # or ids would be used again
    for module in reversed(list(part.modules())):  # inner ones first
        if any(p.is_meta for p in (*module.parameters(False), *module.buffers(False))):
            module._apply(create, recurse=False)
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for places in tied.values():
        for module, name in places[1:]:
            setattr(module, name, getattr(*places[0]))
    del keep


def keep_gathered(model: nn.Module) -> None:
    """Hold the weights of a divided model, once gathered, from forward to backward: a third of the
    exchanges less, for memory of all its weights in `shard`'s dtype."""
    for block in repeated_blocks(model):
        block.set_reshard_after_forward(False)


def is_sharded(value: Any) -> bool:
    """Whether `value` is a tensor that is divided among the processes (a DTensor)."""
    return hasattr(value, "full_tensor")


@torch.no_grad()
def local_shards(tensors: list[Tensor]) -> list[Tensor]:
    """This process's parts of tensors, in the same memory; all or none of them are sharded."""
    if not tensors or not is_sharded(tensors[0]):
        return tensors
    return [tensor.to_local() for tensor in tensors]


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm (scalar) of tensors together; all or none of them are sharded."""
    norm = torch.nn.utils.get_total_norm(local_shards(tensors))
    if is_sharded(tensors[0]):
        norm.square_()
        all_reduce_sum(norm)
        norm.sqrt_()
    return norm


def gather_full(state: Any) -> Any:
    """`state` with every sharded tensor whole on the first process's CPU, one after the other; the
    other processes get None in their places."""
    if isinstance(state, dict):
        return {key: gather_full(value) for key, value in state.items()}
    if is_sharded(state):
        whole = state.full_tensor()
        return whole.cpu() if dist.get_rank() == 0 else None
    return state


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """The rows of the tensor `whole` that are this process's of one that is sharded as `like` is;
    no others are read, if `whole` is a mapped file's."""
    if not is_sharded(like):
        return whole
    first, n = own_rows(like)
    return whole[first : first + n]


def own_rows(sharded: Tensor) -> tuple[int, int]:
    """Which rows of a sharded tensor are this process's: the first, and how many."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    return offset[0], shape[0]


def shard_from_local(local: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that is sharded as `like` is, as a part of it."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip
