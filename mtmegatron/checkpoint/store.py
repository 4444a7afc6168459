"""One checkpoint: safetensors files that hold rectangles of tensors, and one manifest that says where each lies.

Notable: any rectangle of a tensor can be read whatever the cut it was stored in, so nothing is gathered to save and no
rank reads more than it needs. Every byte is under a CRC32: each rectangle's, each file header's (both in the manifest)
and the manifest's own (its first line). A flipped bit is an error that names the file; it never loads.

Files are written by hand, because the safetensors library wants all tensors of a file in memory at once: here they pass
one by one, and the header, whose room is reserved at the front, is filled in at the end. Reading is the library's
(memory-mapped).

This file knows files and rectangles; it does not know models, meshes or optimizers.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import safe_open

from mtmegatron.checkpoint.rectangle import DTYPE_CODES, Box, Ints, Rectangle, dtype_name, tiling_fault
from mtmegatron.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
HEADER = 1 << 16  # bytes before the first rectangle of a file: the format's length word, its JSON, blanks
FILE_LIMIT = 4 << 30  # bytes; a file ends before the rectangle that would pass it

Item = tuple[Rectangle, torch.Tensor]


class CheckpointError(UserError):
    """A checkpoint that cannot be written or must not be read; says which file and tensor, and what to do."""


@contextmanager
def writes_to(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal (disk full, quota, permission) into a message that names the path."""
    try:
        yield
    except OSError as fault:
        repair = "Free disk space or repair the path; earlier checkpoints are untouched"
        raise CheckpointError(f"cannot write {path}: {_reason(fault)}. {repair}") from fault


def _reason(fault: OSError) -> str:
    return os.strerror(fault.errno) if fault.errno else str(fault)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: files created, renamed or removed there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- write ----


def write_shard(folder: Path, rank: int, items: Iterable[Item], limit: int = FILE_LIMIT) -> dict:
    """Writes the rectangles of one rank to `rank-00003.safetensors`, `rank-00003-00001.safetensors`, ...

    They are durable on return. A file ends before the rectangle that would make it longer than `limit` bytes.
    `items` may be a generator: only the tensor being written and the next are held, and copied only where not
    contiguous or not on the CPU. Returns this rank's part of the manifest, plain JSON values. Raises CheckpointError
    when the system refuses.
    """
    part: dict = {"files": {}, "rectangles": []}
    waiting = iter(items)
    pending = list(islice(waiting, 1))
    while pending:
        count = len(part["files"])
        path = folder / (f"rank-{rank:05d}-{count:05d}.safetensors" if count else f"rank-{rank:05d}.safetensors")
        with writes_to(path), open(path, "xb") as file:
            _fill(file, path.name, pending, waiting, limit, part)
    return part


def _fill(file: BinaryIO, name: str, pending: list[Item], waiting: Iterator[Item], limit: int, part: dict) -> None:
    """Writes items until the next would pass the limit or the room for the header; that one stays in `pending`."""
    header: dict[str, dict] = {}
    room, position = HEADER - 8 - len("{}"), 0
    file.write(bytes(HEADER))
    while pending:
        rectangle, tensor = pending[0]
        nbytes = tensor.numel() * tensor.element_size()
        entry = _header_entry(rectangle, tensor, position, position + nbytes)
        room -= len(_compact({rectangle.key: entry}))  # its own braces are not shorter than the comma it brings
        if header and (room < 0 or HEADER + position + nbytes > limit):
            break
        assert room >= 0 and rectangle.key not in header, rectangle
        header[rectangle.key] = entry
        part["rectangles"].append(_write_rectangle(file, name, rectangle, tensor))
        position += nbytes
        pending[:] = islice(waiting, 1)
    blob = _compact(header).ljust(HEADER - 8)
    blob = len(blob).to_bytes(8, "little") + blob
    file.seek(0)
    file.write(blob)
    file.flush()
    os.fsync(file.fileno())
    part["files"][name] = {"bytes": HEADER + position, "header_crc32": zlib.crc32(blob)}


