"""Muon: momentum with all its singular values near one, for matrices (Jordan et al. 2024; the scale is Moonlight's, Liu et al. 2025, 2502.16982).

Notable: the update of an element needs its whole matrix, while ranks hold parts of matrices: rows, columns, or any run of elements of a shard. One
exchange brings each matrix to one rank, its owner; a second one brings back to each rank what it updates (`matrices.py`). So the result is that of
one process in every layout, each matrix is computed once in a stage, and nobody holds more than its share of whole matrices.
"""

from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from mtmegatron.optim.elementwise import Numbers, ahead
from mtmegatron.optim.matrices import Exchange, Matrix, Parts
from mtmegatron.optim.state import State
from mtmegatron.parallel.data import Buckets

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon:
    """w -= lr (0.2 sqrt(max(rows, columns)) orthogonal(u) + decay w), u = g + momentum m (Nesterov) with m = momentum m + g."""

    def __init__(self, states: list[State], names: set[str], buckets: Buckets, dtype: torch.dtype):
        self.states, self._given = states, (names, buckets, dtype)

    @cached_property
    def exchange(self) -> Exchange:
        return Exchange(*self._given)  # only who updates needs the plan

    def update(self, numbers: Numbers, clip_factor: float) -> None:
        """One update of masters and momentum; all ranks of a stage take part."""
        parts, steps = Parts(), []
        for state in self.states:
            steps.append(ahead(numbers, state.gradients * clip_factor, *state.moments.values()).clone())
            for item, local, own in state.parts():
                parts.add(item.name, local.start, steps[-1][own])
        self.exchange.transform(parts, orthogonal_all)
        for state, step in zip(self.states, steps):
            for own, run in state.runs(numbers):
                state.master[own].mul_(1 - run.lr * run.decay).sub_(step[own] * run.lr)


def orthogonal_all(matrices: list[tuple[Matrix, Tensor]]) -> None:
    """0.2 sqrt(max(rows, columns)) orthogonal(x) in place of each matrix x; those of the experts of a parameter together."""
    for _, group in groupby(matrices, key=lambda pair: pair[0].name):
        group = [x for _, x in group]
        scale = 0.2 * max(group[0].shape) ** 0.5
        for x, made in zip(group, orthogonal(torch.stack(group))):
            x.copy_(made * scale)


def orthogonal(x: Tensor) -> Tensor:
    """About U Vᵀ of x = U S Vᵀ: singular values come to [0.7, 1.2] by a quintic Newton-Schulz iteration.

    X = x / |x|; five times A = X Xᵀ, X = a X + (b A + c A²) X. Shapes: [.., rows, columns]."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
