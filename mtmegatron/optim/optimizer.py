"""The optimizer on flat buckets: each rank updates the part that it owns, then all have the new weights.

Notable:
- With ZeRO 0 a rank owns all of each bucket, else its shard. Weights of a 16-bit run have fp32 masters here, unless `optimizer.masters` is false.
- A state is a run of elements of a bucket with the same kind of optimizer; inside it are runs with the same factors on rate and decay. Usually
  that is one state for a bucket and two runs, of what decays and what does not.
- An update is one pass over memory: a piece that fits in the cache is scaled by the clip factor, updated, averaged and rounded into the weights.
- The update counter counts updates that were made: a skipped step leaves it alone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from mtmegatron.config.derived import WARM_UP, optimizers
from mtmegatron.config.schema import OptimizerConfig
from mtmegatron.device import flat_zeros
from mtmegatron.optim.codes import FP8
from mtmegatron.optim.compiled import Compiled
from mtmegatron.optim.elementwise import ELEMENTWISE, Numbers, follow, moments_of
from mtmegatron.optim.groups import Setting, setting_of
from mtmegatron.optim.lamb import Lamb
from mtmegatron.optim.muon import Muon
from mtmegatron.optim.narrow import Narrow, Scales
from mtmegatron.optim.onebit import OneBit, Residual
from mtmegatron.optim.onebit_lamb import FRESH, OneBitLamb, WarmUp
from mtmegatron.optim.state import State
from mtmegatron.optim.zeroone import ZeroOne
from mtmegatron.parallel.data import Bucket, Buckets
from mtmegatron.precision.types import Types

PIECE = 1 << 18  # elements of each array that an update touches at a time: they stay in the cache, and calls are few (measured)


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a bucket whose parameters have one setting; the last of a bucket has its padding."""

    setting: Setting
    start: int
    stop: int


