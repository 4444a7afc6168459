"""What one rank of any layout is and holds: its place, its groups, the bytes of its state, of its activations and of its buffers.

Notable: nothing is computed a second way. The rank's real model, buckets and optimizer are built on torch's meta device, which allocates nothing,
and their tensors are counted; what forward keeps is counted while the real step runs there (see `collectives.py`).
"""

from dataclasses import dataclass

from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import Config
from mtmegatron.layers.build import Build
from mtmegatron.layout import Layout
from mtmegatron.mesh import GROUPS, Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.stages import build_chunks
from mtmegatron.optim.optimizer import Optimizer
from mtmegatron.parallel.data import Buckets
from mtmegatron.parallel.pipeline.schedule import LIVE, Plan, schedule
from mtmegatron.plan.collectives import (
    micro_batches_of,
    record_step,
    with_micro_batches,
)
from mtmegatron.precision.types import TYPES, types_of

COORDINATES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class State:
    """What a rank holds between steps: its blocks and parameters; bytes of weights, gradients and optimizer state."""

    stage: int
    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Group:
    """The ranks that differ from one in some axes alone. `place`: which of them it is."""

    axis: str
    ranks: tuple[int, ...]
    place: int


@dataclass(frozen=True)
class Account:
    """A rank and all that it holds at its fullest moment, in bytes.

    micro_batch: what the forwards of one micro-batch keep for backward, all chunks; live: micro-batches kept at one time, a chunk counts 1/v;
    activations: kept at one time, with what is on its way to host memory; gathered: weights made whole and gradients not yet reduced, under ZeRO 2
    and 3, beside `state`. The working memory of a single operation is in none of them."""

    rank: int
    coordinates: dict[str, int]
    groups: list[Group]
    state: State
    micro_batch: int
    live: float
    activations: int
    gathered: int

    @property
    def total(self) -> int:
        return self.state.total + self.activations + self.gathered


def account(config: Config, rank: int) -> Account:
    """The account of a rank of a resolved configuration."""
    layout, p, m = layout_of(config), config.parallel, micro_batches_of(config)
    log = record_step(with_micro_batches(config, min(m, 2)), rank)  # the second begins while gradients of the first are on their way
    plan, stage = schedule(p.schedule, p.pipeline, p.chunks, m), layout.coordinate(rank, "pipeline")
    kept = [log.kept[chunk] for chunk in range(p.chunks)]
    return Account(
        rank, {axis: layout.coordinate(rank, axis) for axis in COORDINATES}, groups(layout, rank), state_of(config, rank),
        micro_batch=sum(kept), live=most_kept(plan, stage, [1.0 / p.chunks] * p.chunks),
        activations=int(most_kept(plan, stage, kept)) + log.transit,
        gathered=log.gathered,
    )  # fmt: skip


def groups(layout: Layout, rank: int) -> list[Group]:
    """The groups of more than one rank that its mesh makes, each set of ranks once, under the first of its names."""
    mesh, found = Mesh(layout, rank, "meta"), {}
    for axis in (mesh[names] for names in GROUPS):
        if axis.size > 1:
            found.setdefault(axis.ranks, Group(axis.name, axis.ranks, axis.rank))
    return list(found.values())


def most_kept(plan: Plan, stage: int, sizes: list[float]) -> float:
    """The most that a stage's rank keeps for backward at one time, where the forward of a micro-batch keeps `sizes[chunk]`."""
    now = most = 0.0
    for action in plan.actions[stage]:
        now += LIVE.get(action.kind, 0) * sizes[action.chunk]
        most = max(most, now)
    return most


def state_of(config: Config, rank: int) -> State:
    """The state of a rank of a resolved configuration. The first rank of a stage holds most: larger shares go to lower coordinates."""
    chunks, mesh = on_meta(config, rank)
    p, types = config.parallel, types_of(config.train.precision, config.train.numerics == "canonical")
    names = {param: name for chunk in chunks for name, param in chunk.named_parameters()}
    count = sum(param.numel() for param in names)
    units = {unit: modules for chunk in chunks for unit, modules in chunk.units().items()}
    buckets = Buckets(units, names, mesh, types, zero=p.zero, bucket_bytes=p.bucket_mb * 2**20, overlap=p.overlap)
    optimizer = Optimizer(config.optimizer, buckets, types, tuple)
    states, more = optimizer.states, optimizer.onebit.nbytes if optimizer.onebit else 0
    return State(
        mesh.coordinate("pipeline"), sum(len(chunk.layers) for chunk in chunks), count,
        weights=sum((b.own_values if b.loose_values else b.values).nbytes for b in buckets.buckets),
        gradients=sum((b.own_sums if b.loose_gradients else b.gradients).nbytes for b in buckets.buckets),
        optimizer=sum(t.nbytes for s in states for t in s.tensors.values() if t is not s.values) + more,  # a master may be the weight itself
    )  # fmt: skip


def on_meta(config: Config, rank: int) -> tuple[list[Decoder], Mesh]:
    """A rank's part of the model, without memory, and its mesh, without processes."""
    mesh = Mesh(layout_of(config), rank, "meta")
    return build_chunks(config, Build(mesh, TYPES[config.train.precision].compute)), mesh
