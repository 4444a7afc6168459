"""0/1 Adam: its updates of the variance are Adam's, replicas are equal after each synchronisation and nothing is sent in between, in all layouts; it
learns as Adam does and goes on from checkpoints, also from one between two synchronisations."""

import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.config.constraints import check, faults
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import OneBitConfig
from mtmegatron.data.loader import micro_batches
from mtmegatron.mesh import Mesh
from mtmegatron.optim.zeroone import synchronises, variance_updates
from mtmegatron.plan.collectives import Log, Recorded, silent
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import batches, compare, laid_out, serial_reference
from tests.field.training import (
    contents,
    engine_of,
    joined,
    name,
    parts_of,
    same_bits,
    spread,
)
from tests.optim.test_onebit import Chain, everything, train
from tests.tiny import tiny

EPS = torch.finfo(torch.float64).eps
MODEL = {"layers": 2, "tied": True}
# variance updates 1, 2, 4, 6; synchronisations from 7 on: 7, 8, 9, 10, 12, 14, 18
ONEBIT = {"freeze": 6, "variance_interval": 2, "local_steps": 4, "local_interval": 3}
LOCAL = [{"data": 2}, {"data": 4}, {"tensor": 2, "data": 2}, {"pipeline": 2, "data": 2}, {"data": 4, "expert": 2}]
ALWAYS = [{"data": 2, "zero": 1}, {"context": 2, "data": 2}, {"pipeline": 2, "data": 2, "zero": 1}]
# after 5 updates it is between two of the variance, after 12 at a synchronisation, after 13 between two
RESUMED = [
    ({"data": 2}, "fp32", 5), ({"data": 2}, "fp32", 12), ({"data": 2}, "fp32", 13), ({"tensor": 2, "data": 2}, "bf16", 13), ({"data": 2}, "fp16", 13),
    ({"data": 2, "zero": 1}, "fp32", 5),
]  # fmt: skip


def config(layout: dict | None = None, kind: str = "zeroone-adam", **optimizer):
    """`layout`: one without local steps has none."""
    layout = layout or {}
    alone = layout.get("zero") or layout.get("context")
    onebit = ONEBIT | ({"local_steps": 1, "local_interval": None} if alone else {})
    moe = {"moe": {"experts": 4, "top_k": 2, "ffn": 40}} if "expert" in layout else {}
    return tiny(model=MODEL | moe, optimizer={"kind": kind, "lr": 1e-3} | ({"onebit": onebit} if kind != "adamw" else {}) | optimizer)


# ---- when ----


def test_the_table_of_variance_updates():
    made = [c for c in range(1, 41) if variance_updates(c, 4, 30) > variance_updates(c - 1, 4, 30)]
    assert made == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28] and variance_updates(100, 4, 30) == len(made)
    assert [variance_updates(c, 16, 10**6) for c in (0, 1, 16, 17, 18, 48, 51, 52, 112)] == [0, 1, 16, 16, 17, 32, 32, 33, 48]


def test_the_table_of_synchronisations():
    onebit = OneBitConfig(freeze=4, local_steps=4, local_interval=4)
    assert [c for c in range(1, 30) if synchronises(c, onebit)] == [*range(1, 9), 10, 12, 16, 20, 24, 28]
    assert all(synchronises(c, OneBitConfig(freeze=4, local_steps=1)) for c in range(1, 99))
    fast = OneBitConfig(freeze=1, local_steps=8, local_interval=1)
    made = [c for c in range(1, 99) if synchronises(c, fast)]
    assert max(b - a for a, b in zip(made, made[1:])) == 8


@pytest.mark.parametrize("kind, onebit, parallel, line", [
    ("onebit-lamb", {"local_steps": 2}, {}, "`optimizer.onebit.local_steps: 2` has no effect without zeroone-adam"),
    ("onebit-adam", {"variance_interval": 2}, {}, "`optimizer.onebit.variance_interval: 2` has no effect without zeroone-adam"),
    ("zeroone-adam", {"local_steps": 1, "local_interval": 2}, {}, "`optimizer.onebit.local_interval: 2` has no effect without local steps"),
    ("zeroone-adam", {"local_interval": 2}, {"context": 2}, "`parallel.context: 2` with `optimizer.onebit.local_steps: 16`"),
    ("zeroone-adam", {"local_steps": 1}, {"zero": 2}, "`parallel.zero: 2` with `optimizer.kind: zeroone-adam`"),
])  # fmt: skip
def test_what_does_not_fit_is_said_with_a_repair(kind, onebit, parallel, line):
    (found,) = faults(tiny(optimizer={"kind": kind, "onebit": {"freeze": 4} | onebit}, parallel=parallel), 2)
    assert line in found


