"""What of a run is saved, and how its parts become rectangles of global tensors.

Notable:
- A rank writes its shard of each bucket, whatever the ZeRO stage: a run of elements of a parameter's local part, which is at most a few
  rectangles of the global tensor (see `rectangle.py`). Every element is written by exactly one rank, nothing is gathered.
- Buffers, such as the selection biases of experts, are whole and equal on the ranks of a stage; the first of them writes.
- Only masters and moments are saved, in the type that they have, those in fp8 as their numbers in bf16; 16-bit weights are rounded from the
  masters after loading, so they can never disagree. What is loaded into a narrower type is rounded to the nearest.
- Errors of compression are each rank's own, and so are weights between two synchronisations of 0/1 Adam: they are saved for each, and more or
  fewer ranks begin with their mean.
- Loading asks for the rectangles that this rank owns under its own layout, and reads nothing else.
- Randomness needs no state: first weights come from (seed, name), data from (seed, step).
"""

from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any

import torch
import torch.distributed as dist

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.rectangle import Rectangle, dtype_name, flat_rectangles
from mtmegatron.checkpoint.store import Store, write_manifest, write_shard
from mtmegatron.errors import UserError
from mtmegatron.mesh import Mesh
from mtmegatron.optim.codes import FP8
from mtmegatron.optim.onebit import Residual
from mtmegatron.optim.optimizer import Optimizer
from mtmegatron.optim.state import State
from mtmegatron.parallel.data import Item
from mtmegatron.placement import STAGE_AXES

WEIGHT = {"master": "weight"}  # the name of a tensor in a checkpoint, where it is not that of the state


def save(folder: Folder, step: int, optimizer: Optimizer, mesh: Mesh, extra: dict) -> None:
    """Writes the state after `step` steps; when it returns the checkpoint exists on all ranks' word.

    `extra` goes into the manifest. Raises UserError on every rank when any rank could not write; earlier checkpoints stay."""
    begin(folder, step, mesh)
    outcome = attempt(lambda: write_shard(folder.writing(step), mesh.rank, pieces(optimizer, mesh)))
    publish(folder, mesh, outcome, facts(step, optimizer, extra))


def begin(folder: Folder, step: int, mesh: Mesh) -> None:
    """Makes the folder that all ranks write to. Raises UserError on every rank."""
    together(mesh, lambda: folder.begin(step) if mesh.rank == 0 else None)


def facts(step: int, optimizer: Optimizer, extra: dict) -> dict:
    """What the manifest of a checkpoint taken now tells beside the tensors."""
    return extra | {"step": step, "updates": optimizer.updates} | (optimizer.onebit.facts if optimizer.onebit else {})


def publish(folder: Folder, mesh: Mesh, outcome: dict | UserError, extra: dict) -> None:
    """Joins what the ranks wrote and gives the checkpoint its name.

    `outcome`: this rank's part of the manifest, or why there is none. Raises UserError on every rank, and
    publishes nothing, when any rank failed."""
    parts = _agree(mesh, outcome)

    def join() -> None:
        write_manifest(folder.writing(extra["step"]), parts, extra)
        folder.publish(extra["step"])

    together(mesh, lambda: join() if mesh.rank == 0 else None)


def load(store: Store, optimizer: Optimizer, mesh: Mesh, *, moments: bool = True) -> None:
    """Fills masters (and moments) of this rank; `optimizer.publish` then makes the weights of them, on all ranks together.

    What the checkpoint does not have, since another optimizer made it or a parameter was frozen, begins anew.
    Raises CheckpointError when the checkpoint is damaged."""
    known = set(store.names)
    for state in optimizer.states:
        for item, local, owned in state.parts():
            _fill(store, f"weight/{item.name}", item, local, state.master[owned], mesh)
        state.begin()
        for item, local, owned in state.parts() if moments else ():
            for name, tensor in (state.moments | state.ema).items():
                if f"{name}/{item.name}" in known:
                    _fill_moment(store, f"{name}/{item.name}", state, item, local, tensor[owned], mesh)
    if optimizer.onebit and moments:
        optimizer.onebit.load(lambda residual: _fill_residual(store, residual, known, mesh), store.extra)
    elif optimizer.onebit:
        optimizer.onebit.begin()
    _fill_buffers(store, optimizer.buckets.buffers)
    optimizer.updates = store.extra["updates"] if moments else 0


