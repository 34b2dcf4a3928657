"""Activation checkpointing: what backward recomputes instead of keeping, to save memory.

`block` keeps the input of every block and recomputes all of it in backward (Chen et al. 2016,
"Training deep nets with sublinear memory cost"). `selective` keeps what attention returned too, the
one part that is slow to recompute (Korthikanti et al. 2022).
"""

import logging
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

# What `selective` keeps: attention's kernels, and dropout, which must not be drawn a second time.
KEPT = frozenset((
    torch.ops.aten.native_dropout.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
))  # fmt: skip


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that repeat: the entries of the model's nn.ModuleLists and nn.Sequentials, which
    may be in an nn.ModuleDict (nanoGPT's `transformer`)."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            blocks += child
        elif isinstance(child, nn.ModuleDict):
            blocks += repeated_blocks(child)
    return blocks


def use_activation_checkpointing(model: nn.Module, kind: str) -> None:
    """Have every block of `model` recompute as `kind` says: none, selective or block.

    Decide before compiling. A forward pass without gradients keeps nothing in any case.
    """
    # Compiling what is recomputed warns of in-place operations, whether there are any or not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in repeated_blocks(model):
        if getattr(block.forward, "__func__", None) in (run_checkpointed, keep_attention):
            del block.forward  # undo an earlier call
        # With dropout, `block` does what `selective` does: attention that is recomputed inside
        # compiled code would draw from a generator that torch.manual_seed does not reach.
        drops = any(isinstance(m, nn.Dropout) and m.p for m in block.modules())
        if kind == "block" and not drops:
            block.forward = MethodType(run_checkpointed, block)
        elif kind != "none":
            block.forward = MethodType(keep_attention, block)


def keep_attention(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    """A block's forward pass, in backward recomputed around what attention returned."""
    contexts = partial(checkpoint.create_selective_checkpoint_contexts, keep_or_recompute)
    return run_checkpointed(block, *inputs, context_fn=contexts, **named)


def run_checkpointed(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    """A block's forward pass, recomputed in backward if there will be one."""
    forward = type(block).forward
    if not torch.is_grad_enabled():
        named.pop("context_fn", None)
        return forward(block, *inputs, **named)
    return checkpoint.checkpoint(forward, block, *inputs, use_reentrant=False, **named)


def keep_or_recompute(
    context: Any, op: Any, *args: Any, **kwargs: Any
) -> checkpoint.CheckpointPolicy:
    """The policy of selective activation checkpointing."""
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op in KEPT else policy.PREFER_RECOMPUTE
