"""Which tokens make sample i: the order of documents, where each sample begins in it, and the order of samples.

Notable: plain numpy, 64-bit throughout, no loop over documents or samples. Two rules. `epochs`: every pass over the
corpus is cut into the same number of samples and shuffled for itself, drawn after the passes before it, so the order
never depends on how long the run is. `together`: the rule of Megatron, which shuffles all passes as one; a run that
began there sees the same samples here. A run within one pass is the same under both. `RandomState` is used because
numpy promises that its streams never change (NEP 19).
"""

import numpy as np

SEPARATE_BELOW = 0.8  # Megatron: a last epoch that gives fewer of its samples than this is shuffled for itself


def document_order(documents: int, epochs: int, rng: np.random.RandomState) -> np.ndarray:
    """`epochs` copies of 0 .. documents - 1, shuffled together: int32, or int64 where that is too small."""
    order = np.tile(np.arange(documents, dtype=_index_dtype(documents)), epochs)
    rng.shuffle(order)
    return order


def sample_index(lengths: np.ndarray, order: np.ndarray, sequence: int, extra: int = 1) -> np.ndarray:
    """Boundaries of the samples of `sequence` tokens in the documents laid end to end in `order`.

    Row i is (position in `order`, offset in that document) where sample i begins; it reads `sequence + extra` tokens.
    The row after the last sample is where the next one would. `n = (tokens - extra) // sequence` samples. Shapes:
    lengths documents, order any; result (n + 1, 2) int64.
    """
    ends = np.cumsum(lengths[order], dtype=np.int64)
    samples = (int(ends[-1]) - extra) // sequence if len(ends) else 0
    return _locate(np.arange(samples + 1, dtype=np.int64) * sequence, ends, extra)


def epoch_index(lengths: np.ndarray, sequence: int, samples: int, seed: int) -> dict[str, np.ndarray]:
    """`order` of documents and `starts` (samples, 2) of shuffled samples, each epoch for itself.

    An epoch is `(tokens - 1) // sequence` samples; sample i belongs to epoch `i // that`, and is the same however
    many samples are asked for.
    """
    tokens, rng = int(lengths.sum(dtype=np.int64)), np.random.RandomState(seed)
    per_epoch = (tokens - 1) // sequence
    epochs = -(-samples // per_epoch)
    order = np.empty((epochs, len(lengths)), _index_dtype(len(lengths)))
    positions = np.empty((epochs, per_epoch), np.int64)
    for epoch in range(epochs):
        order[epoch] = document_order(len(lengths), 1, rng)
        positions[epoch] = _shuffled(0, per_epoch, rng)
    positions *= sequence
    positions += np.arange(epochs, dtype=np.int64)[:, None] * tokens
    order = order.reshape(-1)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    return {"order": order, "starts": _locate(positions.reshape(-1)[:samples], ends, extra=1)}


def together_index(lengths: np.ndarray, sequence: int, samples: int, seed: int) -> dict[str, np.ndarray]:
    """`order` and `starts` as Megatron draws them for a run of `samples` samples: all epochs shuffled together.

    A last epoch that would give less than 80 % of its samples is kept apart, so that a sample is not seen twice while
    others wait.
    """
    documents, tokens, rng = len(lengths), int(lengths.sum(dtype=np.int64)), np.random.RandomState(seed)
    epochs = max(1, -(-(samples * sequence + 1) // tokens))
    before_last = ((epochs - 1) * tokens - 1) // sequence
    separate = epochs > 1 and samples - before_last < int(SEPARATE_BELOW * ((tokens - 1) // sequence))
    order = document_order(documents, epochs - separate, rng)
    if separate:
        order = np.concatenate([order, document_order(documents, 1, rng)])
    starts = sample_index(lengths, order, sequence)[:-1]
    first = before_last if separate else len(starts)
    shuffle = np.concatenate([_shuffled(0, first, rng), _shuffled(first, len(starts), rng)])
    return {"order": order, "starts": starts[shuffle[:samples]]}


def _locate(positions: np.ndarray, ends: np.ndarray, extra: int) -> np.ndarray:
    """(document, offset) of token positions, given the ends of the documents.

    With `extra` it is the document of the token at the position; without, of the token before, the last of a sample.
    """
    document = np.searchsorted(ends, np.maximum(positions + extra - 1, 0), side="right")
    before = np.where(document > 0, ends[document - 1], 0)
    return np.stack([document, positions - before], axis=1)


def _shuffled(first: int, last: int, rng: np.random.RandomState) -> np.ndarray:
    numbers = np.arange(first, last, dtype=np.int64)
    rng.shuffle(numbers)
    return numbers


def _index_dtype(documents: int) -> np.dtype:
    return np.dtype(np.int32 if documents <= np.iinfo(np.int32).max else np.int64)
