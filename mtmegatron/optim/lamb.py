"""LAMB: Adam's direction, for each parameter as long as the parameter itself (You et al. 2020, 1904.00962, algorithm 2).

Notable: the lengths are those of whole parameters; one sum over all ranks tells all of them, to which every element adds once.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor

from mtmegatron.mesh import Mesh
from mtmegatron.optim.elementwise import Numbers, direction
from mtmegatron.optim.state import State


class Lamb:
    """u = m^ / (sqrt(v^) + eps) + decay w; w -= lr |w| / |u| u, with a ratio of 1 where a length is 0. `names`: of all parameters of the model."""

    def __init__(self, states: list[State], mesh: Mesh, names: Callable[[], Iterable[str]], dtype: torch.dtype):
        self.states, self.mesh, self.names, self.dtype = states, mesh, names, dtype

    @cached_property
    def place(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names())}

    def update(self, numbers: Numbers, clip_factor: float) -> None:
        """One update of masters and moments; all ranks take part."""
        steps = [self._step(state, numbers, clip_factor) for state in self.states]
        weights, updates = self._lengths(steps)
        ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
        for state, step in zip(self.states, steps):
            for item, _, own in state.parts():
                step[own] *= ratios[self.place[item.name]]
            for own, run in state.runs(numbers):
                state.master[own].sub_(step[own] * run.lr)

    def _step(self, state: State, numbers: Numbers, clip_factor: float) -> Tensor:
        """u, of all elements."""
        u = direction(numbers, state.gradients * clip_factor, *state.moments.values()).div_(numbers.first)
        for own, run in state.runs(numbers):
            u[own].add_(state.master[own] * run.decay)
        return u

    def _lengths(self, steps: list[Tensor]) -> Tensor:
        """Lengths of each parameter and of its u. Shapes: [2, parameters]."""
        squares = torch.zeros(2, len(self.place), dtype=self.dtype, device=self.mesh.device)
        for state, step in zip(self.states, steps):
            if state.bucket.counted:
                for item, _, own in state.parts(state.bucket.shard):
                    squares[:, self.place[item.name]] += torch.stack([state.master[own].square().sum(), step[own].square().sum()])
        return self.mesh.world.all_reduce(squares).sqrt()
