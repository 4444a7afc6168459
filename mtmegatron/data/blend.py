"""Mixing corpora: which corpus each sample of a run comes from.

Notable: the greedy rule keeps every corpus within about a sample of its share at every moment of the run, and a
longer run begins with the choices of a shorter one.
"""

from collections.abc import Sequence

import numpy as np

from mtmegatron.errors import UserError


def blend(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`size` choices of a corpus by its share: (corpus int16[size], which sample of that corpus int64[size]).

    Choice i is the corpus with the largest error `weight max(i, 1) - chosen so far`, the first of equals; weights are
    divided by their sum. Raises UserError for a weight that is not positive, and for more than 32767 corpora.
    """
    if any(not (np.isfinite(weight) and weight > 0) for weight in weights):
        raise UserError(
            f"blend weights {list(weights)}: each has to be a positive number: remove a corpus that should not be read"
        )
    return _greedy(np.asarray(weights, np.float64), size, np.full(len(weights), size))


def blend_exhaustive(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """As `blend`, with each corpus read exactly once: shares are the sizes, a corpus that is used up is left out."""
    return _greedy(np.asarray(sizes, np.float64), int(sum(sizes)), np.asarray(sizes))


def _greedy(weights: np.ndarray, size: int, available: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count = len(weights)
    if count > np.iinfo(np.int16).max:
        raise UserError(f"a blend of {count} corpora: at most {np.iinfo(np.int16).max}: merge some (`mtm data merge`)")
    if count == 1:
        return np.zeros(size, np.int16), np.arange(size, dtype=np.int64)
    weights, chosen, error = weights / weights.sum(), np.zeros(count), np.empty(count)
    weights[available == 0] = -np.inf  # an infinite debt: never the largest error
    corpus, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    for i in range(size):
        np.multiply(weights, max(i, 1), out=error)
        error -= chosen
        best = int(error.argmax())
        corpus[i], sample[i] = best, chosen[best]
        chosen[best] += 1
        if chosen[best] == available[best]:
            weights[best] = -np.inf
    return corpus, sample
