"""Training with several processes, one per GPU, launched by torchrun.

All processes call these functions at the same points. A single process pays nothing for them.

ddp: every process holds the whole model. After the last micro-step, one all-reduce sums the
gradients in a single flat tensor. So the model stays one compiled graph and
CUDA graphs keep working (DistributedDataParallel splits the graph at its buckets).
fsdp: PyTorch's FSDP2. Every process holds a shard of the weights, gradients and optimizer state.
"""

import atexit
import contextlib
import functools
import gc
import io
import json
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from steady import UserError
from steady.folder import crc_of_start
from steady.hardware import choose_device, choose_dtype
from steady.recompute import repeated_blocks

NAMES = ("out_dir", "wandb_project", "wandb_run_name")  # settings that do not affect training
PARAMS_PER_GROUP = 2**27  # fsdp's limit, unless a single block is larger
TIMEOUT_MINUTES = 5.0  # minutes without an answer before a process counts as hung
SET_VALUES = "set their initial values in their module's reset_parameters()"  # in fsdp's errors

# the number of processes, set by launchers other than torchrun
SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")  # of the step, else of the whole job
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


class Process(NamedTuple):
    """This process: its rank, its device, and the dtype of its matmuls."""

    rank: int = 0
    world_size: int = 1
    parallel: str = "ddp"
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32

    @property
    def master(self) -> bool:
        """Whether this process prints and saves."""
        return self.rank == 0

    @property
    def shards_model(self) -> bool:
        """Whether every process holds only a shard of every weight (fsdp)."""
        return self.world_size > 1 and self.parallel == "fsdp"

    @property
    def build_device(self) -> torch.device:
        """Where to build the model: on the meta device with fsdp, see `shard`."""
        return torch.device("meta") if self.shards_model else self.device

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context for forward passes."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


SINGLE_PROCESS = Process()


@functools.cache
def launch_id() -> str:
    """The ID of this command in this torchrun launch, kept across restarts; "" without torchrun.
    (torchrun's own ID is "none" unless the user sets it, and containers reuse process IDs.)"""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return first_in_launch("launch", secrets.token_hex(16))


def first_in_launch(key: str, value: Any) -> Any:
    """The first `value` that a process of this launch stored under `key` for this command, even
    before a restart: torchrun's agent keeps the store (except with etcd). Without a store, `value`
    itself."""
    if "RANK" not in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return value
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        key = f"steady/{key}/{sys.argv}"  # a launch can run several commands
        return json.loads(store.compare_set(key, "", json.dumps(value)))
    except RuntimeError:  # without a store there are no restarts
        return value


def on_one_machine() -> bool:
    """Whether torchrun started all processes on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")


def is_peer_failure(error: BaseException) -> bool:
    """Whether communication failed because another process died or hangs: its connection was
    closed, reset or refused, or timed out. The type tells torch's errors from the Hugging Face
    hub's, which mention connections too."""
    return isinstance(error, RuntimeError) and bool(re.search("onnection|imed out", str(error)))


def this_process(
    parallel: str = "ddp", device: str = "cpu", dtype: str = "float32", width: int = 0
) -> Process:
    """This process, from torchrun's environment variables and the device and dtype settings.

    width: the model's width, which decides what dtype=auto means on a CPU.

    Raises UserError if the variables are incomplete or contradict each other.
    """
    require_torchrun()
    found = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    values = found if any(found) else ["0", "0", "1"]
    if not all(value.isdecimal() for value in values) or int(values[0]) >= int(values[2]):
        raise UserError(
            f"RANK, LOCAL_RANK and WORLD_SIZE ({', '.join(map(repr, found))}) are incomplete or "
            "inconsistent: use torchrun, or unset them for one process"
        )
    rank, local_rank, world_size = map(int, values)
    # width=0: the processors of several machines may differ
    chosen = choose_device(device, local_rank if world_size > 1 else None)
    computed = choose_dtype(dtype, chosen, width if world_size == 1 else 0)
    return Process(rank, world_size, parallel, chosen, computed)


def require_torchrun() -> None:
    """Raises UserError if srun or mpirun started several processes without torchrun: each of them
    would train the same run (F77)."""
    in_step = "SLURM_STEP_ID" in os.environ or os.environ.get("SLURM_PROCID", "0") != "0"
    # outside a step this may be the batch script itself
    slurm = [name for name in SLURM_SIZES if in_step and name in os.environ][:1]
    sizes = [os.environ[name] for name in (*slurm, *MPI_SIZES) if name in os.environ]
    number = max((int(size) for size in sizes if size.isdecimal()), default=1)
    if "RANK" in os.environ or number == 1:
        return
    raise UserError(
        f"srun or mpirun has started {number} processes of this script, and each would train the "
        f"same run: start it with torchrun --standalone --nproc_per_node={number} "
        f"{os.path.basename(sys.argv[0])} ... (docs/several-gpus.md: several machines)"
    )


