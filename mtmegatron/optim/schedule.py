"""The learning rate of each update, a pure function of how far the run is.

Notable: `done` counts what lies before the update, in the unit of the configuration (steps or samples), so the first update of a warm-up of 10
uses a tenth of the peak, update 10 the peak, and the last update `min_lr`. Resuming needs no state.
"""

import math

from mtmegatron.config.schema import OptimizerConfig, TrainConfig


def learning_rate(o: OptimizerConfig, train: TrainConfig, step: int) -> float:
    """Learning rate of update `step` (the first is 0)."""
    size = 1 if o.unit == "steps" else train.global_batch
    now = (step + 1) * size  # progress once this update is made
    length = o.decay_length or train.steps * size
    if now <= o.warmup:
        return o.lr * now / o.warmup
    return decayed(o.decay, o.lr, o.min_lr, (now - o.warmup) / max(length - o.warmup, 1))


def decayed(kind: str, peak: float, floor: float, progress: float) -> float:
    """Between `peak` at progress 0 and `floor` at progress 1 and after."""
    progress = min(max(progress, 0.0), 1.0)
    if kind == "constant":
        return peak
    if kind == "linear":
        return floor + (peak - floor) * (1.0 - progress)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
