"""Triton, and whether its kernels can be run; functions compiled where that works.

Before its first kernel Triton compiles a launcher in C. Where that fails, for want of a compiler
perhaps (many containers have none), plain torch computes the same, in more time and memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def kernels_work() -> bool:
    """Whether Triton's kernels run on the GPU here: a small one is tried, once."""
    return triton is not None and _small_kernel_works()


# What torch.compiler.assume_constant_result does, which would import the compiler: torch.compile
# asks, and does not trace into the answer.
kernels_work._dynamo_marked_constant = True


def runs_kernels(tensor: Tensor) -> bool:
    """Whether Triton's kernels run where `tensor` lies."""
    return tensor.is_cuda and kernels_work()


@functools.cache
def _small_kernel_works() -> bool:
    try:
        x = torch.zeros(1, device="cuda")
        _add_one_kernel[(1,)](x)
        return x.item() == 1.0
    except Exception:  # whatever a compiler may come to
        return False


def compiled_if_possible(function: Callable, dynamic: bool = True) -> Callable:
    """`function`, compiled for all shapes at once (`dynamic`) or each; as it is where that fails,
    which is no reason to end a run. (Compiling fails before anything is computed.)"""
    compiled = torch.compile(function, dynamic=dynamic)

    def call(*arguments: Any) -> Any:
        nonlocal compiled
        try:
            return compiled(*arguments)
        except torch._dynamo.exc.TorchDynamoException:
            compiled = function
            return function(*arguments)

    return call


if triton is not None:

    @triton.jit
    def _add_one_kernel(x):
        tl.store(x, tl.load(x) + 1.0)