def _header_entry(rectangle: Rectangle, tensor: torch.Tensor, start: int, stop: int) -> dict:
    found = (tuple(tensor.shape), dtype_name(tensor.dtype))
    assert found == (rectangle.size, rectangle.dtype), (rectangle, found)
    return {"dtype": DTYPE_CODES[rectangle.dtype], "shape": rectangle.size, "data_offsets": (start, stop)}


def _write_rectangle(file: BinaryIO, name: str, rectangle: Rectangle, tensor: torch.Tensor) -> dict:
    data = _raw(tensor)
    file.write(data)
    return {
        "name": rectangle.name, "shape": list(rectangle.shape), "dtype": rectangle.dtype,
        "offset": list(rectangle.offset), "size": list(rectangle.size),
        "file": name, "key": rectangle.key, "crc32": zlib.crc32(data),
    }  # fmt: skip


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor in row-major order, without a copy where it lies so in CPU memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _compact(value: dict) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# ---- manifest ----


def write_manifest(folder: Path, parts: list[dict], extra: dict) -> None:
    """Joins the parts of all ranks, and `extra` (any JSON: step, configuration, ...), to `manifest.json`.

    It is written beside, synced and renamed. Asserts that the rectangles of every tensor tile it exactly.
    """
    files: dict[str, dict] = {}
    for part in parts:
        assert not files.keys() & part["files"].keys(), f"two parts wrote {sorted(files.keys() & part['files'].keys())}"
        files |= part["files"]
    tensors = _tensors(rectangle for part in parts for rectangle in part["rectangles"])
    body = _compact({"format": FORMAT, "extra": extra, "files": files, "tensors": tensors})
    path, beside = folder / MANIFEST, folder / (MANIFEST + ".part")
    with writes_to(path):
        with open(beside, "wb") as file:
            file.write(_signed(body))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(folder)


def _tensors(rectangles: Iterable[dict]) -> dict[str, dict]:
    tensors: dict[str, dict] = {}
    for r in rectangles:
        tensor = tensors.setdefault(r["name"], {"shape": r["shape"], "dtype": r["dtype"], "rectangles": []})
        known = (tensor["shape"], tensor["dtype"])
        assert known == (r["shape"], r["dtype"]), f"{r} against {known}"
        tensor["rectangles"].append({field: r[field] for field in ("offset", "size", "file", "key", "crc32")})
    for name, tensor in tensors.items():
        boxes = [Box(tuple(r["offset"]), tuple(r["size"])) for r in tensor["rectangles"]]
        fault = tiling_fault(tuple(tensor["shape"]), boxes)
        assert not fault, f"the rectangles of {name} do not tile its shape {tensor['shape']}: {fault}"
    return dict(sorted(tensors.items()))


def _signed(body: bytes) -> bytes:
    """Puts `"crc32":"0123abcd",` and a line break after the opening brace: the first line vouches for the rest."""
    return b'{"crc32":"%08x",\n' % zlib.crc32(body) + body[1:]


def _read_manifest(path: Path) -> dict:
    try:
        signed = path.read_bytes()
    except OSError as fault:
        raise CheckpointError(
            f"cannot read {path}: {_reason(fault)}. This is not a complete checkpoint: use another one"
        ) from fault
    _, _, rest = signed.partition(b"\n")
    if signed != _signed(b"{" + rest):
        raise CheckpointError(
            f"{path} does not match its own checksum: it was damaged or edited. Copy it again or use another checkpoint"
        )
    manifest = json.loads(signed)
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}; this version reads format {FORMAT}. Use the version that wrote it"
        )
    return manifest


# ---- read ----


