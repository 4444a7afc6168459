"""Teams of processes that take turns, so that two programs are measured in one run on one machine.

Notable: a team that waits sleeps on a pipe and takes no time from the other. Each member has one thread.
"""

import multiprocessing as mp
import os
import resource
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

Step = Callable[[], None]


class Team:
    """`world` processes that each made a step with `make(rank, world, *args) -> Step`."""

    def __init__(self, name: str, make: Callable[..., Step], world: int, *args: object):
        self.name, self.world, self.seconds, self.memory = name, world, [], 0
        context = mp.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(theirs, store, make, rank, world, args), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def run(self, steps: int, keep: bool = True) -> None:
        """All members make `steps` steps together; the time of each step is that of the slowest member."""
        for pipe in self._pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in self._pipes]
        if keep:
            self.seconds += [max(times) for times in zip(*(a[0] for a in answers))]
        self.memory = max(a[1] for a in answers)

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def take_turns(teams: list[Team], rounds: int, steps: int) -> None:
    """Warm-up, then `rounds` times `steps` steps of each team in turn."""
    for team in teams:
        team.run(3, keep=False)
    for _ in range(rounds):
        for team in teams:
            team.run(steps)


def _member(pipe, store: str, make: Callable[..., Step], rank: int, world: int, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    step = make(rank, world, *args)
    pipe.send("ready")
    while True:
        times = []
        for _ in range(pipe.recv()):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        pipe.send((times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
