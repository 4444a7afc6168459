"""Arrays that are built once and mapped by everyone: a folder per content, named by the hash of what it was built from.

Notable: no process group takes part. Whoever comes first to a folder builds under a file lock, the others wait for
that lock; so it works on a disk shared by all nodes and on disks of their own alike. A folder appears complete, by
one rename, and its sizes and checksums are checked at every load: what a killed writer or a bad disk left is built
again.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mtmegatron.errors import UserError

MANIFEST = "manifest.json"
MAPPED_FROM = 1 << 20  # bytes; smaller files are read

Arrays = dict[str, np.ndarray]


def cached(folder: str | Path | None, description: dict, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` makes for `description` (JSON values), read-only; from the cache where it has them.

    The description has to hold all that the arrays depend on: content of the inputs, settings, a version of the
    format. `folder=None` builds in memory. Raises UserError when the folder cannot be written.
    """
    if folder is None:
        return {name: _read_only(array) for name, array in build().items()}
    text = json.dumps(description, sort_keys=True)
    place = Path(folder).absolute() / hashlib.sha256(text.encode()).hexdigest()
    found = _load(place)
    if found is not None:
        return found
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place):
            found = _load(place)
            if found is None:
                _publish(place, description, build())
                found = _load(place)
    except OSError as error:
        raise UserError(
            f"{folder}: the index cache cannot be written ({error}): choose another cache folder"
        ) from error
    assert found is not None, f"{place} was published and does not load"
    return found


def _load(place: Path) -> Arrays | None:
    """The arrays of a published folder; None when it is absent or not what was published."""
    try:
        files = json.loads((place / MANIFEST).read_text())["files"]
        return {name: _load_array(place / f"{name}.npy", entry) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _load_array(path: Path, entry: dict) -> np.ndarray:
    if path.stat().st_size != entry["size"] or _checksum(path) != entry["crc32"]:
        raise ValueError(f"{path}: damaged")
    return _read_only(np.load(path, mmap_mode="r" if entry["size"] >= MAPPED_FROM else None))


def _publish(place: Path, description: dict, arrays: Arrays) -> None:
    """Write beside the place, then rename. What lies there belongs to nobody: the caller holds the lock."""
    shutil.rmtree(place, ignore_errors=True)
    for leftover in place.parent.glob(f"{place.name}.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{place.name}.new-", dir=place.parent))
    try:
        fresh.chmod(0o755)  # mkdtemp hides it from the other users of a shared cache
        files = {name: _write_array(fresh / f"{name}.npy", array) for name, array in arrays.items()}
        (fresh / MANIFEST).write_text(json.dumps({"description": description, "files": files}, indent=1))
        os.rename(fresh, place)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _write_array(path: Path, array: np.ndarray) -> dict:
    with open(path, "wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "crc32": _checksum(path)}


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while data := file.read(1 << 22):
            value = zlib.crc32(data, value)
    return value


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    with open(f"{place}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
