"""Delayed scaling: the largest numbers that a layer's operands had in the last steps, from which its scales of this step come.

Notable:
- Scales are constant through a step: recomputation in backward has the bits of the forward, and it does not matter which micro-batch comes first.
- Maxima are agreed on once a step, over all ranks of the stage, so histories and scales are the same in every layout. A step that was skipped leaves
  them alone.
- Until there is a history the scales are those of the numbers themselves.
- A history is a buffer of its layer: checkpoints have it, whatever the layout.
"""

import torch
from torch import Tensor, nn

from mtmegatron.mesh import Axis

KINDS = 3  # input, weight, gradient of the output


class Histories:
    """Of each layer, by its weight: maxima of the last steps [KINDS, steps], the newest first.

    steps: how many; margin: scales leave room for numbers 2^margin times as large; interval: steps between two changes of the scales."""

    def __init__(self, axes: tuple[Axis, ...], steps: int, margin: int, interval: int):
        self.axes, self.steps, self.margin, self.interval = axes, steps, margin, interval
        self.layers: dict[nn.Parameter, Tensor] = {}
        self._seen: dict[nn.Parameter, Tensor] = {}
        self._used: dict[nn.Parameter, Tensor] = {}
        self._ready = False

    def add(self, weight: nn.Parameter, history: Tensor) -> None:
        self.layers[weight] = history

    def start(self, updates: int) -> None:
        """Scales after so many updates: of the maxima up to the last multiple of `interval`."""
        known = {weight: history[:, updates % self.interval :].amax(1) for weight, history in self.layers.items()}
        self._ready = self._ready or any(history.is_meta or bool(history.any()) for history in known.values())
        self._used = {weight: largest * 2.0**self.margin for weight, largest in known.items()}
        self._seen = {weight: torch.zeros(KINDS, device=history.device) for weight, history in self.layers.items()}

    def largest(self, weight: nn.Parameter, row: int, found: Tensor) -> Tensor | None:
        """The maximum to scale by, infinite where `found` is, which is noted; None: there is no history."""
        self._seen[weight][row] = torch.maximum(self._seen[weight][row], found.max())
        return torch.where(found.isinf(), found, self._used[weight][row].to(found.dtype)) if self._ready else None

    @torch.no_grad()
    def finish(self) -> None:
        """After an update: what was seen becomes the newest of the history."""
        if not self._seen:
            return
        seen = torch.stack(list(self._seen.values()))
        for axis in self.axes:
            axis.all_reduce(seen, "max")
        for history, newest in zip(self.layers.values(), seen):
            history.copy_(torch.cat([newest[:, None], history[:, :-1]], 1))
