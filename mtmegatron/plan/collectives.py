"""All that one rank of any layout sends and receives in a step, in order, with bytes, from the code that trains and without processes.

Notable:
- There is no second list to keep in step: the real engine runs a real step on torch's meta device, whose tensors have shapes and no memory. Its
  mesh has axes at whose other end nobody is (`Silent`), and each call goes through a log (`Recorded`).
- `Recorded` wraps an axis of real processes as well: what is listed here can be counted there.
- The same run tells two sizes that no formula has to repeat: what forward keeps for backward, and the most that gathered weights and gradients
  not yet reduced take at one time under ZeRO 2 and 3.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mtmegatron.config.derived import layout_of
from mtmegatron.config.ramp import without_ramp
from mtmegatron.config.schema import Config
from mtmegatron.data.gpt import Sample
from mtmegatron.data.loader import micro_batches
from mtmegatron.mesh import Axis, Mesh, Pending
from mtmegatron.parallel.data import Buckets
from mtmegatron.parallel.pipeline.schedule import Action, Plan
from mtmegatron.train.engine import Engine

COLLECTIVES = {
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "start_all_reduce", "start_all_gather", "start_reduce_scatter", "start_shift",
    "start_all_to_all_rows",
}  # fmt: skip
MESSAGES = {"send", "receive"}
PARTS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}  # of a step, by kind of action


@dataclass(frozen=True)
class Transfer:
    """A collective or message as one rank issues it.

    `ranks`: of the axis, global; `bytes`: of the whole that is summed, gathered, cut or sent: the same on every rank; `when`: part of the step;
    `peer`: the other end of a message, a global rank."""

    axis: str
    ranks: tuple[int, ...]
    operation: str
    bytes: int
    dtype: torch.dtype
    when: str
    peer: int | None = None


@dataclass
class Log:
    """What has been issued so far. Handed to the engine as the recorder of its actions, so that each transfer knows its part of the step."""

    transfers: list[Transfer] = field(default_factory=list)
    when: str = "count"
    buckets: Buckets | None = None  # whose buffers that come and go are watched
    gathered: int = 0  # the most bytes that they took at one time
    kept: Counter[int] = field(default_factory=Counter)  # by chunk: bytes that the forward of a micro-batch keeps on the device
    transit: int = 0  # the most bytes that were on their way to host memory at one time

    def issue(self, axis: Axis, name: str, x: Tensor, *given: Any, **named: Any) -> None:
        """Notes a call on an axis; `given` and `named` are the arguments after the tensor."""
        if self.buckets is not None:
            self.gathered = max(self.gathered, loose_bytes(self.buckets))
        if axis.size == 1:
            return
        operation, first, dtype = name.removeprefix("start_"), given[0] if given else None, x.dtype
        if operation == "reduce_scatter":
            dtype = first or named.get("dtype") or dtype
        elif operation == "all_reduce" and "max" in (first, named.get("op")):
            operation = "all_reduce max"
        parts = axis.size if operation == "all_gather" else 1
        peer = axis.ranks[first] if operation in MESSAGES else None
        self.transfers.append(Transfer(axis.name, axis.ranks, operation, x.numel() * dtype.itemsize * parts, dtype, self.when, peer))

    def start(self, plan: Plan) -> None:
        """The actions begin."""

    def time(self, perform: Callable[[Action], None], action: Action) -> None:
        """Performs an action of the pipeline."""
        self.when = PARTS[action.kind.removeprefix("SEND_").removeprefix("RECV_")]
        if action.kind == "F" and action.micro_batch == 0:
            self._perform_keeping(perform, action)
        else:
            perform(action)
        self.when = "reduction"  # what comes after the last action

    def _perform_keeping(self, perform: Callable[[Action], None], action: Action) -> None:
        """Counts each storage that is kept for backward once, without the parameters."""
        seen = {id_of(b.values) for b in self.buckets.buckets} if self.buckets else set()

        def keep(x: Tensor) -> Tensor:
            if id_of(x) not in seen:
                seen.add(id_of(x))
                self.kept[action.chunk] += x.untyped_storage().nbytes()
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            perform(action)

    def read(self, numbers: Tensor) -> list:
        """In place of the numbers of a device that is not there: counts, losses and norms of 1. After the last of them comes the update."""
        self.when = "update"
        return [1] * numbers.numel()


def id_of(x: Tensor) -> int:
    """What tensors that share memory have in common, on the meta device too."""
    return x.untyped_storage()._cdata


def loose_bytes(buckets: Buckets) -> int:
    """Bytes that gathered values and gradients not yet reduced take now, where they are not kept whole."""
    loose = [b.values for b in buckets.buckets if b.loose_values] + [b.gradients for b in buckets.buckets if b.loose_gradients]
    return sum(buffer.untyped_storage().nbytes() for buffer in loose)


class Recorded:
    """An axis whose collectives and messages are noted in a log, then carried out by `inner`."""

    def __init__(self, inner: Axis, log: Log):
        self.inner, self.log = inner, log

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return partial(self._issue, name, found) if name in COLLECTIVES | MESSAGES else found

    def _issue(self, name: str, perform: Callable, x: Tensor, *given: Any, **named: Any) -> Any:
        self.log.issue(self.inner, name, x, *given, **named)
        return perform(x, *given, **named)

    def __repr__(self) -> str:
        return f"Recorded({self.inner})"


class Silent(Axis):
    """An axis without anybody at its other places: results have the right shapes and mean nothing. Only for more than one rank."""

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return x

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.start_all_gather(x, out).wait()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.start_reduce_scatter(x).wait()

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def start_all_to_all_rows(self, x: Tensor, send: list[int], receive: list[int]) -> Pending:
        return Pending(None, lambda: x.new_empty(sum(receive), *x.shape[1:]))

    def start_all_reduce(self, x: Tensor) -> Pending:
        return Pending(None, lambda: x)

    def start_all_gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        result = x.new_empty(x.shape[0] * self.size, *x.shape[1:]) if out is None else out
        return Pending(None, lambda: result)

    def start_reduce_scatter(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Pending:
        return Pending(None, lambda: x.new_empty(x.shape[0] // self.size, *x.shape[1:]) if out is None else out)

    def send(self, x: Tensor, to: int) -> Pending:
        return Pending(None, lambda: x)

    def receive(self, buffer: Tensor, source: int) -> Pending:
        return Pending(None, lambda: buffer)

    def start_shift(self, x: Tensor) -> Pending:
        return Pending(None, lambda: torch.empty_like(x, memory_format=torch.contiguous_format))


def silent(name: str, ranks: tuple[int, ...], *rest: Any, **named: Any) -> Axis:
    """An axis for a mesh without processes."""
    return (Silent if len(ranks) > 1 else Axis)(name, ranks, *rest, **named)


@dataclass(frozen=True)
class _Blank:
    """Samples of one document each: nobody looks at the tokens."""

    sequence: int

    def __getitem__(self, i: int) -> Sample:
        return Sample(np.zeros(self.sequence + 1, dtype=np.int64), np.zeros(1, dtype=np.int64))


def record_step(config: Config, rank: int) -> Log:
    """The log of one optimizer step of one rank of a resolved configuration, every micro-batch of it. Needs neither processes nor memory."""
    log, config = Log(), without_ramp(config)
    mesh = Mesh(layout_of(config), rank, "meta", axis=lambda *place, **named: Recorded(silent(*place, **named), log))
    engine = Engine(config, mesh, read=log.read)
    log.buckets = engine.buckets
    engine.step(micro_batches(config, _Blank(config.data.sequence), mesh, 0), 0, log)
    log.transit = engine.offload.transit if engine.offload else 0
    return log


@dataclass(frozen=True)
class Kind:
    """Transfers that differ in nothing but their place in the order and their peer."""

    when: str
    axis: str
    operation: str
    bytes: int
    dtype: str


def counts(transfers: list[Transfer]) -> Counter[Kind]:
    """How often each kind occurs, in the order of the first of each."""
    return Counter(Kind(t.when, t.axis, t.operation, t.bytes, str(t.dtype).removeprefix("torch.")) for t in transfers)


def step_counts(config: Config, rank: int) -> Counter[Kind]:
    """`counts` of a whole step, in seconds for any number of micro-batches.

    A micro-batch issues the same as every other, so runs of one and of two tell those of all. Not so where weights that are gathered ahead for one
    chunk wait for another (ZeRO 3 with several chunks): there the whole step is run."""
    all_of_them = micro_batches_of(config)
    if all_of_them <= 2 or config.parallel.zero == 3 and config.parallel.chunks > 1:
        return counts(record_step(config, rank).transfers)
    one, two = (counts(record_step(with_micro_batches(config, m), rank).transfers) for m in (1, 2))
    return Counter({kind: one[kind] + (all_of_them - 1) * (two[kind] - one[kind]) for kind in two})


def micro_batches_of(config: Config) -> int:
    """Micro-batches that each rank runs in a step."""
    return config.train.global_batch // (config.train.micro_batch * config.parallel.data)


def with_micro_batches(config: Config, count: int) -> Config:
    """The configuration with a global batch of so many micro-batches."""
    batch = count * config.train.micro_batch * config.parallel.data
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch": batch})})
