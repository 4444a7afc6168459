"""Context parallelism as users met it: a loss of wrong scale, positions that start anew, padding that poisons.

tests/parallel/test_context.py proves the attention of every kind; the cross product (tests/parity) whole runs."""

import pytest
import torch

from mtmegatron.batch import IGNORE, Batch, Bounds
from mtmegatron.parallel.context import ContextSplit
from mtmegatron.verify.protocol import batches
from tests.field.training import engine_of, joined, largest_difference, make_batch, name, parts_of, spread
from tests.tiny import GPT2, tiny

# sums of a few thousand terms, some hundred of them one after the other: far below any fault, far above rounding
REORDERED = 4096 * torch.finfo(torch.float64).eps
SMALL = {"model": {"layers": 2}, "optimizer": {"clip": 0.0}}
KINDS = [
    {"context": 2}, {"context": 2, "context_kind": "ring"}, {"context": 2, "context_kind": "ulysses"},
    {"context": 4, "context_kind": "ring-ulysses", "ulysses": 2},
]  # fmt: skip


# ---- P12: scale of the loss ----


def gradients_of(rank: int, world: int, layout: dict):
    engine = engine_of(tiny(SMALL), layout, rank, world)
    mine = batches(engine, 0)
    return engine.gradients(mine, engine.count_tokens(mine)), parts_of(engine, gradients=True)


@pytest.mark.parametrize("layout", [*KINDS, {"context": 4}, {"data": 2, "context": 2}, {"data": 4}], ids=name)
def test_p12_loss_norm_and_gradients_are_those_of_one_process(layout, pool):
    ((right, whole),) = spread(pool, gradients_of, {}, {})
    ranks = spread(pool, gradients_of, layout, layout)
    assert all(numbers == pytest.approx(right, rel=REORDERED) for numbers, _ in ranks)
    assert largest_difference(joined([parts for _, parts in ranks]), joined([whole])) < REORDERED


# ---- P18: positions ----


def test_p18_each_rank_has_the_positions_of_its_tokens_in_the_whole_sequence():
    held = [batches(engine_of(tiny(SMALL, data={"sequence": 8}), {"context": 2}, rank), 0)[0] for rank in (0, 1)]
    assert held[0].positions.tolist() == [0, 1, 6, 7] * 2
    assert held[1].positions.tolist() == [2, 3, 4, 5] * 2


def logits_of(rank: int, world: int, layout: dict, changes: dict, reverse: bool):
    """Logits of this rank's tokens of two sequences of 8, whose positions the batch gives in reverse or not."""
    engine = engine_of(tiny(SMALL, changes, data={"sequence": 8}), layout, rank, world)
    batch = make_batch(259, [8, 8], seed=1)
    if reverse:
        batch.positions = batch.positions.flip(0)
    split = ContextSplit(engine.mesh["context"].size, engine.mesh["context"].rank)
    with torch.no_grad():
        return split.indices(2, 8).numpy(), engine.model.logits(engine.model(None, split.select(batch, 2))).numpy()


@pytest.mark.parametrize("layout", [*KINDS, {"context": 2, "tensor": 2}], ids=name)
@pytest.mark.parametrize("changes", [{}, GPT2], ids=["rotary", "learned"])
def test_p18_logits_are_those_of_one_process_also_with_explicit_positions(layout, changes, pool):
    whole = {}
    for reverse in (False, True):
        ((_, whole[reverse]),) = spread(pool, logits_of, {}, {}, changes, reverse)
        for held, logits in spread(pool, logits_of, layout, layout, changes, reverse):
            assert logits == pytest.approx(whole[reverse][held], abs=REORDERED * abs(whole[reverse]).max())
    assert abs(whole[False] - whole[True]).max() > 1e-3, "positions make no difference here"


# ---- P20: padding ----

LENGTH = 7  # true length, which nothing divides
PAD = 258  # a token that stands nowhere else


def padded(sequences: int = 2) -> Batch:
    """Sequences of 7 tokens and a pad each; the pad is its own document and has no label."""
    short = make_batch(PAD, [LENGTH] * sequences, seed=4)
    tokens, labels = (torch.full((sequences, LENGTH + 1), fill) for fill in (PAD, IGNORE))
    positions = torch.zeros(sequences, LENGTH + 1, dtype=torch.int64)
    for target, values in ((tokens, short.tokens), (labels, short.labels), (positions, short.positions)):
        target[:, :LENGTH] = values.view(sequences, LENGTH)
    starts = [start for s in range(sequences) for start in (s * (LENGTH + 1), s * (LENGTH + 1) + LENGTH)]
    return Batch(tokens.flatten(), labels.flatten(), positions.flatten(), Bounds((*starts, sequences * (LENGTH + 1))))


def padded_run(rank: int, world: int, layout: dict, garbage: float):
    """Hidden states of this rank's tokens, the summed loss, then gradients, where the pad's embedding is `garbage`."""
    engine = engine_of(tiny(SMALL, data={"sequence": LENGTH + 1}), layout, rank, world)
    with torch.no_grad():
        engine.model.embedding.weight[PAD] = garbage
        split = ContextSplit(engine.mesh["context"].size, engine.mesh["context"].rank)
        mine = split.select(padded(), 2)
        hidden = engine.model(None, mine).numpy()
    total, tokens = engine.evaluate([mine])
    loss, _, norm = engine.gradients([mine], tokens)
    return split.indices(2, LENGTH + 1).numpy(), hidden, (total, tokens, loss), norm


def unpadded():
    """Hidden states [2, 7, D], (summed loss, tokens, mean loss) and norm of one process without any pad."""
    engine = engine_of(tiny(SMALL), {})
    batch = make_batch(PAD, [LENGTH] * 2, seed=4)
    with torch.no_grad():
        hidden = engine.model(None, batch).numpy().reshape(2, LENGTH, -1)
    total, tokens = engine.evaluate([batch])
    loss, _, norm = engine.gradients([batch], tokens)
    return hidden, (total, tokens, loss), norm


@pytest.mark.parametrize("garbage", [0.5, float("nan")])
@pytest.mark.parametrize("layout", [{}, *KINDS], ids=name)
def test_p20_padding_reaches_nobody(layout, garbage, pool):
    right, numbers, norm = unpadded()
    for held, hidden, found, found_norm in spread(pool, padded_run, layout, layout, garbage):
        true = held % (LENGTH + 1) < LENGTH
        expected = right[held[true] // (LENGTH + 1), held[true] % (LENGTH + 1)]
        assert hidden[true] == pytest.approx(expected, abs=REORDERED * abs(right).max())
        assert found == pytest.approx(numbers, rel=REORDERED)
        if garbage == garbage:  # a NaN makes 0 x NaN of the pad in every weight's gradient: the step is refused instead
            assert found_norm == pytest.approx(norm, rel=REORDERED)
