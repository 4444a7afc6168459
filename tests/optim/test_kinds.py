"""Each kind of optimizer against an independent one, on whole tensors; groups, clipping, averages, and their way through checkpoints."""

import math

import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.errors import UserError
from mtmegatron.models.stages import parameters_of
from mtmegatron.optim.groups import check_groups
from mtmegatron.optim.muon import orthogonal
from mtmegatron.train.loop import prepare
from mtmegatron.train.resume import resume
from mtmegatron.verify.protocol import batches
from tests.field.training import (
    engine_of,
    joined,
    largest_difference,
    lines_of,
    parts_of,
    run,
    same_bits,
    spread,
    state_of,
)
from tests.optim.test_optim import gradient
from tests.tiny import tiny

EPS = torch.finfo(torch.float64).eps
LR, FACTOR, STEPS = 1e-2, 0.5, 3
SMALL = {"model": {"layers": 2, "bias_qkv": True}}


def updated(optimizer: dict, precision: str = "fp64") -> dict[str, torch.Tensor]:
    """Weights after updates with gradients drawn from (step, name)."""
    engine = engine_of(tiny(SMALL, optimizer=optimizer), {}, precision=precision)
    for step in range(STEPS):
        set_gradients(engine, step)
        engine.optimizer.step(LR, FACTOR)
    return joined([parts_of(engine)])


def set_gradients(engine, step: int) -> None:
    engine.buckets.start()
    for key, param in engine.model.named_parameters():
        param.grad_sum.copy_(gradient(key, param.placement.shape, step))
    engine.buckets.finish()


def by_torch(make, decay: float = 0.1) -> dict[str, torch.Tensor]:
    """The same by `make(groups of parameters)`, an optimizer of torch."""
    engine = engine_of(tiny(SMALL), {})
    weights = {key: torch.nn.Parameter(value) for key, value in joined([parts_of(engine)]).items()}
    decays = {key: engine.model.get_parameter(key).placement.decay for key in weights}
    optimizer = make([{"params": [w for key, w in weights.items() if decays[key] == d], "weight_decay": decay * d} for d in (True, False)])
    for step in range(STEPS):
        for key, weight in weights.items():
            weight.grad = gradient(key, tuple(weight.shape), step) * FACTOR
        optimizer.step()
    return {key: weight.detach() for key, weight in weights.items()}


class Plain(torch.optim.Optimizer):
    """One update of a tensor as a function of (weight, gradient, state, decay, step)."""

    def __init__(self, groups, rule):
        super().__init__(groups, {})
        self.rule = rule

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                state = self.state[w]
                state["t"] = state.get("t", 0) + 1
                self.rule(w, w.grad, state, group["weight_decay"])


def lion(w, g, state, decay):
    m = state.get("m", torch.zeros_like(w))
    w -= LR * (torch.sign(0.9 * m + 0.1 * g) + decay * w)
    state["m"] = 0.99 * m + 0.01 * g


def lamb(w, g, state, decay):
    m = state["m"] = 0.9 * state.get("m", torch.zeros_like(w)) + 0.1 * g
    v = state["v"] = 0.95 * state.get("v", torch.zeros_like(w)) + 0.05 * g * g
    u = m / (1 - 0.9 ** state["t"]) / ((v / (1 - 0.95 ** state["t"])).sqrt() + 1e-8) + decay * w
    ratio = float(w.norm() / u.norm()) if w.norm() > 0 and u.norm() > 0 else 1.0
    w -= LR * ratio * u


KINDS = {
    "adam": ({}, lambda p: torch.optim.Adam(p, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=False)),
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "sgd-nesterov": ({"nesterov": True, "momentum": 0.8}, lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, nesterov=True)),
    "sgd-plain": ({"momentum": 0.0}, lambda p: torch.optim.SGD(p, lr=LR)),
    "lion": ({"beta2": 0.99}, lambda p: Plain(p, lion)),
    "lamb": ({}, lambda p: Plain(p, lamb)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_the_published_one(kind):
    settings, make = KINDS[kind]
    found, right = updated({"kind": kind.split("-")[0]} | settings), by_torch(make)
    for key, weight in right.items():
        # three updates of size lr (lamb: lr times the weight), each a quotient of sums of three terms
        assert (found[key] - weight).abs().max() <= 3 * 64 * EPS * max(LR, float(weight.abs().max())), key


# ---- muon ----


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24), (3, 16, 40)])
def test_muon_keeps_directions_and_brings_singular_values_near_one(shape):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw, dtype=torch.float64)
    made = orthogonal(x)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    middle = u.mT @ made @ vt.mT
    values = middle.diagonal(dim1=-2, dim2=-1)
    # the iteration is an odd polynomial of the singular values: the same for the diagonal of their matrix
    a, b, c = 3.4445, -4.7750, 2.0315
    right = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        right = a * right + b * right**3 + c * right**5
    amplified = a**5  # the slope of the iteration at zero
    assert (values - right).abs().max() <= 64 * EPS * amplified and (middle - torch.diag_embed(values)).abs().max() <= 64 * EPS * amplified
    assert 0.65 <= values.min() and values.max() <= 1.25