class Store:
    """A checkpoint opened for reading; the manifest is read and checked here, files when a rectangle in them is wanted.

    `on_read(file, key)` is called for each stored rectangle that a `read` or `verify` touches. Raises CheckpointError.
    """

    def __init__(self, folder: Path, on_read: Callable[[str, str], None] = lambda file, key: None):
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder / MANIFEST)
        self.extra: dict = manifest["extra"]
        self._files: dict[str, dict] = manifest["files"]
        self._tensors: dict[str, dict] = manifest["tensors"]
        self._on_read = on_read
        self._opened: dict[str, safe_open] = {}  # at most one: what is mapped counts as memory of this process
        self._verified: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> Ints:
        return tuple(self._tensor(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self._tensor(name)["dtype"])

    def read(self, name: str, offset: Ints | None = None, size: Ints | None = None) -> torch.Tensor:
        """The part [offset, offset + size) of a tensor, by default all from `offset` on.

        Shapes: `size`; new CPU memory, dtype as stored. Only rectangles that intersect it are read. A stored rectangle
        is checked in full when it is first touched.
        """
        shape = self.shape(name)
        offset = (0,) * len(shape) if offset is None else tuple(offset)
        size = tuple(s - o for s, o in zip(shape, offset)) if size is None else tuple(size)
        wanted = Box(offset, size)
        assert wanted.inside(shape), (name, shape, wanted)
        out = torch.empty(size, dtype=self.dtype(name))
        for stored in self._tensor(name)["rectangles"]:
            common = wanted.cut(Box(stored["offset"], stored["size"]))
            if common is not None:
                out[common.slices(offset)].copy_(self._stored(name, stored)[common.slices(stored["offset"])])
        return out

    def check_sizes(self) -> None:
        """The quick check: every file is there and has the length that the manifest says."""
        for name in self._files:
            self._check_size(name)

    def verify(self) -> None:
        """The full check: reads every byte, whatever was read before."""
        self._opened.clear()
        self._verified.clear()
        self.check_sizes()
        for file in self._files:
            self._open(file)
        for name, tensor in self._tensors.items():
            for stored in tensor["rectangles"]:
                self._stored(name, stored)

    def _tensor(self, name: str) -> dict:
        if name not in self._tensors:
            close = get_close_matches(name, self._tensors)
            like = f"; it has {', '.join(close)}" if close else ""
            raise CheckpointError(
                f"{self.folder} has no tensor {name}{like}. Was it saved by a model with another configuration?"
            )
        return self._tensors[name]

    def _stored(self, name: str, stored: dict) -> torch.Tensor:
        """A stored rectangle, a view of the mapped file."""
        file, key = stored["file"], stored["key"]
        self._on_read(file, key)
        tensor = self._open(file).get_tensor(key)
        if (file, key) not in self._verified:
            if zlib.crc32(_raw(tensor)) != stored["crc32"]:
                raise self._damaged(file, f"tensor {name} at offset {stored['offset']} does not match its CRC32")
            self._verified.add((file, key))
        return tensor

    def _open(self, file: str) -> safe_open:
        if file not in self._opened:
            self._check_size(file)
            try:
                with open(self.folder / file, "rb") as raw:
                    header = raw.read(HEADER)
                if zlib.crc32(header) != self._files[file]["header_crc32"]:
                    raise self._damaged(file, "its header does not match its CRC32")
                self._opened.clear()
                self._opened[file] = safe_open(self.folder / file, framework="pt")
            except OSError as fault:
                raise self._damaged(file, f"it cannot be read ({_reason(fault)})") from fault
        return self._opened[file]

    def _check_size(self, file: str) -> None:
        expected = self._files[file]["bytes"]
        try:
            found = (self.folder / file).stat().st_size
        except OSError as fault:
            raise self._damaged(file, f"it cannot be found ({_reason(fault)})") from fault
        if found != expected:
            raise self._damaged(file, f"it has {found} bytes instead of {expected}")

    def _damaged(self, file: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / file} is damaged: {what}. Copy the file again or use another checkpoint"
        )
