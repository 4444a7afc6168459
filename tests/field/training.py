"""Small runs for the cases of this folder: an engine, a loop, what they leave; in this process or on the pool."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from mtmegatron.batch import Batch, Bounds
from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.store import Store
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import Config
from mtmegatron.device import Device
from mtmegatron.mesh import Mesh
from mtmegatron.train.corpus import Corpus
from mtmegatron.train.engine import Engine
from mtmegatron.train.loop import Loop
from mtmegatron.verify.pool import Pool
from mtmegatron.verify.protocol import RandomSamples, laid_out, world_of

CLOCK = ("seconds", "tokens_per_second", "tflops_per_rank", "memory_bytes", "mfu")  # the only values of a line that depend on the machine


class Cut(BaseException):
    """Ends a run as a kill would: nothing is written any more."""


class Samples(RandomSamples):
    """Random samples where a corpus is expected."""

    datasets = (SimpleNamespace(epochs=1),)


def engine_of(config: Config, layout: dict, rank: int = 0, world: int = 1, precision: str = "fp64") -> Engine:
    """The engine of one rank; `world` of 1 builds any rank of any layout without processes."""
    own = check(laid_out(config, layout, precision), world_of(layout))
    return Engine(own, Mesh(layout_of(own), rank, connect=world > 1))


def loop_of(config: Config, layout: dict, precision: str, folder: Path, rank: int = 0, world: int = 1) -> Loop:
    engine = engine_of(config, layout, rank, world, precision)
    own = engine.config.model_copy(update={"train": engine.config.train.model_copy(update={"folder": str(folder)})})
    engine.config = own
    training = Samples(own.model.vocab, own.data.sequence, own.train.seed)
    held_out = Samples(own.model.vocab, own.data.sequence, own.train.seed + 1)
    return Loop(own, Corpus(training, held_out, None), Device("cpu"), engine.mesh, engine)


def run_rank(
    rank: int, world: int, config: Config, layout: dict, precision: str, folder: Path, stop: int | None
) -> None:
    """Trains in a folder to the end, or until it is cut off after update `stop`."""
    loop = loop_of(config, layout, precision, folder, rank, world)

    def after(step: int, result) -> None:
        if step == stop:
            raise Cut

    loop.after_step = after
    try:
        loop.run()
    except Cut:
        pass


def run(
    pool: Pool, config: Config, layout: dict, folder: Path, precision: str = "fp32", stop: int | None = None
) -> None:
    spread(pool, run_rank, layout, config, layout, precision, folder, stop)


def spread(pool: Pool, function: Callable, layout: dict, *arguments, timeout: float = 60.0) -> list:
    """The results of `function(rank, world, *arguments)` on all ranks of a layout; one rank runs here."""
    world = world_of(layout)
    return [function(0, 1, *arguments)] if world == 1 else pool.run(function, world, *arguments, timeout=timeout)


def state_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All that the checkpoint of a step holds: whole weights and both moments by name."""
    return contents(Folder(folder / "checkpoints").open(step))


def contents(store: Store) -> dict[str, torch.Tensor]:
    return {name: store.read(name) for name in store.names}


def lines_of(folder: Path) -> list[dict]:
    """metrics.jsonl without what the clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def make_batch(vocab: int, lengths: list[int], seed: int, valid: list[int] | None = None) -> Batch:
    """Sequences of these lengths end to end; `valid`: only so many first labels of each count."""
    draw = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(vocab, (sum(lengths),), generator=draw) for _ in range(2))
    positions = torch.cat([torch.arange(n) for n in lengths])
    if valid is not None:
        kept = torch.tensor(valid).repeat_interleave(torch.tensor(lengths))
        labels[positions >= kept] = -100
    starts = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    return Batch(tokens, labels, positions, Bounds(starts))


def parts_of(engine: Engine, gradients: bool = False) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], object]]:
    """This rank's parts of the weights, or of the reduced gradients (ZeRO 0): name -> (global shape, offset, array)."""
    found = {}
    for name, param in engine.model.named_parameters():
        offset, _ = param.placement.offset_and_size(engine.mesh.layout, engine.mesh.rank)
        value = param.grad_sum if gradients else param.detach()
        found[name] = (param.placement.shape, offset, value.clone().double().numpy())
    return found


def joined(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """Whole tensors from the parts of all ranks; copies of a part must be the same bits."""
    whole: dict[str, torch.Tensor] = {}
    for name, (shape, offset, array) in (item for parts in ranks for item in parts.items()):
        target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        place = target[tuple(slice(o, o + n) for o, n in zip(offset, array.shape))]
        mine = torch.from_numpy(array)
        assert torch.equal(torch.where(place.isnan(), mine, place), mine), f"{name}: copies differ"
        place.copy_(mine)
    return whole


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Over all tensors: |a - b| / |b|, in the 2-norm."""
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).norm() / b[n].double().norm().clamp(min=1e-300)) for n in b)


def name(value: object) -> str:
    """A layout, or other settings, as part of the name of a test."""
    return ",".join(f"{k}={v}" for k, v in value.items()) or "serial" if isinstance(value, dict) else str(value)