def test_muon_updates_hidden_matrices_and_adamw_the_rest():
    found, adamw = updated({"kind": "muon"}), updated({})
    engine, weights = engine_of(tiny(SMALL), {}), joined([parts_of(engine_of(tiny(SMALL), {}))])
    for key, weight in weights.items():
        hidden = weight.dim() == 2 and key not in ("embedding.weight", "head.weight")
        if not hidden:
            assert torch.equal(found[key], adamw[key]), key
            continue
        m, w = torch.zeros_like(weight), weight.clone()
        for step in range(STEPS):
            g = gradient(key, tuple(weight.shape), step) * FACTOR
            m = 0.95 * m + g
            w = w - LR * (0.2 * max(w.shape) ** 0.5 * orthogonal(g + 0.95 * m) + 0.1 * engine.model.get_parameter(key).placement.decay * w)
        assert (found[key] - w).abs().max() <= 3 * 64 * EPS * 3.4445**5 * LR, key


def test_muon_keeps_half_of_the_moments():
    sizes = {}
    for kind in ("adamw", "muon"):
        states = engine_of(tiny(SMALL, optimizer={"kind": kind}), {}).optimizer.states
        sizes[kind] = sum(tensor.numel() for state in states for tensor in state.moments.values())
    hidden = sum(math.prod(p.shape) for key, p in parameters_of(tiny(SMALL)).items() if len(p.shape) == 2 and key not in ("embedding.weight", "head.weight"))
    assert sizes["adamw"] - sizes["muon"] == hidden


# ---- groups ----


def refusal(*groups: dict) -> str:
    config = tiny(SMALL, optimizer={"groups": list(groups)})
    with pytest.raises(UserError) as told:
        check_groups(config.optimizer.groups, parameters_of(config))
    return str(told.value)


@pytest.mark.parametrize(
    "groups, words",
    [
        ([{"match": "*.weigth", "lr": 2.0}], "`optimizer.groups.0.match: *.weigth` fits no parameter: use a pattern of these names: embedding.weight, layers.0."),
        ([{"match": "*", "lr": 2.0}, {"match": "head*", "lr": 3.0}], "fits only parameters that earlier groups take (head.weight)"),
        ([{"match": "*norm*", "kind": "muon"}], "fits what is no matrix between embedding and head (layers.0.attention_norm.weight"),
        ([{"match": "head.weight", "kind": "muon"}], "fits what is no matrix between embedding and head (head.weight)"),
        ([{"match": "*", "frozen": True}], "freeze every parameter"),
    ],
)
def test_groups_that_cannot_be(groups, words):
    assert words in refusal(*groups)


def test_a_run_is_refused_before_it_starts(tmp_path):
    config = tiny(SMALL, optimizer={"groups": [{"match": "nothing", "lr": 2.0}]}, train={"folder": str(tmp_path)})
    with pytest.raises(UserError, match="fits no parameter"):
        prepare(config, 1)


def test_factors_on_rate_and_decay_are_those_of_another_rate_and_decay():
    groups = [{"match": "*norm*", "lr": 0.5, "decay": 2.0}, {"match": "layers.1.*", "decay": 0.0}]
    found = updated({"groups": groups})
    engine = engine_of(tiny(SMALL), {})
    weights = {key: torch.nn.Parameter(value) for key, value in joined([parts_of(engine)]).items()}
    for key, w in weights.items():
        norm = "norm" in key
        decay = 0.2 if norm else 0.0 if key.startswith("layers.1.") else 0.1 * engine.model.get_parameter(key).placement.decay
        optimizer = torch.optim.AdamW([w], lr=LR * (0.5 if norm else 1.0), betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, foreach=False)
        for step in range(STEPS):
            w.grad = gradient(key, tuple(w.shape), step) * FACTOR
            optimizer.step()
        assert (found[key] - w.detach()).abs().max() <= 3 * 64 * EPS * max(LR, float(w.detach().abs().max())), key


FROZEN = {"groups": [{"match": "layers.0.*", "frozen": True}]}


def test_frozen_parameters_stay_and_are_not_in_the_norm():
    one, other = (engine_of(tiny(SMALL, optimizer=settings), {}) for settings in (FROZEN, {}))
    before, mine = joined([parts_of(one)]), batches(one, 0)
    tokens = one.count_tokens(mine)
    loss, _, norm = one.gradients(mine, tokens)
    whole_loss, _, whole_norm = other.gradients(mine, tokens)
    gradients = {key: p.grad_sum for key, p in other.model.named_parameters() if not key.startswith("layers.0.")}
    right = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert loss == whole_loss and norm == pytest.approx(right, rel=64 * EPS) and norm < whole_norm
    one.step(mine, 0)
    for key, value in joined([parts_of(one)]).items():
        assert torch.equal(value, before[key]) == key.startswith("layers.0."), key
    assert not any(state.moments for state in one.optimizer.states if state.kind == "frozen")


