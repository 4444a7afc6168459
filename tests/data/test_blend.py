"""The blend: golden vectors, and closeness to the shares at every moment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.data.blend import blend, blend_exhaustive
from mtmegatron.errors import UserError


def test_golden():
    corpus, sample = blend([0.5, 0.3, 0.2], 10)
    assert corpus.dtype == np.int16 and sample.dtype == np.int64
    assert corpus.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0] and sample.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert blend([0.7, 0.3], 10)[0].tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
    assert blend_exhaustive([3, 1, 2])[0].tolist() == [0, 2, 1, 0, 2, 0]


def test_choice_is_the_largest_error_of_the_documented_rule():
    weights, chosen = [0.33, 0.23, 0.44], [0, 0, 0]
    for i, found in enumerate(blend(weights, 200)[0].tolist()):
        errors = [weight * max(i, 1) - count for weight, count in zip(weights, chosen)]
        assert found == errors.index(max(errors))
        chosen[found] += 1


def test_weights_need_not_add_up_to_one():
    assert blend([7, 3], 10)[0].tolist() == blend([0.7, 0.3], 10)[0].tolist()


@settings(max_examples=50)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(1, 300))
def test_every_corpus_stays_near_its_share_and_a_longer_run_begins_alike(weights, size):
    corpus, sample = blend(weights, size)
    share = np.array(weights) / sum(weights)
    for d in range(len(weights)):
        taken = np.cumsum(corpus == d)
        assert sample[corpus == d].tolist() == list(range(taken[-1]))
        assert (
            taken - share[d] * np.arange(1, size + 1)
        ).max() < 1  # never a whole sample ahead: it had the largest error before
    assert blend(weights, size + 7)[0][:size].tolist() == corpus.tolist()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any))
def test_exhaustive_reads_each_sample_once(sizes):
    corpus, sample = blend_exhaustive(sizes)
    expected = {(d, k) for d, size in enumerate(sizes) for k in range(size)}
    assert len(corpus) == len(expected) and set(zip(corpus.tolist(), sample.tolist())) == expected


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [1, float("nan")], [float("inf"), 1]])
def test_weights_have_to_be_positive(weights):
    with pytest.raises(UserError, match="positive"):
        blend(weights, 3)


def test_more_corpora_than_an_int16_counts_are_refused():
    with pytest.raises(UserError, match="32767"):
        blend([1.0] * 32768, 3)
