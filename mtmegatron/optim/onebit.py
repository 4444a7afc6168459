"""1-bit Adam: after a warm-up with Adam its variance stays as it is, and ranks exchange the signs of their momentum (Tang et al. 2021, 2102.02888).

Notable:
- In the compressed stage no gradient is reduced. Each rank adds its own part to the momentum, m_i = beta1 m + (1 - beta1) n g_i with n ranks, whose
  mean is Adam's m; the mean goes through `parallel/compress.py`, bucket by bucket, over the ranks of the bucket alone.
- So momentum and errors are whole on every rank, whatever the ZeRO stage; masters and variance are shards with ZeRO 1, which gathers the new
  weights as ever. ZeRO 2 and 3 do not keep a rank's own gradient whole.
- An element without a gradient in the warm-up has a variance of 0 on all ranks: it takes no part, and stays as it is but for its decay.
- Adam's update of an element is at most max(1, (1 - beta1) / sqrt(1 - beta2)) (Kingma & Ba 2015, section 2.1). A variance that stays behind would no
  longer keep that, and what is seldom used would leap: the bound is held here.
- The gradient norm is unknown in this stage. In its place stands the norm of a rank's own gradient n g_i, the root mean square over the ranks, which
  is at least as large: clipping by it is safe.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtmegatron.config.schema import OptimizerConfig
from mtmegatron.device import flat_zeros
from mtmegatron.optim.elementwise import Numbers
from mtmegatron.optim.state import State
from mtmegatron.parallel.compress import CompressedMean
from mtmegatron.parallel.data import Bucket, Buckets, Item


@dataclass(frozen=True)
class Residual:
    """What a checkpoint holds of a parameter beside its state: elements `local` of its local part.

    `workers`: how many ranks have one of their own, of which this is number `worker`; 0: there is one for all."""

    kind: str
    item: Item
    local: slice
    values: Tensor
    counted: bool
    worker: int = 0
    workers: int = 0

    def name(self, worker: int | None = None) -> str:
        """Its name in a checkpoint, or that of another worker's."""
        number = f".{self.worker if worker is None else worker}" if self.workers else ""
        return f"{self.kind}{number}/{self.item.name}"


@dataclass
class Whole:
    """Of a bucket, whole on every rank: its momentum, which elements take part, the errors of its compression."""

    bucket: Bucket
    momentum: Tensor
    compressed: CompressedMean
    used: Tensor | None = None

    def residuals(self) -> Iterator[Residual]:
        """What belongs in a checkpoint, parameter by parameter."""
        bucket, axis, shard = self.bucket, self.bucket.axis, self.bucket.shard
        if axis.size == 1:
            return
        for item in bucket.items:
            here, local = slice(item.start, item.stop), slice(0, item.stop - item.start)
            yield Residual("worker_error", item, local, self.compressed.worker[here], bucket.counted, axis.rank, axis.size)
            start, stop = max(item.start, shard.start), min(item.stop, shard.stop)
            if start < stop:
                mine = self.compressed.server[start - shard.start : stop - shard.start]
                yield Residual("server_error", item, slice(start - item.start, stop - item.start), mine, bucket.counted)


