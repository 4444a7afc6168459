"""The dataset of language modelling: samples, document starts, splits, blends and its checks."""

import numpy as np
import pytest

from mtmegatron.data.gpt import (
    BlendedDataset,
    GPTDataset,
    build_dataset,
    check_tokenizer,
    check_vocabulary,
    split_documents,
)
from mtmegatron.data.indexed import IndexedReader
from mtmegatron.data.tokenizers import load_tokenizer
from mtmegatron.errors import UserError
from tests.data.test_indexed import write

DOCUMENTS = [[10, 11, 12], [20], [], [30, 31, 32, 33, 34], [40, 41]]


@pytest.fixture
def reader(tmp_path):
    return IndexedReader(write(tmp_path / "x", DOCUMENTS))


def stream(dataset):
    """Tokens of one epoch in document order, and where documents begin in it."""
    pieces = [dataset.reader.read(dataset.first + d) for d in dataset._order.tolist()]
    return np.concatenate(pieces), np.cumsum([0] + [len(piece) for piece in pieces])


def test_samples_are_cut_from_documents_with_their_starts(reader):
    dataset = GPTDataset(reader, sequence=3, seed=4)
    assert len(dataset) == dataset.samples_per_epoch == (11 - 1) // 3
    tokens, begins = stream(dataset)
    seen = []
    for sample in map(dataset.__getitem__, range(3)):
        assert sample.tokens.dtype == np.int64 and len(sample.tokens) == 4
        place = next(k for k in (0, 3, 6) if tokens[k : k + 4].tolist() == sample.tokens.tolist())
        inside = [b - place for b in sorted({*begins.tolist()}) if place < b < place + 4]
        assert sample.starts.tolist() == [0, *inside]
        seen.append(place)
    assert sorted(seen) == [0, 3, 6]


def test_samples_own_their_memory(reader):
    dataset = GPTDataset(reader, sequence=3)
    first = dataset[0].tokens.copy()
    dataset[0].tokens[:] = -1
    assert dataset[0].tokens.tolist() == first.tolist()


def test_bounds_are_checked(reader):
    dataset = GPTDataset(reader, sequence=3)
    for i in (-1, 3):
        with pytest.raises(IndexError):
            dataset[i]


def test_cache_holds_the_index_and_follows_the_content(tmp_path, reader):
    fresh = GPTDataset(reader, sequence=3, samples=9, cache=tmp_path / "cache")
    again = GPTDataset(reader, sequence=3, samples=9, cache=tmp_path / "cache")
    assert all(fresh[i].tokens.tolist() == again[i].tokens.tolist() for i in range(9))
    changed = IndexedReader(write(tmp_path / "x", [*DOCUMENTS[:4], [50] * 20]))  # as many documents, one longer
    other, alone = (GPTDataset(changed, sequence=3, samples=9, cache=cache) for cache in (tmp_path / "cache", None))
    assert [other[i].tokens.tolist() for i in range(9)] == [alone[i].tokens.tolist() for i in range(9)]


@pytest.mark.parametrize(
    "change", [{"sequence": 4}, {"seed": 1}, {"samples": 8}, {"documents": (0, 4)}, {"shuffle": "together"}]
)
def test_each_setting_has_its_own_cache_entry(tmp_path, reader, change):
    settings = {"sequence": 3, "seed": 0, "samples": 6, "cache": tmp_path / "cache"}
    GPTDataset(reader, **settings)
    cachless = GPTDataset(reader, **{**settings, **change, "cache": None})
    cached_one = GPTDataset(reader, **{**settings, **change})
    assert [cachless[i].tokens.tolist() for i in range(6)] == [cached_one[i].tokens.tolist() for i in range(6)]
    assert len(list((tmp_path / "cache").glob("*.lock"))) == 2


def test_split_too_small_for_a_sample_is_named(reader):
    with pytest.raises(UserError, match="x, split valid: 2 tokens in 1 documents, one sample needs 4"):
        GPTDataset(reader, sequence=3, samples=1, documents=(4, 5), split_name="valid")
    with pytest.raises(UserError, match="one sample needs 4"):
        GPTDataset(reader, sequence=3, documents=(4, 5))
    assert len(GPTDataset(reader, sequence=3, samples=0, documents=(4, 5))) == 0


def test_seed_outside_32_bits_is_refused(reader):
    with pytest.raises(UserError, match="data seed"):
        GPTDataset(reader, sequence=3, seed=2**32)


@pytest.mark.parametrize("documents", [0, 1, 5, 99, 100, 1001])
@pytest.mark.parametrize("ratios", [(0.98, 0.01, 0.01), (98, 1, 1), (50, 50, 0), (1,), (0, 0, 1)])
def test_splits_are_disjoint_and_cover_all(documents, ratios):
    ranges = split_documents(documents, ratios)
    assert [d for first, last in ranges for d in range(first, last)] == list(range(documents))
    for (first, last), ratio in zip(ranges, ratios):
        assert abs(last - first - documents * ratio / sum(ratios)) <= 1  # both bounds are rounded


