"""The checkpoints of a run: published by one rename, found by number, pruned without losing the newest or the best.

    root/step-00000100/            a checkpoint; it exists from the moment of the rename that gave it this name
    root/.writing-step-00000200/   being written; left behind by a crash, and removed when the next one begins
    root/.replaced-step-00000100/  moved aside while a rerun puts another in its place; step 100 as long as no other is
    root/.removing-step-00000050/  being removed

Notable: no file says which is the latest. The newest folder that is complete decides, so there are not two that can
disagree. Every step below leaves a folder from which the last published checkpoint loads, whenever the process is
killed.

One process calls `begin`, `publish` and `prune`; the others write to `writing(step)` between the first two.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from mtmegatron.checkpoint.store import CheckpointError, Store, sync_folder, writes_to

WRITING, REPLACED, REMOVING = ".writing-", ".replaced-", ".removing-"
STEP = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d{{8}}|[1-9]\d{{8,}})")


class Folder:
    """Checkpoints of one run in `root`.

    `run` names the run as its manifests do (`extra["run"]`): checkpoints of other runs in the same root are never
    pruned or counted.
    """

    def __init__(self, root: Path, run: str = ""):
        self.root, self.run = Path(root), run
        self._published = -1  # the last step that this object published

    # ---- find ----

    def steps(self) -> list[int]:
        """Steps of all checkpoints in the root, complete or not, in numeric order."""
        if not self.root.exists():
            return []
        try:
            found = (STEP.fullmatch(entry.name) for entry in os.scandir(self.root) if entry.is_dir())
            return sorted({int(match[1]) for match in found if match})
        except OSError as fault:
            raise CheckpointError(
                f"cannot list {self.root}: {fault.strerror}. Repair the path or its permissions"
            ) from fault

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        final, replaced = self._final(step), self._final(step, REPLACED)
        return replaced if replaced.exists() and not final.exists() else final

    def open(self, step: int) -> Store:
        """The checkpoint of a step, for reading. Raises CheckpointError that lists the steps there are."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.root} has no checkpoint of step {step}. Steps there: {there}")
        return Store(self.path(step))

    def newest_good(self, log: Callable[[str], None], before: int | None = None) -> Store | None:
        """The newest checkpoint whose manifest is intact and whose files have their sizes.

        Says which one that is, and what it passed over and why. Bytes are checked as they are read (`Store.read`), or
        all at once by `Store.verify`; when that fails, `before` that step there may be another.
        """
        steps = [step for step in self.steps() if before is None or step < before]
        for step in reversed(steps):
            try:
                store = self._complete(step)
            except CheckpointError as fault:
                log(f"passing over the checkpoint of step {step}: {fault}")
                continue
            log(f"newest complete checkpoint: step {step} in {store.folder}")
            return store
        log(f"no complete checkpoint in {self.root}" + (f", {len(steps)} passed over" if steps else ""))
        return None

    def _complete(self, step: int) -> Store:
        store = self.open(step)
        store.check_sizes()
        return store

    # ---- write ----

    def writing(self, step: int) -> Path:
        """Where the files of a checkpoint go between `begin` and `publish`."""
        return self._final(step, WRITING)

    def begin(self, step: int) -> Path:
        """Clears what earlier crashes left behind and makes the folder to write to."""
        folder = self.writing(step)
        with writes_to(folder):
            self.root.mkdir(parents=True, exist_ok=True)
            sync_folder(self.root.parent)
            self._recover()
            for stale in self.root.glob(WRITING + "step-*"):
                shutil.rmtree(stale)
            folder.mkdir()
        return folder

    def publish(self, step: int) -> Path:
        """Gives the written checkpoint its name, in place of an older one of the same step; durable on return.

        Raises CheckpointError, and publishes nothing, when a file is missing or has another size than the manifest
        says.
        """
        folder, final, replaced = self.writing(step), self._final(step), self._final(step, REPLACED)
        store = Store(folder)
        assert store.extra.get("run", "") == self.run, f"the manifest names the run {store.extra.get('run')!r}"
        store.check_sizes()
        with writes_to(final):
            sync_folder(folder)
            if final.exists():
                final.rename(replaced)
            folder.rename(final)
            sync_folder(self.root)
            if replaced.exists():
                self._remove(replaced)
        self._published = step
        return final

    def prune(self, keep: int, protect: Collection[int] = ()) -> list[int]:
        """Removes this run's complete checkpoints except the `keep` newest and the protected; returns what it removed.

        What is incomplete, of another run, or beyond the step published last (an abandoned future) is neither counted
        nor removed.
        """
        assert keep >= 1, keep
        with writes_to(self.root):
            self._recover()
            own = [step for step in self.steps() if self._is_own(step)]
            past = [step for step in own if step <= self._published] if self._published in own else own
            removed = [step for step in past[:-keep] if step not in protect]
            for step in removed:
                self._remove(self._final(step))
        return removed

    def _is_own(self, step: int) -> bool:
        try:
            return self._complete(step).extra.get("run", "") == self.run
        except CheckpointError:
            return False

    def _recover(self) -> None:
        """Finishes what a crash cut short: a removal is completed, a replacement undone or completed."""
        for removing in self.root.glob(REMOVING + "step-*"):
            shutil.rmtree(removing)
        for replaced in self.root.glob(REPLACED + "step-*"):
            final = self.root / replaced.name.removeprefix(REPLACED)
            if final.exists():
                self._remove(replaced)
            else:
                replaced.rename(final)

    def _remove(self, folder: Path) -> None:
        """Renamed first: a removal that is cut short never leaves half a checkpoint under a checkpoint's name."""
        removing = self.root / (REMOVING + folder.name.removeprefix(REPLACED))
        folder.rename(removing)
        sync_folder(self.root)
        shutil.rmtree(removing)

    def _final(self, step: int, prefix: str = "") -> Path:
        return self.root / f"{prefix}step-{step:08d}"
