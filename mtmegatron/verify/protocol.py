"""The reference protocol: one state, one global batch, and every layout must give the loss, gradients and weights of one process.

Notable:
- The yardstick is the serial run in fp64. Serial runs in the tested precision, with the batch cut in different micro-batches, differ from it by
  rounding alone, tensor by tensor; a layout, which rounds in yet another order, may differ by the largest of that times `FACTOR`. Nothing else is
  tolerated, and no number is chosen per test.
- The fp64 run of a layout is held to the same bound times the ratio of the units of rounding, about 1e-9: any fault of logic shows there.
- A norm is one projection of the rounding of all gradients, which serial runs may hit near zero by luck: it has no yardstick of its own. Gradients
  are held to theirs one by one, and | |g| - |g'| | <= |g - g'|: the norm may be off by what the gradients of that run and step are, and no more.
- Each rank compares its own shards in place; nothing is gathered.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from mtmegatron.batch import Batch
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import (
    TWO_MOMENTS,
    depends_on_micro_batch,
    idle_defaults,
    layout_of,
    optimizers,
)
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config
from mtmegatron.data.gpt import Sample
from mtmegatron.data.loader import micro_batches
from mtmegatron.mesh import Mesh
from mtmegatron.parallel.data import Item
from mtmegatron.precision.types import TYPES
from mtmegatron.train.engine import Engine
from mtmegatron.verify.pool import Pool

# Two sums of the same terms in different orders have independent rounding errors of the same size; the worst of some hundred tensors is within
# a small factor of that.
FACTOR = 8.0
STEPS = 3
# Where a gradient is far below its eps, Adam's update is that gradient, rounding and all, times lr / eps: with the usual 1e-8 a handful of such
# elements is all that a comparison of weights would see, and their error is a matter of luck. The protocol's optimizer has at least this eps.
LEAST_EPS = 1e-5
RECOMPUTE = ("parts", "every", "first", "offload")  # settings of a layout beside its mode of recomputation


class RandomSamples:
    """Samples of uniform tokens with some document starts: a pure function of (seed, number)."""

    def __init__(self, vocab: int, sequence: int, seed: int):
        self.vocab, self.sequence, self.seed = vocab, sequence, seed

    def __getitem__(self, i: int) -> Sample:
        draw = np.random.default_rng((self.seed, i))
        inside = np.sort(draw.choice(np.arange(1, self.sequence + 1), size=min(3, self.sequence), replace=False))
        return Sample(draw.integers(0, self.vocab, self.sequence + 1), np.concatenate([[0], inside]))


@dataclass
class Trace:
    """What one run of the protocol shows: per-step loss and norm, and in the first step the count of zero gradients."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    zeros: int = 0
    errors: dict[tuple[str, str, tuple], float] = field(default_factory=dict)  # (kind, name, copy) -> squared error on this rank


@dataclass
class Reference:
    """The serial runs: `exact` in fp64, and for each tested precision what rounding does to its tensors and to its losses.

    `tensors`: fp64 state, gradients of each step and weights after the last, by kind and name."""

    exact: Trace
    tensors: dict[str, dict[str, torch.Tensor]]
    rounding: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)


@dataclass
class Check:
    """One line of the table: what was compared, how far it is off, what it is held to."""

    layout: str
    precision: str
    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # false for NaN


def serial_reference(config: Config, precisions: tuple[str, ...]) -> Reference:
    """Runs the configuration in this one process, in fp64 and in each precision."""
    single = check(_steady(laid_out(config, {}, "fp64")), 1)
    engine = Engine(single, Mesh(layout_of(single)))
    state = {name: p.detach().clone() for p, name in engine.names.items()}
    exact, kept = Trace(), {"state": state}
    for kind, parts in _steps(engine, exact):
        kept[kind] = {item.name: mine.clone().view_as(item.param) for item, mine, _ in parts}
    reference = Reference(exact, kept)
    train = config.train
    cuts = [train.micro_batch] if depends_on_micro_batch(config) else sorted({1, train.micro_batch, train.global_batch})
    for precision in precisions:
        traces = [run_layout(0, 1, config, {"micro_batch": cut}, precision, kept) for cut in cuts]
        keys = [(kind, name) for kind, name, _ in traces[0].errors]
        errors = [{(kind, name): e for (kind, name, _), e in trace.errors.items()} for trace in traces]
        reference.loss[precision] = max(distance(trace.losses, exact.losses) for trace in traces)
        reference.rounding[precision] = {key: math.sqrt(max(e[key] for e in errors)) for key in keys}
    return reference


