"""The index cache: built once, published whole, rebuilt when damaged, in shared and in separate folders."""

import multiprocessing
import os
import time

import numpy as np
import pytest

from mtmegatron.data.cache import cached
from mtmegatron.errors import UserError


def build_counted(folder, size=3):
    """A `build` that leaves a mark for each time it runs."""

    def build():
        (folder / f"built-{time.monotonic_ns()}").touch()
        return {"a": np.arange(size), "b": np.zeros((0, 2), np.int32)}

    return build


def count(folder):
    return len(list(folder.glob("built-*")))


def place(cache):
    return next(path for path in cache.iterdir() if path.is_dir())


def test_built_once_and_read_only(tmp_path):
    for _ in range(2):
        found = cached(tmp_path / "cache", {"x": 1}, build_counted(tmp_path))
        assert found["a"].tolist() == [0, 1, 2] and found["b"].shape == (0, 2)
        with pytest.raises(ValueError, match="read-only"):
            found["a"][0] = 5
    assert count(tmp_path) == 1
    cached(tmp_path / "cache", {"x": 2}, build_counted(tmp_path))
    assert count(tmp_path) == 2


def test_large_arrays_are_mapped(tmp_path):
    assert isinstance(cached(tmp_path, {}, lambda: {"a": np.zeros(1 << 18)})["a"], np.memmap)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cached(None, {"x": 1}, lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    assert not os.listdir(tmp_path)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "array cut": lambda p: truncate(p / "a.npy"),
    "bit flipped": lambda p: flip(p / "a.npy"),
    "array gone": lambda p: os.remove(p / "a.npy"),
    "manifest cut": lambda p: truncate(p / "manifest.json"),
    "manifest empty": lambda p: os.truncate(p / "manifest.json", 0),
    "manifest gone": lambda p: os.remove(p / "manifest.json"),
    "manifest foreign": lambda p: (p / "manifest.json").write_text('{"files": [1]}'),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_cache_is_rebuilt(tmp_path, kind):
    cache = tmp_path / "cache"
    cached(cache, {"x": 1}, build_counted(tmp_path, 1000))
    DAMAGE[kind](place(cache))
    assert cached(cache, {"x": 1}, build_counted(tmp_path, 1000))["a"].tolist() == list(range(1000))
    cached(cache, {"x": 1}, build_counted(tmp_path, 1000))
    assert count(tmp_path) == 2


def test_failed_build_leaves_nothing_and_may_be_tried_again(tmp_path):
    def fail():
        raise KeyError("disk")

    with pytest.raises(KeyError):
        cached(tmp_path / "cache", {}, fail)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert cached(tmp_path / "cache", {}, build_counted(tmp_path))["a"].tolist() == [0, 1, 2]


def test_half_written_folder_of_a_killed_builder_is_not_a_cache(tmp_path):
    cache = tmp_path / "cache"
    cached(cache, {}, build_counted(tmp_path))
    os.rename(place(cache), f"{place(cache)}.new-abc")
    assert cached(cache, {}, build_counted(tmp_path))["a"].tolist() == [0, 1, 2]
    assert count(tmp_path) == 2 and not list(cache.glob("*.new-*"))


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cache cannot be written.*choose another cache folder"):
        cached(tmp_path / "file" / "cache", {}, build_counted(tmp_path))


def slow_build(marks):
    (marks / f"built-{os.getpid()}").touch()
    time.sleep(0.3)
    return {"a": np.arange(100000)}


def worker(cache, marks, results):
    results.put(int(cached(cache, {"x": 1}, lambda: slow_build(marks))["a"].sum()))


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_build_per_disk(tmp_path, nodes):
    """Four processes that start at once on 1 shared disk, or on the own disks of 2 nodes."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=worker, args=(tmp_path / f"disk{i % nodes}", tmp_path, results)) for i in range(4)
    ]
    for process in processes:
        process.start()
    assert [results.get(timeout=30) for _ in processes] == [sum(range(100000))] * 4
    for process in processes:
        process.join()
    assert count(tmp_path) == nodes
