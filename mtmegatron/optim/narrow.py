"""Optimizer state that is kept in bf16 or fp8, and bf16 weights without masters: an update widens a piece, computes in fp32, and rounds at random.

Notable:
- Rounding to the nearest would stall: bf16 keeps 8 bits, so whatever changes a number by less than 1/512 of it leaves it as it was, in every update
  again. Stochastic rounding goes up with the probability of what is cut off, and is right in the mean (Gupta et al. 2015, 1502.02551, section 3).
- The draws are a hash of (seed, update, parameter, element of the whole parameter): the same in every layout, on all copies, and after a resume.
  An element has 64 bits in an update, of which its weight and each of its moments take 16: as many as rounding from fp32 cuts off.
- A first moment in fp8 gets the scale of its whole parameter before its numbers are known, from a bound on them (`Scales`). What is far below the
  largest number of the parameter is now 0, now a code that is too large, for which Adam's second moment is no match: it would make a leap. It is
  cut to twice what m and v of any gradients keep to: once is nearly reached by gradients that are all alike, rounding then passes it.
- Updates here are made of single operations, so that equal gradients give equal bits wherever a layout cuts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

import torch
from torch import Tensor

from mtmegatron.config.schema import OptimizerConfig
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.ops.dropout import GOLDEN, MIX_1, MIX_2, Stream
from mtmegatron.optim.codes import FP8, coded, largest, scale_for
from mtmegatron.optim.elementwise import ELEMENTWISE, Numbers
from mtmegatron.optim.state import State
from mtmegatron.parallel.data import Item
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

    def update(
        self, rule: Callable, state: State, numbers: Numbers, clip_factor: float, after: Callable[[State, slice], None], scales: Mapping[str, Tensor]
    ) -> None:
        """One update by a rule for single elements; `after` is told of each piece that is done; `scales`: the next ones, by parameter.

        Padding, which is zero, stays as it is."""
        size = PIECE if self.mesh.device.type == "cpu" else LARGE
        for own, run in state.runs(replace(numbers, single=True)):
            for item, local, mine in state.parts(slice(state.owned.start + own.start, state.owned.start + own.stop)):
                key, scale = Stream(self.seed, numbers.count, 0, f"rounding of {item.name}").key, scales.get(item.name)
                for start in range(mine.start, mine.stop, size):
                    piece = slice(start, min(start + size, mine.stop))
                    first = local.start + piece.start - mine.start
                    where = slice(first, first + piece.stop - piece.start)
                    self._update(rule, state, item, run, clip_factor, piece, draws(key, self._elements(item.placement, where)), scale)
                    after(state, piece)
                if scale is not None:
                    state.scales[item.name] = scale

    def _update(
        self, rule: Callable, state: State, item: Item, run: Numbers, clip_factor: float, piece: slice, bits: Tensor, scale: Tensor | None
    ) -> None:
        kept = [t[piece] for t in (state.master, *state.moments.values())]
        weights, *moments = wide = [state.numbers(item, t, self.wide).to(self.wide) for t in kept]
        if scale is not None and len(moments) == 2 and (most := momentum_limit(run.config)) < inf:
            limit = moments[1].sqrt().mul_(2 * most)
            moments[0].clamp_(-limit, limit)
        rule(run, weights, state.gradients[piece] * clip_factor, *moments)
        for place, (stored, new) in enumerate(zip(kept, wide)):
            if stored.dtype == FP8:
                stored.copy_(coded(new / scale, bits >> 16 * place))
            elif stored.dtype != self.wide:
                stored.copy_(rounded(new, bits >> 16 * place))

    def _elements(self, placement: Placement, local: slice) -> Tensor:
        return elements(placement, self.mesh.layout, self.mesh.rank, local, self.mesh.device)


@dataclass(frozen=True)
class Scales:
    """Scales of first moments for the next update, the same on all ranks. `names`: of all parameters of the model; `wide`: as in `Narrow`."""

    mesh: Mesh
    names: Callable[[], Iterable[str]]
    wide: torch.dtype

    @cached_property
    def place(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names())}

    def next(self, states: list[State], numbers: Numbers, clip_factor: float) -> dict[str, Tensor]:
        """By parameter; all ranks take part.

        |m| after an update grows with |m|, |g| and, where decay is a part of the gradient, |w| before it; so does each rounding of its operations.
        Hence the update of the largest of each is a bound that holds to the last bit."""
        states, found = [state for state in states if state.moments], {}
        most = self.mesh.world.all_reduce(self._largest(states), "max")
        for state in states:
            for own, run in state.runs(replace(numbers, single=True)):
                weights, gradients, first = most.clone()
                second = [torch.ones_like(first) for _ in list(state.moments)[1:]]
                ELEMENTWISE[state.kind](run, weights, gradients * clip_factor, first, *second)
                scales = scale_for(first)
                for item, *_ in state.parts(slice(state.owned.start + own.start, state.owned.start + own.stop)):
                    found[item.name] = scales[self.place[item.name]]
        return found

    def _largest(self, states: list[State]) -> Tensor:
        """max |w|, |g| and |m| of what each parameter has here. Shapes: [3, parameters]."""
        most = torch.zeros(3, len(self.place), dtype=self.wide, device=self.mesh.device)
        for state in states:
            codes = next(iter(state.moments.values()))
            for item, _, own in state.parts():
                m = largest(codes[own], self.wide) * state.scales.get(item.name, 1.0)
                w = largest(state.master[own], self.wide) if state.kind in ("adam", "sgd") else torch.zeros_like(m)
                most[:, self.place[item.name]] = torch.stack([w, largest(state.gradients[own], self.wide), m])
        return most


def momentum_limit(c: OptimizerConfig) -> float:
    """The largest |m| / sqrt(v) that any gradients make: by Cauchy-Schwarz the root of the sum over k of
    ((1 - beta1) beta1^k)² / ((1 - beta2) beta2^k); infinity where that does not converge."""
    ratio = c.beta1**2 / c.beta2 if c.beta2 else 1.0
    return (1 - c.beta1) / ((1 - c.beta2) * (1 - ratio)) ** 0.5 if ratio < 1 else inf


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
