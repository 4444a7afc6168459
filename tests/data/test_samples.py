"""The order of documents and samples: golden vectors, and the laws of an epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.data.samples import document_order, epoch_index, sample_index, together_index

LENGTHS = np.array([5, 3, 8], np.int32)


@pytest.mark.parametrize(
    "lengths, order, extra, expected",
    [
        ([5, 3, 8], [0, 1, 2], 1, [(0, 0), (0, 4), (2, 0), (2, 4)]),
        ([5, 3, 8], [0, 1, 2], 0, [(0, 0), (0, 4), (1, 3), (2, 4), (2, 8)]),
        ([5, 3, 9], [0, 1, 2], 1, [(0, 0), (0, 4), (2, 0), (2, 4), (2, 8)]),
        ([5, 3, 8], [2, 0, 1, 1, 2, 0], 1, [(0, 0), (0, 4), (1, 0), (1, 4), (3, 0), (4, 1), (4, 5), (5, 1)]),
    ],
)
def test_sample_index_golden(lengths, order, extra, expected):
    found = sample_index(np.array(lengths, np.int32), np.array(order), 4, extra)
    assert found.dtype == np.int64 and [tuple(row) for row in found.tolist()] == expected


def test_orders_golden():
    rng = np.random.RandomState(1234)
    shuffle = np.arange(8)
    assert document_order(5, 1, rng).tolist() == [4, 0, 1, 2, 3]
    rng.shuffle(shuffle)
    assert shuffle.tolist() == [2, 6, 7, 3, 5, 1, 0, 4]
    rng = np.random.RandomState(1234)
    shuffle = np.arange(7)
    assert document_order(3, 2, rng).tolist() == [2, 1, 2, 0, 1, 0]
    rng.shuffle(shuffle)
    assert shuffle.tolist() == [5, 0, 3, 4, 2, 6, 1]


def test_together_index_is_document_order_then_shuffle():
    found = together_index(LENGTHS, sequence=4, samples=7, seed=1234)  # 7 samples of 32 tokens: both epochs whole
    assert found["order"].tolist() == [2, 1, 2, 0, 1, 0]
    straight = sample_index(LENGTHS, found["order"], 4)[:-1]
    assert found["starts"].tolist() == straight[[5, 0, 3, 4, 2, 6, 1]].tolist()


def test_together_index_keeps_a_short_last_epoch_apart():
    """4 samples of 3 per epoch: the second epoch gives 1 of 3 (< 80 %), so the first epoch's samples all come first."""
    found = together_index(LENGTHS, sequence=4, samples=4, seed=3)
    assert sorted(found["order"][:3].tolist()) == sorted(found["order"][3:].tolist()) == [0, 1, 2]
    straight = sample_index(LENGTHS, found["order"], 4)[:-1].tolist()
    assert sorted(found["starts"][:3].tolist()) == sorted(straight[:3])


def test_one_epoch_is_the_same_under_both_rules():
    lengths = np.random.RandomState(0).randint(0, 30, 50)
    for samples in (1, 20, (int(lengths.sum()) - 1) // 7):
        ours, theirs = epoch_index(lengths, 7, samples, 5), together_index(lengths, 7, samples, 5)
        assert (
            ours["order"].tolist() == theirs["order"].tolist() and ours["starts"].tolist() == theirs["starts"].tolist()
        )


def tokens_of(index, lengths, length):
    """Tokens of each sample by walking the documents one token at a time; token k of document d is (d, k)."""
    stream = [(int(d), k) for d in index["order"] for k in range(lengths[d])]
    begins = np.concatenate([[0], np.cumsum(lengths[index["order"]])])
    return [tuple(stream[begins[p] + offset :][:length]) for p, offset in index["starts"].tolist()]


corpora = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 6)


@settings(max_examples=60)
@given(corpora, st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_epochs_are_permutations_cut_from_the_corpus(lengths, sequence, samples, seed):
    lengths = np.array(lengths)
    per_epoch = (int(lengths.sum()) - 1) // sequence
    index = epoch_index(lengths, sequence, samples, seed)
    assert index["starts"].dtype == np.int64 and len(index["starts"]) == samples
    assert (
        index["starts"][:, 1] < lengths[index["order"]][index["starts"][:, 0]]
    ).all()  # begins at a token, not at an end
    found = tokens_of(index, lengths, sequence + 1)
    assert {len(tokens) for tokens in found} == {sequence + 1}
    for first in range(0, samples - per_epoch + 1, per_epoch):
        epoch = first // per_epoch
        assert sorted(index["order"][epoch * len(lengths) :][: len(lengths)]) == list(range(len(lengths)))
        inputs = [token for tokens in found[first : first + per_epoch] for token in tokens[:-1]]
        assert len(set(inputs)) == len(inputs) == per_epoch * sequence  # no token twice in an epoch


@settings(max_examples=30)
@given(corpora, st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))
def test_longer_run_begins_with_the_shorter_one(lengths, sequence, samples, more):
    lengths = np.array(lengths)
    short, long = (epoch_index(lengths, sequence, n, 7) for n in (samples, samples + more))
    assert short["starts"].tolist() == long["starts"][:samples].tolist()
    assert short["order"].tolist() == long["order"][: len(short["order"])].tolist()


def test_order_is_a_function_of_the_seed():
    lengths = np.full(50, 10)
    once, again, other = (epoch_index(lengths, 4, 200, seed)["starts"].tolist() for seed in (1, 1, 2))
    assert once == again != other
    assert once[:124] != once[124:]


def test_token_count_beyond_32_bits():
    lengths = np.array([2**31 - 1] * 4, np.int32)
    found = sample_index(lengths, np.arange(4, dtype=np.int32), 2**30)
    assert found.tolist() == [
        [0, 0],
        [0, 2**30],
        [1, 1],
        [1, 2**30 + 1],
        [2, 2],
        [2, 2**30 + 2],
        [3, 3],
        [3, 2**30 + 3],
    ]


def test_document_numbers_are_small_integers_while_they_fit():
    assert document_order(3, 2, np.random.RandomState(0)).dtype == np.int32
