"""Between a step and the layers with experts: records are summed once a step, selection biases follow, and a log can read the loads.

Notable: one collective for all layers, over the world. Ranks of other stages add zeros to a layer's row, so it is the sum over exactly the ranks
that share its tokens, and every rank knows the loads of all layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtmegatron.config.model import MoEConfig
from mtmegatron.config.schema import Config
from mtmegatron.layers.moe import TERMS, MoE, observed
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.placement import STAGE_AXES


@dataclass(frozen=True)
class Load:
    """One layer in one step. counts: tokens that chose each expert, before dropping; dropped: part of the choices; entropy: of the scores, mean
    over tokens, in nats; losses: the balance terms by name; bias: the lowest and the highest that the step used, None without."""

    counts: list[int]
    dropped: float
    entropy: float
    losses: dict[str, float]
    bias: tuple[float, float] | None

    @property
    def relative(self) -> list[float]:
        """Load of each expert, relative to the mean."""
        return [count * len(self.counts) / sum(self.counts) for count in self.counts]

    @property
    def highest(self) -> float:
        """Load of the fullest expert, relative to the mean."""
        return max(self.relative)

    @property
    def lowest(self) -> float:
        """Load of the emptiest expert, relative to the mean."""
        return min(self.relative)

    @property
    def numbers(self) -> dict[str, float]:
        """What a log tells of the layer, by name."""
        bias = {} if self.bias is None else {"bias_lowest": self.bias[0], "bias_highest": self.bias[1]}
        return {"load_highest": self.highest, "load_lowest": self.lowest, "entropy": self.entropy, "dropped": self.dropped, **self.losses, **bias}


@dataclass(frozen=True)
class Loads:
    """The loads of a step on the device; `table`: a row for each block of the model, those without experts zero."""

    table: Tensor
    moe: MoEConfig

    def read(self) -> dict[int, Load]:
        """By number of the block. Waits for the device."""
        rows = enumerate(self.table.tolist())
        return {layer: self._load(row) for layer, row in rows if any(row[: self.moe.experts])}

    def _load(self, row: list[float]) -> Load:
        moe = self.moe
        counts, (dropped, entropy, *rest) = [round(n) for n in row[: moe.experts]], row[moe.experts :]
        losses = {name: value for name, value in zip(TERMS, rest) if getattr(moe, name)}
        bias = (rest[-2], rest[-1]) if moe.bias_rate else None
        return Load(counts, dropped / sum(counts), entropy / (sum(counts) / moe.top_k), losses, bias)


def numbers_of(loads: dict[int, Load]) -> dict[str, float]:
    """The numbers of all layers for a log, `experts_<block>_<name>`, and `experts_load_highest` over all of them."""
    each = {f"experts_{layer}_{name}": x for layer, load in loads.items() for name, x in load.numbers.items()}
    return {"experts_load_highest": max(load.highest for load in loads.values()), **each}


class ExpertLayers:
    """The layers with experts on this rank."""

    def __init__(self, config: Config, chunks: list[Decoder], mesh: Mesh):
        self.mesh, self.moe = mesh, config.model.moe
        self.layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoE)]
        self.blocks = config.model.layers + (config.model.prediction.depth if config.model.prediction else 0)

    def start(self) -> None:
        """A step begins: what was recorded belongs to the one before, or to one that was skipped."""
        for layer in self.layers:
            layer.record.zero_()

    def finish(self) -> Loads:
        """A step was applied: sums the records, and updates biases and the loads that the next step uses."""
        table = torch.zeros(self.blocks, observed(self.moe) + 2, dtype=torch.float64, device=self.mesh.device)
        tells = all(self.mesh.coordinate(axis) == 0 for axis in STAGE_AXES)
        for layer in self.layers:
            bias = layer.bias if tells and layer.bias is not None else table.new_zeros(1)
            table[layer.layer] = torch.cat([layer.record, torch.stack([bias.min(), bias.max()]).double()])
        self.mesh.world.all_reduce(table)
        for layer in self.layers:
            layer.update(table[layer.layer, : self.moe.experts].long())
        return Loads(table, self.moe)
