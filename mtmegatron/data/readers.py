"""Documents out of files: text, JSON lines, JSON arrays, parquet, each plain, gzip or zstd, and folders of them.

Notable: every fault carries its place (`file:line`) and goes to one function, which raises (`refuse`, the default) or
counts. A compressed file that was cut off is a fault of the whole file, never a silent end; text keeps its bytes,
line ends included.

A record of JSON or parquet is one document with the asked-for keys; any other file is one document. Blank lines are
no records.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mtmegatron.errors import UserError

Fault = Callable[[str], None]


@dataclass(frozen=True)
class Document:
    """Texts of one record by key, and where it is from: `line` counts lines, array items or rows from 1."""

    texts: dict[str, str]
    source: str
    line: int


def refuse(message: str) -> NoReturn:
    """The fault function that stops at the first fault."""
    raise UserError(f"{message}: repair it, or skip such records with a count (on_error: skip)")


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files of paths, folders walked in sorted order without hidden files. Raises UserError for missing ones."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such file or folder: correct the input path")
        found = _walk(path) if path.is_dir() else [path]
        if not found:
            raise UserError(f"{path}: a folder without files: correct the input path")
        files += found
    return files


def documents(
    paths: Sequence[str | Path], keys: Sequence[str] = ("text",), fault: Fault = refuse
) -> Iterator[Document]:
    """All documents of files and folders, in order. `fault(message)` hears of every malformed record; it is skipped
    where that returns.

    Raises UserError for faults of a whole file: damaged compression, a malformed JSON array, a parquet without the
    keys.
    """
    for path in list_files(paths):
        yield from _file_documents(path, keys, fault)


def _file_documents(path: Path, keys: Sequence[str], fault: Fault) -> Iterator[Document]:
    kind = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    if kind in (".jsonl", ".ndjson"):
        return _json_lines(path, keys, fault)
    if kind == ".json":
        return _json_array(path, keys, fault) if _first_byte(path) == b"[" else _json_lines(path, keys, fault)
    if kind == ".parquet":
        return _parquet(path, keys, fault)
    return _plain_text(path, keys, fault)


def _json_lines(path: Path, keys: Sequence[str], fault: Fault) -> Iterator[Document]:
    with _open(path) as file:
        for number, line in enumerate(_guarded(file, path), 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
                fault(f"{path}:{number}: not JSON ({error})")
                continue
            yield from _checked(record, keys, str(path), number, fault)


def _json_array(path: Path, keys: Sequence[str], fault: Fault) -> Iterator[Document]:
    with _open(path) as file:
        content = b"".join(_guarded(file, path))
    try:
        records = json.loads(content.removeprefix(b"\xef\xbb\xbf"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not a JSON array ({error.msg}): repair it, no record of it can be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON array ({error}): repair it, no record of it can be read") from error
    for number, record in enumerate(records, 1):
        yield from _checked(record, keys, str(path), number, fault)


def _parquet(path: Path, keys: Sequence[str], fault: Fault) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path}: reading it needs a package: `pip install pyarrow`") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            missing = [key for key in keys if key not in file.schema_arrow.names]
            if missing:
                raise UserError(f"{path}: has no column {missing[0]!r}: choose of {', '.join(file.schema_arrow.names)}")
            for batch in file.iter_batches(batch_size=1024, columns=list(keys), use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    yield from _checked(record, keys, str(path), number, fault)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole parquet file ({error}): fetch it again") from error


def _plain_text(path: Path, keys: Sequence[str], fault: Fault) -> Iterator[Document]:
    if len(keys) != 1:
        raise UserError(
            f"{path}: plain text has no keys, {', '.join(keys)} were asked for: give JSON or parquet, or one key"
        )
    with _open(path) as file:
        content = b"".join(_guarded(file, path))
    try:
        text = content.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        fault(f"{path}:{line}: not UTF-8 text (byte {error.start})")
        return
    yield Document({keys[0]: text}, str(path), 1)


def _checked(record: object, keys: Sequence[str], source: str, line: int, fault: Fault) -> Iterator[Document]:
    """The document of a record, or its fault."""
    message = _record_fault(record, keys)
    if message:
        fault(f"{source}:{line}: {message}")
    else:
        yield Document({key: record[key] for key in keys}, source, line)


def _record_fault(record: object, keys: Sequence[str]) -> str | None:
    if not isinstance(record, dict):
        return f"a {type(record).__name__} where an object with {', '.join(keys)} should be"
    for key in keys:
        if key not in record:
            return f"no key {key!r} (it has {', '.join(map(str, record)) or 'none'})"
        if not isinstance(record[key], str):
            return f"{key!r} is a {type(record[key]).__name__}, not a text"
        try:
            record[key].encode()
        except UnicodeEncodeError as error:
            return f"{key!r} holds half of a surrogate pair at character {error.start}, which no encoding can write"
    return None


def _walk(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place) / name for name in sorted(names) if not name.startswith(".")]
    return found


def _first_byte(path: Path) -> bytes:
    with _open(path) as file:
        for line in _guarded(file, path):
            if line := line.removeprefix(b"\xef\xbb\xbf").lstrip():
                return line[:1]
    return b""


def _open(path: Path) -> io.BufferedIOBase:
    try:
        file = open(path, "rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    return io.BufferedReader(_Zstd(file, path), 1 << 20) if path.suffix == ".zst" else file


def _guarded(file: io.BufferedIOBase, path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except (EOFError, OSError, zlib.error) as error:  # BadGzipFile is an OSError
        raise UserError(f"{path}: cannot be read to its end ({error}): fetch it again") from error


class _Zstd(io.RawIOBase):
    """Decompresses frame after frame, and notices a frame that was cut off: the library's reader ends silently."""

    def __init__(self, file: io.BufferedReader, path: Path):
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{path}: reading it needs a package: `pip install zstandard`") from error
        self._file, self._error = file, zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor().decompressobj
        self._current, self._ready, self._between = None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._ready and self._advance():
            pass
        piece, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _advance(self) -> bool:
        """Decompress one more piece; False at the end of the file."""
        data = self._between or self._file.read(1 << 16)
        if not data:
            if self._current is not None:
                raise EOFError("the compressed file ended within a frame")
            return False
        self._current = self._current or self._frame()
        try:
            self._ready = memoryview(self._current.decompress(data))
        except self._error as error:
            raise OSError(str(error)) from error
        self._between = self._current.unused_data if self._current.eof else b""
        self._current = None if self._current.eof else self._current
        return True