def load_weights(store: Store, model: torch.nn.Module, mesh: Mesh) -> None:
    """Fills the parameters of a model that has no optimizer."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            offset, size = param.placement.offset_and_size(mesh.layout, mesh.rank)
            param.copy_(store.read(f"weight/{name}", offset, size))
    _fill_buffers(store, dict(model.named_buffers()))


def check_architecture(store: Store, optimizer: Optimizer) -> None:
    """UserError that says which keys and shapes of this rank's parameters differ from a checkpoint's."""
    there = {name.removeprefix("weight/"): store.shape(name) for name in store.names if name.startswith("weight/")}
    here = {item.name: item.param.placement.shape for state in optimizer.states for item in state.bucket.items}
    lines = [f"{name}: not in the checkpoint" for name in sorted(here) if name not in there]
    lines += [f"{name}: shape {tuple(there[name])} in the checkpoint, {shape} in this model" for name, shape in sorted(here.items())
              if name in there and tuple(there[name]) != tuple(shape)]  # fmt: skip
    if lines:
        more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise UserError(f"{store.folder} is of another architecture:\n  " + "\n  ".join(lines[:10]) + more)


def pieces(optimizer: Optimizer, mesh: Mesh) -> Iterator[tuple[Rectangle, torch.Tensor]]:
    """The rectangles that this rank writes: views of the state, or numbers of its codes, in the same order at every save."""
    for state in optimizer.states:
        if not state.bucket.counted:
            continue
        for item, local, owned in state.parts(state.bucket.shard):
            for name, tensor in state.tensors.items():
                yield from _cut(f"{WEIGHT.get(name, name)}/{item.name}", item, local, state.numbers(item, tensor[owned]), mesh)
    for residual in optimizer.residuals():
        if residual.counted:
            yield from _cut(residual.name(), residual.item, residual.local, residual.values, mesh)
    if all(mesh.coordinate(axis) == 0 for axis in STAGE_AXES):
        for name, buffer in optimizer.buckets.buffers.items():
            yield Rectangle.whole(f"buffer/{name}", buffer), buffer


def _fill_buffers(store: Store, buffers: dict[str, torch.Tensor]) -> None:
    """One that the checkpoint does not have keeps its first value: its option was off before."""
    for name, buffer in buffers.items():
        if f"buffer/{name}" in store.names:
            saved = store.read(f"buffer/{name}")
            if saved.shape != buffer.shape:  # a history of another length, the newest first
                saved = torch.nn.functional.pad(saved, (0, buffer.shape[-1] - saved.shape[-1]))
            buffer.copy_(saved)


def _cut(name: str, item: Item, local: slice, values: torch.Tensor, mesh: Mesh) -> Iterator[tuple[Rectangle, torch.Tensor]]:
    placement, position = item.param.placement, 0
    origin, _ = placement.offset_and_size(mesh.layout, mesh.rank)
    for box in flat_rectangles(tuple(item.param.shape), local.start, local.stop):
        count = torch.Size(box.size).numel()
        offset = tuple(o + b for o, b in zip(origin, box.offset))
        rectangle = Rectangle(name, placement.shape, dtype_name(values.dtype), offset, box.size)
        yield rectangle, values[position : position + count].view(box.size)
        position += count


def _fill_residual(store: Store, residual: Residual, known: set[str], mesh: Mesh) -> None:
    """Among as many workers as there were each takes its own; else all take the mean, which leaves that over the workers as it is.

    One that the checkpoint does not have stays as it is."""
    saved = list(takewhile(known.__contains__, map(residual.name, count() if residual.workers else range(1))))
    if residual.workers and len(saved) == residual.workers:
        saved = [residual.name()]
    total = torch.zeros_like(residual.values)
    for name in saved:
        part = torch.empty_like(total)
        _fill(store, name, residual.item, residual.local, part, mesh)
        total += part / len(saved)
    if saved:
        residual.values.copy_(total)


def _fill_moment(store: Store, name: str, state: State, item: Item, local: slice, values: torch.Tensor, mesh: Mesh) -> None:
    """Codes in fp8 are made of numbers once all of them are there."""
    if values.dtype != FP8:
        return _fill(store, name, item, local, values, mesh)
    numbers = torch.empty_like(values, dtype=torch.float32)
    _fill(store, name, item, local, numbers, mesh)
    state.hold(item, values, numbers)


def _fill(store: Store, name: str, item: Item, local: slice, values: torch.Tensor, mesh: Mesh) -> None:
    for rectangle, target in _cut(name, item, local, values, mesh):
        target.copy_(store.read(name, rectangle.offset, rectangle.size))


def attempt(work: Callable[[], object]) -> object:
    """The result of work, or the UserError that it raised."""
    try:
        return work()
    except UserError as error:
        return error


def together(mesh: Mesh, work: Callable[[], Any]) -> Any:
    """The result of work on this rank, once all ranks have done theirs. Raises UserError on every rank when one could not: nobody goes on alone."""
    outcome = attempt(work)
    _agree(mesh, outcome if isinstance(outcome, UserError) else None)
    return outcome


def _agree(mesh: Mesh, outcome: object) -> list:
    """Every rank's outcome; raises on all ranks when one failed."""
    if mesh.layout.world == 1:
        outcomes = [outcome]
    else:
        outcomes = [None] * mesh.layout.world
        dist.all_gather_object(outcomes, outcome, group=mesh.world.group)
    errors = [o for o in outcomes if isinstance(o, UserError)]
    if errors:
        raise errors[0]
    return outcomes
