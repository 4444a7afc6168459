"""AdamW on the flat buckets: one fused call over the part that this rank owns, clipping included.

Notable:
- With ZeRO 0 a rank owns all of each bucket, with ZeRO 1 its shard. Weights of a 16-bit run have fp32 masters here.
- Decay is a property of the placement: a bucket begins with the elements that decay, so at most two runs of elements per bucket differ.
- The update counter counts updates that were made: a skipped step leaves it alone (bias correction, Kingma & Ba 2015, algorithm 1;
  decoupled decay, Loshchilov & Hutter 2019).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtmegatron.config.schema import OptimizerConfig
from mtmegatron.parallel.data import Bucket, Buckets
from mtmegatron.precision.types import Types


@dataclass
class State:
    """Optimizer state of the owned part of one bucket: masters and the two moments, flat; `values`, `gradients`: that part of the bucket."""

    bucket: Bucket
    owned: slice
    values: Tensor
    gradients: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by kind."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class AdamW:
    """theta -= lr (m / (sqrt(v) + eps) + decay theta), with bias-corrected moments m, v."""

    def __init__(self, config: OptimizerConfig, buckets: Buckets, types: Types):
        self.config, self.buckets, self.types = config, buckets, types
        self.updates = 0
        self.states = [self._state(bucket) for bucket in buckets.buckets]

    def _state(self, bucket: Bucket) -> State:
        whole = self.buckets.zero == 0
        owned = slice(0, bucket.values.numel()) if whole else bucket.shard
        values, gradients = (bucket.values, bucket.gradients) if whole else (bucket.own_values, bucket.own_gradients)
        master = values if values.dtype == self.types.master else values.to(self.types.master)
        return State(bucket, owned, values, gradients, master, torch.zeros_like(master), torch.zeros_like(master))

    @torch.no_grad()
    def step(self, lr: float, clip_factor: float) -> None:
        """One update with gradients times `clip_factor`; afterwards all ranks hold the new weights."""
        self.updates += 1  # fused_adamw_ takes the count after this update
        self._update(lr, clip_factor)
        self.publish()

    def publish(self) -> None:
        """Rounds the masters into the weights and gathers them."""
        for state in self.states:
            if state.values is not state.master:
                state.values.copy_(state.master)
        self.buckets.publish()

    def refresh_masters(self) -> None:
        """Takes the masters from the weights, after those were set from outside."""
        for state in self.states:
            state.master.copy_(state.values)

    def _update(self, lr: float, clip_factor: float) -> None:
        c = self.config
        for decays, decay in ((True, c.weight_decay), (False, 0.0)):
            parts = [part for s in self.states if (part := _part(s, decays)) is not None]
            if not parts:
                continue
            weights, gradients, m, v = (list(x) for x in zip(*parts))
            steps = [torch.tensor(float(self.updates), device=w.device) for w in weights]
            scale = None if clip_factor == 1.0 else torch.tensor(1.0 / clip_factor, device=weights[0].device)
            torch._fused_adamw_(
                weights, gradients, m, v, [], steps, lr=lr, beta1=c.beta1, beta2=c.beta2, weight_decay=decay, eps=c.eps,
                amsgrad=False, maximize=False, grad_scale=scale, found_inf=None,
            )  # fmt: skip


def _part(state: State, decays: bool) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The owned elements that decay, or those that do not: (weights, gradients, m, v); None when there are none."""
    border = min(max(state.bucket.decaying - state.owned.start, 0), state.master.numel())
    run = slice(0, border) if decays else slice(border, None)
    if state.master[run].numel() == 0:
        return None
    return state.master[run], state.gradients[run], state.exp_avg[run], state.exp_avg_sq[run]
