"""Learning rate and weight decay of each update, pure functions of how far the run is.

Notable: progress counts what lies up to the end of the update, in the unit of the configuration (steps, samples or tokens), so the first update of
a warm-up of 10 uses a tenth of the peak, update 10 the peak, and the last update `min_lr`. Resuming needs no state.
"""

import math

from mtmegatron.config.ramp import samples_before
from mtmegatron.config.schema import Config, OptimizerConfig


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of update `step` (the first is 0)."""
    o, now, length = config.optimizer, progress(config, step + 1), decay_length(config)
    if now <= o.warmup:
        return o.warmup_from + (o.lr - o.warmup_from) * now / o.warmup
    if o.decay == "inverse-sqrt":
        return max(o.min_lr, o.lr * math.sqrt(max(o.warmup, 1) / now))
    start = o.warmup if o.decay != "wsd" else length - (o.wsd_length or length)
    done = min(max((now - start) / max(length - start, 1), 0.0), 1.0)
    return o.min_lr + (o.lr - o.min_lr) * remaining(o, done)


def weight_decay(config: Config, step: int) -> float:
    """Weight decay of update `step`: between `weight_decay` at the start and `weight_decay_end` at the end of the decay."""
    o = config.optimizer
    if o.weight_decay_end is None:
        return o.weight_decay
    done = min(progress(config, step + 1) / decay_length(config), 1.0)
    return o.weight_decay_end + (o.weight_decay - o.weight_decay_end) * SHAPES[o.weight_decay_shape](done)


def progress(config: Config, steps: int) -> int:
    """How far the run is after so many steps, in the unit of the configuration."""
    if config.optimizer.unit == "steps":
        return steps
    return samples_before(config.train, steps) * (config.data.sequence if config.optimizer.unit == "tokens" else 1)


def decay_length(config: Config) -> int:
    """Where the decay ends, in the unit of the configuration."""
    return config.optimizer.decay_length or progress(config, config.train.steps)


def remaining(o: OptimizerConfig, done: float) -> float:
    """What is left of the way from the peak (1) to the floor (0), when the part `done` of the decay is over."""
    if o.decay == "polynomial":
        return (1.0 - done) ** o.power
    return SHAPES[o.wsd_shape if o.decay == "wsd" else o.decay](done)


SHAPES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,  # Hu et al. 2024 (2404.06395), shifted so that it ends at 0
    "minus-sqrt": lambda done: 1.0 - math.sqrt(done),  # Hagele et al. 2024 (2405.18392)
}
