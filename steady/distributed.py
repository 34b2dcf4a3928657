"""Several processes, one per GPU, as torchrun starts them: who does what, and what they exchange.

All processes call these functions at the same points. A process on its own pays nothing for them.

ddp: every process holds the whole model; after the last micro-step its gradients are moved into one
flat tensor and summed by one all-reduce. So the model stays one compiled graph, CUDA graphs keep
working, and nothing is exchanged before (DistributedDataParallel cuts the graph into buckets).
fsdp: PyTorch's FSDP2; every process holds its share of weights, gradients and optimizer state.
"""

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

PARAMS_PER_EXCHANGE = 2**27  # at most, with fsdp, unless a single block has more


class Place(NamedTuple):
    """Which of the processes this one is, and what they divide among themselves."""

    rank: int = 0
    local_rank: int = 0  # among those on this machine
    world_size: int = 1
    parallel: str = "ddp"

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
    def restarted(self) -> bool:
        """Whether torchrun started the processes anew, after one had died."""
        return restarts() > 0


ALONE = Place()


def restarts() -> int:
    """How often torchrun has started the processes anew."""
    found = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not found.isdecimal():
        raise ValueError(f"TORCHELASTIC_RESTART_COUNT={found} is no number: unset it")
    return int(found)


def launch() -> str:
    """What tells the processes that one torchrun has started, and started anew, from others; "" for
    a process of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name and on_one_machine():
        name += f", process {os.getppid()}"  # torchrun's, the same for all
    return name


def on_one_machine() -> bool:
    """Whether torchrun has started all of the processes on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")


def peer_has_ended(error: BaseException) -> bool:
    """Whether an exchange failed because another process is gone: its connection was closed, reset
    or refused. torch says so by a RuntimeError; the hub's errors speak of connections too."""
    return isinstance(error, RuntimeError) and "onnection" in str(error)