@pytest.mark.parametrize("ratios", [(), (0, 0), (-1, 2)])
def test_senseless_splits_are_refused(ratios):
    with pytest.raises(UserError, match="split"):
        split_documents(10, ratios)


def corpora(tmp_path):
    """Two corpora whose tokens tell them and their documents apart."""
    return [write(tmp_path / name, [np.full(20, base + d) for d in range(10)]) for name, base in (("a", 0), ("b", 100))]


def test_blend_of_two_corpora(tmp_path):
    a, b = corpora(tmp_path)
    dataset = build_dataset([(0.7, a), (0.3, b)], sequence=8, samples=10, cache=tmp_path / "cache", split=(1,))
    assert isinstance(dataset, BlendedDataset) and len(dataset) == 10
    from_b = [bool((dataset[i].tokens >= 100).all()) for i in range(10)]
    assert from_b == [bool(c) for c in [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]]
    assert [len(part) for part in dataset.datasets] == [7, 3]
    alone = GPTDataset(IndexedReader(b), sequence=8, samples=3)
    assert [dataset[i].tokens.tolist() for i in (1, 4, 7)] == [alone[i].tokens.tolist() for i in range(3)]
    with pytest.raises(IndexError):
        dataset[10]


def test_splits_of_a_blend_share_no_document(tmp_path):
    a, b = corpora(tmp_path)
    seen = []
    for name in ("train", "valid", "test"):
        dataset = build_dataset([(1, a), (1, b)], sequence=8, samples=40, split=(60, 20, 20), split_name=name)
        seen.append({token for i in range(40) for token in dataset[i].tokens.tolist()})
    assert seen == [{*range(6), *range(100, 106)}, {6, 7, 106, 107}, {8, 9, 108, 109}]


def test_longer_run_of_a_blend_begins_with_the_shorter_one(tmp_path):
    a, b = corpora(tmp_path)
    short, long = (build_dataset([(2, a), (1, b)], sequence=8, samples=n, seed=3, split=(1,)) for n in (50, 120))
    assert [short[i].tokens.tolist() for i in range(50)] == [long[i].tokens.tolist() for i in range(50)]


def test_token_outside_the_vocabulary_is_named(tmp_path):
    prefix = write(tmp_path / "x", [[1, 2], [3, 259], [100000]])
    with pytest.raises(UserError, match=r"x, document 2: token id 100000 is outside the vocabulary of 259"):
        check_vocabulary(IndexedReader(prefix), 259)
    check_vocabulary(IndexedReader(prefix), 100001)
    with pytest.raises(UserError, match="document 1: token id -5"):
        check_vocabulary(IndexedReader(write(tmp_path / "y", [[1], [-5, 2]])), 259)
    with pytest.raises(UserError, match="holds float32"):
        check_vocabulary(IndexedReader(write(tmp_path / "z", [[1.5]], np.float32)), 259)


def test_vocabulary_check_is_cached_by_content(tmp_path, monkeypatch):
    prefix, scans = write(tmp_path / "x", [[1, 2], [3, 4]]), []
    scan = IndexedReader.extremes
    monkeypatch.setattr(IndexedReader, "extremes", lambda self: (scans.append(1), scan(self))[1])
    for _ in range(2):
        check_vocabulary(IndexedReader(prefix), 5, tmp_path / "cache")
    assert len(scans) == 1
    with open(f"{prefix}.bin", "r+b") as file:  # same lengths, other tokens
        file.write(np.array([77], "<i4").tobytes())
    with pytest.raises(UserError, match="document 0: token id 77"):
        check_vocabulary(IndexedReader(prefix), 5, tmp_path / "cache")


def test_tokenizer_of_the_data_has_to_be_that_of_the_run(tmp_path):
    tokenizer = load_tokenizer("bytes")
    silent = IndexedReader(write(tmp_path / "x", [[1]]))
    same = IndexedReader(
        write(tmp_path / "y", [[1]], description={"tokenizer": "bytes", "tokenizer_hash": tokenizer.hash})
    )
    other = IndexedReader(
        write(tmp_path / "z", [[1]], description={"tokenizer": "llama", "tokenizer_hash": "5", "vocab_size": 32000})
    )
    check_tokenizer(silent, tokenizer)
    check_tokenizer(same, tokenizer)
    with pytest.raises(
        UserError, match=r"z: prepared with tokenizer llama \(32000 ids\), the run has bytes \(257 ids\)"
    ):
        check_tokenizer(other, tokenizer)
