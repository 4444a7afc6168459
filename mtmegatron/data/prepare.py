"""Tokenise a corpus into indexed files: one document in, one document out, in the order of the input.

Notable: the files are the same bytes for any number of workers: one process reads and writes, the others only turn
texts into ids, and their results are taken in the order they were given out, a bounded number ahead. A worker that
dies is an error, not a wait.

A document without content (empty or white space alone, or no token) is skipped and counted, for each key by itself.
An input that has nothing else is an error. At any failure nothing is left at the output.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import numpy as np

from mtmegatron.data.indexed import IndexedWriter, token_dtype
from mtmegatron.data.readers import documents, list_files, refuse
from mtmegatron.data.tokenizers import Tokenizer, load_tokenizer
from mtmegatron.errors import UserError

CHUNK_DOCUMENTS, CHUNK_CHARACTERS = 512, 1 << 18  # what one worker gets at once: whichever is reached first
AHEAD = 3  # chunks in flight for each worker
FAULTS_KEPT = 10

Chunk = list[tuple[int, str]]  # (number of the output, text)
Encoded = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # ids end to end, length of each document (0: no content), its output

Progress = Callable[[int, int], None]  # documents and tokens so far, over all outputs


@dataclass(frozen=True)
class Output:
    """One written prefix; `empty` counts the documents without content."""

    prefix: str
    key: str
    documents: int
    tokens: int
    empty: int


@dataclass(frozen=True)
class Summary:
    """What was prepared; `malformed` counts skipped records, `faults` says where the first ones are."""

    outputs: tuple[Output, ...]
    malformed: int
    faults: tuple[str, ...]


@dataclass(frozen=True)
class _Encoder:
    """What turns texts into ids, in this process or, made again from `recipe`, in a worker."""

    tokenizer: Tokenizer
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def recipe(self) -> tuple:
        return self.tokenizer.spec, self.begin, self.end

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.tokenizer.vocab_size)

    def __call__(self, chunk: Chunk) -> Encoded:
        texts = [text if text.strip() else "" for _, text in chunk]
        ids = [[*self.begin, *found, *self.end] if found else [] for found in self.tokenizer.encode_batch(texts)]
        lengths = np.array([len(document) for document in ids], np.int64)
        tokens = np.fromiter(chain.from_iterable(ids), self.dtype, int(lengths.sum()))
        return tokens, lengths, np.array([output for output, _ in chunk])


class _Faults:
    """Hears of malformed records: refuses the first, or counts all."""

    def __init__(self, on_error: Literal["refuse", "skip"]):
        self.skip, self.count, self.first = on_error == "skip", 0, []

    def __call__(self, message: str) -> None:
        if not self.skip:
            refuse(message)
        self.count += 1
        if self.count <= FAULTS_KEPT:
            self.first.append(message)


class _Sink:
    """The writers, one per key, and what they were given."""

    def __init__(self, writers: list[IndexedWriter], progress: Progress | None):
        self.writers, self.progress, self.empty = writers, progress, [0] * len(writers)

    def write(self, tokens: np.ndarray, lengths: np.ndarray, outputs: np.ndarray) -> None:
        owners = np.repeat(outputs, lengths)
        for output, writer in enumerate(self.writers):
            mine = lengths[outputs == output]
            self.empty[output] += int((mine == 0).sum())
            writer.add_many(tokens[owners == output], mine[mine > 0])
        if self.progress:
            self.progress(sum(w.documents for w in self.writers), sum(w.tokens for w in self.writers))


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: Tokenizer | str | Path,
    *,
    keys: Sequence[str] = ("text",),
    append_end: bool = True,
    prepend_begin: bool = False,
    workers: int = 1,
    on_error: Literal["refuse", "skip"] = "refuse",
    progress: Progress | None = None,
) -> Summary:
    """Write `output.bin/.idx` (with several keys: `output_KEY.bin/.idx` for each) from the documents of files and
    folders.

    Raises UserError with `file:line` for a malformed record unless `on_error` is "skip", when no document has
    content, and when a worker dies.
    """
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    encoder, faults, files = _encoder(tokenizer, prepend_begin, append_end), _Faults(on_error), list_files(inputs)
    prefixes = [f"{output}_{key}" if len(keys) > 1 else str(output) for key in keys]
    texts = ((i, document.texts[key]) for document in documents(files, keys, faults) for i, key in enumerate(keys))
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(prefix, encoder.dtype, _description(encoder, key)))
            for prefix, key in zip(prefixes, keys)
        ]
        sink = _Sink(writers, progress)
        with closing(_encoded(encoder, _chunked(texts), workers)) as results:
            for result in results:
                sink.write(*result)
        _check_content(sink, inputs, keys, faults)
    counts = zip(prefixes, keys, writers, sink.empty)
    return Summary(
        tuple(Output(p, k, w.documents, w.tokens, e) for p, k, w, e in counts), faults.count, tuple(faults.first)
    )


def _encoder(tokenizer: Tokenizer, prepend_begin: bool, append_end: bool) -> _Encoder:
    if prepend_begin and tokenizer.begin is None:
        raise UserError(f"{tokenizer.spec}: has no beginning-of-document token to prepend: leave it out")
    begin = (tokenizer.begin,) if prepend_begin else ()
    return _Encoder(tokenizer, begin, (tokenizer.end_of_document,) if append_end else ())


def _description(encoder: _Encoder, key: str) -> dict:
    tokenizer = encoder.tokenizer
    return {
        "tokenizer": tokenizer.name,
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": encoder.end[0] if encoder.end else None,
        "begin": encoder.begin[0] if encoder.begin else None,
        "key": key,
    }


def _chunked(texts: Iterable[tuple[int, str]]) -> Iterator[Chunk]:
    chunk, characters = [], 0
    for text in texts:
        chunk.append(text)
        characters += len(text[1])
        if len(chunk) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _encoded(encoder: _Encoder, chunks: Iterable[Chunk], workers: int) -> Iterator[Encoded]:
    """The chunks' ids, in order."""
    if workers == 1:
        yield from map(encoder, chunks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("forkserver")) as pool:
        waiting: deque[Future] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_encode, encoder.recipe, chunk))
                if len(waiting) == AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process died (killed, or out of memory): nothing was written; use fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _encode(recipe: tuple, chunk: Chunk) -> Encoded:
    return _worker_encoder(*recipe)(chunk)


@lru_cache(maxsize=1)
def _worker_encoder(spec: str, begin: tuple[int, ...], end: tuple[int, ...]) -> _Encoder:
    return _Encoder(load_tokenizer(spec), begin, end)


def _check_content(sink: _Sink, inputs: Sequence[str | Path], keys: Sequence[str], faults: _Faults) -> None:
    for writer, key, empty in zip(sink.writers, keys, sink.empty):
        if writer.documents == 0:
            also = f" and {faults.count} malformed records, the first {faults.first[0]}" if faults.count else ""
            raise UserError(
                f"{', '.join(map(str, inputs))}: no content for {key!r}: {empty} empty documents{also}: "
                "correct the input or the key"
            )
