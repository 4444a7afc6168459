"""Samples for language modelling: `sequence + 1` tokens cut out of documents laid end to end, from one corpus or a
blend of several.

Notable: a dataset has no state: sample i is a pure function of (files, documents, sequence, samples' order rule,
seed). Where documents begin inside a sample comes from the index, not from a search for end-of-document ids, so
masking is right for corpora without them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from mtmegatron.data.blend import blend
from mtmegatron.data.cache import cached
from mtmegatron.data.indexed import IndexedReader
from mtmegatron.data.samples import epoch_index, together_index
from mtmegatron.data.tokenizers import Tokenizer
from mtmegatron.errors import UserError

SPLITS = ("train", "valid", "test")
INDEX = {"epochs": epoch_index, "together": together_index}


class Sample(NamedTuple):
    """One sample. Shapes: tokens sequence + 1 (int64): inputs are tokens[:sequence], labels tokens[1 : sequence + 1];
    behind them up to `ahead` more, for multi-token prediction.

    `starts` (int64, ascending): where the pieces of documents begin in `tokens`. The first is 0 (a document's
    beginning, or its continuation from another sample); the last may be `sequence` or more, where only labels are of a
    new document. With document masking, positions restart at each of them and the label before each (`labels[start -
    1]`) crosses a boundary.
    """

    tokens: np.ndarray
    starts: np.ndarray


class GPTDataset:
    """`samples` samples of the documents first .. last - 1 of an indexed file; `samples=None` is one pass.

    `shuffle`: see `samples.py`. `wrap`: whether a corpus that is too short starts a new epoch; else UserError "needs
    12 samples, has 5". `cache`: folder for the index, shared or not between the processes; None keeps it in memory.
    `ahead`: tokens that a sample shows beyond its last label, as far as its pass over the documents has them. They
    change neither the number of samples nor their order.
    """

    def __init__(
        self,
        reader: IndexedReader,
        *,
        documents: tuple[int, int] | None = None,
        sequence: int,
        samples: int | None = None,
        seed: int = 0,
        cache: str | Path | None = None,
        split_name: str = "train",
        wrap: bool = True,
        shuffle: Literal["epochs", "together"] = "epochs",
        ahead: int = 0,
    ):
        self.reader, self.sequence, self.split_name, self.ahead = reader, sequence, split_name, ahead
        self.first, last = documents or (0, reader.documents)
        self.documents = last - self.first
        tokens = reader.token_start(last) - reader.token_start(self.first)
        self.samples_per_epoch = max(0, tokens - 1) // sequence
        self.samples = self.samples_per_epoch if samples is None else samples
        self._check_request(tokens, last - self.first, samples, wrap, seed)
        description = {
            "kind": "gpt samples", "version": 1, "data": reader.identity, "documents": [self.first, last],
            "sequence": sequence, "samples": self.samples, "seed": seed, "shuffle": shuffle,
        }  # fmt: skip

        def build() -> dict[str, np.ndarray]:
            return INDEX[shuffle](reader.lengths[self.first : last], sequence, self.samples, seed)

        index = (
            cached(cache, description, build)
            if self.samples
            else dict.fromkeys(("order", "starts"), np.empty(0, np.int64))
        )
        self._order, self._starts = index["order"], index["starts"]

    @property
    def epochs(self) -> int:
        """Passes over the corpus that the samples begin: more than 1 says that the corpus is shorter than the run."""
        return -(-self.samples // max(1, self.samples_per_epoch))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self.samples:
            raise IndexError(f"sample {i} of {self.samples}")
        position, offset = (int(x) for x in self._starts[i])
        pieces, starts, found, wanted = [], [], 0, self.sequence + 1 + self.ahead
        while found < wanted and not (found > self.sequence and self._begins_a_pass(position)):
            document = self.first + int(self._order[position])
            length = self.reader.token_start(document + 1) - self.reader.token_start(document)
            piece = self.reader.read(document, offset, min(wanted - found, length - offset))
            if len(piece):
                starts.append(found)
                pieces.append(piece)
            found += len(piece)
            position, offset = position + 1, 0
        return Sample(np.concatenate(pieces).astype(np.int64), np.array(starts, np.int64))

    def _begins_a_pass(self, position: int) -> bool:
        """Whether a place in the order of documents comes after a whole pass: only a longer run has tokens there."""
        return position % self.documents == 0

    def _check_request(self, tokens: int, documents: int, samples: int | None, wrap: bool, seed: int) -> None:
        where = f"{self.reader.prefix}, split {self.split_name}"
        if tokens <= self.sequence and samples != 0:
            raise UserError(
                f"{where}: {tokens} tokens in {documents} documents, one sample needs {self.sequence + 1}: "
                "give this split more documents or shorten the sequence"
            )
        if self.samples > self.samples_per_epoch and not wrap:
            raise UserError(
                f"{where}: needs {self.samples} samples, has {self.samples_per_epoch}: "
                "allow it to wrap into a new epoch, train for fewer steps, or give more data"
            )
        if not 0 <= seed < 2**32:
            raise UserError(f"data seed {seed}: has to be between 0 and {2**32 - 1}")


class BlendedDataset:
    """Samples of several datasets: sample i is sample `sample[i]` of dataset `corpus[i]`."""

    def __init__(self, datasets: Sequence[GPTDataset], corpus: np.ndarray, sample: np.ndarray):
        self.datasets, self.corpus, self.sample = datasets, corpus, sample

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return self.datasets[self.corpus[i]][int(self.sample[i])]


def split_documents(documents: int, ratios: Sequence[float]) -> list[tuple[int, int]]:
    """Disjoint ranges (first, last) that cover all documents, one for each ratio; bounds are rounded."""
    if not ratios or min(ratios) < 0 or sum(ratios) <= 0:
        raise UserError(f"split {list(ratios)}: shares have to be 0 or more and not all 0, as 98, 1, 1")
    bounds = np.concatenate([[0], np.cumsum(ratios) / np.sum(ratios)])
    bounds = [int(round(share * documents)) for share in bounds.tolist()]
    return list(zip(bounds, bounds[1:]))


def build_dataset(
    corpora: Sequence[tuple[float, str | Path]],
    *,
    sequence: int,
    samples: int,
    seed: int = 0,
    split: Sequence[float] = (0.98, 0.01, 0.01),
    split_name: Literal["train", "valid", "test"] = "train",
    cache: str | Path | None = None,
    wrap: bool = True,
    shuffle: Literal["epochs", "together"] = "epochs",
    ahead: int = 0,
) -> BlendedDataset:
    """One split of (weight, prefix) corpora: each corpus is split by documents, then sampled by weight."""
    readers = [IndexedReader(prefix) for _, prefix in corpora]
    weights = [float(weight) for weight, _ in corpora]

    def build() -> dict[str, np.ndarray]:
        return dict(zip(("corpus", "sample"), blend(weights, samples)))

    chosen = cached(cache, {"kind": "blend", "version": 1, "weights": weights, "samples": samples}, build)
    needed = np.bincount(chosen["corpus"], minlength=len(readers)).tolist()
    which = SPLITS.index(split_name)
    datasets = [
        GPTDataset(
            reader, documents=_range(reader, split, which), sequence=sequence, samples=count, seed=seed, cache=cache,
            split_name=split_name, wrap=wrap, shuffle=shuffle, ahead=ahead,
        )
        for reader, count in zip(readers, needed)
    ]  # fmt: skip
    return BlendedDataset(datasets, chosen["corpus"], chosen["sample"])


def check_vocabulary(reader: IndexedReader, vocab_size: int, cache: str | Path | None = None) -> None:
    """Raises UserError when a token id is outside 0 .. vocab_size - 1. Reads all tokens, once per content."""
    file = str(Path(reader.prefix).absolute())
    description = {"kind": "extremes", "version": 1, "file": file, "data": reader.identity, "modified": reader.modified}
    found = cached(cache, description, lambda: {"extremes": np.array(reader.extremes(), np.int64)})["extremes"]
    for token, document in found.tolist():
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{reader.prefix}, document {document}: token id {token} is outside the vocabulary of {vocab_size}: "
                "the data was prepared with another tokenizer, prepare it with this one"
            )


def check_tokenizer(reader: IndexedReader, tokenizer: Tokenizer) -> None:
    """Raises UserError when the file was prepared with another tokenizer; a file that does not say passes."""
    known = reader.description
    if known.get("tokenizer_hash", tokenizer.hash) != tokenizer.hash:
        raise UserError(
            f"{reader.prefix}: prepared with tokenizer {known.get('tokenizer')} ({known.get('vocab_size')} ids), "
            f"the run has {tokenizer.name} ({tokenizer.vocab_size} ids): "
            "prepare it with this tokenizer, or name that one in the run"
        )


def _range(reader: IndexedReader, split: Sequence[float], which: int) -> tuple[int, int]:
    ranges = split_documents(reader.documents, split)
    return ranges[which] if which < len(ranges) else (0, 0)
