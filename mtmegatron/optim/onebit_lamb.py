"""1-bit LAMB: 1-bit Adam whose layers go at LAMB's ratios, which the compressed stage adapts (Li et al. 2021, 2104.06069, algorithm 1).

Notable:
- The warm-up is LAMB. It leaves the variance v, and of each parameter a moving average c of its ratio |w| / |u|.
- A frozen v grows stale. From the change of the averaged momentum comes the gradient that made it, (m - beta1 m_before) / (1 - beta1), and a second
  variance that follows it. The most that sqrt(v) exceeds its root, over the elements of a parameter, is the factor f on c: within [0.5, 4], and
  within a tenth of the last. Elements that take no part do not count.
- The paper makes momentums of all layers alike before one scale for all of them compresses them. Here each 256 elements have a scale: not needed.
- (c, f) of each parameter is a buffer of two numbers in checkpoints, equal on all ranks whatever the layout.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from mtmegatron.config.schema import OptimizerConfig
from mtmegatron.errors import UserError
from mtmegatron.optim.elementwise import Numbers
from mtmegatron.optim.lamb import Lamb
from mtmegatron.optim.onebit import OneBit, Whole
from mtmegatron.optim.state import State
from mtmegatron.parallel.data import Buckets

FRESH = "exp_avg_sq_fresh"
RETAINED = 0.9  # of the average ratio, at each update
LOWEST, HIGHEST, CHANGE = 0.5, 4.0, 0.1  # of the factor, all as published


class OneBitLamb(OneBit):
    """w -= lr f c u with u = m^ / (sqrt(v^) + eps) + decay w. `names`: of all parameters of the model.

    `layers`: (c, f) of each parameter here; c is 0 before the first update. Shapes: [parameters, 2]."""

    def __init__(self, config: OptimizerConfig, buckets: Buckets, names: Callable[[], Iterable[str]], dtype: torch.dtype):
        super().__init__(config, buckets, dtype)
        self.mesh, self.names = buckets.mesh, names
        self.row = {item.name: row for row, item in enumerate(item for bucket in buckets.buckets for item in bucket.items)}
        self.layers = torch.zeros(len(self.row), 2, dtype=dtype, device=self.mesh.device)
        first = self.mesh.coordinate("pipeline") == 0
        saved = [item.name for bucket in buckets.buckets if first or not bucket.leaves_stage for item in bucket.items]
        self.saved = {name: self.layers[self.row[name]] for name in saved}  # a table on two stages is saved by one
        buckets.buffers |= {f"lamb/{name}": layer for name, layer in self.saved.items()}
        self._forget()

    @cached_property
    def place(self) -> Tensor:
        """Where the parameters here are among all of the model."""
        places = {name: i for i, name in enumerate(self.names())}
        return torch.tensor([places[name] for name in self.row], device=self.mesh.device)

    def begin(self) -> None:
        super().begin()
        self._forget()
        self.shared = False  # a checkpoint is about to be read

    def _forget(self) -> None:
        self.layers[:, 0], self.layers[:, 1] = 0.0, 1.0
        self.shared = True

    def prepare(self) -> None:
        """Also begins the second variance. Raises UserError where the warm-up was another optimizer's."""
        if self.prepared:
            return
        super().prepare()
        self._share()
        if not self.layers[:, 0].all():
            raise UserError(
                f"`optimizer.kind: onebit-lamb` after its warm-up of `optimizer.onebit.freeze: {self.onebit.freeze}` updates: "
                "the checkpoint has no ratios of LAMB, it is of another kind: use a freeze above the updates that it has made"
            )
        for state in self.states:
            fresh = state.moments[FRESH]
            fresh.copy_(torch.where(fresh == 0, state.moments["exp_avg_sq"], fresh))

    def record(self, lengths: Tensor, count: int) -> None:
        """c = 0.9 c + 0.1 |w| / |u|, from the lengths of all parameters of the model at update number `count` of the warm-up."""
        if count == 1:  # whatever the checkpoint had from which only weights were taken
            self._forget()
        self._share()
        weights, updates = lengths[:, self.place]
        now, ratio = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0), self.layers[:, 0]
        ratio.copy_(torch.where(ratio == 0, now, RETAINED * ratio + (1 - RETAINED) * now))

    def _share(self) -> None:
        """What a checkpoint gave to one of the stages that hold a table, all have."""
        if not self.shared:
            mine = {self.row[name] for name in self.saved}
            everywhere = self._everywhere(torch.stack([layer if row in mine else 0 * layer for row, layer in enumerate(self.layers)]))
            self.layers.copy_(everywhere)
            self.shared = True

    def _everywhere(self, values: Tensor) -> Tensor:
        """The largest value on any rank for each parameter here. Shapes: [parameters, ..]."""
        most = values.new_zeros(len(list(self.names())), *values.shape[1:])
        most[self.place] = values
        return self.mesh.world.all_reduce(most, "max")[self.place]

    def _exchange(self, whole: Whole, factor: float) -> None:
        before, c = whole.momentum.clone(), self.config
        super()._exchange(whole, factor)
        for state in self.states:
            if state.bucket is whole.bucket:
                gradient = (state.moments["exp_avg"] - before[state.owned] * c.beta1).div_(1 - c.beta1)
                state.moments[FRESH].mul_(c.beta2).add_(gradient.square_(), alpha=1 - c.beta2)

    def _apply(self, numbers: Numbers) -> None:
        self._adapt(numbers.count)
        rates = self.layers.prod(1)
        for state in self.states:
            step = self._direction(state.moments["exp_avg"], state.moments["exp_avg_sq"], numbers)
            for own, run in state.runs(numbers):
                step[own].add_(state.master[own], alpha=run.decay).mul_(run.lr)
            for item, _, own in state.parts():
                state.master[own].sub_(step[own] * rates[self.row[item.name]])

    def _adapt(self, count: int) -> None:
        """f = max of (sqrt(v^) + eps) / (sqrt(fresh^) + eps), within its limits."""
        most, last = self.layers.new_zeros(len(self.row)), self.layers[:, 1]
        for state in self.states:
            grown = self._grown(state, count)
            for item, _, own in state.parts():
                row = self.row[item.name]
                most[row] = torch.maximum(most[row], grown[own].max())
        most = self._everywhere(most)
        wanted = torch.where(most > 0, most, 1.0).clamp(LOWEST, HIGHEST)  # 0: none takes part
        last.copy_(torch.clamp(wanted, last * (1 - CHANGE), last * (1 + CHANGE)))

    def _grown(self, state: State, count: int) -> Tensor:
        """How far the frozen root exceeds the fresh one; 0 for what takes no part."""
        c, frozen = self.config, state.moments["exp_avg_sq"]
        old = (frozen / (1 - c.beta2**self.onebit.freeze)).sqrt_().add_(c.eps)
        new = (state.moments[FRESH] / (1 - c.beta2**count)).sqrt_().add_(c.eps)
        return torch.where(frozen > 0, old / new, 0.0)


class WarmUp(Lamb):
    """LAMB, whose ratios 1-bit LAMB keeps."""

    def __init__(self, states: list[State], onebit: OneBitLamb, dtype: torch.dtype):
        super().__init__(states, onebit.mesh, onebit.names, dtype)
        self.onebit, self.count = onebit, 0

    def update(self, numbers: Numbers, clip_factor: float) -> None:
        self.count = numbers.count
        super().update(numbers, clip_factor)

    def _step(self, state: State, numbers: Numbers, clip_factor: float) -> Tensor:
        own = {name: moment for name, moment in state.moments.items() if name != FRESH}
        return super()._step(replace(state, moments=own), numbers, clip_factor)

    def _lengths(self, steps: list[Tensor]) -> Tensor:
        lengths = super()._lengths(steps)
        self.onebit.record(lengths, self.count)
        return lengths
