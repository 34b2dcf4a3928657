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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

ENGINES = ("ddp", "fsdp")
BACKENDS = ("auto", "nccl", "gloo")
EXCHANGED = 2**27  # most parameters in an exchange of fsdp, unless one block has more


def place() -> tuple[int, int, int]:
    """This process's rank, its rank on this machine, and the number of processes.

    Raises ValueError when torchrun's variables are incomplete or contradict each other.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if not found:
        return 0, 0, 1
    try:
        rank, local_rank, world_size = (int(found[name]) for name in names)
        if 0 <= rank < world_size and 0 <= local_rank:
            return rank, local_rank, world_size
    except (KeyError, ValueError):
        pass
    shown = ", ".join(f"{name}={found.get(name, '(not set)')}" for name in names)
    raise ValueError(
        f"{shown} do not describe a process: start several with torchrun, or unset them for one"
    )


def check_accumulation(gradient_accumulation_steps: int, world_size: int) -> None:
    """Raises ValueError unless every process gets as many of a step's micro-batches."""
    if gradient_accumulation_steps % world_size:
        below = gradient_accumulation_steps // world_size * world_size
        raise ValueError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} counts the micro-batches "
            f"of all {world_size} processes, so it must be a multiple of {world_size}: use "
            + " or ".join(str(n) for n in (below, below + world_size) if n)
        )


def start(device: torch.device, backend: str, config: dict[str, Any]) -> None:
    """Join the other processes, if there are any, and see that all have the same settings."""
    rank, _, world_size = place()
    if world_size == 1:
        return
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"  # small things are exchanged without waiting for the GPU
    try:
        store, _, _ = next(rendezvous("env://"))
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
            # torchrun keeps its store when it starts the processes anew: without a prefix they
            # would meet at the addresses of the dead. (Machines count restarts each on its own.)
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"cannot join {world_size} processes with {backend}: {reason}") from None
    show_error = sys.excepthook

    def show_error_and_leave(*error: Any) -> None:
        show_error(*error)
        leave(1)

    sys.excepthook = show_error_and_leave
    configs: list[Any] = [None] * world_size
    dist.all_gather_object(configs, config)
    differing = [key for key in config if any(c.get(key) != config[key] for c in configs)]
    if differing:
        listed = "; ".join(f"{key} is {[c.get(key) for c in configs]}" for key in differing)
        raise ValueError(f"the processes have different settings: {listed}")


def launcher() -> list[str]:
    """The beginning of the command that started this process."""
    world_size = place()[2]
    if world_size == 1:
        return ["python"]
    local = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    if int(local) < world_size:
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


def add_up(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def any_of(flag: bool) -> bool:
    """Whether `flag` is true on any process."""
    if not dist.is_initialized():
        return flag
    found = torch.tensor(int(flag))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def smallest(value: float) -> float:
    """The smallest `value` of any process."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return float(found)


def blocks_together(n_layer: int, block_params: int) -> int:
    """How many blocks fsdp exchanges at once. An exchange costs the host as much time for small
    blocks as for large ones, and small ones keep a GPU busy for less. Four exchanges at least are
    left, if there are four blocks: they overlap with computation."""
    return max(1, min(EXCHANGED // block_params, n_layer // 4))


def shard(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Divide `model` among all processes, a few blocks at a time, in place (FSDP2).

    It may come on the CPU: then no device ever holds more than its share and those blocks. Products
    run in `dtype`, gradients are summed in float32, as without it.
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
    n = blocks_together(len(blocks), sum(p.numel() for p in blocks[0].parameters()))
    for modules in (*(blocks[i : i + n] for i in range(0, len(blocks), n)), [model]):
        fully_shard(modules, mesh=mesh, mp_policy=policy)
        modules[0].set_gradient_divide_factor(1.0)  # a sum: losses are divided already
        modules[0].set_force_sum_reduction_for_comms(True)  # gloo has no other


def keep_gathered(model: nn.Module) -> None:
    """Hold the weights of a divided model, once gathered, from forward to backward: a third of the
    exchanges less, for memory of all its weights in `shard`'s dtype."""
    for block in model.blocks:
        block.set_reshard_after_forward(False)


def compile_blocks(model: nn.Module, mode: str, checkpointing: str) -> None:
    """Compile the blocks of a divided model, each on its own: weights are exchanged in between."""
    import torch._functorch.config as functorch_config

    # without activation checkpointing, recompute what costs next to nothing
    functorch_config.activation_memory_budget = 0.9 if checkpointing == "none" else 1.0
    for block in model.blocks:
        block.forward = torch.compile(block.forward, mode=mode, dynamic=False)


def is_divided(value: Any) -> bool:
    """Whether `value` is a tensor that is divided among the processes (a DTensor)."""
    return hasattr(value, "full_tensor")


@torch.no_grad()
def shares(tensors: list[Tensor]) -> list[Tensor]:
    """This process's parts of tensors, in the same memory; all or none of them are divided."""
    if not tensors or not is_divided(tensors[0]):
        return tensors
    return [tensor.to_local() for tensor in tensors]


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm (scalar) of tensors together; all or none of them are divided."""
    norm = torch.nn.utils.get_total_norm(shares(tensors))
    if is_divided(tensors[0]):
        norm.square_()
        add_up(norm)
        norm.sqrt_()
    return norm


def gather(state: Any) -> Any:
    """`state` with every divided tensor whole on the first process's CPU, one after the other; the
    other processes get None in their places."""
    if isinstance(state, dict):
        return {key: gather(value) for key, value in state.items()}
    if is_divided(state):
        whole = state.full_tensor()
        return whole.cpu() if dist.get_rank() == 0 else None
    return state


def divide_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The whole `tensor`, divided among the processes as `parameter` is."""
    if not is_divided(parameter):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor.to(parameter.device), mesh, placements, src_data_rank=None)
