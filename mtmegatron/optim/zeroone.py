"""0/1 Adam: a variance that is refreshed ever more seldom, then local steps between ever rarer exchanges of signs (Lu et al. 2022, 2202.06009).

Notable:
- Up to update `freeze` a variance update reduces gradients and is Adam's; gaps between two double every `variance_interval` of them. At all others
  ranks exchange the signs of their momentum, as 1-bit Adam does. The bias of the variance is that of so many variance updates.
- After it gaps between exchanges double every `local_interval` updates, up to `local_steps`. In between each data rank takes its own way with its own
  momentum, and nothing of gradients, momenta or weights is sent.
- The way of a rank is u / s: the mean of its momenta since the last synchronisation, weighted by their rates, whose sum is s. Masters stay those of
  the last synchronisation, less their decay, equal on all ranks; the model computes with master - s (way^ / (sqrt(v^) + eps)), within Adam's bound.
  A synchronisation makes the way, and with it the momentum, the compressed mean, and takes that step with the masters: replicas are then equal.
- What is compressed is u / s, not u as published: errors keep the size of a momentum when rates or gaps change, and are not dropped at the switch.
- Local are buckets whose gradients are shared by ranks of one data axis alone. Others (norms under sequence parallel, a table on two stages) belong
  to ranks that compute one replica together, and are synchronised at each update.
- A checkpoint has the way and momentum of every rank. The same layout restores them; in another all go on from their mean, as if just synchronised.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mtmegatron.config.schema import OneBitConfig, OptimizerConfig
from mtmegatron.optim.elementwise import Numbers
from mtmegatron.optim.onebit import OneBit, Residual
from mtmegatron.optim.state import State
from mtmegatron.parallel.data import Bucket, Buckets, Item


def variance_updates(count: int, interval: int, freeze: int) -> int:
    """How many of the first `count` updates are variance updates: `interval` with gaps of 1, as many with gaps of 2, 4, .., up to update `freeze`."""
    count = min(count, freeze)
    doublings = (count // interval + 1).bit_length() - 1
    return doublings * interval + (count - interval * (2**doublings - 1)) // 2**doublings


def synchronises(count: int, onebit: OneBitConfig) -> bool:
    """Whether replicas are equal after update `count`: its distance from `freeze` is a multiple of the gap at that distance."""
    distance = count - onebit.freeze
    if distance <= 0 or onebit.local_interval is None:
        return True
    doublings = min((distance - 1) // onebit.local_interval, onebit.local_steps.bit_length())
    return distance % min(2**doublings, onebit.local_steps) == 0


class ZeroOne(OneBit):
    """`ways`: of local buckets, u / s; `rates`: s, 0 right after a synchronisation."""

    def __init__(self, config: OptimizerConfig, buckets: Buckets, dtype: torch.dtype):
        super().__init__(config, buckets, dtype)
        self.layout, self.data, self.rates = repr(buckets.mesh.layout), set(buckets.mesh["data"].ranks), 0.0
        self.ways = {key: torch.zeros_like(whole.momentum) for key, whole in self.wholes.items() if self.is_local(whole.bucket)}

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(way.nbytes for way in self.ways.values())

    @property
    def facts(self) -> dict:
        return {"local": {"rates": self.rates, "layout": self.layout}}

    def is_local(self, bucket: Bucket) -> bool:
        return self.onebit.local_steps > 1 and bucket.axis.size > 1 and self.data.issuperset(bucket.axis.ranks)

    def variances(self, count: int) -> int:
        return variance_updates(count, self.onebit.variance_interval, self.onebit.freeze)

    # ---- updates

    def update(self, numbers: Numbers, clip_factor: float) -> None:
        self.prepare()
        now, self.rates = synchronises(numbers.count, self.onebit), self.rates + numbers.lr
        for key, whole in self.wholes.items():
            if key not in self.ways:
                self._exchange(whole, (1 - self.config.beta1) * clip_factor)
                continue
            whole.momentum.copy_(self._own(whole, (1 - self.config.beta1) * clip_factor).mul_(whole.used))
            self.ways[key].lerp_(whole.momentum, numbers.lr / self.rates if self.rates else 1.0)
            if now:
                whole.momentum.copy_(whole.compressed.mean(self.ways[key], whole.used))
        self._apply(numbers)
        if now:
            self._forget()

    def _apply(self, numbers: Numbers) -> None:
        for state in self.states:
            for own, run in state.runs(numbers):
                state.master[own].mul_(1 - run.lr * run.decay)
            if id(state.bucket) not in self.ways:
                self._move(state.master, state, state.moments["exp_avg"], numbers)
            elif synchronises(numbers.count, self.onebit):
                self._move(state.master, state, state.moments["exp_avg"], replace(numbers, lr=self.rates))

    def _move(self, weights: Tensor, state: State, momentum: Tensor, numbers: Numbers) -> None:
        """weights -= lr m^ / (sqrt(v^) + eps)."""
        step = self._direction(momentum, state.moments["exp_avg_sq"], numbers)
        for own, run in state.runs(numbers):
            weights[own].sub_(step[own], alpha=run.lr)

    def displace(self, count: int) -> None:
        for state in self.states if self.rates else ():
            way = self.ways.get(id(state.bucket))
            if way is not None:
                own = state.master.clone()
                self._move(own, state, way[state.owned], self._numbers(count))
                state.values.copy_(own)

    def _numbers(self, count: int) -> Numbers:
        """Those of all updates since the last synchronisation as one."""
        return Numbers(self.config, self.rates, 0.0, count, variances=self.variances(count))

    def _forget(self) -> None:
        self.rates = 0.0
        for way in self.ways.values():
            way.zero_()

    # ---- checkpoints

    def begin(self) -> None:
        super().begin()
        self._forget()

    def residuals(self) -> Iterator[Residual]:
        yield from super().residuals()
        for key, way in self.ways.items():
            whole, axis = self.wholes[key], self.wholes[key].bucket.axis
            for item in whole.bucket.items:
                local, here = slice(0, item.stop - item.start), slice(item.start, item.stop)
                for kind, values in (("own_momentum", whole.momentum), ("way", way)):
                    yield Residual(kind, item, local, values[here], whole.bucket.counted, axis.rank, axis.size)

    def load(self, fill: Callable[[Residual], None], facts: dict) -> None:
        super().load(fill, facts)
        local = facts.get("local", self.facts["local"])
        self.rates = local["rates"]
        if self.rates and not (self.ways and local["layout"] == self.layout):
            for state in self.states:
                self._synchronise(state, fill, self._numbers(facts["updates"]))
            self._forget()

    def _synchronise(self, state: State, fill: Callable[[Residual], None], numbers: Numbers) -> None:
        """Takes the mean of all ways and momenta that a checkpoint of other ranks has; what it has none of was synchronised."""
        way, momentum = torch.zeros_like(state.moments["exp_avg"]), state.moments["exp_avg"]
        for item, local, own in state.parts():
            fill(_mean_of("own_momentum", item, local, momentum[own]))
            fill(_mean_of("way", item, local, way[own]))
        self._move(state.master, state, way, numbers)


def _mean_of(kind: str, item: Item, local: slice, values: Tensor) -> Residual:
    return Residual(kind, item, local, values, counted=True, workers=-1)  # none of them has this one's number