# ---- what ----


def trained_rank(rank, world, config_, layout, precision, steps, last):
    """Weights after the last so many of some steps, and results of all."""
    engine = engine_of(config_, layout, rank, world, precision)
    results, parts = [], []
    for step in range(steps):
        results += train(engine, step, step + 1)
        parts.append(parts_of(engine) if step >= steps - last else None)
    return parts[steps - last :], [(r.loss, r.grad_norm, r.fault) for r in results]


@pytest.mark.parametrize("layout", [{}, *LOCAL, *ALWAYS], ids=name)
def test_first_it_is_adam_bit_for_bit_and_replicas_are_equal_after_each_synchronisation(layout, pool):
    warm, adam = (spread(pool, trained_rank, layout, config(layout, kind), layout, "fp32", 2, 1) for kind in ("zeroone-adam", "adamw"))
    assert warm[0][1] == adam[0][1] and same_bits(joined([p for (p,), _ in warm]), joined([p for (p,), _ in adam]))
    ranks = spread(pool, trained_rank, layout, config(layout), layout, "fp32", 14, 14)
    assert all(results == ranks[0][1] for _, results in ranks) and not any(fault for _, _, fault in ranks[0][1])
    differ = [update for update, parts in enumerate(zip(*(parts for parts, _ in ranks)), 1) if not equal(parts)]
    assert differ == ([11, 13] if layout in LOCAL else [])


def equal(parts) -> bool:
    try:
        return bool(joined(list(parts)))
    except AssertionError as error:
        assert "copies differ" in str(error)
        return False


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"tensor": 2, "sequence": False}], ids=name)
def test_where_nobody_shares_a_gradient_all_of_it_is_that_of_one_process(layout, pool):
    own = tiny(model={"layers": 2}, optimizer={"kind": "zeroone-adam", "onebit": {"freeze": 2, "variance_interval": 1, "local_interval": 1}})
    failed = [c for c in compare(own, layout, "fp64", serial_reference(own, ("fp32",)), pool) if not c.passed]
    assert not failed, failed


def equation_rank(rank, world, rates):
    """The largest distance of weights from the equations over some updates with given gradients, and means that are exact."""
    optimizer = {"weight_decay": 0.5, "beta2": 0.99, "groups": [{"match": "layers.0.*", "lr": 0.5}]}
    engine = engine_of(config(**optimizer), {"data": 2}, rank, world)
    onebit, (bucket, *_) = engine.optimizer.onebit, engine.buckets.buckets
    for whole in onebit.wholes.values():
        whole.compressed.mean = lambda x, used, axis=whole.bucket.axis: axis.all_reduce(x).div_(axis.size).mul_(used)
    n, beta1, beta2, eps = bucket.gradients.numel(), 0.9, 0.99, 1e-8
    draw, used = torch.Generator().manual_seed(5), bucket.items[-1].stop
    factor, decay = (torch.zeros(n, dtype=torch.float64) for _ in range(2))
    for item in bucket.items:
        factor[item.start : item.stop] = 0.5 if item.name.startswith("layers.0.") else 1.0
        decay[item.start : item.stop] = 0.5 * item.placement.decay
    m, v, u, s, updates, worst = torch.zeros(2, n, dtype=torch.float64), 0.0, 0.0, 0.0, 0, 0.0
    anchor = bucket.values.clone()
    for count, lr in enumerate(rates, 1):
        g = torch.randn(2, n, dtype=torch.float64, generator=draw)
        g[:, :8] *= count > 6  # without a gradient while there was a variance: at rest
        engine.buckets.start(engine.optimizer.reduces)
        bucket.gradients.copy_(g.mean(0) if engine.buckets.reduces else g[rank] / 2)  # parts of a sum
        engine.optimizer.step(lr, 1.0)
        if count in (1, 2, 4, 6):
            g = g.mean(0).expand(2, n)
            v, updates = beta2 * v + (1 - beta2) * g[0].square(), updates + 1
        m, s = (beta1 * m + (1 - beta1) * g) * (v > 0), s + lr
        u, anchor = u + lr * m, anchor * (1 - lr * factor * decay)
        root = (v / (1 - beta2**updates)).sqrt() + eps
        step = u / (1 - beta1**count) / root
        if synchronises(count, onebit.onebit):
            step = step.mean(0).expand(2, n)
            m = (u.mean(0) / s).expand(2, n) if s else m.mean(0).expand(2, n)
        bound = s * torch.full((), torch.inf if count in (1, 2, 4, 6) else 1.0, dtype=torch.float64)  # (1 - 0.9) / sqrt(1 - 0.99)
        weights = anchor - factor * step.clamp(-bound, bound)[rank]
        worst = max(worst, float((bucket.values - weights)[:used].abs().max() / weights[:used].abs().max()))
        if synchronises(count, onebit.onebit):
            anchor, u, s = weights, 0.0, 0.0
    return worst, engine.optimizer.updates