def test_o10_half_frozen_saved_and_gone_on_without(pool, tmp_path):
    first = tiny(SMALL, optimizer=FROZEN, train={"steps": 2, "eval_batches": 1})
    run(pool, first, {"data": 2, "zero": 1}, tmp_path)
    saved = state_of(tmp_path, 2)
    assert "weight/layers.0.mlp.up.weight" in saved and "exp_avg/layers.0.mlp.up.weight" not in saved
    thawed = tiny(SMALL, train={"steps": 4, "accept_changes": ["optimizer.groups", "train.steps"]})
    engine = engine_of(thawed, {}, precision="fp32")
    assert resume(engine, Folder(tmp_path / "checkpoints"), {}, print) == 2
    assert torch.equal(engine.model.get_parameter("layers.0.mlp.up.weight").detach(), saved["weight/layers.0.mlp.up.weight"])
    assert not engine.step(batches(engine, 2), 2).fault
    strict = engine_of(tiny(SMALL, train={"steps": 4}), {}, precision="fp32")
    with pytest.raises(UserError, match="optimizer.groups"):
        resume(strict, Folder(tmp_path / "checkpoints"), {}, print)


# ---- clipping, skipping, averages ----


def test_o11_the_update_has_the_norm_that_it_is_clipped_to():
    engine = engine_of(tiny(SMALL, optimizer={"kind": "sgd", "momentum": 0.0, "clip": 0.1, "lr": 1.0, "decay": "constant", "weight_decay": 0.0}), {})
    before = joined([parts_of(engine)])
    result = engine.step(batches(engine, 0), 0)
    moved = math.sqrt(sum(float((value - before[key]).square().sum()) for key, value in joined([parts_of(engine)]).items()))
    assert result.grad_norm > 0.1 and moved == pytest.approx(0.1, rel=1e4 * EPS), "the logged norm is the one before clipping"


def test_clip_value_cuts_elements_and_the_norm_tells_what_was_there():
    cut = 1e-3
    engine, free = (
        engine_of(tiny(SMALL, optimizer={"kind": "sgd", "momentum": 0.0, "lr": 1.0, "decay": "constant", "weight_decay": 0.0, "clip": 0.0} | more), {})
        for more in ({"clip_value": cut}, {})
    )
    before, mine = joined([parts_of(engine)]), batches(engine, 0)
    results = [e.step(mine, 0) for e in (engine, free)]
    assert results[0].grad_norm == results[1].grad_norm
    a, b = joined([parts_of(engine)]), joined([parts_of(free)])
    for key, w in before.items():
        assert (a[key] - (w - (w - b[key]).clamp(-cut, cut))).abs().max() <= 4 * EPS * max(1.0, float(w.detach().abs().max())), key
    assert max(float((b[key] - before[key]).abs().max()) for key in before) > cut


def test_m05_an_infinite_gradient_is_not_cut_but_skipped():
    engine = engine_of(tiny(SMALL, optimizer={"clip": 0.0, "clip_value": 1.0}), {})
    with torch.no_grad():
        engine.model.head.weight[0, 0] = math.inf
    assert engine.step(batches(engine, 0), 0).fault and engine.optimizer.updates == 0


def test_a_norm_above_the_limit_skips_the_step_and_is_counted(tmp_path, pool):
    config = tiny(SMALL, optimizer={"skip_norm": 1e-3}, train={"steps": 4, "max_skipped": 9, "eval_batches": 1})
    engine = engine_of(config, {})
    before = joined([parts_of(engine)])
    result = engine.step(batches(engine, 0), 0)
    assert "is above `optimizer.skip_norm: 0.001`" in result.fault and engine.optimizer.updates == 0
    assert same_bits(joined([parts_of(engine)]), before)
    run(pool, config, {}, tmp_path)
    assert all("skip_norm" in line["skipped"] and "hardware" not in line["skipped"] for line in lines_of(tmp_path) if "loss" in line)


