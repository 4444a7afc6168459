"""Wrong losses and gradients that users met when they ran in parallel; each test is named after its report.

tests/parity proves that every layout gives the loss, norm, gradients, weights and zero count of one process. It covers
P02 and P06 (norms of tied models and of stages), P03 (copies in the norm), P10 and P11 (scale of the gradients under a
pipeline), P16 (fewer key/value heads than tensor ranks) and P37 (accumulation). tests/ops covers P13 (smoothing over a
split vocabulary). Not repeated here.

fp64 wherever two orders of the same sums are compared: a fault of logic moves a number by 1e-2, another order by 1e-15.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from mtmegatron.batch import IGNORE
from mtmegatron.config.constraints import check, faults
from mtmegatron.config.derived import layout_of
from mtmegatron.errors import UserError
from mtmegatron.layers.build import Build
from mtmegatron.layers.linear import Linear
from mtmegatron.mesh import Mesh
from mtmegatron.verify.protocol import batches
from tests.field.training import (
    engine_of,
    joined,
    largest_difference,
    make_batch,
    name,
    parts_of,
    spread,
)
from tests.tiny import tiny

EPS = torch.finfo(torch.float64).eps
# sums of a few thousand terms, some hundred of them one after the other: far below any fault, far above rounding
REORDERED = 4096 * EPS
SMALL = {"model": {"layers": 2}, "optimizer": {"clip": 0.0}}


# ---- the clipping norm ----


def norm_of_biases_alone(rank, world, layout):
    """The norm when nothing but two split biases have a gradient: 1, 2, 3, ... of the query, and of the key."""
    config = tiny(model={"layers": 1, "bias_qkv": True, "kv_heads": 1})
    engine = engine_of(config, layout, rank, world)
    engine.buckets.start()
    for which in ("query", "key"):
        bias = engine.model.get_parameter(f"layers.0.attention.{which}.bias")
        whole = torch.arange(1.0, bias.placement.shape[0] + 1, dtype=torch.float64)
        copies = engine.mesh["data_shards", "context", "key_value_copies"].size if which == "key" else 1
        bias.grad_sum.copy_(bias.placement.part(whole, engine.mesh.layout, rank) / copies)
    engine.buckets.finish()
    return math.sqrt(engine.mesh.world.all_reduce(engine.buckets.squared_norm().reshape(1)).item())


@pytest.mark.parametrize("sequence", [True, False])
def test_p04_split_biases_count_in_the_norm(sequence, pool):
    right = math.sqrt(sum(i * i for i in range(1, 65)) + sum(i * i for i in range(1, 17)))
    assert spread(pool, norm_of_biases_alone, {}, {}) == [pytest.approx(right, rel=REORDERED)]
    layout = {"tensor": 2, "sequence": sequence}
    assert spread(pool, norm_of_biases_alone, layout, layout) == [pytest.approx(right, rel=REORDERED)] * 2


# ---- unequal tokens ----


def uneven_batches(config, micro_batch: int, rank: int = 0, ranks: int = 1):
    """8 sequences with 30, 2, 0, 17, ... valid tokens, cut in micro-batches for a data rank."""
    valid = [30, 2, 0, 17, 32, 1, 9, 25]
    one = make_batch(config.model.vocab, [32] * 8, seed=5, valid=valid)
    made = []
    for start in range(rank * micro_batch, 8, ranks * micro_batch):
        cut = slice(start * 32, (start + micro_batch) * 32)
        part = make_batch(config.model.vocab, [32] * micro_batch, seed=0)
        part.tokens, part.labels = one.tokens[cut].clone(), one.labels[cut].clone()
        made.append(part)
    return made


def step_and_evaluate(rank, world, layout, changes=None):
    """(training loss, z term, norm, evaluation's mean) and gradients for the uneven batch."""
    config = tiny(SMALL, changes or {}, train={"micro_batch": layout.get("micro_batch", 2)})
    engine = engine_of(config, layout, rank, world)
    mine = uneven_batches(
        config, engine.config.train.micro_batch, engine.mesh.coordinate("data"), engine.mesh["data"].size
    )
    total, tokens = engine.evaluate(mine)
    numbers = engine.gradients(mine, engine.count_tokens(mine))
    return (*numbers, total / tokens), parts_of(engine, gradients=True)


CUTS = [{"micro_batch": 1}, {"micro_batch": 2}, {"micro_batch": 4}]
SPREAD = [{"data": 2, "micro_batch": 1}, {"data": 2, "micro_batch": 4}, {"pipeline": 2, "micro_batch": 1}]


@pytest.mark.parametrize("layout", CUTS + SPREAD, ids=name)
def test_p07_p09_unequal_tokens_give_one_loss_whatever_the_micro_batch(layout, pool):
    (right, gradients), *_ = spread(pool, step_and_evaluate, {}, {"micro_batch": 8})
    ranks = spread(pool, step_and_evaluate, layout, layout)
    for numbers, _ in ranks:
        assert numbers == pytest.approx(right, rel=REORDERED)
    assert largest_difference(joined([parts for _, parts in ranks]), joined([gradients])) < REORDERED


def test_p07_the_loss_is_the_mean_over_tokens_not_of_means():
    config = tiny(SMALL)
    engine = engine_of(config, {})
    long, short = make_batch(259, [32], seed=1, valid=[30]), make_batch(259, [32], seed=2, valid=[2])
    a, b = (total / tokens for total, tokens in (engine.evaluate([long]), engine.evaluate([short])))
    assert engine.gradients([long, short], 32)[0] == pytest.approx((30 * a + 2 * b) / 32, rel=REORDERED)
    assert abs((30 * a + 2 * b) / 32 - (a + b) / 2) > 1e-4, "these samples cannot tell the two apart"


def logits_rank(rank, world, layout):
    """(whole logits through torch's cross entropy, the engine's loss), summed over tokens, on each tensor rank."""
    config = tiny(SMALL)
    engine = engine_of(config, layout, rank, world)
    batch = make_batch(259, [32, 32], seed=3, valid=[32, 11])
    with torch.no_grad():
        logits = engine.model.logits(engine.model(None, batch))
    return F.cross_entropy(logits, batch.labels, reduction="sum").item(), engine.evaluate([batch])[0]


def test_p14_gathered_logits_give_the_loss_of_the_split_ones(pool):
    (right, _), *_ = spread(pool, logits_rank, {}, {})
    for gathered, split in spread(pool, logits_rank, {"tensor": 4}, {"tensor": 4}):
        assert [gathered, split] == pytest.approx([right, right], rel=REORDERED)


@pytest.mark.parametrize("layout", [{"micro_batch": 1}, {"micro_batch": 4}, {"data": 2}], ids=name)
def test_p33_the_z_term_is_a_mean_over_tokens(layout, pool):
    weight, config = 1e-2, tiny(SMALL)
    engine = engine_of(config, {})
    (whole,) = uneven_batches(config, 8)
    with torch.no_grad():
        lse = engine.model.logits(engine.model(None, whole)).logsumexp(-1)
    right = weight * lse[whole.labels != IGNORE].square().mean().item()
    changes = {"train": {"z_loss": weight}}
    for (_, z_loss, *_), _ in spread(pool, step_and_evaluate, layout, layout, changes):
        assert z_loss == pytest.approx(right, rel=REORDERED)


def no_label_rank(rank, world, layout, masked):
    """Loss and norm when the sequences `masked` have no label; then what a step with no label at all does."""
    config = tiny(SMALL, train={"global_batch": 4, "micro_batch": 1})
    engine = engine_of(config, layout, rank, world)
    coordinate, ranks = engine.mesh.coordinate("data"), engine.mesh["data"].size
    mine = [make_batch(259, [32], seed=i, valid=[0 if i in masked else 20 + i]) for i in range(coordinate, 4, ranks)]
    result = engine.step(mine, 0)
    before = parts_of(engine)
    for batch in mine:
        batch.labels.fill_(IGNORE)
    empty = engine.step(mine, 1)
    unchanged = all((before[n][2] == value).all() for n, (_, _, value) in parts_of(engine).items())
    return result.loss, result.grad_norm, result.tokens, result.fault, empty, unchanged, engine.optimizer.updates


@pytest.mark.parametrize("masked", [(1, 3), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("layout", [{"data": 2}, {"pipeline": 2}], ids=name)
def test_p35_ranks_and_micro_batches_without_a_label(layout, masked, pool):
    ((loss, norm, tokens, fault, *_),) = spread(pool, no_label_rank, {}, {}, masked)
    assert math.isfinite(loss) and loss > 1 and norm > 0 and not fault
    for rank in spread(pool, no_label_rank, layout, layout, masked):
        assert rank[:4] == (pytest.approx(loss, rel=REORDERED), pytest.approx(norm, rel=REORDERED), tokens, "")


@pytest.mark.parametrize("layout", [{}, {"data": 2}, {"pipeline": 2}], ids=name)
def test_p35_a_global_batch_without_a_label_changes_nothing_and_says_so(layout, pool):
    for *_, empty, unchanged, updates in spread(pool, no_label_rank, layout, layout, (1,)):
        assert "no token" in empty.fault and empty.tokens == 0 and (empty.loss, empty.grad_norm) == (0.0, 0.0)
        assert unchanged and updates == 1


# ---- what does not divide ----


@pytest.mark.parametrize(
    "changes, tensor, words",
    [
        ({"model": {"heads": 25, "width": 1600, "kv_heads": None}}, 2, ["tensor: 2", "heads: 25", "1, 5 or 25"]),
        ({"model": {"heads": 4, "kv_heads": 4}}, 3, ["tensor: 3", "heads: 4", "1, 2 or 4"]),
        ({"model": {"heads": 14, "kv_heads": 2, "width": 896}}, 4, ["tensor: 4", "heads: 14", "1, 2 or 14"]),
        ({"model": {"heads": 12, "kv_heads": 4, "width": 96}}, 6, ["tensor: 6", "kv_heads: 4", "1, 2, 4 or 12"]),
    ],
)
def test_p16_heads_that_do_not_divide_are_refused_before_the_model_exists(changes, tensor, words):
    with pytest.raises(UserError) as caught:
        check(tiny(changes, parallel={"tensor": tensor}), tensor)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_p17_a_sequence_that_the_tensor_ranks_cannot_share_is_refused_with_the_next_that_they_can():
    def lines(**parallel):
        config = tiny(data={"sequence": 30}, train={"micro_batch": 1, "global_batch": 4}, parallel=parallel)
        return list(faults(config, 4))

    (line,) = lines(tensor=4)
    assert "sequence: 30" in line and "tensor: 4" in line and "28 or 32" in line
    assert not lines(tensor=4, sequence=False) and not lines(tensor=2)


def odd_length_rank(rank, world, layout):
    config = tiny(SMALL, data={"sequence": 31}, train={"micro_batch": 1, "global_batch": 2})
    engine = engine_of(config, layout, rank, world)
    return engine.gradients([make_batch(259, [31], 1), make_batch(259, [31], 2)], 62)


def test_p17_without_sequence_parallel_any_length_runs(pool):
    (right,) = spread(pool, odd_length_rank, {}, {})
    layout = {"tensor": 4, "sequence": False}
    assert spread(pool, odd_length_rank, layout, layout) == [pytest.approx(right, rel=REORDERED)] * 4


@pytest.mark.parametrize("global_batch, repair", [(7, "6 or 12"), (10, "6 or 12"), (4, "6 or 12"), (20, "18 or 24")])
def test_p34_a_batch_with_a_partial_window_is_refused(global_batch, repair):
    config = tiny(train={"global_batch": global_batch, "micro_batch": 2})
    (line,) = faults(config, 3)
    assert (
        f"global_batch: {global_batch}" in line
        and "micro_batch: 2" in line
        and "data ranks 3" in line
        and repair in line
    )
    with pytest.raises(UserError, match="micro_batch: 0 is refused"):
        tiny(train={"micro_batch": 0})


# ---- layers and stages ----


def tables_rank(rank, world, layout, steps):
    """The tied table after every step, where this rank has it, and the losses."""
    config = tiny(
        model={"tied": True},
        optimizer={"decay_embeddings": True, "weight_decay": 0.1},
        train={"global_batch": 4, "micro_batch": 1},
    )
    engine = engine_of(config, layout, rank, world)
    tables, losses = [], []
    for step in range(steps):
        losses.append(engine.step(batches(engine, step), step).loss)
        tables.append(
            engine.model.embedding.weight.detach().clone().numpy() if hasattr(engine.model, "embedding") else None
        )
    return tables, losses


def tolerance_after(steps: int, lr: float) -> float:
    """What rounding of gradients may move a weight by: 64 units of rounding on gradients of size 1, once a step.

    Adam divides by the gradient plus 1e-8, so an element whose gradient is near zero carries a relative error of
    rounding / 1e-8."""
    return steps * lr * 64 * EPS / 1e-8


@pytest.mark.parametrize("pipeline", [2, 4])
def test_p26_tied_tables_of_both_ends_stay_the_same_bits(pipeline, pool):
    steps, layout = 10, {"pipeline": pipeline, "data": 2, "zero": 1}
    ((right, losses),) = spread(pool, tables_rank, {}, {}, steps)
    ranks = spread(pool, tables_rank, layout, layout, steps)
    holders = [tables for tables, _ in ranks if tables[0] is not None]
    assert len(holders) == 4
    for step in range(steps):
        assert len({table[step].tobytes() for table in holders}) == 1, f"step {step}"
    assert abs(holders[0][-1] - right[-1]).max() < tolerance_after(steps, 1e-2)
    assert all(loss == pytest.approx(losses, abs=tolerance_after(steps, 1e-2)) for _, loss in ranks)


def few_layers_rank(rank, world, layout):
    config = tiny(model={"layers": 2, "tied": True}, train={"global_batch": 4, "micro_batch": 1})
    engine = engine_of(config, layout, rank, world)
    return [engine.step(batches(engine, step), step).loss for step in range(3)]


@pytest.mark.parametrize("layout", [{"pipeline": 4, "zero": 1}, {"pipeline": 4, "zero": 1, "data": 2}], ids=name)
def test_p27_stages_without_layers_train(layout, pool):
    (right,) = spread(pool, few_layers_rank, {}, {})
    for losses in spread(pool, few_layers_rank, layout, layout):
        assert losses == pytest.approx(right, abs=tolerance_after(3, 1e-2))
    with pytest.raises(UserError, match="pipeline: 5.*use at most 4"):
        check(tiny(model={"layers": 2}, parallel={"pipeline": 5}), 5)


# ---- micro-batches ----


def shapes_rank(rank, world, layout):
    """Micro-batches of other lengths, the last with one sequence where the others have two."""
    config = tiny(model={"layers": 4}, optimizer={"clip": 0.0})
    engine = engine_of(config, layout, rank, world)
    lengths = [[32, 32], [20, 20], [32, 18], [7, 9], [32]]
    mine = [make_batch(259, many, seed) for seed, many in enumerate(lengths)]
    return engine.gradients(mine, engine.count_tokens(mine)), engine.evaluate(mine)[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline": 2},
        {"pipeline": 4},
        {"pipeline": 2, "schedule": "gpipe"},
        {"pipeline": 2, "tensor": 2, "sequence": False},
    ],
    ids=name,
)
def test_p28_shapes_change_between_micro_batches(layout, pool):
    ((right, evaluated),) = spread(pool, shapes_rank, {}, {})
    for numbers, total in spread(pool, shapes_rank, layout, layout):
        assert numbers == pytest.approx(right, rel=REORDERED) and total == pytest.approx(evaluated, rel=REORDERED)


def few_micro_batches_rank(rank, world, layout, count):
    config = tiny(train={"global_batch": count, "micro_batch": 1})
    engine = engine_of(config, layout, rank, world)
    mine = [make_batch(259, [32], seed) for seed in range(count)]
    return engine.gradients(mine, 32 * count)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_p29_fewer_micro_batches_than_stages(count, schedule, pool):
    (right,) = spread(pool, few_micro_batches_rank, {}, {}, count)
    layout = {"pipeline": 4, "schedule": schedule}
    assert spread(pool, few_micro_batches_rank, layout, layout, count) == [pytest.approx(right, rel=REORDERED)] * 4


# ---- ZeRO, overlap ----


def weights_rank(rank, world, layout, steps, evaluate, micro_batch):
    config = tiny(SMALL, optimizer={"clip": 0.5}, train={"global_batch": 6, "micro_batch": micro_batch})
    engine = engine_of(config, layout, rank, world, "fp32")
    held_out = [make_batch(259, [32], 99)]
    norms = []
    for step in range(steps):
        norms.append(engine.step(batches(engine, step), step).grad_norm)
        if evaluate:
            engine.evaluate(held_out)
    return parts_of(engine), norms


def same(a: list, b: list) -> bool:
    return all(
        x[1] == y[1] and x[0].keys() == y[0].keys() and all((x[0][n][2] == y[0][n][2]).all() for n in x[0])
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "pipeline": 2}, {"data": 2, "tensor": 2}], ids=name)
def test_p30_overlap_changes_no_bit(axes, pool):
    assert same(
        *(spread(pool, weights_rank, axes, axes | {"zero": 1, "overlap": on}, 4, True, 1) for on in (True, False))
    )


