"""Dropout between layers: masks drawn from (seed, step, layer, site, global token, channel), so every layout draws the same ones.
"""

from dataclasses import dataclass

from torch import Tensor

from mtmegatron.layers.build import Build
from mtmegatron.ops.dropout import Stream, dropout


@dataclass
class Noise:
    """What masks of one micro-batch are drawn from. `numbers`: tokens of the micro-batch [T], by their place in the global batch."""

    seed: int
    step: int
    numbers: Tensor

    def stream(self, layer: int, site: str) -> Stream:
        return Stream(self.seed, self.step, layer, site)

    def drop(self, x: Tensor, layer: int, site: str, p: float, build: Build) -> Tensor:
        """x with a part p of its elements set to zero and the others scaled up. Shapes: [T', D] -> [T', D]."""
        if p == 0.0:
            return x
        return dropout(x, self.stream(layer, site), build.own_tokens(self.numbers), range(x.shape[1]), p)
