"""Peak activation memory per rank of 32k tokens on 1, 2 and 4 processes of a context-parallel run.

    python -m benchmarks.context_memory [--tokens 32768] [--kind allgather]

The model is so narrow that 32k tokens of attention take seconds. Measured twice: the bytes that forward keeps for backward, and by how much the
process grew at its peak (the highest resident set during the step, less that before it), which also holds the working memory of operations and,
for allgather, the keys and values of all ranks.
"""

import argparse
import resource
import sys

from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config
from mtmegatron.data.loader import micro_batches
from mtmegatron.mesh import Mesh
from mtmegatron.plan.collectives import Log
from mtmegatron.train.engine import Engine
from mtmegatron.verify.pool import Pool
from mtmegatron.verify.protocol import RandomSamples


def settings(tokens: int, degree: int, kind: str | None) -> Config:
    """One layer of width 32 with one head, one sequence."""
    tree = {
        "model": {"layers": 1, "width": 32, "heads": 1, "ffn": 96, "vocab": 256},
        "data": {"sequence": tokens},
        "train": {"global_batch": 1},
        "parallel": {"context": degree} | ({"context_kind": kind} if degree > 1 else {}),
    }
    return check(validate(tree, "benchmark"), degree)


def measured(rank: int, world: int, small: Config, config: Config) -> tuple[int, int]:
    """(bytes kept for backward, bytes by which the process grew) in one step, after a small one in which libraries took their memory."""
    step(rank, world, small)
    return step(rank, world, config)


def step(rank: int, world: int, config: Config) -> tuple[int, int]:
    mesh, log = Mesh(layout_of(config), rank, connect=world > 1, shared=False), Log()  # shared pages would count as this process's
    engine = Engine(config, mesh)
    log.buckets = engine.buckets
    batches = micro_batches(config, RandomSamples(config.model.vocab, config.data.sequence, 0), mesh, 0)
    before = resident()
    engine.step(batches, 0, log)
    return sum(log.kept.values()), highest() - before


def resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def highest() -> int:
    """The most that they ever were."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--kind", default="allgather", choices=["allgather", "ring"])
    options = parser.parse_args()
    print(f"{options.tokens:,} tokens, fp32, {options.kind}; most of any rank, in MiB; in brackets the ratio to one process")
    print(f"{'processes':>9} {'kept for backward':>20} {'growth at the peak':>20}")
    rows: list[list[int]] = []
    for degree in (1, 2, 4):
        small, config = (settings(tokens, degree, options.kind) for tokens in (1024, options.tokens))
        with Pool(degree) as pool:  # fresh processes, since the peak of a process never falls
            answers = pool.run(measured, degree, small, config, timeout=300.0)
        rows.append([max(column) for column in zip(*answers)])
        cells = [f"{size / 2**20:>12.1f} ({size / first:.2f})" for size, first in zip(rows[-1], rows[0])]
        print(f"{degree:>9} {cells[0]:>20} {cells[1]:>20}", flush=True)
    sys.exit(any(after >= before for first, second in zip(rows, rows[1:]) for before, after in zip(first, second)))


if __name__ == "__main__":
    main()
