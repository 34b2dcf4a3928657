"""Sampled softmax: a training loss over part of the vocabulary.

At 124M parameters the output layer takes a quarter of a step, mostly for tokens that are neither
targets nor likely. So a step may compare its targets with each other and with a random sample of
the rest. Each sampled token counts for those left out, so that the sum of the exponentials is right
on average, and the gradient nearly so (Jean et al. 2015, "On using very large target vocabulary for
neural machine translation"). Evaluation and sampling use the whole vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steady.dataloader import TokenFile, even_starts
from steady.optim import loss_layers

COUNTED_TOKENS = 2**22  # of train.bin, to estimate how frequent each token is
EVEN_SHARE = 0.25  # of the probability, spread evenly: bounds the weight of rare tokens


class VocabularySampler(nn.Module):
    """Draws the tokens of one micro-batch's softmax: all targets and, by priority sampling, others
    (Duffield, Lund and Thorup 2007, "Priority sampling for estimation of arbitrary subset sums").

    Args:
        frequencies: (V,) positive; a token is drawn with a probability of about
            min(1, frequency / threshold) and then counts as 1 / probability tokens.
        size: tokens to draw, fewer than V. If there are more different targets, some are ignored.
    """

    def __init__(self, frequencies: Tensor, size: int):
        super().__init__()
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        self.size = size

    def forward(
        self, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Select rows of an output layer.

        Args:
            weight: (V, C). bias: (V,). targets: int64; negative ones are ignored.

        Returns `size` rows of the weight, their biases plus the logs of their counts, and the
        targets as numbers of these rows. A layer for another vocabulary stays as it is.
        """
        if len(weight) != len(self.frequencies):
            return weight, bias, targets
        known = targets.clamp(min=0).long()
        frequencies = self.frequencies.float().index_fill(0, known.flatten(), math.inf)
        drawn = (frequencies / torch.rand_like(frequencies)).topk(self.size + 1)
        ids, threshold = drawn.indices[:-1], drawn.values[-1]
        counts = (threshold / frequencies[ids]).nan_to_num(1.0, posinf=1.0).clamp(min=1.0)
        biases = counts.log() if bias is None else bias[ids] + counts.log()
        rows = torch.full_like(frequencies, -1, dtype=torch.int64)
        rows = rows.index_copy(0, ids, torch.arange(self.size, device=ids.device))
        return weight[ids], biases, torch.where(targets < 0, targets, rows[known])


def saved_flops(model: nn.Module, config: dict[str, Any]) -> int:
    """FLOPs per token that the model's sampled softmax saves."""
    samplers = [module for module in model.modules() if isinstance(module, VocabularySampler)]
    return sum(6 * config["n_embd"] * (len(s.frequencies) - s.size) for s in samplers)


def use_sampled_softmax(
    model: nn.Module, file: TokenFile, config: dict[str, Any], say: Callable[[str], object] = print
) -> None:
    """Let training losses use config["sampled_softmax"] tokens of the vocabulary, if it is larger.

    If less than half of them would be drawn besides the targets of a micro-batch, print a note
    and use more: with few tokens the counts would be large.
    """
    size, vocab_size = config.get("sampled_softmax", 0), config.get("vocab_size", 0)
    if not 0 < size < vocab_size or config.get("eval_only"):
        return
    n_windows = max(1, min(COUNTED_TOKENS, file.n_tokens) // (file.block_size + 1))
    windows = file.windows(even_starts(file, n_windows))
    n_batches = max(1, n_windows // config["batch_size"])
    different = max(len(np.unique(windows[i::n_batches])) for i in range(n_batches))
    if size < 2 * different:
        why = f"micro-batches have up to {different:,} different tokens, so sampled_softmax={size}"
        size = math.ceil(3 * different / 64) * 64
        say(f"note: {why} is too small: using {size if size < vocab_size else 'all tokens'}")
    if size >= vocab_size:
        return
    shares = np.bincount(windows.ravel(), minlength=vocab_size) / windows.size
    shares = (1.0 - EVEN_SHARE) * shares + EVEN_SHARE / vocab_size
    device = next(model.parameters()).device
    frequencies = torch.tensor(shares.astype(np.float32), device=device)
    for layer in loss_layers(model, "sampled_softmax"):
        layer.sampler = VocabularySampler(frequencies, size)
