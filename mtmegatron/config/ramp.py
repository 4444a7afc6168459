"""How many sequences each step has, and how many came before it: pure functions of the step, also while the global batch grows.

Notable: stage k of a ramp has `start + k x increment` sequences a step and begins with the first step before which at least k shares of `samples`
were seen (Megatron's rule), so nothing has to be kept or restored.
"""

from collections.abc import Iterator

from mtmegatron.config.schema import Config, TrainConfig


def batch_sizes(train: TrainConfig) -> list[int]:
    """Every size that the global batch has in turn."""
    if train.ramp is None:
        return [train.global_batch]
    return [*range(train.ramp.start, train.global_batch, train.ramp.increment), train.global_batch]


def batch_size(train: TrainConfig, step: int) -> int:
    """Sequences of step `step` (the first is 0)."""
    return _place(train, step)[0]


def samples_before(train: TrainConfig, step: int) -> int:
    """Sequences of all steps before step `step`."""
    return _place(train, step)[1]


def without_ramp(config: Config) -> Config:
    """The configuration with the whole global batch in every step."""
    return config.model_copy(update={"train": config.train.model_copy(update={"ramp": None})})


def _place(train: TrainConfig, step: int) -> tuple[int, int]:
    """(sequences of a step, sequences of all steps before it)."""
    for first, before, size, steps in _stages(train):
        if steps is None or step < first + steps:
            return size, before + (step - first) * size
    raise AssertionError("the last stage has no end")


def _stages(train: TrainConfig) -> Iterator[tuple[int, int, int, int | None]]:
    """(first step, sequences before it, sequences of a step, steps; None: without end)."""
    first, before, sizes = 0, 0, batch_sizes(train)
    for k, size in enumerate(sizes[:-1], 1):
        left = train.ramp.samples * k - before * (len(sizes) - 1)  # in parts of a share, so that shares need not be whole
        steps = max(-(-left // (size * (len(sizes) - 1))), 0)
        yield first, before, size, steps
        first, before = first + steps, before + steps * size
    yield first, before, sizes[-1], None
