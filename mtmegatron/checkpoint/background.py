"""Saving while training goes on: the state is copied to host memory, and a thread writes the copy.

Notable:
- Training may change the state as soon as `start` returns: the thread sees only the copy. Its buffers are made at the
  first save and used again.
- The thread writes this rank's files and does nothing else. All that concerns several ranks (has everybody written?
  then manifest and name) happens in `poll`, on the thread that trains: collectives of two threads would have no common
  order on all ranks.
- At most one checkpoint is in flight: the next one waits for it, aloud.
- A checkpoint that could not be written stops nothing: earlier ones stay, training goes on, and the reason is said as
  soon as all ranks know. Only if the last save of the run failed does `finish` raise: its end would be lost.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import attempt, begin, facts, pieces, publish
from mtmegatron.checkpoint.store import Item, write_shard
from mtmegatron.errors import UserError
from mtmegatron.mesh import Mesh
from mtmegatron.optim.optimizer import Optimizer

TICK = 0.1  # seconds between two looks while waiting; nobody stays longer in a collective because another one writes


@dataclass
class Flight:
    """A checkpoint that was requested and is not complete."""

    extra: dict
    written: Future
    began: float

    @property
    def step(self) -> int:
        return self.extra["step"]


class Background:
    """Saves one checkpoint at a time in the background.

    All methods but `close` are called by all ranks, after the same steps. `completed(step, seconds)` is called on every
    rank once a checkpoint has its name. Host memory: one copy of the state that this rank owns."""

    def __init__(
        self, folder: Folder, optimizer: Optimizer, mesh: Mesh, say: Callable[[str], None],
        completed: Callable[[int, float], None],
    ):  # fmt: skip
        self.folder, self.optimizer, self.mesh, self.say, self.completed = folder, optimizer, mesh, say, completed
        self.failure: UserError | None = None  # of the last save that ended
        self._flight: Flight | None = None
        self._staged: list[Item] = []
        self._stopped = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def start(self, step: int, extra: dict) -> None:
        """Copies the state and begins to write it. Waits first for a checkpoint that is still being written."""
        self.wait()
        began = time.perf_counter()
        try:
            begin(self.folder, step, self.mesh)
        except UserError as error:
            return self._failed(step, error)
        self._stage()
        target, rank = self.folder.writing(step), self.mesh.rank
        written = self._thread.submit(attempt, lambda: write_shard(target, rank, self._items()))
        self._flight = Flight(facts(step, self.optimizer, extra), written, began)
        self.say(f"step {step}: checkpoint requested, copied in {time.perf_counter() - began:.1f} s")

    def poll(self) -> None:
        """Makes the checkpoint in flight complete, if all ranks have written. Raises a fault of our own in the thread."""
        if self._flight is None:
            return
        done = torch.tensor([int(self._flight.written.done())], device=self.mesh.device)
        if int(self.mesh.world.all_reduce(done, "min").item()):
            flight, self._flight = self._flight, None
            self._land(flight)

    def wait(self) -> None:
        """Until no checkpoint is in flight; says how long that took."""
        if self._flight is None:
            return
        self.say(f"waiting for the checkpoint of step {self._flight.step}, which is still being written")
        began = time.perf_counter()
        while self._flight is not None:
            wait([self._flight.written], timeout=TICK)
            self.poll()
        self.say(f"waited {time.perf_counter() - began:.1f} s")

    def finish(self) -> None:
        """Waits for the checkpoint in flight; raises UserError when the last one that was requested failed."""
        self.wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Ends the thread; what it has not written is given up, as by a kill."""
        self._stopped = True
        self._thread.shutdown()

    def _stage(self) -> None:
        if not self._staged:
            own = pieces(self.optimizer, self.mesh)
            self._staged = [(where, tensor.detach().to("cpu", copy=True)) for where, tensor in own]
            return
        for (_, copy), (_, tensor) in zip(self._staged, pieces(self.optimizer, self.mesh), strict=True):
            copy.copy_(tensor.detach())

    def _items(self) -> Iterator[Item]:
        for item in self._staged:
            if self._stopped:
                raise RuntimeError("the run ended while its checkpoint was being written")
            yield item

    def _land(self, flight: Flight) -> None:
        try:
            publish(self.folder, self.mesh, flight.written.result(), flight.extra)
        except UserError as error:
            return self._failed(flight.step, error)
        self.failure = None
        self.completed(flight.step, time.perf_counter() - flight.began)

    def _failed(self, step: int, error: UserError) -> None:
        """Says it, and gives back at once the room that half a checkpoint takes: metrics may need it."""
        self.failure = error
        self.say(f"step {step}: checkpoint FAILED: {error}. The next save tries again")
        if self.mesh.rank == 0:
            shutil.rmtree(self.folder.writing(step), ignore_errors=True)