@pytest.mark.parametrize("micro_batch", [3, 1])
def test_p31_zero_stages_agree_for_twenty_steps(micro_batch, pool):
    layout = {"data": 2}
    runs = [spread(pool, weights_rank, layout, layout | {"zero": zero}, 20, False, micro_batch) for zero in (0, 1)]
    assert min(runs[0][0][1]) > 0.5, "nothing was clipped"
    assert same(*runs)


# ---- views, groups ----


def transposed_input_rank(rank, world, layout):
    """The input gradient of a column-split layer for an input that lies transposed in memory."""
    mesh = Mesh(layout_of(check(tiny(parallel=layout), world)), rank, connect=world > 1)
    layer = Linear(8, 12, Build(mesh, torch.float64), split="columns", bias=True, std=1.0)
    draw = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 8, generator=draw, dtype=torch.float64) for n in (12, 6))
    with torch.no_grad():
        layer.weight.copy_(layer.weight.placement.part(weight, mesh.layout, rank))
        layer.bias.zero_()
    rows = slice(3 * rank, 3 * rank + 3) if mesh.layout.sequence else slice(None)
    mine = x[rows].t().contiguous().t().requires_grad_()
    assert not mine.is_contiguous()
    y = layer(mine)
    y.backward(torch.ones(y.shape[::-1], dtype=torch.float64).t())
    return mine.grad.numpy(), weight.sum(0).expand_as(x)[rows].numpy()


