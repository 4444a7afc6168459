"""The proof of canonical numerics: after some steps every layout has the bits of one process.

Notable: a tensor's digest is a sum over its elements of a hash of (global place, bits), modulo 2^64. So ranks digest the parts that they hold, in
place, and the digests of the parts add up to that of the whole.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import Config
from mtmegatron.mesh import Mesh
from mtmegatron.train.engine import Engine
from mtmegatron.verify.pool import Pool
from mtmegatron.verify.protocol import (
    Check,
    Part,
    batches,
    copy_of,
    describe,
    laid_out,
    own_gradients,
    whole_weights,
    world_of,
)

STEPS = 10
Digests = dict[tuple[str, str, tuple], int]  # (kind with step, name, copy) -> digest of this rank's parts
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
MIX = tuple(m - 2**64 if m >= 2**63 else m for m in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def canonical(config: Config) -> Config:
    """The configuration with canonical numerics."""
    return config.model_copy(update={"train": config.train.model_copy(update={"numerics": "canonical"})})


def compare_bits(config: Config, layouts: list[dict[str, object]], precisions: Iterable[str], pool: Pool, steps: int = STEPS) -> list[Check]:
    """For each layout and precision: how many losses, norms, gradients and weights differ from those of one process."""
    found = []
    for precision in precisions:
        right = run(0, 1, config, {}, precision, steps)
        for layout in layouts:
            ranks = pool.run(run, world_of(layout), config, layout, precision, steps, timeout=600.0)
            found += _checks(describe(layout), precision, ranks, right)
    return found


def run(rank: int, world: int, config: Config, layout: dict, precision: str, steps: int) -> tuple[list[tuple[str, str]], Digests]:
    """One rank of one layout: (loss, norm) of each step in hexadecimal, digests of gradients of each step and of the last weights."""
    own = check(laid_out(config, layout, precision), world)
    mesh = Mesh(layout_of(own), rank, connect=world > 1, shared=own.parallel.shared_memory)
    engine = Engine(own, mesh)
    scalars, digests = [], defaultdict(int)
    for step in range(steps):
        result = engine.step(batches(engine, step), step)
        scalars.append((result.loss.hex(), result.grad_norm.hex()))
        _digest(digests, mesh, f"gradient of step {step}", own_gradients(engine))
    _digest(digests, mesh, "weight", whole_weights(engine))
    return scalars, dict(digests)


def _digest(into: Digests, mesh: Mesh, label: str, parts: Iterable[Part]) -> None:
    for item, mine, where in parts:
        shape = item.placement.shape
        place = item.placement.part(torch.arange(math.prod(shape)).view(shape), mesh.layout, mesh.rank)
        key = label, item.name, copy_of(mesh, item.placement, label)
        into[key] = (into[key] + digest(mine, place.reshape(-1)[where])) % 2**64


def digest(values: torch.Tensor, places: torch.Tensor) -> int:
    """Sum of a hash of (place, bits) over elements, modulo 2^64 (the finaliser of Steele et al. 2014, SplitMix64)."""
    x = (values.detach().clone().view(BITS[values.dtype]).to(torch.int64) ^ (places * MIX[0])) + MIX[0]
    for shift, factor in ((30, MIX[1]), (27, MIX[2])):
        x = (x ^ _shifted(x, shift)) * factor
    return int((x ^ _shifted(x, 31)).sum()) % 2**64


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x >> by of an unsigned number."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _checks(layout: str, precision: str, ranks: list[tuple[list, Digests]], right: tuple[list, Digests]) -> Iterable[Check]:
    scalars, digests = right
    for place, what in enumerate(("loss", "gradient norm")):
        wrong = [step for step, mine in enumerate(zip(*(s for s, _ in ranks))) if any(m[place] != scalars[step][place] for m in mine)]
        yield _line(layout, precision, what, len(wrong), f"first in step {wrong[0]}" if wrong else "")
    whole: Digests = defaultdict(int)
    for _, mine in ranks:
        for key, value in mine.items():
            whole[key] = (whole[key] + value) % 2**64
    expected = {(label, name): value for (label, name, _), value in digests.items()}
    different = [(label, name) for (label, name, _), value in whole.items() if value != expected[label, name]]
    different += expected.keys() - {(label, name) for label, name, _ in whole}
    for kind in ("gradient", "weight"):
        mine = [pair for pair in dict.fromkeys(different) if pair[0].startswith(kind)]
        yield _line(layout, precision, f"{kind}s", len(mine), f"first {mine[0][0]} {mine[0][1]}" if mine else "")


def _line(layout: str, precision: str, what: str, wrong: int, first: str) -> Check:
    return Check(layout, precision, f"bits of {what}" + (f" ({first})" if first else ""), float(wrong), 0.0)
