"""Bytes on the wire and time of the one-bit mean, beside the all-reduce that it replaces.

    python -m benchmarks.compress [--ranks 4] [--elements 1048576] [--turns 5] [--updates 20000] [--freeze 4000]

Prints for one flat buffer of fp32 numbers the bytes that a rank sends in an all-reduce of fp32 and of bf16 (two phases, (n - 1) / n of the buffer
each) and in the compressed mean, scales included; of a run of so many updates the share of them that send something, and the bytes of an update
in the mean over all stages, without ZeRO; then milliseconds, medians over turns in the same processes: both collectives, and what of the
mean is compression (the same work with nobody at the other end).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mtmegatron.config.schema import OneBitConfig
from mtmegatron.layout import Layout
from mtmegatron.mesh import Axis, Mesh
from mtmegatron.optim.zeroone import synchronises, variance_updates
from mtmegatron.parallel.compress import CompressedMean
from mtmegatron.verify.pool import Pool


class Counted:
    """An axis that counts what this rank sends to the others; `silent`: nothing travels."""

    def __init__(self, axis: Axis, silent: bool = False):
        self.axis, self.size, self.rank, self.silent, self.sent = axis, axis.size, axis.rank, silent, 0

    def all_to_all(self, x: Tensor) -> Tensor:
        self.sent += x.nbytes * (self.size - 1) // self.size
        return x if self.silent else self.axis.all_to_all(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent += x.nbytes * (self.size - 1)
        return x.repeat(self.size, 1) if self.silent else self.axis.all_gather(x)


def milliseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def measure(rank: int, world: int, elements: int, turns: int) -> tuple[int, dict[str, float]]:
    """(bytes that this rank sends in one mean, milliseconds by what was timed)."""
    axis = Mesh(Layout(data=world), rank, connect=True)["data"]
    x, used = torch.randn(elements), torch.ones(elements, dtype=torch.bool)
    counted = Counted(axis)
    means = [CompressedMean(Counted(axis, silent=True), x), CompressedMean(counted, x)]
    work = {"all-reduce": lambda: axis.all_reduce(x.clone())}
    work |= {name: lambda mean=mean: mean.mean(x.clone(), used) for name, mean in zip(("compression", "compressed mean"), means)}
    times = {name: [milliseconds(one) for _ in range(turns + 1)][1:] for name, one in work.items()}
    return counted.sent // (turns + 1), {name: statistics.median(found) for name, found in times.items()}


def stages(kind: str, updates: int, onebit: OneBitConfig) -> tuple[int, int]:
    """(updates with an all-reduce, with a compressed mean) of a run."""
    if kind != "zeroone-adam":
        whole = onebit.freeze if kind == "onebit-adam" else updates
        return whole, updates - whole
    whole = variance_updates(updates, onebit.variance_interval, onebit.freeze)
    return whole, sum(synchronises(count, onebit) for count in range(1, updates + 1)) - whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20000)
    parser.add_argument("--freeze", type=int, default=4000)
    options = parser.parse_args()
    with Pool(options.ranks) as pool:
        ranks = pool.run(measure, options.ranks, options.elements, options.turns)
    sent = ranks[0][0]
    for name, size in (("fp32", 4), ("bf16", 2)):
        plain = 2 * size * options.elements * (options.ranks - 1) // options.ranks
        print(f"all-reduce of {name}: {plain:>12} bytes from each rank, {plain / sent:.1f} times those of the compressed mean, {sent}")
    all_reduce = 8 * options.elements * (options.ranks - 1) // options.ranks
    onebit = OneBitConfig(freeze=options.freeze, local_interval=max((options.updates - options.freeze) // 8, 1))
    for kind in ("adamw", "onebit-adam", "zeroone-adam"):
        whole, signs = stages(kind, options.updates, onebit)
        mean = (whole * all_reduce + signs * sent) / options.updates
        share = (whole + signs) / options.updates
        print(f"{kind:>12}: {share:7.1%} of updates send, {mean:12.0f} bytes in the mean, {all_reduce / mean:5.1f} times fewer")
    for name in ranks[0][1]:
        print(f"{name:>16}: {max(times[name] for _, times in ranks):8.2f} ms")


if __name__ == "__main__":
    main()