RATES = {"constant": [1e-2] * 16, "rising": [1e-2 * k for k in range(16)], "some 0": [0.02, *[0.01] * 9, 0.0, 0.0, 0.02, 0.0]}


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_it_is_the_equations_where_means_are_exact(rates, pool):
    for worst, updates in pool.run(equation_rank, 2, rates):
        assert worst <= 64 * len(rates) * EPS and updates == len(rates)


@pytest.mark.parametrize("layout, world", [({"data": 2}, 2), ({"tensor": 2, "data": 2}, 4)], ids=name)
def test_nothing_of_gradients_momenta_or_weights_is_sent_in_a_local_step(layout, world):
    own, log = check(laid_out(config(), layout, "fp32"), world), Log()
    engine = Engine(own, Mesh(layout_of(own), 0, "meta", axis=lambda *place, **named: Recorded(silent(*place, **named), log)), read=log.read)
    sent, own_data = {}, engine.mesh["data"].ranks
    for step in range(14):
        log.transfers.clear()
        log.when = "count"
        engine.step(batches(engine, step), step, log)
        moved = [t for t in log.transfers if t.when in ("reduction", "update")]
        sent[step + 1] = max((t.bytes for t in moved if len(layout) == 1 or t.ranks == own_data), default=0)
    assert {update for update, most in sent.items() if most <= 5 * 4} == {11, 13}, sent  # 3 numbers: loss, z term, squared norm


# ---- learning ----


def learning_rank(rank, world, kind):
    """Losses of a run on chains."""
    onebit = {"onebit": {"freeze": 60, "variance_interval": 8, "local_steps": 4, "local_interval": 24}} if kind != "adamw" else {}
    optimizer = {"lr": 3e-3, "warmup": 10, "beta2": 0.99, "kind": kind} | onebit
    small = {"layers": 1, "width": 32, "ffn": 64, "vocab": 61}
    own = tiny(model=small, optimizer=optimizer, train={"steps": 160, "global_batch": 16, "micro_batch": 8})
    engine = engine_of(own, {"data": 2}, rank, world, "fp32")
    return [engine.step(micro_batches(engine.config, Chain(), engine.mesh, step), step).loss for step in range(160)]


def test_it_reaches_the_loss_of_adam_within_one_percent(pool):
    (adam, _), (compressed, _) = (pool.run(learning_rank, 2, kind) for kind in ("adamw", "zeroone-adam"))
    assert compressed[:9] == adam[:9] and compressed[10:] != adam[10:]
    last = [sum(losses[-20:]) / 20 for losses in (adam, compressed)]
    assert last[0] < 0.75 * adam[0] and last[1] <= 1.01 * last[0], last


# ---- checkpoints ----


def test_a_number_that_is_not_finite_skips_a_local_step_and_leaves_all_as_it_is(pool):
    assert pool.run(overflow_rank, 2) == [("the gradient is not finite", 11, True)] * 2


