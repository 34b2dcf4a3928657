"""Checks whether Triton kernels run (Triton needs a C compiler). Plain torch takes more memory."""

import functools

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def kernels_work() -> bool:
    """Whether Triton kernels run on this GPU. Tries a small one, once."""
    return triton is not None and _small_kernel_works()


# Same as torch.compiler.assume_constant_result, but without importing the compiler: torch.compile
# calls the function instead of tracing it.
kernels_work._dynamo_marked_constant = True


@functools.cache
def _small_kernel_works() -> bool:
    try:
        x = torch.zeros(1, device="cuda")
        _add_one_kernel[(1,)](x)
        return x.item() == 1.0
    except Exception:  # compilers raise all kinds of errors
        return False


if triton is not None:

    @triton.jit
    def _add_one_kernel(x):
        tl.store(x, tl.load(x) + 1.0)
