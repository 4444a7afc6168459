"""Optimizer state that is kept in bf16, and bf16 weights without masters: an update widens a piece, computes in fp32, and rounds back at random.

Notable:
- Rounding to the nearest would stall: bf16 keeps 8 bits, so whatever changes a number by less than 1/512 of it leaves it as it was, in every update
  again. Stochastic rounding goes up with the probability of what is cut off, and is right in the mean (Gupta et al. 2015, 1502.02551, section 3).
- The draws are a hash of (seed, update, parameter, element of the whole parameter): the same in every layout, on all copies, and after a resume.
  An element has 64 bits in an update, of which its weight and each of its moments take 16: as many as rounding from fp32 cuts off.
- Updates here are made of single operations, so that equal gradients give equal bits wherever a layout cuts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.ops.dropout import GOLDEN, MIX_1, MIX_2, Stream
from mtmegatron.optim.elementwise import Numbers
from mtmegatron.optim.state import State
from mtmegatron.placement import Placement

PIECE, LARGE = 1 << 16, 1 << 24  # elements at a time: on a CPU their draws stay in the cache, elsewhere they bound the working memory


@dataclass(frozen=True)
class Narrow:
    """Updates states of which some tensors are narrower than `wide`, the type of the arithmetic."""

    seed: int
    mesh: Mesh
    wide: torch.dtype

    def holds(self, state: State) -> bool:
        """Whether a state is one of them."""
        return any(t.dtype != self.wide for t in (state.master, *state.moments.values()))

    def update(self, rule: Callable, state: State, numbers: Numbers, clip_factor: float, after: Callable[[State, slice], None]) -> None:
        """One update by a rule for single elements; `after` is told of each piece that is done. Padding, which is zero, stays as it is."""
        size = PIECE if self.mesh.device.type == "cpu" else LARGE
        for own, run in state.runs(replace(numbers, single=True)):
            for item, local, mine in state.parts(slice(state.owned.start + own.start, state.owned.start + own.stop)):
                key = Stream(self.seed, numbers.count, 0, f"rounding of {item.name}").key
                for start in range(mine.start, mine.stop, size):
                    piece = slice(start, min(start + size, mine.stop))
                    first = local.start + piece.start - mine.start
                    where = slice(first, first + piece.stop - piece.start)
                    self._update(rule, state, run, clip_factor, piece, draws(key, self._elements(item.placement, where)))
                    after(state, piece)

    def _update(self, rule: Callable, state: State, run: Numbers, clip_factor: float, piece: slice, bits: Tensor) -> None:
        kept = [t[piece] for t in (state.master, *state.moments.values())]
        weights, *moments = wide = [t.to(self.wide) for t in kept]
        rule(run, weights, state.gradients[piece] * clip_factor, *moments)
        for place, (stored, new) in enumerate(zip(kept, wide)):
            if stored.dtype != self.wide:
                stored.copy_(rounded(new, bits >> 16 * place))

    def _elements(self, placement: Placement, local: slice) -> Tensor:
        return elements(placement, self.mesh.layout, self.mesh.rank, local, self.mesh.device)


def elements(placement: Placement, layout: Layout, rank: int, local: slice, device: torch.device | str = "cpu") -> Tensor:
    """Numbers, in the whole parameter, of the elements `local` of the part that a rank holds. Shapes: [elements], int64."""
    offset, size = placement.offset_and_size(layout, rank)
    rest = torch.arange(local.start, local.stop, device=device)
    if size[1:] == placement.shape[1:]:
        return rest + offset[0] * prod(placement.shape[1:])
    found, stride = torch.zeros_like(rest), 1
    for first, count, whole in zip(reversed(offset), reversed(size), reversed(placement.shape)):
        found += (rest % count + first) * stride
        rest, stride = rest // count, stride * whole
    return found


def draws(key: int, numbers: Tensor) -> Tensor:
    """64 random bits for each number: splitmix64, started at the key, after so many steps (Steele, Lea and Flood 2014). Shapes: [elements], int64."""
    x = (numbers + 1) * GOLDEN + key
    for places, factor in ((30, MIX_1), (27, MIX_2)):
        x = (x ^ (x >> places) & (1 << 64 - places) - 1) * factor
    return x ^ (x >> 31) & (1 << 33) - 1


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """x in bf16: of its two neighbours the larger with the probability of how far x is on the way to it, by the lowest 16 of `bits`.

    The pattern of an fp32 number is that of a bf16 number and 16 bits more, in which it rises with the size; a number of 16 random bits added to
    them carries into the upper half as often as it should. What bf16 holds, infinities too, stays as it is."""
    pattern = x.to(torch.float32).view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (pattern & -0x10000).view(torch.float32).to(torch.bfloat16)
