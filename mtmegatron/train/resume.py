"""Going on from the newest good checkpoint of a run's folder.

Notable: what the run computes must not change unnoticed: values of the configuration that differ from the checkpoint's are refused unless named in
`train.accept_changes`; how it executes (parallel, device, logging, folders) may change freely.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import check_architecture, load, together
from mtmegatron.checkpoint.store import CheckpointError, Store
from mtmegatron.config.derived import depends_on_micro_batch
from mtmegatron.config.load import values
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError
from mtmegatron.train.engine import Engine

FREE = ("device", "parallel.", "recompute.", "log.", "checkpoint.", "data.cache", "data.train", "data.valid", "data.tokenizer", "train.folder", "train.resume",
        "train.accept_changes", "train.eval_", "train.max_skipped", "train.timeline", "train.timeout", "train.micro_batch",
        "optimizer.compiled")  # fmt: skip

NO_CHECKPOINT, ALL_DAMAGED = -1, -2  # in place of a step, when the first rank tells the others


def resume(engine: Engine, folder: Folder, extra: dict[str, Any], say: Callable[[str], None]) -> int | None:
    """Loads the newest good checkpoint into the engine; returns the step to go on with. None: there is no checkpoint.

    A damaged checkpoint is passed over aloud for the one before.
    Raises UserError, also when there are checkpoints and none is good: a disk that fails does not begin a run anew."""
    before: int | None = None
    while True:
        store = _choose(engine, folder, before, say)
        if store is None:
            return None
        together(engine.mesh, partial(_check, engine, store, extra))
        fault = _load(engine, store)
        if not fault:
            say(f"resumed from step {store.extra['step']} in {store.folder}")
            return store.extra["step"]
        say(f"passing over the checkpoint of step {store.extra['step']}: {fault}")
        before = store.extra["step"]


def _check(engine: Engine, store: Store, extra: dict[str, Any]) -> None:
    check_architecture(store, engine.optimizer)
    check_changes(engine.config, store, extra)


def check_changes(config: Config, store: Store, extra: dict[str, Any]) -> None:
    """UserError that lists both values of what differs from the checkpoint's configuration and was not accepted."""
    saved, now = values(Config.model_validate(store.extra["config"])), values(config)
    free = [key for key in FREE if key != "train.micro_batch" or not depends_on_micro_batch(config)]
    lines = [
        f"{key}: {saved.get(key)} in the checkpoint, {now.get(key)} now"
        for key in now | saved  # a section that one of them lacks differs in each of its keys
        if saved.get(key) != now.get(key) and not key.startswith(tuple(free)) and key not in config.train.accept_changes
    ]
    if extra.get("tokenizer_hash") != store.extra.get("tokenizer_hash"):
        lines.append("the tokenizer is another one")
    if lines:
        raise UserError(
            f"{store.folder} was made with another configuration:\n  " + "\n  ".join(lines)
            + "\n  set the values back, name them in train.accept_changes, or choose another train.folder"
        )  # fmt: skip


def _choose(engine: Engine, folder: Folder, before: int | None, say: Callable[[str], None]) -> Store | None:
    """The first rank chooses, the others open the same step. None: there are no checkpoints."""
    chosen = torch.zeros(1, dtype=torch.int64, device=engine.mesh.device)
    faults: list[str] = []

    def newest() -> int:
        store = folder.newest_good(faults.append, before)
        return store.extra["step"] if store else ALL_DAMAGED if folder.steps() else NO_CHECKPOINT

    chosen[0] = together(engine.mesh, lambda: newest() if engine.mesh.rank == 0 else 0)
    step = int(engine.mesh.world.all_reduce(chosen).item())
    if step == ALL_DAMAGED:
        told = "".join(f"\n  {fault}" for fault in faults)
        repair = "copy them again, or choose another train.folder to begin anew"
        raise UserError(f"no checkpoint in {folder.root} is good: {repair}{told}")
    for fault in faults:
        say(fault)
    return None if step == NO_CHECKPOINT else together(engine.mesh, lambda: folder.open(step))


def _load(engine: Engine, store: Store) -> str:
    """Loads; tells why a rank could not read the checkpoint, or nothing when all could."""
    fault = ""
    try:
        load(store, engine.optimizer, engine.mesh)
        if engine.loss_scale and store.extra.get("loss_scale"):
            engine.loss_scale.load(store.extra["loss_scale"])
    except CheckpointError as error:
        fault = str(error)
    failed = torch.tensor([1 if fault else 0], device=engine.mesh.device)
    if not int(engine.mesh.world.all_reduce(failed).item()):
        engine.optimizer.publish()
        return ""
    return fault or "another rank could not read it"