class Optimizer:
    """State and update of the elements that this rank owns. `names`: of all parameters of the model; `updates`: how many were made;
    `seed`: of the run, for what is rounded at random."""

    def __init__(self, config: OptimizerConfig, buckets: Buckets, types: Types, names: Callable[[], Iterable[str]], seed: int = 0):
        self.config, self.buckets, self.types = config, buckets, types
        self.updates, self.piece = 0, PIECE
        self.compiled = Compiled(config, optimizers(config) - {"frozen"}, types.master, buckets.mesh.device) if config.compiled else None
        self.narrow = Narrow(seed, buckets.mesh, types.master)
        self.scales = Scales(buckets.mesh, names, types.master) if config.moments == "fp8" else None
        self.onebit = None
        if config.kind in WARM_UP:
            lamb, own = config.kind == "onebit-lamb", ZeroOne if config.kind == "zeroone-adam" else OneBit
            self.onebit = OneBitLamb(config, buckets, names, types.master) if lamb else own(config, buckets, types.master)
        self.states = [state for bucket in buckets.buckets for state in self._states(bucket)]
        lamb, muon = ([s for s in self.states if WARM_UP.get(s.kind, s.kind) == kind] for kind in ("lamb", "muon"))
        if self.onebit:
            self.onebit.states = [state for state in self.states if state.kind != "frozen"]
        # every parameter of the model takes part in one sum over all ranks, whose stages hold different ones
        self.lamb = Lamb(lamb, buckets.mesh, names, types.master) if self._uses("lamb") else None
        if isinstance(self.onebit, OneBitLamb):
            self.lamb = WarmUp(lamb, self.onebit, types.master)
        self.muon = Muon(muon, self._names("muon"), buckets, types.master) if self._uses("muon") else None

    @property
    def reduces(self) -> bool:
        """Whether the next update needs reduced gradients; else it makes its own use of each rank's part."""
        return self.onebit is None or self.onebit.reduces(self.updates + 1)

    def residuals(self) -> Iterator[Residual]:
        """What a checkpoint holds beside the states."""
        return self.onebit.residuals() if self.onebit else iter(())

    def _uses(self, kind: str) -> bool:
        return kind in {WARM_UP.get(used, used) for used in optimizers(self.config)}

    def _names(self, kind: str) -> set[str]:
        """Parameters of this stage with a kind of optimizer."""
        items = [item for bucket in self.buckets.buckets for item in bucket.items]
        return {item.name for item in items if setting_of(item.name, item.placement, self.config).kind == kind}

    def _states(self, bucket: Bucket) -> Iterator[State]:
        whole = self.buckets.zero == 0
        owned = slice(0, bucket.values.numel()) if whole else bucket.shard
        values, gradients = bucket.values if whole else bucket.own_values, bucket.reduced
        for kind, runs in groupby(runs_of(bucket, self.config), key=lambda run: run.setting.kind):
            runs = [Run(r.setting, max(r.start, owned.start), min(r.stop, owned.stop)) for r in runs]
            runs = [r for r in runs if r.start < r.stop]
            if not runs:
                continue
            mine = slice(runs[0].start, runs[-1].stop)
            inside = slice(mine.start - owned.start, mine.stop - owned.start)
            yield self._state(bucket, kind, mine, values[inside], gradients[inside], runs)

    def _state(self, bucket: Bucket, kind: str, owned: slice, values: Tensor, gradients: Tensor, runs: list[Run]) -> State:
        wide, size = self.types.master, values.numel()
        apart = values.dtype != wide or self.onebit is not None and self.onebit.is_local(bucket)
        master = flat_zeros(size, wide, values.device).copy_(values) if apart and self.config.masters else values
        first, second = {"fp32": (wide, wide), "bf16": (torch.bfloat16, torch.bfloat16), "fp8": (FP8, torch.bfloat16)}[self.config.moments]
        names = moments_of(kind, self.config)
        moments = {name: flat_zeros(size, second if name == "exp_avg_sq" else first, values.device) for name in names}
        if self.onebit and moments:
            moments["exp_avg"] = self.onebit.momentum(bucket)[owned]
            moments |= {FRESH: torch.zeros_like(master)} if isinstance(self.onebit, OneBitLamb) else {}
        ema = {"ema": flat_zeros(size, wide, values.device).copy_(values)} if self.config.ema is not None and kind != "frozen" else {}
        settings = [(run.setting, slice(run.start - owned.start, run.stop - owned.start)) for run in runs]
        return State(bucket, kind, owned, values, gradients, master, moments, ema, settings)

    @torch.no_grad()
    def prepare_gradients(self) -> None:
        """Frozen parameters have no gradient, so that they are not in the norm."""
        for state in self.states:
            if state.kind == "frozen":
                (state.gradients if self.buckets.reduces else state.bucket.gradients[state.owned]).zero_()

    @torch.no_grad()
    def step(self, lr: float, clip_factor: float, decay: float | None = None) -> None:
        """One update with gradients times `clip_factor` and a weight decay, by default the configured one; then all ranks hold the new weights."""
        self.updates += 1
        decay = self.config.weight_decay if decay is None else decay
        variances = self.onebit.variances(self.updates) if self.onebit else self.updates
        single = variances != self.updates or not self.types.sums.is_floating_point
        numbers = Numbers(self.config, lr, decay, self.updates, single, variances=variances)
        if self.config.clip_value is not None:  # after the norm, in which what is not finite still shows
            for state in self.states:
                state.gradients.clamp_(-self.config.clip_value, self.config.clip_value)
        scales = self.scales.next(self.states, numbers, clip_factor) if self.scales else {}
        if self.buckets.reduces:
            for state in self.states:
                if WARM_UP.get(state.kind, state.kind) in ELEMENTWISE:
                    self._update(state, numbers, clip_factor, scales)
            if self.onebit:
                self.onebit.prepared = False
        for whole in filter(None, (self.lamb, self.muon) if self.buckets.reduces else (self.onebit,)):  # what looks at more than elements
            whole.update(numbers, clip_factor)
            for state in whole.states:
                self._after(state, slice(None))
        self._share()

    def _update(self, state: State, numbers: Numbers, clip_factor: float, scales: dict[str, Tensor]) -> None:
        kind, moments = WARM_UP.get(state.kind, state.kind), state.moments.values()
        rule, fused = ELEMENTWISE[kind], numbers.fuses(kind)
        if self.narrow.holds(state):
            return self.narrow.update(rule, state, numbers, clip_factor, self._after, scales)
        if self.compiled:
            return self.compiled.update(state, numbers, clip_factor)
        one_pass = fused and state.values is state.master and not state.ema
        in_pieces = state.master.device.type == "cpu" and not one_pass
        for own, run in state.runs(replace(numbers, clip=clip_factor) if fused else numbers):
            for piece in pieces(own, self.piece if in_pieces else own.stop - own.start):
                gradient = state.gradients[piece] if fused or clip_factor == 1.0 else state.gradients[piece] * clip_factor
                rule(run, state.master[piece], gradient, *(m[piece] for m in moments))
                self._after(state, piece)

    def _after(self, state: State, piece: slice) -> None:
        follow(self.config, state.master[piece], *(None if t is None else t[piece] for t in state.followers))

    def publish(self) -> None:
        """Rounds the masters into the weights and gathers them."""
        for state in self.states:
            if state.values is not state.master:
                state.values.copy_(state.master)
        self._share()

    def _share(self) -> None:
        """All ranks hold the new weights, or those of their own between two synchronisations."""
        self.buckets.publish()
        if self.onebit:
            self.onebit.displace(self.updates)

    def refresh_masters(self) -> None:
        """Takes the masters, and their average, from the weights, after those were set from outside."""
        for state in self.states:
            for tensor in (state.master, *state.ema.values()):
                tensor.copy_(state.values)


def runs_of(bucket: Bucket, config: OptimizerConfig) -> list[Run]:
    """The bucket cut where the setting of its parameters changes."""
    found: list[Run] = []
    for item in bucket.items:
        setting = setting_of(item.name, item.placement, config)
        if found and found[-1].setting == setting:
            found[-1] = Run(setting, found[-1].start, item.stop)
        else:
            found.append(Run(setting, item.start, item.stop))
    found[-1] = Run(found[-1].setting, found[-1].start, bucket.values.numel())
    return found


def pieces(run: slice, size: int) -> Iterator[slice]:
    """The run in pieces of at most so many elements."""
    for start in range(run.start, run.stop, max(size, 1)):
        yield slice(start, min(start + size, run.stop))
