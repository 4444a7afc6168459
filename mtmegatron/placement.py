"""The one description of a parameter: its global shape, who holds which part, whose gradients add up, its first value, its decay.

Notable: initialisation, gradient reduction, the clipping norm, ZeRO, checkpoints, the planner and the verifier all read this, and nothing else
says any of it. Three kinds of axes describe a parameter on the ranks of its stage:

- `split`: (dim, axis): each coordinate of the axis holds its own part of that dim;
- `summed`: each rank's gradient is one part of a sum over these axes (data and context always; tensor for what sees a part of the sequence;
  `ends` for a tied table on the first and the last stage);
- all others: copies that already have equal gradients, of which coordinate 0 counts.

Experts divide the ranks of a stage in another way: split over `expert` and `expert_tensor`, summed over `expert_data`, they have no copies.

The first value of a parameter is drawn from (seed, name) for the whole tensor and then cut, so it does not depend on the layout.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import nn

from mtmegatron.layout import Layout, share

GRADIENT_AXES = ("data", "context")
STAGE_AXES = ("data", "context", "tensor")


@dataclass(frozen=True)
class Init:
    """The distribution of the first value: normal with standard deviation `std`, or a constant when std is 0."""

    std: float = 0.0
    constant: float = 0.0


@dataclass(frozen=True)
class Placement:
    """What a parameter is, globally, and which part of it a rank holds."""

    shape: tuple[int, ...]
    init: Init
    decay: bool
    split: tuple[tuple[int, str], ...] = ()
    summed: tuple[str, ...] = GRADIENT_AXES

    def offset_and_size(self, layout: Layout, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rectangle of the global tensor that `rank` holds."""
        offset, size = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.split:
            offset[dim], size[dim] = share(self.shape[dim], layout.size(axis), layout.coordinate(rank, axis))
        return tuple(offset), tuple(size)

    def part(self, whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
        """The view of a global tensor that `rank` holds."""
        for dim, (start, length) in enumerate(zip(*self.offset_and_size(layout, rank))):
            whole = whole.narrow(dim, start, length)
        return whole

    @property
    def copies(self) -> tuple[str, ...]:
        """Axes along which ranks hold the same part and have the same gradient already; only coordinate 0 counts in sums over all ranks."""
        moved = {axis for _, axis in self.split} | set(self.summed)
        if "expert_data" in moved:
            return ()
        if "key_value" in moved:
            moved.add("tensor")  # cut in two axes: the split one and the summed one
        return tuple(axis for axis in STAGE_AXES if axis not in moved)


def parameter(placement: Placement, layout: Layout, rank: int, dtype: torch.dtype) -> nn.Parameter:
    """This rank's part of a parameter, not yet filled; the only way to make one. `.placement` is its description."""
    _, size = placement.offset_and_size(layout, rank)
    made = nn.Parameter(torch.empty(size, dtype=dtype))
    made.placement = placement
    return made


def initial_value(name: str, placement: Placement, seed: int) -> torch.Tensor:
    """The whole first value of a parameter, fp32: drawn from (seed, name) alone."""
    if not placement.init.std:
        return torch.full(placement.shape, placement.init.constant)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
    return torch.empty(placement.shape).normal_(0.0, placement.init.std, generator=torch.Generator().manual_seed(key))


@torch.no_grad()
def initialise(names: dict[nn.Parameter, str], layout: Layout, rank: int, seed: int) -> None:
    """Fills parameters, given with their names, with their part of the first value; those on the meta device have none."""
    for param, name in names.items():
        if param.is_meta:
            continue
        param.copy_(param.placement.part(initial_value(name, param.placement, seed), layout, rank))
