"""Bytes per rank by category for each ZeRO stage, measured in real processes, against the formula of the paper.

    python -m benchmarks.memory [--ranks 2] [--width 256]

Measured: after two steps every tensor that the process still holds is found through Python's garbage collector and its
storage counted once; storages of weights, gradients and optimizer state go to their categories, all others are buffers
(most of them the memory that ranks of a host share). Activations: bytes of the storages that the forward of one micro-
batch keeps, beside those that `mtm info` tells. Gathered: the most that weights made whole and gradients not yet
reduced took at one time. The formula, for mixed precision with fp32 gradients (Rajbhandari et al. 2020, section 3): of
N parameters 2 N bytes of weights, 4 N of gradients, 12 N of optimizer state; ZeRO 1 divides the last by the number of
ranks, 2 also the gradients, 3 also the weights. Exit code 1 when one of these is further than 5 % from what is
measured.
"""

import argparse
import gc
import sys

import torch

from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config
from mtmegatron.data.loader import micro_batches
from mtmegatron.mesh import Axis, Mesh
from mtmegatron.models.size import parameters
from mtmegatron.plan.account import account
from mtmegatron.plan.collectives import Log, Recorded
from mtmegatron.train.engine import Engine
from mtmegatron.verify.pool import Pool
from mtmegatron.verify.protocol import RandomSamples

BOUND, STEPS = 0.05, 2


def settings(ranks: int, width: int, zero: int) -> Config:
    """4 layers, sequences of 1,024: above 512 attention keeps on a CPU what it keeps elsewhere."""
    tree = {
        "model": {"layers": 4, "width": width, "heads": 4, "ffn": 3 * width, "vocab": 2048},
        "data": {"sequence": 1024},
        "train": {"global_batch": 2 * ranks, "precision": "bf16"},
        "parallel": {"data": ranks, "zero": zero},
    }
    return check(validate(tree, "benchmark"), ranks)


def held(rank: int, world: int, config: Config) -> dict[str, int]:
    """Bytes by category that this process holds after two steps."""
    log = Log()
    mesh = Mesh(layout_of(config), rank, connect=world > 1, axis=lambda *place, **more: Recorded(Axis(*place, **more), log))
    engine = Engine(config, mesh, native_bf16=False)
    log.buckets = engine.buckets
    samples = RandomSamples(config.model.vocab, config.data.sequence, 0)
    for step in range(STEPS):
        engine.step(micro_batches(config, samples, mesh, step), step, log)
    category = {}
    for bucket in engine.buckets.buckets:
        category |= {key(t): "gradients" for t in (bucket.gradients, bucket.own_gradients)}
        category |= {key(t): "parameters" for t in (bucket.values, bucket.own_values)}
    for state in engine.optimizer.states:
        category |= {key(t): "optimizer" for t in state.tensors.values() if key(t) not in category}
    found = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0)
    storages = {key(x): x.untyped_storage().nbytes() for x in everything()}
    for name, size in storages.items():
        found[category.get(name, "buffers")] += size
    return found | {"activations": sum(log.kept.values()) // STEPS, "gathered": log.gathered}


def key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def everything() -> list[torch.Tensor]:
    """All tensors with memory of their own in this process."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    found += [x.grad for x in found if x.is_leaf and x.grad is not None]
    return [x for x in found if x.device.type != "meta"]


def formula(config: Config, zero: int) -> dict[str, float]:
    """Bytes by category of the paper."""
    count, ranks = parameters(config.model), config.parallel.data
    return {
        "parameters": 2 * count / (ranks if zero >= 3 else 1),
        "gradients": 4 * count / (ranks if zero >= 2 else 1),
        "optimizer": 12 * count / (ranks if zero >= 1 else 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    worst = 0.0
    count = parameters(settings(options.ranks, options.width, 0).model)
    print(f"{count:,} parameters, {options.ranks} data ranks, bf16; MiB on rank 0: measured (formula)")
    print(f"{'ZeRO':>4} {'parameters':>16} {'gradients':>16} {'optimizer':>16} {'activations':>16} {'buffers':>8} {'gathered':>9}")
    with Pool(options.ranks) as pool:
        for zero in range(4):
            config = settings(options.ranks, options.width, zero)
            own = pool.run(held, options.ranks, config)[0]
            expected = formula(config, zero) | {"activations": account(config, 0).micro_batch}
            worst = max([worst, *(abs(own[name] / size - 1) for name, size in expected.items() if name != "activations")])
            cells = [f"{own[name] / 2**20:>7.2f} ({size / 2**20:>6.2f})" for name, size in expected.items()]
            print(f"{zero:>4} {' '.join(cells)} {own['buffers'] / 2**20:>8.2f} {own['gathered'] / 2**20:>9.2f}", flush=True)
    print(f"furthest from the formula among parameters, gradients, optimizer: {worst:.1%}; bound {BOUND:.0%}")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