def compare(config: Config, layout: dict[str, object], precision: str, reference: Reference, pool: Pool, timeout: float = 240.0) -> list[Check]:
    """Runs one layout in as many processes as it has ranks and checks all that the protocol checks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference.pt"
        torch.save(reference.tensors, path)
        traces = pool.run(_rank, world_of(layout), config, layout, precision, path, timeout=timeout)
    return list(checks_of(describe(layout), precision, traces, reference))


def world_of(layout: dict[str, object]) -> int:
    """Processes of a layout."""
    return math.prod(int(layout.get(axis, 1)) for axis in ("tensor", "pipeline", "data", "context"))


def describe(layout: dict[str, object]) -> str:
    """A layout as a user writes it."""
    return ",".join(f"{key}={spell(value)}" for key, value in layout.items()) or "serial"


def spell(value: object) -> str:
    """A value as a user writes it: `true`, `1+3` for a list."""
    if isinstance(value, list):
        return "+".join(map(spell, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_layout(rank: int, world: int, config: Config, layout: dict, precision: str, tensors: dict[str, dict[str, torch.Tensor]]) -> Trace:
    """One rank of one layout: the protocol's steps, with this rank's squared differences from the reference."""
    own = check(_steady(laid_out(config, layout, precision)), world)
    mesh = Mesh(layout_of(own), rank, connect=world > 1, shared=own.parallel.shared_memory)
    engine = Engine(own, mesh)
    load_state(engine, tensors["state"])
    trace = Trace()
    for kind, parts in _steps(engine, trace):
        for item, mine, where in parts:
            right = item.placement.part(tensors[kind][item.name], mesh.layout, rank).reshape(-1)[where]
            key = (kind, item.name, copy_of(mesh, item.placement, kind))
            trace.errors[key] = float((mine.double() - right.double()).square().sum())
    return trace


def load_state(engine: Engine, state: dict[str, torch.Tensor]) -> None:
    """Sets the weights from global tensors."""
    with torch.no_grad():
        for item in engine.buckets.whole_values():
            item.param.copy_(item.placement.part(state[item.name], engine.mesh.layout, engine.mesh.rank))
    engine.optimizer.refresh_masters()


def _rank(rank: int, world: int, config: Config, layout: dict, precision: str, path: Path) -> Trace:
    return run_layout(rank, world, config, layout, precision, torch.load(path, mmap=True))


def laid_out(config: Config, layout: dict, precision: str) -> Config:
    """The configuration under a layout, in a precision. Raises UserError.

    A layout is settings of `parallel`; `recompute`, which is its mode, with `parts`, `every`, `first` and `offload`; and `micro_batch`."""
    tree = config.model_dump()
    tree["recompute"] = {"mode": layout.get("recompute", "none")} | {key: layout[key] for key in RECOMPUTE if key in layout}
    settings = {key: value for key, value in layout.items() if key not in ("micro_batch", "recompute", *RECOMPUTE)}
    tree["parallel"] = {key: getattr(config.parallel, key) for key in ("bucket_mb", "overlap", "shared_memory")} | settings
    tree["optimizer"]["masters"] |= not (precision == "bf16" or precision.startswith("fp8-"))  # other weights are their own, or need them
    tree["train"] |= idle_defaults(precision) | {"precision": precision, "micro_batch": layout.get("micro_batch", config.train.micro_batch)}
    return validate(tree, f"layout {describe(layout)}")


def _steady(config: Config) -> Config:
    """The configuration with an optimizer that does not turn rounding into weights."""
    if not optimizers(config.optimizer) & TWO_MOMENTS:
        return config
    optimizer = config.optimizer.model_copy(update={"eps": max(config.optimizer.eps, LEAST_EPS)})
    return config.model_copy(update={"optimizer": optimizer})


def batches(engine: Engine, step: int) -> list[Batch]:
    """This rank's part of the protocol's global batch of a step."""
    config = engine.config
    samples = RandomSamples(config.model.vocab, config.data.sequence, config.train.seed)
    return micro_batches(config, samples, engine.mesh, step)


Part = tuple[Item, torch.Tensor, slice]  # a parameter, flat elements of it that this rank answers for, which of its local elements they are


def _steps(engine: Engine, trace: Trace) -> Iterator[tuple[str, Iterator[Part]]]:
    """Runs the steps; yields ("gradient of step 0", ..) and so on after each backward and ("weight", ..) at the end."""
    for step in range(STEPS):
        result = engine.backward(batches(engine, step), step)
        if step == 0:
            rounding = torch.finfo(engine.types.gradient).eps * result.grad_norm
            trace.zeros = int(engine.mesh.world.all_reduce(engine.buckets.zero_gradients(rounding).reshape(1)))
        yield f"gradient of step {step}", own_gradients(engine)
        engine.update(result, step)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    yield "weight", whole_weights(engine)


def whole_weights(engine: Engine) -> Iterator[Part]:
    """The weights that this rank holds."""
    return ((item, item.param.detach().reshape(-1), slice(None)) for item in engine.buckets.whole_values())


def own_gradients(engine: Engine) -> Iterator[Part]:
    """The gradients in this rank's shards."""
    for bucket in engine.buckets.buckets:
        for item in bucket.items:
            start, stop = max(item.start, bucket.shard.start), min(item.stop, bucket.shard.stop)
            inside = slice(start - bucket.shard.start, max(stop - bucket.shard.start, start - bucket.shard.start))
            yield item, bucket.own_gradients[inside], slice(start - item.start, max(stop, start) - item.start)