def this_process(parallel: str = "ddp") -> Place:
    """What torchrun's variables say of this process.

    Raises ValueError when they are incomplete or contradict each other.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if not found:
        return ALONE._replace(parallel=parallel)
    try:
        rank, local_rank, world_size = (int(found[name]) for name in names)
        if 0 <= rank < world_size and 0 <= local_rank:
            return Place(rank, local_rank, world_size, parallel)
    except (KeyError, ValueError):
        pass
    shown = ", ".join(f"{name}={found.get(name, '(not set)')}" for name in names)
    raise ValueError(
        f"{shown} do not describe a process: start several with torchrun, or unset them for one"
    )


def check(
    here: Place,
    batch_size: int,
    gradient_accumulation_steps: int,
    dtype: torch.dtype,
    cuda_graphs: bool,
) -> None:
    """Raises ValueError for what several processes cannot do; before they meet, so that each says
    so itself."""
    world_size = here.world_size
    if gradient_accumulation_steps % world_size:
        below = gradient_accumulation_steps // world_size * world_size
        choices = [str(n) for n in (below, below + world_size) if n]
        size, rest = divmod(batch_size * gradient_accumulation_steps, below + world_size)
        if not rest:
            choices[-1] += f" (with batch_size={size} for the same global batch)"
        raise ValueError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} counts the micro-batches "
            f"of all {world_size} processes, so it must be a multiple of {world_size}: use "
            + " or ".join(choices)
        )
    if here.shards_model and (cuda_graphs or dtype == torch.float16):
        raise ValueError(
            "parallel=fsdp exchanges weights inside a step, which CUDA graphs and float16's loss "
            "scaling do not allow: use compile_mode=default (or max-autotune-no-cudagraphs) and "
            "dtype=bfloat16, or parallel=ddp"
        )


def start(here: Place, device: torch.device, backend: str, config: dict[str, Any]) -> None:
    """Join the other processes, if there are any, and see that all have the same settings."""
    rank, world_size = here.rank, here.world_size
    if world_size == 1:
        return
    port = os.environ.get("MASTER_PORT", "0")
    if not (port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"MASTER_PORT={port} is no port: use a number below 65536")
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"  # small things are exchanged without waiting for the GPU
    try:
        store, _, _ = next(rendezvous("env://"))
        if on_one_machine():
            # torchrun keeps its store when it starts the processes anew: without a prefix they
            # would meet at the addresses of the dead. (Machines count restarts each on its own.)
            store = dist.PrefixStore(str(restarts()), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"cannot join {world_size} processes with {backend}: {reason}") from None
    show_error = sys.excepthook

    def show_error_and_leave(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if peer_has_ended(error):
            print(f"rank {rank}: error: another process has ended", file=sys.stderr)
        else:
            show_error(kind, error, trace)
        leave(1)

    sys.excepthook = show_error_and_leave
    configs: list[Any] = [None] * world_size
    dist.all_gather_object(configs, config)
    differing = [key for key in config if any(c.get(key) != config[key] for c in configs)]
    if differing:
        listed = "; ".join(f"{key} is {[c.get(key) for c in configs]}" for key in differing)
        raise ValueError(f"the processes have different settings: {listed}")


def first_does(here: Place, action: Callable[[], None]) -> None:
    """Have the first process do what one has to do for all. If it raises an error about a file or a
    value, the others end without a word."""
    error = None
    try:
        if here.master:
            action()
    except (OSError, ValueError) as found:
        error = found
    failed = any_process(error is not None)
    if error is not None:
        raise error
    if failed:
        leave(1)


def launcher() -> list[str]:
    """The beginning of the command that started this process."""
    world_size = this_process().world_size
    if world_size == 1:
        return ["python"]
    local = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    if local != str(world_size):
        return ["torchrun", "..."]
    return ["torchrun", "--standalone", f"--nproc_per_node={local}"]


def stop() -> None:
    """Leave the other processes."""
    if dist.is_initialized():
        dist.barrier()  # none leaves while another still waits for it
        dist.destroy_process_group()


def leave(status: int = 0) -> None:
    """End a process that has nothing more to say. Python's orderly end may meet a thread of torch's
    that is still finishing, and then aborts ("terminate called without an active exception")."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def all_reduce_sum(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def all_reduce_min(value: float) -> float:
    """The smallest `value` of any process."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return float(found)


def any_process(flag: bool) -> bool:
    """Whether `flag` is true on any process."""
    return all_reduce_min(0.0 if flag else 1.0) == 0.0


def blocks_per_exchange(n_layer: int, block_params: int) -> int:
    """How many blocks fsdp exchanges at once. An exchange costs the host as much time for small
    blocks as for large ones, and small ones keep a GPU busy for less. Four exchanges at least are
    left, if there are four blocks: they overlap with computation."""
    return max(1, min(PARAMS_PER_EXCHANGE // block_params, n_layer // 4))


def move_to_device(model: nn.Module, here: Place, device: torch.device, dtype: torch.dtype) -> None:
    """Move `model` from the CPU to `device`, all of it or this process's part, in place."""
    if here.shards_model:
        shard(model, device, dtype)
    else:
        model.to(device)


def shard(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Divide `model` among all processes, a few blocks at a time, in place (FSDP2).

    If it comes on the CPU, no device ever holds more than its share and those blocks. Products and
    a micro-batch's gradients are in `dtype`, and gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the rotary tables stay in float32
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    blocks = list(model.blocks)
    n = blocks_per_exchange(len(blocks), sum(p.numel() for p in blocks[0].parameters()))
    for modules in (*(blocks[i : i + n] for i in range(0, len(blocks), n)), [model]):
        fully_shard(modules, mesh=mesh, mp_policy=policy)
        modules[0].set_gradient_divide_factor(1.0)  # a sum: losses are divided already
        modules[0].set_force_sum_reduction_for_comms(True)  # gloo has no other


def keep_gathered(model: nn.Module) -> None:
    """Hold the weights of a divided model, once gathered, from forward to backward: a third of the
    exchanges less, for memory of all its weights in `shard`'s dtype."""
    for block in model.blocks:
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


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The whole `tensor`, sharded as `parameter` is."""
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor.to(parameter.device), mesh, placements, src_data_rank=None)


def shard_from_local(local: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that is sharded as `like` is, as a part of it."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip
