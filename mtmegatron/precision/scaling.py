"""The dynamic loss scale of fp16: gradients are made times `scale`, so that small ones are not rounded to zero (Micikevicius et al. 2018, 1710.03740).

Notable, exactly:
- A step *overflows* when its loss is finite and its gradient is not. All ranks see that in the sum of squares, skip the update and lower the scale
  together. A loss that is not finite is no matter of the scale, which then stays.
- After `interval` steps in a row without overflow the scale is multiplied by `growth`, and the counts of good steps and of overflows begin anew.
- The `hysteresis`-th overflow since the scale last grew, and each after it, multiplies the scale by `backoff`; those before it only skip their step.
- At `minimum` an overflow cannot be answered any more: the run stops.
"""

from dataclasses import dataclass

from mtmegatron.config.schema import LossScaleConfig
from mtmegatron.errors import UserError


@dataclass
class LossScale:
    """`good`: steps without overflow since the last overflow or growth; `overflows`: since the last growth."""

    config: LossScaleConfig
    scale: float
    good: int = 0
    overflows: int = 0

    @classmethod
    def of(cls, config: LossScaleConfig) -> "LossScale":
        return cls(config, config.initial)

    def succeeded(self) -> None:
        """A step was made."""
        self.good += 1
        if self.good == self.config.interval:
            self.scale, self.good, self.overflows = self.scale * self.config.growth, 0, 0

    def overflowed(self) -> None:
        """A step was skipped for its gradient. Raises UserError when the scale was already at its minimum."""
        if self.scale <= self.config.minimum:
            raise UserError(
                f"the gradient is not finite at `train.loss_scale.minimum: {self.config.minimum:g}`: values grow beyond what fp16 holds (65504), "
                "and a smaller scale would not repair that: use train.precision bf16, lower the learning rate, or go on from an earlier checkpoint"
            )
        self.good, self.overflows = 0, self.overflows + 1
        if self.overflows >= self.config.hysteresis:
            self.scale = max(self.scale * self.config.backoff, self.config.minimum)

    @property
    def state(self) -> dict[str, float]:
        """What a checkpoint has of it."""
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    def load(self, state: dict[str, float]) -> None:
        self.scale, self.good, self.overflows = float(state["scale"]), int(state["good"]), int(state["overflows"])