@pytest.mark.parametrize("layout", [{}, {"data": 2, "zero": 1}, {"tensor": 2, "data": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_average_of_weights_is_kept_in_every_layout_and_in_checkpoints(kind, layout, pool, tmp_path):
    config = tiny(SMALL, optimizer={"kind": kind, "ema": 0.8}, train={"steps": 3, "eval_batches": 1}, checkpoint={"every": 1, "keep": 9})
    run(pool, config, layout, tmp_path, precision="fp64")
    names = [name.removeprefix("ema/") for name in state_of(tmp_path, 3) if name.startswith("ema/")]
    average = joined([parts_of(engine_of(config, {}))])
    assert sorted(names) == sorted(average)
    for step in (1, 2, 3):
        saved = state_of(tmp_path, step)
        for key in average:
            average[key] = 0.8 * average[key] + 0.2 * saved[f"weight/{key}"]
            assert (saved[f"ema/{key}"] - average[key]).abs().max() <= 8 * EPS * max(1.0, float(average[key].abs().max())), key


# ---- checkpoints ----

OPTIMIZERS = {
    "muon": {"kind": "muon"}, "lamb": {"kind": "lamb", "ema": 0.5}, "sgd": {"kind": "sgd"}, "lion": {"kind": "lion"},
    "groups": {"groups": [{"match": "*.mlp.*", "kind": "muon"}, {"match": "layers.1.*", "frozen": True}, {"match": "head*", "kind": "lion"}]},
}  # fmt: skip
RUN = {"train": {"steps": 4, "micro_batch": 1, "eval_batches": 1}, "checkpoint": {"every": 2}}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_that_was_cut_off_repeats_its_bits(kind, pool, tmp_path):
    config, layout = tiny(SMALL, RUN, optimizer=OPTIMIZERS[kind]), {"tensor": 2, "data": 2, "zero": 1}
    run(pool, config, layout, tmp_path / "whole")
    run(pool, config, layout, tmp_path / "cut", stop=2)
    run(pool, config, layout, tmp_path / "cut")
    assert same_bits(state_of(tmp_path / "cut", 4), state_of(tmp_path / "whole", 4))


def passed_on(rank, world, config, layout, source, target):
    engine = engine_of(config, layout, rank, world, "fp32")
    load(Folder(source).open(4), engine.optimizer, engine.mesh)
    engine.optimizer.publish()
    save(Folder(target), 4, engine.optimizer, engine.mesh, {})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_of_every_kind_passes_through_other_layouts_bit_for_bit(kind, pool, tmp_path):
    config = tiny(SMALL, RUN, optimizer=OPTIMIZERS[kind])
    run(pool, config, {"tensor": 2}, tmp_path)
    right, source = state_of(tmp_path, 4), tmp_path / "checkpoints"
    for number, layout in enumerate([{"data": 3, "zero": 1, "micro_batch": 1}, {"pipeline": 2, "tensor": 2}, {"tensor": 1}]):
        config_now = config if layout.get("data") != 3 else tiny(SMALL, RUN, optimizer=OPTIMIZERS[kind], train={"global_batch": 6})
        target = tmp_path / str(number)
        spread(pool, passed_on, layout, config_now, layout, source, target)
        source = target
        store = Folder(target).open(4)
        assert same_bits({name: store.read(name) for name in store.names}, right), layout


def test_another_optimizer_begins_its_moments_anew(pool, tmp_path):
    run(pool, tiny(SMALL, RUN), {}, tmp_path)
    config = tiny(SMALL, RUN, optimizer={"kind": "muon"}, train={"accept_changes": ["optimizer.kind"], "steps": 6})
    engine = engine_of(config.model_copy(update={"train": config.train.model_copy(update={"accept_changes": ["optimizer.kind", "train.steps"]})}), {}, precision="fp32")
    assert resume(engine, Folder(tmp_path / "checkpoints"), {}, print) == 4
    for state in engine.optimizer.states:
        assert bool(state.moments["exp_avg" if state.kind == "adamw" else "momentum"].any()) == (state.kind == "adamw")


def test_masters_of_a_16_bit_run_take_the_update_of_a_wide_one():
    for kind in ("lion", "muon", "lamb", "sgd"):
        found, right = updated({"kind": kind}, "bf16"), updated({"kind": kind}, "fp32")
        # first weights, then weights, are rounded to 8 bits; Lion's and Muon's steps are of size lr at most
        assert largest_difference(found, right) <= 4 * 2.0**-8, kind


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "lion"])
def test_canonical_updates_have_the_same_bits_wherever_the_elements_are_cut(kind):
    engines = [engine_of(tiny(SMALL, optimizer={"kind": kind, "ema": 0.9}, train={"numerics": "canonical"}), {}, precision="fp32") for _ in range(2)]
    for engine, size in zip(engines, (10**9, 37)):
        engine.optimizer.piece = size
        engine.buckets.start()
        for bucket in engine.buckets.buckets:
            bucket.reduced.copy_(torch.randn(bucket.reduced.shape, generator=torch.Generator().manual_seed(bucket.reduced.numel())))
        engine.optimizer.step(LR, 0.3)
    for one, other in zip(*(engine.optimizer.states for engine in engines)):
        assert same_bits(one.tensors, other.tensors) and any(m.any() for m in one.moments.values())
