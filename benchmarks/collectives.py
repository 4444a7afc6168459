"""Collectives over Gloo and through shared memory, in turns in the same processes.

    python -m benchmarks.collectives [--turns 7] [--ranks 2 4]

Prints milliseconds of one collective (median over turns of the mean of a turn, on the slowest rank) in fp32. The size is that of the whole: what a
rank puts into a sum, gets from a gather, exchanges in an all-to-all.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from mtmegatron.layout import Layout
from mtmegatron.mesh import Axis, Mesh
from mtmegatron.verify.pool import Pool

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 2 << 20, 16 << 20)  # bytes


def call(axis: Axis, operation: str, numbers: int) -> Callable[[], object]:
    """One collective on buffers that are used again."""
    whole = torch.ones(max(numbers, axis.size))
    part = whole[: max(numbers // axis.size, 1)].clone()
    return {
        "all-reduce": lambda: axis.all_reduce(whole),
        "all-gather": lambda: axis.all_gather(part),
        "reduce-scatter": lambda: axis.reduce_scatter(whole),
        "all-to-all": lambda: axis.all_to_all(whole),
    }[operation]


def turn(collective: Callable[[], object], repeats: int) -> float:
    """Mean seconds of one collective."""
    collective()
    begin = time.perf_counter()
    for _ in range(repeats):
        collective()
    return (time.perf_counter() - begin) / repeats


def measure(rank: int, world: int, turns: int) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """For each operation and size the times of all turns: (gloo, shared)."""
    axes = [Mesh(Layout(data=world), rank, connect=True, shared=shared)["data"] for shared in (False, True)]
    times = {}
    for operation in OPERATIONS:
        for size in SIZES:
            pair = [call(axis, operation, size // 4) for axis in axes]
            repeats = 2 if size > 2 << 20 else 10
            times[operation, size] = [tuple(turn(collective, repeats) for collective in pair) for _ in range(turns)]
    return times


def readable(size: int) -> str:
    return next(f"{size >> shift} {unit}" for shift, unit in ((20, "MiB"), (10, "KiB"), (0, "B")) if size >> shift)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, one thread per process, fp32")
    print(f"{'ranks':>5} {'operation':>15} {'size':>8} {'gloo ms':>9} {'shared ms':>9} {'ratio':>6}")
    with Pool(max(options.ranks)) as pool:
        for world in options.ranks:
            ranks = pool.run(measure, world, options.turns, timeout=600)
            for operation, size in ranks[0]:
                slowest = [tuple(max(times) for times in zip(*turns)) for turns in zip(*(found[operation, size] for found in ranks))]
                gloo, shared = (statistics.median(times) * 1e3 for times in zip(*slowest))
                print(f"{world:>5} {operation:>15} {readable(size):>8} {gloo:>9.3f} {shared:>9.3f} {gloo / shared:>6.1f}")


if __name__ == "__main__":
    main()
