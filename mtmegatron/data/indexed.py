"""Indexed token files: `PREFIX.bin` holds the tokens of all documents end to end, `PREFIX.idx` where each one lies.
Megatron's format.

Notable: a prefix exists from the moment of one rename (`.bin` first, `.idx` last), so a killed writer leaves nothing
that looks whole; every length and pointer is 64-bit and is checked against the size of the files before the first
read; tokens are read with `pread` into memory of the caller's own, so results never alias and mapped pages never
grow. Writing takes the same memory for ten documents or ten billion.

Layout of `.idx`, little endian: magic, version u64 = 1, dtype code u8, sequences S u64, documents + 1 as D u64;
lengths i32[S] (tokens), pointers i64[S] (bytes), document starts i64[D] (sequence numbers), and for files with modes
i8[S].
"""

import errno
import fcntl
import hashlib
import json
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from mtmegatron.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
PARTIAL = ".partial"
SIDECAR = ".meta.json"
CHUNK = 1 << 20  # elements handled at once where a whole array could be too large
AGAIN = "prepare the data again (`mtm data prepare`)"


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest dtype that Megatron writes for a vocabulary: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedWriter:
    """Writes one indexed file; use as a context manager, an exception inside leaves nothing behind.

    `description` (what the tokens are: tokenizer, vocabulary, ...) goes to `PREFIX.meta.json` with the counts.
    Raises UserError when another process writes the same prefix, or when a token does not fit the dtype.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type | str, description: dict | None = None):
        self.prefix, self.dtype, self.description = str(prefix), np.dtype(dtype).newbyteorder("<"), description
        assert self.dtype in CODES, f"no dtype code for {dtype}"
        self.documents = self.sequences = self.tokens = 0
        folder = Path(self.prefix).absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._bin = _open_exclusive(self.prefix + ".bin" + PARTIAL)
            self._lengths, self._starts, self._modes = (tempfile.TemporaryFile(dir=folder) for _ in range(3))
        except OSError as error:
            raise UserError(f"{self.prefix}: cannot be written ({error.strerror}): choose another place") from error

    def add(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Append one document."""
        self.add_many(tokens, np.array([len(tokens)]))

    def add_many(self, tokens: np.ndarray | Sequence[int], lengths: np.ndarray) -> None:
        """Append documents whose tokens lie end to end; `lengths` in tokens."""
        starts = np.arange(self.sequences + 1, self.sequences + len(lengths) + 1)
        self._append_index(lengths, starts)
        self._bin.write(self._converted(np.asarray(tokens)).tobytes())

    def append(self, reader: "IndexedReader") -> None:
        """Append all documents of another file, with their sequences and modes."""
        if reader.dtype != self.dtype:
            kinds = f"{reader.prefix} holds {reader.dtype}, {self.prefix} is {self.dtype}"
            raise UserError(f"{kinds}: {AGAIN} with one tokenizer")
        if reader.modes is not None:
            self._modes.truncate(self.sequences)
            self._modes.seek(self.sequences)
            self._modes.write(reader.modes.tobytes())
        starts = self.sequences
        for lengths in _chunks(reader.sequence_lengths):
            self._append_index(lengths, np.empty(0, np.int64))
        for ends in _chunks(reader.document_starts[1:]):
            self._starts.write((ends.astype("<i8") + starts).tobytes())
        self.documents += reader.documents
        reader.copy_tokens(self._bin)

    def close(self) -> None:
        """Finish the files and publish them: old `.idx` away, then `.bin`, description, and `.idx` last."""
        with open(self.prefix + ".idx" + PARTIAL, "wb") as index:
            self._write_index(index)
            _sync(index)
        counts = {"documents": self.documents, "tokens": self.tokens}
        with open(self.prefix + SIDECAR + PARTIAL, "w") as sidecar:
            json.dump({**(self.description or {}), **counts}, sidecar, indent=1)
            _sync(sidecar)
        _sync(self._bin)
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        for name in (".bin", SIDECAR, ".idx"):
            os.replace(self.prefix + name + PARTIAL, self.prefix + name)
        self._close_files()

    def abort(self) -> None:
        """Remove what was written."""
        for name in (".bin", SIDECAR, ".idx"):
            Path(self.prefix + name + PARTIAL).unlink(missing_ok=True)
        self._close_files()

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            return self.abort()
        try:
            self.close()
        except BaseException:
            self.abort()
            raise

    def _converted(self, tokens: np.ndarray) -> np.ndarray:
        converted = tokens.astype(self.dtype, copy=False)
        if tokens.dtype != self.dtype and not np.array_equal(converted, tokens):
            wrong = tokens[np.flatnonzero(converted != tokens)[0]]
            raise UserError(
                f"{self.prefix}: token id {wrong} does not fit {self.dtype}: give the tokenizer's true vocabulary size"
            )
        return converted

    def _append_index(self, lengths: np.ndarray, starts: np.ndarray) -> None:
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise UserError(
                f"{self.prefix}: a document of {lengths.max()} tokens; the format holds 2147483647: split the document"
            )
        self._lengths.write(lengths.astype("<i4").tobytes())
        self._starts.write(starts.astype("<i8").tobytes())
        self.sequences += len(lengths)
        self.documents += len(starts)
        self.tokens += int(lengths.sum(dtype=np.int64))

    def _write_index(self, index) -> None:
        index.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], self.sequences, self.documents + 1))
        for lengths in _stored(self._lengths, "<i4"):
            index.write(lengths.tobytes())
        position = 0
        for lengths in _stored(self._lengths, "<i4"):
            ends = position + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            index.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes())
            position = int(ends[-1])
        index.write(bytes(8))
        for starts in _stored(self._starts, "<i8"):
            index.write(starts.tobytes())
        if self._modes.seek(0, os.SEEK_END):
            self._modes.truncate(self.sequences)
            for modes in _stored(self._modes, "<i1"):
                index.write(modes.tobytes())

    def _close_files(self) -> None:
        for file in (self._bin, self._lengths, self._starts, self._modes):
            file.close()