def check(process: Process, config: dict[str, Any], cuda_graphs: bool) -> None:
    """Raises UserError for settings that do not work with several processes."""
    world_size, steps = process.world_size, config["gradient_accumulation_steps"]
    if steps % world_size:
        below = steps // world_size * world_size
        choices = [str(n) for n in (below, below + world_size) if n]
        raise UserError(
            f"gradient_accumulation_steps={steps} counts the micro-batches of all {world_size} "
            f"processes, so it must be a multiple of {world_size}: use " + " or ".join(choices)
        )
    if process.shards_model and (cuda_graphs or process.dtype == torch.float16):
        raise UserError(
            "parallel=fsdp exchanges weights inside a step, which does not work with CUDA graphs "
            "or float16 loss scaling: use compile_mode=default (or max-autotune-no-cudagraphs) "
            "and dtype=bfloat16, or parallel=ddp"
        )


def start(process: Process, config: dict[str, Any], cuda_graphs: bool = False) -> None:
    """Join the other processes, if any, and check that all have the same settings. A config file
    may compute the settings in NAMES from the clock, so all processes use rank 0's, and a restart
    uses those of the launch's first start (F73)."""
    check(process, config, cuda_graphs)  # before joining, so that each prints its own error
    if process.world_size > 1:
        join(process, config.get("backend", "auto"))
    names = {name: config[name] for name in NAMES if name in config}
    config |= on_rank0_first(process, lambda: first_in_launch("names", names))
    launch_id()  # ask for it now: torchrun may be dead when the run saves
    if process.world_size == 1:
        return
    # "auto" may choose another dtype on another GPU
    own = config | {"dtype": str(process.dtype).removeprefix("torch.")}
    configs = gather_objects(process, own)
    differing = [key for key in own if any(c.get(key) != own[key] for c in configs)]
    if differing:
        listed = "; ".join(f"{key} is {[c.get(key) for c in configs]}" for key in differing)
        raise UserError(f"the processes have different settings: {listed}")


