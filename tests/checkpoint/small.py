"""A checkpoint of two ranks, small enough to be damaged byte by byte."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from mtmegatron.checkpoint.rectangle import Rectangle
from mtmegatron.checkpoint.store import Store, write_manifest, write_shard


def tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "head.weight": torch.randn(8, 6, generator=draw),
        "norm.weight": torch.randn(7, generator=draw).to(torch.bfloat16),
        "random_state": torch.randint(256, (5,), generator=draw, dtype=torch.uint8),
        "step": torch.tensor(seed),
    }


def write(folder: Path, seed: int, run: str = "") -> None:
    """Rank 0 holds the upper rows of head.weight and the rest, rank 1 the lower rows."""
    whole = tensors(seed)
    head = whole.pop("head.weight")
    upper, lower = (
        (Rectangle("head.weight", (8, 6), "float32", (row, 0), (4, 6)), head[row : row + 4]) for row in (0, 4)
    )
    parts = [
        write_shard(folder, 0, [upper, *((Rectangle.whole(name, tensor), tensor) for name, tensor in whole.items())]),
        write_shard(folder, 1, [lower]),
    ]
    write_manifest(folder, parts, {"step": seed, "run": run})


def holds(store: Store, seed: int) -> bool:
    """Whether every tensor reads back bit for bit."""
    expected = tensors(seed)
    return store.names == sorted(expected) and all(
        torch.equal(store.read(name), tensor) for name, tensor in expected.items()
    )


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; its exit status, negative for a signal, 1 for an exception."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