class IndexedReader:
    """Reads an indexed file of any dtype, with one or several sequences per document.

    `documents`, `tokens`: counts. `sequence_lengths` i32[S], `pointers` i64[S], `document_starts` i64[D], `modes`
    i8[S] or None: views of the mapped index. Raises UserError for files that are missing, empty, truncated, foreign
    or do not belong together.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = _without_suffix(str(prefix))
        self._open_index()
        self.tokens = self._checked_tokens()
        self._open_tokens()

    def __reduce__(self) -> tuple:
        return IndexedReader, (self.prefix,)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64[documents]; computed at each use, so that only those who need it hold it."""
        if self.documents == len(self.sequence_lengths) and bool((np.diff(self.document_starts) == 1).all()):
            return self.sequence_lengths.astype(np.int64)
        ends = np.append(self.pointers, self.tokens * self.dtype.itemsize)[self.document_starts]
        return np.diff(ends) // self.dtype.itemsize

    def token_start(self, document: int) -> int:
        """Tokens of the file before a document; `document == documents` gives all tokens."""
        sequence = int(self.document_starts[document])
        return int(self.pointers[sequence]) // self.dtype.itemsize if sequence < len(self.pointers) else self.tokens

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of a document from `offset` on (to its end by default), in memory of their own."""
        start, end = self.token_start(document), self.token_start(document + 1)
        length = end - start - offset if length is None else length
        assert 0 <= offset and 0 <= length <= end - start - offset, (document, offset, length)
        return self._read_tokens(start + offset, length)

    @cached_property
    def description(self) -> dict:
        """What `PREFIX.meta.json` says about these tokens; empty when there is none."""
        path = Path(self.prefix + SIDECAR)
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text())
            same = (found["documents"], found["tokens"]) == (self.documents, self.tokens)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a description of indexed data ({error!r}): delete it, or {AGAIN}") from error
        if not same:
            raise UserError(f"{path}: describes other files than the .bin and .idx beside it: delete it, or {AGAIN}")
        return found

    @cached_property
    def identity(self) -> str:
        """Hash of the index and the size of the tokens: changes whenever where a document lies changes."""
        with open(self.prefix + ".idx", "rb") as index:
            digest = hashlib.file_digest(index, "sha256").hexdigest()
        return f"{digest}-{self.tokens * self.dtype.itemsize}"

    @property
    def modified(self) -> int:
        """Time of the last change of the tokens, nanoseconds."""
        return os.fstat(self._file).st_mtime_ns

    def extremes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """((smallest id, its document), (largest id, its document)): the first ones, by reading the whole file once."""
        if self.dtype.kind == "f":
            raise UserError(f"{self.prefix}: holds {self.dtype}, not token ids: {AGAIN}")
        low, high = (np.iinfo(np.int64).max, 0), (np.iinfo(np.int64).min, 0)
        for start in range(0, self.tokens, CHUNK):
            tokens = self._read_tokens(start, min(CHUNK, self.tokens - start))
            least, most = int(tokens.min()), int(tokens.max())
            if least < low[0]:
                low = least, start + int(tokens.argmin())
            if most > high[0]:
                high = most, start + int(tokens.argmax())
        return (low[0], self._document_at(low[1])), (high[0], self._document_at(high[1]))

    def largest_token(self) -> tuple[int, int]:
        """(largest id, the first document that holds it)."""
        return self.extremes()[1]

    def copy_tokens(self, target) -> None:
        """Append all tokens to an open file, leaving holes of a sparse file holes."""
        size, base, position = self.tokens * self.dtype.itemsize, target.tell(), 0
        while (position := _next_data(self._file, position)) < size:
            hole = min(size, os.lseek(self._file, position, os.SEEK_HOLE))
            target.seek(base + position)
            while position < hole:
                piece = os.pread(self._file, min(CHUNK, hole - position), position)
                if not piece:
                    raise UserError(f"{self.prefix}.bin: shrank while it was read: {AGAIN}")
                position += target.write(piece)
        target.truncate(base + size)
        target.seek(base + size)

    def _document_at(self, token: int) -> int:
        sequence = int(np.searchsorted(self.pointers, token * self.dtype.itemsize, side="right")) - 1
        return int(np.searchsorted(self.document_starts, sequence, side="right")) - 1

    def _read_tokens(self, start: int, count: int) -> np.ndarray:
        result = np.empty(count, self.dtype)
        view, filled = memoryview(result.view(np.uint8)), 0
        while filled < len(view):
            got = os.preadv(self._file, [view[filled:]], start * self.dtype.itemsize + filled)
            if got == 0:
                raise UserError(f"{self.prefix}.bin: shrank while it was read: {AGAIN}")
            filled += got
        return result

    def _open_index(self) -> None:
        path = self.prefix + ".idx"
        size = self._size(".idx")
        if size < HEADER.size:
            raise UserError(f"{path}: {size} bytes, truncated: {AGAIN}")
        index = np.memmap(path, np.uint8, "r")
        magic, version, code, sequences, starts = HEADER.unpack(index[: HEADER.size].tobytes())
        if magic != MAGIC or version != 1 or code not in DTYPES:
            found = f"magic {magic!r}, version {version}, dtype code {code}"
            raise UserError(f"{path}: not an index of this format ({found}): {AGAIN}")
        expected = HEADER.size + 12 * sequences + 8 * starts
        if size not in (expected, expected + sequences) or starts < 1:
            fault = "truncated" if size < expected else "foreign"
            raise UserError(f"{path}: {size} bytes where its header says {expected}, {fault}: {AGAIN}")
        self.dtype, self.documents = np.dtype(DTYPES[code]), starts - 1
        ends = HEADER.size + np.cumsum([4 * sequences, 8 * sequences, 8 * starts])
        self.sequence_lengths = index[HEADER.size : ends[0]].view("<i4")
        self.pointers = index[ends[0] : ends[1]].view("<i8")
        self.document_starts = index[ends[1] : ends[2]].view("<i8")
        self.modes = index[ends[2] :].view("<i1") if size > expected else None

    def _checked_tokens(self) -> int:
        """All tokens, after a check that pointers follow from lengths and documents from sequences."""
        starts, sequences, position = self.document_starts, len(self.sequence_lengths), 0
        for lengths, pointers in zip(_chunks(self.sequence_lengths), _chunks(self.pointers)):
            sizes = lengths.astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            if sizes.min() < 0 or not np.array_equal(ends - sizes, pointers):
                raise UserError(f"{self.prefix}.idx: pointers do not follow from lengths, damaged: {AGAIN}")
            position = int(ends[-1])
        falling = any((np.diff(part) < 0).any() for part in _chunks(starts, overlap=1))
        if falling or starts[0] != 0 or starts[-1] != sequences:
            raise UserError(f"{self.prefix}.idx: documents do not cover the sequences in order, damaged: {AGAIN}")
        return position // self.dtype.itemsize

    def _open_tokens(self) -> None:
        size, expected = self._size(".bin"), self.tokens * self.dtype.itemsize
        if size != expected:
            fault = "truncated" if size < expected else "of another index"
            raise UserError(f"{self.prefix}.bin: {size} bytes where the index says {expected}, {fault}: {AGAIN}")
        if self.tokens == 0:
            raise UserError(f"{self.prefix}: empty, {self.documents} documents without a token: {AGAIN}")
        self._file = os.open(self.prefix + ".bin", os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def _size(self, suffix: str) -> int:
        path = Path(self.prefix + suffix)
        if path.is_file():
            return path.stat().st_size
        unfinished = Path(self.prefix + ".bin" + PARTIAL).exists()
        reason = "its preparation did not finish" if unfinished else f"give the path without its suffix, or {AGAIN}"
        raise UserError(f"{path}: no such file: {reason}")


def merge(prefixes: Sequence[str | Path], output: str | Path) -> IndexedReader:
    """Write the documents of several indexed files, in order, as one."""
    readers = [IndexedReader(prefix) for prefix in prefixes]
    tokenizers = {reader.description.get("tokenizer_hash"): reader for reader in readers}
    if len(tokenizers.keys() - {None}) > 1:
        names = ", ".join(f"{reader.prefix} ({reader.description.get('tokenizer')})" for reader in tokenizers.values())
        raise UserError(f"cannot merge files of different tokenizers: {names}: {AGAIN} with one tokenizer")
    description = readers[0].description if len(tokenizers) == 1 else {}
    with IndexedWriter(output, readers[0].dtype, description) as writer:
        for reader in readers:
            writer.append(reader)
    return IndexedReader(output)


def _chunks(array: np.ndarray, overlap: int = 0) -> Iterator[np.ndarray]:
    for begin in range(0, len(array), CHUNK):
        yield array[begin : begin + CHUNK + overlap]


def _stored(file, dtype: str) -> Iterator[np.ndarray]:
    file.seek(0)
    while data := file.read(CHUNK * np.dtype(dtype).itemsize):
        yield np.frombuffer(data, dtype)


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _next_data(file: int, position: int) -> int:
    """Position of the next byte that is not in a hole; beyond any file when only a hole is left."""
    try:
        return os.lseek(file, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return np.iinfo(np.int64).max


def _open_exclusive(path: str):
    """An empty file that no other process writes: two writers of one prefix would mix their tokens."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=1 << 20)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        mine = False
    if not mine:
        file.close()
        raise UserError(f"{path}: another process is writing it: wait for it, or choose another output")
    file.truncate(0)
    return file


def _without_suffix(prefix: str) -> str:
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    return prefix if Path(prefix + ".idx").exists() else stem
