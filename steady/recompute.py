"""Activation checkpointing: save memory by recomputing activations in the backward pass.

`block` keeps the input of every block and recomputes the block in the backward pass (Chen et al.
2016, "Training deep nets with sublinear memory cost"). `selective` also keeps the attention output,
the one part that is slow to recompute (Korthikanti et al. 2022).
"""

import logging
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import checkpoint

# `selective` keeps the outputs of these
ATTENTION = [
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated layers: the items of its nn.ModuleLists and nn.Sequentials, at any
    depth, but not inside each other. If an item is itself a list or dict, which has no forward
    pass, its items count. Single layers of torch's in an nn.Sequential, which may be the head, do
    not count."""
    found = list(dict.fromkeys(listed(model)))
    inside = {m for block in found for m in block.modules() if m is not block}
    return [block for block in found if block not in inside]


def listed(module: nn.Module) -> Iterator[nn.Module]:
    """The items of the lists in `module`."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and not isinstance(child, ParametrizationList):
            yield from entries(child)
        elif isinstance(child, nn.Sequential):
            yield from (item for item in entries(child) if [*item.children()]
                        or not type(item).__module__.startswith("torch.nn."))  # fmt: skip
        else:
            yield from listed(child)


def entries(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in a list or dict; for those that are lists or dicts too, the modules in them."""
    for child in module.children():
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        yield from entries(child) if is_list else (child,)


def use_activation_checkpointing(model: nn.Module, kind: str) -> None:
    """Set the activation checkpointing of every block of `model`: none, selective or block.

    Call this once, before compiling. A forward pass without gradients never keeps activations.
    """
    # Compiling recomputed code warns about in-place operations even if there are none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if kind == "none":
        return
    for block in repeated_blocks(model):
        block.set_forward = vars(block).get("forward")  # one that you set on this block only
        # With dropout, `block` acts like `selective`: compiled code that recomputes attention
        # would draw from a generator that torch.manual_seed does not control.
        drops = any(isinstance(m, nn.Dropout) and m.p for m in block.modules())
        block.keeps_attention = kind == "selective" or drops
        block.forward = MethodType(run_checkpointed, block)


def keep_or_recompute(_context: Any, operation: Any, *inputs: Any, **named: Any) -> Any:
    """Whether `selective` keeps an operation's output or recomputes it. On a GPU attention may draw
    random numbers (dropout). Its output is kept. Nothing that is recomputed may draw random
    numbers, because it would get different ones."""
    draws = torch.Tag.nondeterministic_seeded in operation.tags and torch.cuda.is_initialized()
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if operation in ATTENTION or draws else policy.PREFER_RECOMPUTE


def run_checkpointed(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    """A block's forward pass. If there is a backward pass, it recomputes the block."""
    forward = block.set_forward
    if forward is None:
        forward, inputs = type(block).forward, (block, *inputs)
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    if block.keeps_attention:  # recompute the rest
        contexts = partial(checkpoint.create_selective_checkpoint_contexts, keep_or_recompute)
        named["context_fn"] = contexts
    return checkpoint.checkpoint(forward, *inputs, use_reentrant=False, **named)
