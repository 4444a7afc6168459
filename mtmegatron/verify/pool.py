"""A pool of Gloo processes to which functions are sent.

Notable: starting processes is what costs, so they are forked from a server that has imported torch once, and stay for many jobs. Each job has a
fresh process group of as many of them as it asks for. A rank that fails fails the job: the pool names the first rank that failed and
starts over with new processes.
"""

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


class RankFailed(RuntimeError):
    """A rank of a job raised, died or hung; the message carries its traceback."""


class Pool:
    """Up to `size` processes, one thread each. `run(function, world, *args)` calls `function(rank, world, *args)` in `world` of them."""

    def __init__(self, size: int, preload: tuple[str, ...] = ("torch", "torch.distributed", "mtmegatron.verify.protocol")):
        self.size = size
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable, world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """The results of all ranks. Raises RankFailed."""
        assert world <= self.size, f"{world} ranks of a pool of {self.size}"
        self._start(world)
        with tempfile.TemporaryDirectory() as folder:
            pipes = [pipe for _, pipe in self._workers[:world]]
            for rank, pipe in enumerate(pipes):
                pipe.send((function, rank, world, os.path.join(folder, "store"), timeout, args))
            try:
                return self._collect(pipes, timeout)
            except RankFailed:
                self.close()
                raise

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, pipes: list[Connection], timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(pipes):
            open_pipes = [p for r, p in enumerate(pipes) if r not in results and r not in {f[1] for f in failures}]
            left = deadline - time.monotonic() if not failures else min(5.0, deadline - time.monotonic())
            ready = wait(open_pipes, timeout=max(left, 0.0))
            if not ready:
                silent = [pipes.index(p) for p in open_pipes]
                failures.append((time.time(), silent[0], f"ranks {silent} did not finish in {timeout:.0f} s"))
                break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    good, value, when = pipe.recv()
                except EOFError:
                    good, value, when = False, "the process died", time.time()
                if good:
                    results[rank] = value
                else:
                    failures.append((when, rank, value))
        if failures:
            when, rank, text = min(failures)
            raise RankFailed(f"rank {rank} of {len(pipes)}:\n{text}")
        return [results[rank] for rank in range(len(pipes))]

    def close(self) -> None:
        """Ends all processes."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection) -> None:
    """Runs jobs until the other end closes."""
    import torch

    torch.set_num_threads(1)

    while True:
        try:
            function, rank, world, store, timeout, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, _job(function, rank, world, store, timeout, args), time.time())
        except BaseException as error:
            answer = (False, traceback.format_exc(), getattr(error, "raised_at", time.time()))
        pipe.send(answer)


def _job(function: Callable, rank: int, world: int, store: str, timeout: float, args: tuple) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    try:
        return function(rank, world, *args)
    except BaseException as error:
        error.raised_at = time.time()  # before this rank leaves the group, which makes the others fail too
        raise
    finally:
        dist.destroy_process_group()
