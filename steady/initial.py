"""Which layers a model's init_weights may initialise: those that nobody has initialised yet."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def fingerprint(weight: Tensor) -> tuple:
    """Identify a weight by its values. On the meta device, where it has no values, use its id."""
    if weight.is_meta:
        return id(weight), weight._version  # the version counts in-place changes
    rows = torch.atleast_2d(weight.detach()).flatten(0, -2).contiguous()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of bits: exact
    steps = rows.shape[1], rows.stride(0), rows.storage_offset()
    bits = rows.view(kinds[math.gcd(8, rows.itemsize * math.gcd(*steps))])  # the widest is fastest
    sums = bits.sum(dim=0), bits.sum(dim=1)
    return weight.shape, *((s * torch.arange(1, len(s) + 1).to(s)).sum().item() for s in sums)


class InitialWeights:
    """Draws the initial weights of layers, but not of those that you have initialised yourself."""

    def __init__(self):
        self.unset: set = set()  # fingerprints of weights as torch has initialised them
        self.draws: dict[str, tuple[float, int]] = {}  # layer name: (std, seed)

    @contextlib.contextmanager
    def new_layers(self) -> Iterator[None]:
        """Note the weights that torch gives to new layers in the `with` block. If a weight is not
        among them later, you have changed it, or `draw` has. The random state stays as it was."""
        resets = {kind: kind.reset_parameters for kind in (nn.Linear, nn.Embedding)}

        def reset_and_note(layer: nn.Linear | nn.Embedding) -> None:
            resets[nn.Linear if isinstance(layer, nn.Linear) else nn.Embedding](layer)
            self.unset.add(fingerprint(layer.weight))

        for kind in resets:
            kind.reset_parameters = reset_and_note
        try:
            with torch.random.fork_rng([]):
                yield
        finally:
            for kind, reset in resets.items():
                kind.reset_parameters = reset

    def draw(self, name: str, layer: nn.Linear | nn.Embedding, std: float) -> None:
        """Draw the weight of a layer from a normal distribution, if nobody has changed it yet."""
        torchs = nn.Linear.reset_parameters, nn.Embedding.reset_parameters
        by_torch = type(layer).reset_parameters in torchs  # other classes initialise themselves
        if by_torch and fingerprint(layer.weight) in self.unset:  # tied weights are drawn once
            # one generator per matrix: its values must not depend on the sizes of the others
            self.draws[name] = std, int(torch.randint(2**63 - 1, (), device="cpu"))
            self.repeat(name, layer)

    def repeat(self, name: str, layer: nn.Linear | nn.Embedding) -> None:
        """Draw the same weight again. (fsdp builds the model on the meta device: no values.)"""
        (std, seed), weight = self.draws[name], layer.weight
        generator = None if weight.is_meta else torch.Generator(weight.device).manual_seed(seed)
        nn.init.normal_(weight, std=std, generator=generator)
        if isinstance(layer, nn.Embedding):
            layer._fill_padding_idx_with_zero()
