"""How much of the time of communication each mode hides behind computation.

    python -m benchmarks.overlap [--delay 5] [--rounds 8]

Each collective and each message is made to complete no earlier than some milliseconds after its start: who waits for it
earlier sleeps, and sleeping takes no time from the other rank. Steps with and without the delay take turns in the same
processes. What the step does not become slower by was hidden: hidden = 1 - (slow - plain) / (count x delay), with the
count of the rank that has most. A blocking collective hides nothing of its own; several that are under way together
hide each other. Needs a core for each of the 2 processes and an otherwise idle machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config
from mtmegatron.data.loader import micro_batches
from mtmegatron.mesh import Axis, Mesh
from mtmegatron.train.engine import Engine
from mtmegatron.verify.pool import Pool
from mtmegatron.verify.protocol import RandomSamples, describe, world_of

BLOCKING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
STARTING = ("start_all_reduce", "start_all_gather", "start_reduce_scatter", "start_shift", "receive")
MODES = [
    *({"data": 2, "zero": zero, "overlap": overlap} for zero in range(4) for overlap in (False, True)),
    {"tensor": 2}, {"tensor": 2, "sequence": False}, {"context": 2}, {"context": 2, "context_kind": "ring"},
    *({"pipeline": 2, "schedule": schedule} for schedule in ("1f1b", "gpipe", "zb-h1", "zb-v")),
]  # fmt: skip


@dataclass
class Delay:
    """Makes communication slow while `seconds` is not 0, and counts it."""

    seconds: float = 0.0
    count: int = 0
    inside: bool = False  # an all-reduce that calls another collective is one


class SlowAxis(Axis):
    """An axis whose collectives and messages are late; its methods are made below."""

    def __init__(self, delay: Delay, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.delay = delay


def _delayed(name: str) -> Callable:
    original = getattr(Axis, name)

    def call(axis: SlowAxis, *args, **kwargs):
        delay = axis.delay
        if axis.size == 1 or delay.inside or not delay.seconds:
            return original(axis, *args, **kwargs)
        delay.inside, delay.count, due = True, delay.count + 1, time.perf_counter() + delay.seconds
        try:
            result = original(axis, *args, **kwargs)
        finally:
            delay.inside = False
        if name in STARTING:
            return _Late(delay, result, due)
        _sleep_until(due)
        return result

    return call


for _name in BLOCKING + STARTING:
    setattr(SlowAxis, _name, _delayed(_name))


class _Late:
    """Something under way that is not there before it is due."""

    def __init__(self, delay: Delay, pending, due: float):
        self.delay, self.pending, self.due = delay, pending, due

    def wait(self):
        outer, self.delay.inside = self.delay.inside, True
        try:
            result = self.pending.wait()
        finally:
            self.delay.inside = outer
        _sleep_until(self.due)
        return result


def _sleep_until(due: float) -> None:
    time.sleep(max(due - time.perf_counter(), 0.0))


def settings(mode: dict[str, object]) -> Config:
    """Width 256, 6 layers, sequence 128, 8 sequences a step in micro-batches of 1, buckets of about a block."""
    tree = {
        "model": {"layers": 6, "width": 256, "heads": 8, "ffn": 768, "vocab": 2048},
        "data": {"sequence": 128},
        "train": {"micro_batch": 1, "global_batch": 8, "steps": 1_000_000},
        "parallel": {"bucket_mb": 3} | mode,
    }
    return check(validate(tree, "benchmark"), world_of(mode))


def measure(rank: int, world: int, config: Config, delay: float, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds of steps without and with the delay, and delayed operations of a step."""
    slow = Delay()
    mesh = Mesh(layout_of(config), rank, connect=True, axis=partial(SlowAxis, slow))
    engine, samples = Engine(config, mesh), RandomSamples(config.model.vocab, config.data.sequence, 1)
    batches = micro_batches(config, samples, mesh, 0)
    times: dict[float, list[float]] = {0.0: [], delay: []}
    for step in range(2 * rounds + 2):
        slow.seconds, slow.count = (0.0, delay)[step % 2], 0
        torch.distributed.barrier()
        begin = time.perf_counter()
        engine.step(batches, step)
        if step > 1:
            times[slow.seconds].append(time.perf_counter() - begin)
    return times[0.0], times[delay], slow.count


def report(mode: dict[str, object], delay: float, ranks: list[tuple]) -> None:
    """One line: the slowest rank's median of each kind of step."""
    plain, slow = (1e3 * statistics.median(map(max, zip(*(rank[i] for rank in ranks)))) for i in (0, 1))
    count = max(rank[2] for rank in ranks)
    hidden = 1 - (slow - plain) / (count * delay)
    numbers = f"{count:>6} {count * delay:>9.0f} {plain:>9.1f} {slow:>8.1f} {hidden:>7.0%}"
    print(f"{describe(mode):<40} {numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    print(f"{options.delay:g} ms for each collective or message, 2 processes, torch {torch.__version__}")
    print(f"{'mode':<40} {'count':>6} {'delay ms':>9} {'plain ms':>9} {'slow ms':>8} {'hidden':>7}")
    with Pool(2) as pool:
        for mode in MODES:
            ranks = pool.run(measure, 2, settings(mode), options.delay / 1e3, options.rounds)
            report(mode, options.delay, ranks)


if __name__ == "__main__":
    main()