@pytest.mark.parametrize("sequence", [True, False])
def test_p36_a_transposed_input_gets_the_summed_gradient(sequence, pool):
    layout = {"tensor": 2, "sequence": sequence}
    for found, right in spread(pool, transposed_input_rank, layout, layout):
        assert found == pytest.approx(right, rel=16 * EPS)


def replica_rank(rank, world, layout):
    """Hidden states and logits of this replica's own data."""
    engine = engine_of(tiny(SMALL), layout, rank, world)
    batch = make_batch(259, [32, 32], seed=engine.mesh.coordinate("data"))
    with torch.no_grad():
        return engine.mesh.coordinate("data"), engine.model.logits(engine.model(None, batch)).numpy()


@pytest.mark.parametrize("sequence", [True, False])
def test_p39_replicas_do_not_mix_their_data(sequence, pool):
    engine = engine_of(tiny(SMALL), {})
    with torch.no_grad():
        alone = [engine.model.logits(engine.model(None, make_batch(259, [32, 32], seed))).numpy() for seed in (0, 1)]
    assert abs(alone[0] - alone[1]).max() > 0.1
    layout = {"tensor": 2, "data": 2, "sequence": sequence}
    for replica, logits in spread(pool, replica_rank, layout, layout):
        assert logits == pytest.approx(alone[replica], abs=REORDERED * abs(alone[replica]).max())
