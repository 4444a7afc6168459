"""An update of single elements as one pass over memory: `torch.compile` makes one loop of clip, rule, average and rounding into the weights.

Notable:
- The loop does what `elementwise.py` says, operation by operation; it is written nowhere a second time.
- Numbers that change from one update to the next are in a tensor, so they do not cause another compilation. Powers of beta are made outside: the loop
  would make them for each element.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtmegatron.config.schema import OptimizerConfig
from mtmegatron.errors import UserError
from mtmegatron.optim.elementwise import ELEMENTWISE, Numbers, follow, moments_of
from mtmegatron.optim.state import State


@dataclass(frozen=True)
class Scalars:
    """What a rule reads of `Numbers`."""

    config: OptimizerConfig
    lr: Tensor
    decay: Tensor
    first: Tensor
    second: Tensor
    decays: bool
    single: bool = True


class Compiled:
    """Updates of some of the kinds in `elementwise.py`. `wide`: the type of the arithmetic.

    Raises UserError where there is nothing to compile with."""

    def __init__(self, config: OptimizerConfig, kinds: set[str], wide: torch.dtype, device: torch.device):
        self.wide = wide
        self.passes = {kind: _pass(kind, config) for kind in kinds}
        for kind in kinds if device.type != "meta" else ():
            arrays = [torch.zeros(64, dtype=wide, device=device) for _ in range(2 + len(moments_of(kind, config)))]
            try:
                self._run(kind, Numbers(config, 0.0, 0.0, 1), 1.0, arrays[0], arrays[1], arrays[2:], None, None)
            except Exception as error:  # whatever the compilers of all devices raise
                reason = str(error).strip().splitlines()[0]
                raise UserError(f"`optimizer.compiled: true`: torch.compile failed ({reason}): install a C++ compiler (g++), or use false") from error

    def update(self, state: State, numbers: Numbers, clip_factor: float) -> None:
        """One update of a state, and with it of its average and its weights."""
        for own, run in state.runs(numbers):
            followers = (None if t is None else t[own] for t in state.followers)
            moments = [moment[own] for moment in state.moments.values()]
            self._run(state.kind, run, clip_factor, state.master[own], state.gradients[own], moments, *followers)

    def _run(self, kind: str, n: Numbers, clip: float, w: Tensor, g: Tensor, moments: list[Tensor], values: Tensor | None, average: Tensor | None) -> None:
        if w.is_meta:  # a step that is only described
            return
        numbers = torch.tensor([n.lr, n.decay, n.first, n.second, clip], dtype=self.wide, device=w.device)
        self.passes[kind](w, g, moments, values, average, n.decays, numbers)


def _pass(kind: str, config: OptimizerConfig) -> Callable:
    rule = ELEMENTWISE[kind]

    def update(w, g, moments, values, average, decays, numbers):
        lr, decay, first, second, clip = numbers.unbind()
        rule(Scalars(config, lr, decay, first, second, decays), w, g * clip, *moments)
        follow(config, w, values, average)

    return torch.compile(update, dynamic=True, fullgraph=True, isolate_recompiles=True)