def overflow_rank(rank, world):
    """An infinite gradient on one rank between two synchronisations: fault, updates, whether weights and residuals stayed."""
    engine = engine_of(config(), {"data": 2}, rank, world, "fp32")
    train(engine, 0, 11)
    kept = [t.clone() for t in state_of(engine)]
    finish = engine.buckets.finish
    engine.buckets.finish = lambda: (finish(), engine.buckets.buckets[0].gradients[rank].fill_(float("inf") if rank == 1 else 0.0))
    result = engine.step(batches(engine, 11), 11)
    return result.fault, engine.optimizer.updates, all(torch.equal(a, b) for a, b in zip(kept, state_of(engine)))


def state_of(engine) -> list[torch.Tensor]:
    values = [bucket.values for bucket in engine.buckets.buckets]
    return [*everything(engine), *values, torch.tensor(engine.optimizer.onebit.rates)]


def saving_rank(rank, world, layout, precision, at, folder):
    """Weights of each update up to 16 after a checkpoint of update `at`."""
    engine = engine_of(config(layout), layout, rank, world, precision)
    train(engine, 0, at)
    save(Folder(folder), at, engine.optimizer, engine.mesh, {})
    return [parts_of(engine), *(train(engine, step, step + 1) and parts_of(engine) for step in range(at, 16))]


def resuming_rank(rank, world, layout, precision, at, folder, again):
    """The same from the checkpoint, which is saved again first."""
    engine = engine_of(config(layout), layout, rank, world, precision)
    load(Folder(folder).open(at), engine.optimizer, engine.mesh)
    engine.optimizer.publish()
    save(Folder(again), at, engine.optimizer, engine.mesh, {})
    return [parts_of(engine), *(train(engine, step, step + 1) and parts_of(engine) for step in range(at, 16))]


@pytest.mark.parametrize("layout, precision, at", RESUMED, ids=name)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(layout, precision, at, pool, tmp_path):
    whole = spread(pool, saving_rank, layout, layout, precision, at, tmp_path / "a")
    resumed = spread(pool, resuming_rank, layout, layout, precision, at, tmp_path / "a", tmp_path / "b")
    for mine, other in zip(whole, resumed, strict=True):  # of each rank
        for a, b in zip(mine, other, strict=True):  # after each update
            assert all((a[key][2] == b[key][2]).all() for key in a) and a.keys() == b.keys()
    assert same_bits(contents(Folder(tmp_path / "a").open(at)), contents(Folder(tmp_path / "b").open(at)))


@pytest.mark.parametrize("other", [{"data": 4}, {"tensor": 2, "data": 2}, {"data": 2, "zero": 1}, {}], ids=name)
def test_another_layout_goes_on_from_the_mean_of_what_the_ranks_had(other, pool, tmp_path):
    whole = spread(pool, saving_rank, {"data": 2}, {"data": 2}, "fp32", 13, tmp_path / "a")
    resumed = spread(pool, resuming_rank, other, other, "fp32", 13, tmp_path / "a", tmp_path / "b")
    last = contents(Folder(tmp_path / "a").open(13))
    own, (after, synchronised) = [joined([parts[0]]) for parts in whole], (joined([parts[i] for parts in resumed]) for i in (0, 1))
    most = max(float((mine[key] - last[f"weight/{key}"]).abs().max()) for mine in own for key in mine)
    right, first = joined([parts[1] for parts in whole]), joined([parts_of(engine_of(config(), {}))])
    for key, tensor in after.items():
        anchor, eps = last[f"weight/{key}"], torch.finfo(torch.float32).eps
        free = torch.stack([(mine[key] - anchor).abs() for mine in own]).amax(0) < 0.999 * most  # where no rank was cut by the bound
        away = (tensor - (own[0][key] + own[1][key]) / 2).abs()
        assert free.double().mean() > 0.3 and away[free].max() <= 4 * eps * tensor.abs().max(), key
    off, way = (torch.cat([(right[key] - x[key]).flatten() for key in right]).norm() for x in (synchronised, first))
    assert not same_bits(*own) and off < 0.25 * way, (off, way)  # what signs leave out, beside the way of 14 updates