def join(process: Process, backend: str) -> None:
    """Meet the other processes. From here on an error in one of them ends all."""
    rank, world_size = process.rank, process.world_size
    if backend != "gloo":  # small values need not wait for the GPU
        backend = "cpu:gloo,cuda:nccl" if process.device.type == "cuda" else "gloo"
    try:
        store, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(rendezvous_prefix(store, process), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (ValueError, RuntimeError) as error:
        reason = f"at MASTER_ADDR:MASTER_PORT: {str(error).splitlines()[0]}"
        raise UserError(f"cannot join {world_size} processes with {backend} {reason}") from None
    show_error = sys.excepthook

    def show_error_and_exit(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if is_peer_failure(error):
            print(f"rank {rank}: error: another process has ended or hangs", file=sys.stderr)
        else:
            show_error(kind, error, trace)
        exit_now(1)

    sys.excepthook = show_error_and_exit


def rendezvous_prefix(store: dist.Store, process: Process) -> str:
    """A key prefix for these processes in the store. torchrun's survives restarts, so without a
    prefix they would connect to the addresses of dead processes. (torchrun's restart count cannot
    be the prefix: every machine keeps its own count.)

    Rank 0 publishes a token. The other ranks sign it with a random number until rank 0 returns
    their number. So no process uses the token of a dead one.
    """
    number, others = secrets.token_hex(8), range(1, process.world_size)
    if process.master:
        store.set("steady/token", token := number)
        signed = {str(rank): store.get(f"steady/{token}/{rank}").decode() for rank in others}
        store.set(f"steady/{token}", json.dumps(signed))
        return token
    for _ in range(1800 * 20):  # half an hour
        token = store.get("steady/token").decode()
        store.set(f"steady/{token}/{process.rank}", number)
        time.sleep(0.05)
        if store.check([f"steady/{token}"]):
            if json.loads(store.get(f"steady/{token}")).get(str(process.rank)) == number:
                return token
    raise RuntimeError("the first process does not answer")


def on_rank0_first(process: Process, action: Callable[[], Any]) -> Any:
    """Run `action()` on rank 0 and return its result on every process. If it raises an error, the
    other processes exit without a message."""
    try:
        return all_or_none(process, lambda: action() if process.master else None)[0]
    except OSError:
        if process.master:
            raise
        exit_now(1)


def all_or_none(process: Process, action: Callable[[], Any]) -> list[Any]:
    """Run `action()` on every process and return all results; if it fails on one, raise on all."""
    error, result = None, None
    try:
        result = action()
    except Exception as found:
        error = found
    results = gather_objects(process, (error and str(error), result))
    for rank, (message, _) in enumerate(results):
        if message is not None:
            raise error or OSError(f"rank {rank}: {message}")
    return [result for _, result in results]


def gather_objects(process: Process, value: Any) -> list[Any]:
    """The values of all processes, on every process."""
    if process.world_size == 1:
        return [value]
    values: list[Any] = [None] * process.world_size
    dist.all_gather_object(values, value)
    return values


def require_same(process: Process, value: Any, name: str) -> None:
    """Raises UserError unless `value`, which describes `name`, is the same on all processes."""
    if any(other != value for other in gather_objects(process, value)):
        raise UserError(f"{name} differs between machines: copy it from one to the others")


def require_same_files(*paths: Path) -> None:
    """Raises UserError if some machines have other files under these names, judging by their size
    and their first MiB. (A checkpoint has its settings and its iteration there.) All processes must
    call it."""
    if dist.is_initialized():
        own = [(path.stat().st_size, crc_of_start(path)) for path in paths if path.exists()]
        everyone = Process(world_size=dist.get_world_size())
        require_same(everyone, own, ", ".join(map(str, paths[:3])))


def launcher() -> list[str]:
    """The first words of the command that started this process."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size == "1":
        return ["python"]
    if not on_one_machine():
        return ["torchrun", "..."]
    return ["torchrun", "--standalone", f"--nproc_per_node={world_size}"]


def stop(process: Process) -> None:
    """Leave the process group. All processes but rank 0 exit here."""
    if dist.is_initialized():
        dist.barrier()  # do not leave while another process still waits for this one
        dist.destroy_process_group()
        # let gloo's threads finish: Python's shutdown aborts if one of them still needs its lock
        time.sleep(0.1)
    if not process.master:
        exit_now()


def exit_now(status: int = 0) -> None:
    """Exit without Python's own shutdown, which aborts if one of torch's threads is still finishing
    ("terminate called without an active exception")."""
    atexit._run_exitfuncs()
    flusher = threading.Thread(target=flush_files, daemon=True)
    flusher.start()
    flusher.join(timeout=10)  # a pipe that nobody reads would block it
    os._exit(status)


def flush_files() -> None:
    """Write the buffers of open files, as Python's own shutdown does."""
    gc.unfreeze()  # memory.fit has hidden the set-up's objects
    objects = gc.get_objects()
    kinds = {kind for kind in {*map(type, objects)} if issubclass(kind, io.IOBase)}  # slow
    files = [file for file in objects if type(file) in kinds]
    for file in (*files, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it is closed, for example
            file.flush()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum `tensor` over all processes in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def set_timeout(minutes: float | None = None) -> None:
    """Set the timeout for communication, so that a hanging process ends the run. Before the
    training loop, torch's own timeouts apply: 10 minutes with NCCL, 30 with gloo."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes or TIMEOUT_MINUTES))


def any_process(flag: bool) -> bool:
    """Whether `flag` is true on any process."""
    return bool(all_reduce_sum(torch.tensor(float(flag))))


def broadcast(tensor: Tensor) -> None:
    """Give all processes rank 0's values of a dense tensor, of any dtype and strides."""
    if tensor.layout != torch.strided or not tensor.numel():
        return
    tensor = tensor.detach()
    dense = tensor.contiguous()
    dist.broadcast(dense.flatten().view(torch.uint8), 0)
    if dense is not tensor and not torch.equal(dense, tensor):
        tensor.copy_(dense)


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that checkpoints contain (model.py has none)."""
    found = ((m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False))
    return [b for m, name, b in found if name not in m._non_persistent_buffers_set]


@torch.no_grad()
def sum_gradients(
    process: Process, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """With ddp, replace each gradient by its sum over all processes, in one all-reduce. This
    includes parameters outside the model that the optimizer trains. With ddp and fsdp, all
    processes also get rank 0's buffers (running statistics, for example).

    A parameter's gradient stays None if no process has one, so that the optimizer skips it.
    """
    if process.world_size == 1:
        return
    for buffer in persistent_buffers(model):
        broadcast(buffer)
    if process.shards_model:
        return
    groups = optimizer.param_groups if optimizer else []
    found = dict.fromkeys([*model.parameters(), *(p for group in groups for p in group["params"])])
    parameters = [p for p in found if p.requires_grad]
    present = all_reduce_sum(torch.tensor([float(p.grad is not None) for p in parameters]))
    used = [p for p, count in zip(parameters, present.tolist(), strict=True) if count]
    if not used:
        return
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in used]
    flat = all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))
    sums = zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)
    torch._foreach_copy_(gradients, [total.view_as(gradient) for total, gradient in sums])


def shard(model: nn.Module, process: Process) -> None:
    """With ddp, give `model` rank 0's initial values: GPUs of other kinds draw other numbers from
    the same seed. With fsdp, shard `model`, which is on the meta device, over all processes in
    place (FSDP2). A few blocks at a time get their initial values and are then sharded, so that no
    process ever holds the whole model.

    Matmuls and a micro-batch's gradients use the process's dtype; gradients are summed in float32.
    Raises UserError that names scalar parameters, which FSDP2 cannot shard, and tensors whose
    initial values are set in the model's code only.
    """
    if not process.shards_model:  # for AdamW, and so that one process trains as several do
        own_memory(model.parameters())
        if process.world_size > 1:
            for tensor in (*model.parameters(), *persistent_buffers(model)):
                broadcast(tensor)
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    refuse(scalars, "give scalar parameters the shape (1,)")
    on_rank0_first(process, lambda: require_initial_values(model))
    policy = MixedPrecisionPolicy(
        param_dtype=None if process.dtype == torch.float32 else process.dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the rotary tables stay in float32
    )
    mesh = dist.init_device_mesh(process.device.type, (process.world_size,))
    for modules in initialized_groups(model, process.device):
        fully_shard(modules, mesh=mesh, mp_policy=policy)
        modules[0].set_gradient_divide_factor(1.0)  # sum: the losses are already divided
        modules[0].set_force_sum_reduction_for_comms(True)  # gloo supports only sums
    named = [*model.named_parameters(), *model.named_buffers()]
    refuse([n for n, t in named if local_shards([t])[0].isnan().any()], SET_VALUES)


def refuse(names: list[str], remedy: str) -> None:
    """Raises UserError if there are `names` of tensors that fsdp cannot handle."""
    if names:
        names = ", ".join(names[:5])
        raise UserError(f"parallel=fsdp cannot use {names}: {remedy}, or use parallel=ddp")


def fsdp_groups(model: nn.Module) -> list[list[nn.Module]]:
    """The groups of modules that fsdp communicates together: a few blocks each, the rest last. The
    host needs as much time for small blocks as for large ones, but small ones keep the GPU busy for
    less time. At least four groups remain if there are four blocks, so that communication overlaps
    with computation."""
    blocks = repeated_blocks(model)
    largest = max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0)
    n = max(1, min(PARAMS_PER_GROUP // max(1, largest), len(blocks) // 4))
    return [*(blocks[i : i + n] for i in range(0, len(blocks), n)), [model]]


def drawn_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that `init_weights` has initialised, by name."""
    names = getattr(getattr(model, "initial", None), "draws", ())  # an edit may do without
    return {name: model.get_submodule(name) for name in names}


def initialized_groups(model: nn.Module, device: torch.device) -> Iterator[list[nn.Module]]:
    """Yield each of the `fsdp_groups` of a model on the meta device, once its tensors are on
    `device` with their initial values."""
    undrawn = drawn_layers(model)
    for modules in fsdp_groups(model):
        for module in modules:
            materialize(module, device)
        for name in [name for name, layer in undrawn.items() if not layer.weight.is_meta]:
            model.initial.repeat(name, undrawn.pop(name))
        yield modules


def require_initial_values(model: nn.Module) -> None:
    """Raises UserError that names parameters that several blocks share, or tensors of a model on
    the meta device that would not get the initial values from the model's code.

    The meta device stores no values. So this builds a small model of the same class with and
    without fsdp. It has the first blocks, as many as it takes to include each kind. If every
    random operation starts from the same seed, their order does not matter, and all values must be
    equal up to rounding.
    """
    blocks = repeated_blocks(model)
    owners = [{*block.parameters()} for block in blocks]
    inside = {module for block in blocks for module in block.modules()}
    others = [module for module in model.modules() if module not in inside]
    owners.append({p for module in others for p in module.parameters(recurse=False)})
    shared = [n for n, p in model.named_parameters() if sum(p in own for own in owners) > 1]
    refuse(shared, "do not share parameters across blocks")
    config = model.config
    drawn = {layer.weight for layer in drawn_layers(model).values()}
    kinds = [kind_of_block(block, drawn) for block in blocks]
    if is_dataclass(config) and hasattr(config, "n_layer"):
        n = min(config.n_layer, max([2, *(kinds.index(kind) + 1 for kind in kinds)]))
        meta = torch.device("meta")
        with torch.random.fork_rng(devices=[]), meta, contextlib.suppress(Exception):
            config = type(model)(replace(config, n_layer=n)).config  # an edit may need more layers
    with torch.random.fork_rng(devices=[]), Reseeded():
        with torch.device("cpu"):
            expected = type(model)(config)
        with torch.device("meta"):
            found = type(model)(config)
        for _ in initialized_groups(found, torch.device("cpu")):
            pass
    theirs = dict([*expected.named_parameters(), *expected.named_buffers()])
    ours = [*found.named_parameters(), *found.named_buffers()]
    refuse([n for n, t in ours if not equal_up_to_rounding(t, theirs[n])], SET_VALUES)


def kind_of_block(block: nn.Module, drawn: set[nn.Parameter]) -> list[tuple]:
    """The properties that tell blocks apart: their modules, how often their tensors were changed in
    place, and which of them are among those that the model has `drawn`."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    modules = [(name, type(module)) for name, module in block.named_modules()]
    return modules + [(name, tensor._version, tensor in drawn) for name, tensor in tensors]


def equal_up_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Whether a and b are the same values, up to rounding. (A run on 64 CPU cores was refused once
    because its cosines differed.)"""
    if torch.equal(a, b):
        return True
    if not a.is_floating_point() or a.shape != b.shape:
        return False
    rounding = 8 * torch.finfo(a.dtype).eps
    return bool((a.double() - b.double()).abs().max() <= rounding * b.double().abs().max())


class Reseeded(TorchDispatchMode):
    """Sets the same seed before every operation."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        torch.default_generator.manual_seed(1)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def materialize(part: nn.Module, device: torch.device) -> None:
    """Create the meta tensors of a part of a model on `device`, with the values from their modules'
    reset_parameters(), or NaN without one. Tied tensors stay tied."""

    def create(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        value = float("nan") if tensor.is_floating_point() else 0
        return torch.full_like(tensor, value, device=device)

    created = {p: nn.Parameter(create(p), p.requires_grad) for p in part.parameters() if p.is_meta}
    for module in reversed(list(part.modules())):  # inner modules first
        if any(t.is_meta for t in (*module.parameters(False), *module.buffers(False))):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, created.get(parameter, parameter))
            module._apply(create, recurse=False)  # buffers
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def reshard(model: nn.Module) -> None:
    """Free a sharded model's gathered weights: the next forward pass gathers the new ones."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def is_sharded(value: Any) -> bool:
    """Whether `value` is a tensor that is sharded over the processes (a DTensor)."""
    return hasattr(value, "full_tensor")


def own_memory(tensors: Iterable[Tensor]) -> None:
    """Give slices of other tensors and expanded tensors memory of their own, in place."""
    for tensor in tensors:
        if is_sharded(tensor):
            continue
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor.data = tensor.data.contiguous()


@torch.no_grad()
def local_shards(tensors: list[Tensor]) -> list[Tensor]:
    """This process's shards of `tensors`, in the same memory. All or none must be sharded."""
    if not tensors or not is_sharded(tensors[0]):
        return tensors
    return [tensor.to_local() for tensor in tensors]


def gather_full(state: Any) -> Any:
    """`state` with every sharded tensor gathered on rank 0's CPU, one at a time. The other
    processes get None instead."""
    if isinstance(state, dict):
        return {key: gather_full(value) for key, value in state.items()}
    if is_sharded(state):
        whole = state.full_tensor()
        return whole.cpu() if dist.get_rank() == 0 else None
    return state


def local_rows(whole: Tensor, like: Tensor) -> Tensor:
    """This process's rows of `whole`, if sharded like `like`. If `whole` is a memory-mapped file,
    no other rows are read."""
    if not is_sharded(like):
        return whole
    first = first_row(like)
    return whole[first : first + len(like.to_local())]


def first_row(sharded: Tensor) -> int:
    """The first of this process's rows of a sharded tensor. FSDP2 gives equally many to all
    processes, except for the last ones, which may have fewer, or none."""
    return math.ceil(len(sharded) / dist.get_world_size()) * dist.get_rank()