def copy_of(mesh: Mesh, placement, kind: str) -> tuple[int, ...]:
    """Which copy of a tensor a rank belongs to: errors add up over the parts of one copy, and the worst copy counts."""
    split = {axis for _, axis in placement.split}
    if kind != "weight":
        return tuple(mesh.coordinate(axis) for axis in (*placement.copies, "data_copies"))
    if "expert_data" in placement.summed:
        return (mesh.coordinate("pipeline"), mesh.coordinate("expert_data"))
    axes = ["pipeline", "data", "context"]
    axes += ["key_value_copies"] if "key_value" in split else [] if "tensor" in split else ["tensor"]
    return tuple(mesh.coordinate(axis) for axis in axes)


def distance(mine: list[float], right: list[float]) -> float:
    """The largest difference of the steps."""
    return max(abs(a - b) for a, b in zip(mine, right))


def checks_of(layout: str, precision: str, traces: list[Trace], reference: Reference) -> Iterator[Check]:
    """All that the protocol checks of a layout whose ranks left these traces."""
    basis = precision if precision in reference.rounding else "fp32"
    unit, finest = torch.finfo(TYPES[basis].compute).eps, torch.finfo(TYPES[precision].gradient).eps
    exact, first, factor = reference.exact, traces[0], FACTOR * torch.finfo(TYPES[precision].compute).eps / unit
    errors: dict[tuple[str, str, tuple], float] = defaultdict(float)
    for key, error in (item for trace in traces for item in trace.errors.items()):
        errors[key] += error

    loss = max(reference.loss[basis], unit * max(map(abs, exact.losses)))
    yield Check(layout, precision, "loss", distance(first.losses, exact.losses), factor * loss)
    off = [_distance_of(f"gradient of step {step}", errors) for step in range(STEPS)]
    steps = zip(first.norms, exact.norms, off, strict=True)
    yield _worst(Check(layout, precision, "gradient norm", abs(mine - right), far + FACTOR * finest * right) for mine, right, far in steps)
    for kind in ("gradient", "weight"):
        yield _worst_tensor(layout, precision, kind, errors, reference, factor, basis)
    if precision == "fp64":
        yield Check(layout, precision, "zero gradients", abs(first.zeros - exact.zeros), 0)
    same = all(t.losses == first.losses and t.norms == first.norms for t in traces)
    yield Check(layout, precision, "ranks agree on loss and norm", 0.0 if same else 1.0, 0.0)


def _distance_of(kind: str, errors: dict[tuple[str, str, tuple], float]) -> float:
    """|g - g'| of all tensors of a kind together, each in its worst copy."""
    copies: dict[str, list[float]] = defaultdict(list)
    for (k, name, _), error in errors.items():
        copies[name] += [error] * (k == kind)
    return math.sqrt(sum(max(found, default=0.0) for found in copies.values()))


def _worst_tensor(
    layout: str, precision: str, what: str, errors: dict[tuple[str, str, tuple], float], reference: Reference, factor: float, basis: str
) -> Check:
    """The weight, or the gradient of some step, that comes nearest to its bound."""
    expected = {(kind, name) for kind, tensors in reference.tensors.items() if kind.startswith(what) for name in tensors}
    missing = expected - {(kind, name) for kind, name, _ in errors}
    if missing:
        return Check(layout, precision, "{} {} is on no rank".format(*min(missing)), math.inf, 0.0)
    unit = torch.finfo(TYPES[basis].compute).eps
    bounds = {key: factor * max(reference.rounding[basis][key], unit * float(reference.tensors[key[0]][key[1]].double().norm())) for key in expected}
    found = ((kind, name, error) for (kind, name, _), error in errors.items() if (kind, name) in bounds)
    return _worst(Check(layout, precision, f"{kind} {name}", math.sqrt(error), bounds[kind, name]) for kind, name, error in found)


def _worst(checks: Iterable[Check]) -> Check:
    """The one that comes nearest to its bound, or passes it furthest."""
    return max(checks, key=lambda c: (not c.passed, c.error / c.bound if c.bound else math.inf))
