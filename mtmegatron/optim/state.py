"""Optimizer state of a run of elements of a bucket, all of one kind of optimizer.

Notable: everything is flat and has the length of `owned`. `parts` tells which elements are whose, so checkpoints cut any of these tensors into
rectangles of parameters, whatever the kind.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mtmegatron.optim.codes import FP8, largest, scale_for
from mtmegatron.optim.elementwise import Numbers
from mtmegatron.optim.groups import Setting
from mtmegatron.parallel.data import Bucket, Item
from mtmegatron.precision.quantise import decoded


@dataclass
class State:
    """`owned`: elements of the bucket; `values`, `gradients`: those elements of it; `settings`: of runs of the elements.

    `ema`: the average of the weights, where there is one; `scales`: of moments in fp8, by the name of the parameter."""

    bucket: Bucket
    kind: str
    owned: slice
    values: Tensor
    gradients: Tensor
    master: Tensor
    moments: dict[str, Tensor]
    ema: dict[str, Tensor]
    settings: list[tuple[Setting, slice]]
    scales: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name."""
        return {"master": self.master} | self.moments | self.ema

    @property
    def followers(self) -> tuple[Tensor | None, Tensor | None]:
        """What an update of the masters changes too: the weights that the model computes with, where they are apart, and the average."""
        return None if self.values is self.master else self.values, self.ema.get("ema")

    def runs(self, numbers: Numbers) -> Iterator[tuple[slice, Numbers]]:
        """Runs of elements with their own rate and decay."""
        for setting, own in self.settings:
            yield own, replace(numbers, lr=numbers.lr * setting.lr, decay=numbers.decay * setting.decay)

    def parts(self, within: slice | None = None) -> Iterator[tuple[Item, slice, slice]]:
        """Parameters here, or in the part of the bucket `within`: (item, elements of its local part, elements of this state)."""
        first, last = self.owned.start, self.owned.stop
        if within is not None:
            first, last = max(first, within.start), min(last, within.stop)
        for item in self.bucket.items:
            start, stop = max(item.start, first), min(item.stop, last)
            if start < stop:
                yield item, slice(start - item.start, stop - item.start), slice(start - self.owned.start, stop - self.owned.start)

    def numbers(self, item: Item, stored: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """What is stored of a parameter. Codes in fp8 are multiplied out, which bf16 holds exactly."""
        return decoded(stored, dtype).mul_(self.scales.get(item.name, 1.0)) if stored.dtype == FP8 else stored

    def hold(self, item: Item, stored: Tensor, numbers: Tensor) -> None:
        """Stores in fp8 all that is here of a parameter: numbers that were codes as they were, others rounded to the nearest."""
        self.scales[item.name] = scale = scale_for(largest(numbers, self.master.dtype))
        stored.copy_(numbers / scale)

    def begin(self) -> None:
        """The state before the first update: moments of zero, the average at the weights."""
        for moment in self.moments.values():
            moment.zero_()
        for average in self.ema.values():
            average.copy_(self.master)