class OneBit:
    """Momentum and errors of all buckets, and the update in the compressed stage. The warm-up is made by the optimizer as any other."""

    def __init__(self, config: OptimizerConfig, buckets: Buckets, dtype: torch.dtype):
        self.config, self.onebit, self.zero = config, config.onebit, buckets.zero
        self.states: list[State] = []  # of what is not frozen
        self.wholes = {id(bucket): _whole(bucket, dtype) for bucket in buckets.buckets}
        self.prepared = False

    @property
    def nbytes(self) -> int:
        """Bytes beside those of the states."""
        counted = sum(state.moments["exp_avg"].nbytes for state in self.states)
        kept = sum(t.nbytes for w in self.wholes.values() for t in (w.momentum, w.compressed.worker, w.compressed.server))
        return kept + sum(w.momentum.numel() for w in self.wholes.values()) - counted  # and a byte for whether an element takes part

    def momentum(self, bucket: Bucket) -> Tensor:
        """That of a whole bucket, in which the optimizer's states have their parts."""
        return self.wholes[id(bucket)].momentum

    def reduces(self, count: int) -> bool:
        """Whether update number `count`, from 1, is made with reduced gradients."""
        return self.variances(count) > self.variances(count - 1)

    def variances(self, count: int) -> int:
        """How many of the first `count` updates made the variance."""
        return min(count, self.onebit.freeze)

    def is_local(self, bucket: Bucket) -> bool:
        """Whether ranks have weights of their own between two synchronisations, which needs masters apart."""
        return False

    def displace(self, count: int) -> None:
        """Gives the model, `count` updates being made, the weights that this rank has of its own."""

    @property
    def facts(self) -> dict:
        """What the manifest of a checkpoint tells beside the tensors."""
        return {}

    def residuals(self) -> Iterator[Residual]:
        """The errors of all buckets."""
        for whole in self.wholes.values():
            yield from whole.residuals()

    def begin(self) -> None:
        """The state before the first update."""
        self.prepared = False
        for whole in self.wholes.values():
            whole.compressed.clear()

    def load(self, fill: Callable[[Residual], None], facts: dict) -> None:
        """Takes from a checkpoint what is not in the states, whose masters and moments are there; `facts`: of its manifest."""
        self.begin()
        for residual in self.residuals():
            fill(residual)

    def update(self, numbers: Numbers, clip_factor: float) -> None:
        """One update of the compressed stage; all ranks take part."""
        self.prepare()
        for whole in self.wholes.values():
            self._exchange(whole, (1 - self.config.beta1) * clip_factor)
        self._apply(numbers)

    def prepare(self) -> None:
        """Makes whole what the warm-up, or a checkpoint, left in shards."""
        if self.prepared:
            return
        for whole in self.wholes.values():
            whole.used = torch.zeros_like(whole.momentum, dtype=torch.uint8)
        for state in self.states:
            self.wholes[id(state.bucket)].used[state.owned] = (state.moments["exp_avg_sq"] > 0).to(torch.uint8)
        for whole in self.wholes.values():
            axis, shard = whole.bucket.axis, whole.bucket.shard
            if self.zero:
                axis.all_gather(whole.momentum[shard], out=whole.momentum)
                axis.all_gather(whole.used[shard], out=whole.used)
            whole.used = whole.used.bool()
        self.prepared = True

    def _exchange(self, whole: Whole, factor: float) -> None:
        """m = the mean over ranks of m_i."""
        whole.momentum.copy_(whole.compressed.mean(self._own(whole, factor), whole.used))

    def _own(self, whole: Whole, factor: float) -> Tensor:
        """m_i = beta1 m + factor n g_i."""
        own = whole.bucket.gradients * (factor * whole.bucket.axis.size)
        return own.add_(whole.momentum, alpha=self.config.beta1)

    def _apply(self, numbers: Numbers) -> None:
        """w -= lr (m^ / (sqrt(v^) + eps) + decay w)."""
        for state in self.states:
            step = self._direction(state.moments["exp_avg"], state.moments["exp_avg_sq"], numbers)
            for own, run in state.runs(numbers):
                state.master[own].mul_(1 - run.lr * run.decay).sub_(step[own], alpha=run.lr)

    def _direction(self, m: Tensor, v: Tensor, n: Numbers) -> Tensor:
        """m^ / (sqrt(v^) + eps) within Adam's bound."""
        c = self.config
        root = (v / (1 - c.beta2**n.variances)).sqrt_().add_(c.eps)
        bound = max(1.0, (1 - c.beta1) / (1 - c.beta2) ** 0.5)
        return torch.div(m, root.mul_(n.first), out=root).clamp_(-bound, bound)


def _whole(bucket: Bucket, dtype: torch.dtype) -> Whole:
    momentum = flat_zeros(bucket.values.numel(), dtype, bucket.values.device)
    return Whole(bucket, momentum, CompressedMean(bucket.axis, momentum))
