"""The layer with experts: its definition, what is counted and when, the selection bias, checkpoints, and the step without memory."""

import pytest
import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, load_weights, save
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import LossScaleConfig
from mtmegatron.layers.moe import MoE
from mtmegatron.mesh import Mesh
from mtmegatron.models.generation import Options, generate
from mtmegatron.ops.dropout import Stream, uniform
from mtmegatron.ops.router import route
from mtmegatron.plan.account import account
from mtmegatron.plan.collectives import step_counts
from mtmegatron.precision.scaling import LossScale
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import batches, laid_out
from tests.models.test_generation import (
    LLAMA,
    configuration,
    greedy,
    in_layout,
    model_of,
    prompts_of,
    saved,
)
from tests.tiny import tiny

SMALL = {"experts": 4, "top_k": 2, "ffn": 24, "first_dense": 1}
BALANCED = SMALL | {"score": "sigmoid", "bias_rate": 0.01, "global_loss": 0.01, "z_loss": 1e-3, "shared": 1, "shared_gate": True}


def engine(moe: dict, precision: str = "fp64", mesh: Mesh | None = None, **layout) -> Engine:
    config = check(laid_out(tiny(model={"moe": moe, "layers": 2, "init_std": 0.1}), layout, precision), mesh.layout.world if mesh else 1)
    return Engine(config, mesh or Mesh(layout_of(config)))


def layers(made: Engine) -> list[MoE]:
    return [module for chunk in made.chunks for module in chunk.modules() if isinstance(module, MoE)]


def run(made: Engine, steps: int, first: int = 0) -> list:
    return [made.step(batches(made, step), step) for step in range(first, first + steps)]


# ---- what it computes


@pytest.mark.parametrize("moe", [SMALL, BALANCED, SMALL | {"capacity": 0.5}, SMALL | {"capacity": 1.0, "pad": True}], ids=str)
def test_the_layer_is_its_definition(moe):
    """Token by token: the weighted sum of its experts, those that are not over their capacity, and the shared ones."""
    made = engine(moe)
    (layer,), (batch, *_) = layers(made), batches(made, 0)
    torch.manual_seed(0)
    x = torch.randn(batch.tokens.shape[0], 64, dtype=torch.float64)
    chosen, weights = within_capacity(layer, x)
    e = layer.experts
    expected = torch.zeros_like(x)
    for t, (which, how) in enumerate(zip(chosen, weights)):
        for n, w in zip(which.tolist(), how):
            if n < 4:
                inner = torch.nn.functional.silu(e.gate[n] @ x[t]) * (e.up[n] @ x[t])
                expected[t] += w * (e.down[n] @ inner)
    if layer.shared is not None:
        gate = torch.sigmoid(x @ layer.shared_gate.weight.t())
        expected += gate * layer.shared(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, made.model._where(batch, None, None)), expected)


@pytest.mark.parametrize(
    "logits, precision, wide", [("fp32", "fp64", torch.float64), ("fp64", "fp32", torch.float64), ("fp32", "bf16", torch.float32)]
)  # fmt: skip
def test_the_router_works_in_the_wider_of_its_own_type_and_that_of_the_run(logits, precision, wide):
    layer = layers(engine(SMALL | {"logits": logits}, precision))[0]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(layer.router.weight.dtype)
    found = layer.router(x, None)
    assert found.dtype == wide and torch.equal(found, x.to(wide) @ layer.router.weight.to(wide).t())


def within_capacity(layer: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices by the router, those beyond the capacity taken out one by one."""
    routing = route(x @ layer.router.weight.t(), layer.moe, layer.bias)
    chosen, moe = routing.experts.clone(), layer.moe
    if moe.capacity:
        most = -(-int(x.shape[0] * moe.top_k * moe.capacity) // moe.experts)
        for e in range(moe.experts):
            places = [(-float(routing.weights[t, j].detach()), t, j) for t, j in (chosen == e).nonzero().tolist()]
            for _, t, j in sorted(places)[most:]:
                chosen[t, j] = moe.experts
    return chosen, routing.weights


def test_without_experts_beside_them_parameters_have_their_global_shape():
    (layer,) = layers(engine(BALANCED))
    shapes = {name: tuple(p.placement.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "router.weight": (4, 64), "experts.gate": (4, 24, 64), "experts.up": (4, 24, 64), "experts.down": (4, 64, 24),
        "shared.gate.weight": (24, 64), "shared.up.weight": (24, 64), "shared.down.weight": (64, 24), "shared_gate.weight": (1, 64),
    }  # fmt: skip
    assert "experts.gate" not in dict(layers(ungated())[0].named_parameters())


def ungated() -> Engine:
    config = check(tiny(model={"moe": SMALL, "layers": 2, "activation": "gelu"}), 1)
    return Engine(config, Mesh(layout_of(config)))


def test_jitter_is_uniform_and_each_token_has_its_own():
    draws = uniform(Stream(1, 2, 3, "router"), torch.arange(500), range(200))
    assert 0 < draws.min() and draws.max() < 1 and torch.equal(uniform(Stream(1, 2, 3, "router"), torch.arange(7, 9), range(200)), draws[7:9])
    # of 100,000 draws the mean has a standard deviation of 0.289 / sqrt(1e5) and each tenth of one of sqrt(1e5 x 0.09); 5 of them
    assert abs(draws.mean() - 0.5) < 5 * 0.289 / 1e5**0.5
    assert ((torch.histc(draws, 10, 0, 1) - 1e4).abs() < 5 * (1e5 * 0.09) ** 0.5).all()


# ---- what is counted


@pytest.mark.parametrize("layout", [{}, {"recompute": "full"}, {"recompute": "selective", "parts": ["norm", "activation", "up"]}], ids=str)
def test_e11_loads_count_each_token_once_and_evaluation_not_at_all(layout):
    made = engine(BALANCED, **layout)
    (result,) = run(made, 1)
    made.evaluate(batches(made, 1))
    (load,) = result.experts.read().values()
    assert sum(load.counts) == 8 * 32 * 2 and load.dropped == 0
    assert layers(made)[0].record[:4].tolist() == load.counts
    assert torch.equal(layers(made)[0].load, torch.tensor(load.counts))


@pytest.mark.parametrize("layout", [{"recompute": "full"}, {"recompute": "selective", "parts": ["norm", "activation", "up"]}], ids=str)
def test_recomputation_has_the_same_bits(layout):
    plain, again = engine(BALANCED | {"jitter": 0.1}, "fp32"), engine(BALANCED | {"jitter": 0.1}, "fp32", **layout)
    for a, b in zip(run(plain, 3), run(again, 3)):
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm) and torch.equal(a.experts.table, b.experts.table)
    assert torch.equal(layers(plain)[0].bias, layers(again)[0].bias)


def test_e05_the_bias_moves_once_for_each_applied_step_by_the_rate():
    made = engine(BALANCED)
    (layer,) = layers(made)
    expected = torch.zeros(4)
    for result in run(made, 3):
        counts = torch.tensor(result.experts.read()[1].counts)
        expected += 0.01 * (counts.sum() / 4 - counts).sign()
    assert torch.equal(layer.bias, expected) and expected.any() and layer.bias.dtype == torch.float32


def test_a_step_that_is_skipped_moves_nothing():
    made = engine(BALANCED)
    (layer,) = layers(made)
    run(made, 1)
    before = layer.bias.clone(), layer.load.clone()
    with torch.no_grad():
        layer.experts.down[0, 0, 0] = torch.nan
    (result,) = run(made, 1, first=1)
    assert result.fault and result.experts is None
    assert torch.equal(layer.bias, before[0]) and torch.equal(layer.load, before[1])


def test_records_tell_drops_entropy_and_terms():
    made = engine(BALANCED | {"capacity": 0.5})
    (result,) = run(made, 1)
    load = result.experts.read()[1]
    assert 0.4 < load.dropped < 1 and sum(load.counts) == 512, "counts are those before dropping"
    assert 0 < load.entropy <= torch.tensor(4.0).log() and load.lowest <= 1 <= load.highest
    assert set(load.losses) == {"global_loss", "z_loss"} and load.bias == (0.0, 0.0)
    # f = 1 before the first step, so the term is the coefficient times the mean sum of the scores, which lie in (0, 1)
    assert 0 < load.losses["global_loss"] < 0.01 * 4


def test_experts_that_nobody_chose_have_gradients_of_zero():
    made = engine(SMALL | {"experts": 8, "top_k": 1, "score": "sigmoid"})
    (layer,) = layers(made)
    with torch.no_grad():
        layer.router.weight.zero_()  # all scores equal: the first expert gets all
    (result,) = run(made, 1)
    assert result.experts.read()[1].counts == [256, 0, 0, 0, 0, 0, 0, 0]
    for weight in (layer.experts.gate, layer.experts.up, layer.experts.down):
        assert weight.grad_sum[0].any() and not weight.grad_sum[1:].any()


# ---- state


def test_c21_biases_and_loads_are_in_checkpoints(tmp_path):
    made = engine(BALANCED)
    run(made, 2)
    folder = Folder(tmp_path)
    save(folder, 2, made.optimizer, made.mesh, {})
    other = engine(BALANCED)
    load(folder.open(2), other.optimizer, other.mesh)
    other.optimizer.publish()
    assert torch.equal(layers(other)[0].bias, layers(made)[0].bias) and layers(made)[0].bias.any()
    for a, b in zip(run(made, 2, first=2), run(other, 2, first=2)):
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm) and torch.equal(a.experts.table, b.experts.table)
    fresh = engine(BALANCED)
    load_weights(folder.open(2), fresh.model, fresh.mesh)
    assert torch.equal(layers(fresh)[0].bias, folder.open(2).read("buffer/layers.1.mlp.bias"))


def test_a_checkpoint_from_before_the_bias_leaves_it_at_zero(tmp_path):
    made = engine(SMALL)
    folder = Folder(tmp_path)
    save(folder, 0, made.optimizer, made.mesh, {})
    other = engine(SMALL | {"bias_rate": 0.1})
    load(folder.open(0), other.optimizer, other.mesh)
    assert not layers(other)[0].bias.any()


@pytest.mark.parametrize("layout", [{"data": 2, "expert": 2, "zero": 3}, {"tensor": 2, "expert": 2, "dispatch_parts": 2}, {"context": 2, "expert_tensor": 2}], ids=str)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_rank_can_be_accounted_without_memory(layout, dispatcher):
    if dispatcher == "allgather" and "dispatch_parts" in layout:
        return
    moe = BALANCED | {"capacity": 1.0}
    config = check(laid_out(tiny(model={"moe": moe}), layout | {"dispatcher": dispatcher}, "fp32"), 2)
    found, degree = account(config, 1), max(layout.get("expert", 1), layout.get("expert_tensor", 1))
    assert degree == 2 and found.micro_batch > 0
    experts = [k for k in step_counts(config, 1) if k.when == "forward" and k.axis.startswith("expert") and k.dtype == "float32"]
    assert {k.operation for k in experts} & {"all_to_all_rows", "all_gather", "reduce_scatter"}, "rows travel"



# ---- generation


@pytest.mark.parametrize("layout", [{"tensor": 2, "expert": 2}, {"data": 2, "expert_tensor": 2}, {"data": 2, "expert": 2, "dispatcher": "allgather"}], ids=str)
def test_generation_is_never_cut_by_capacity_and_equal_in_every_layout(layout, pool, tmp_path):
    moe = {"experts": 4, "ffn": 24, "score": "sigmoid", "bias_rate": 0.1, "capacity": 0.5, "jitter": 0.2}

    def bias(model):
        for number, block in enumerate(model.layers.values()):
            block.mlp.bias.copy_(torch.tensor([0.0, 0.3, -0.2, 0.1]) * (number + 1))

    store, prompts, options = saved(tmp_path, configuration(LLAMA | {"moe": moe}), bias), prompts_of(1, 3, 17), Options(max_new_tokens=8)
    model = model_of(store)
    right = [greedy(model, prompt, 8) for prompt in prompts]
    assert model.layers["1"].mlp.bias[1] == torch.tensor(0.6) and len(set(map(tuple, right))) == 3
    assert generate(model, prompts, options) == right
    for (answer,) in pool.run(in_layout, 2, store.folder, layout, prompts, [options]):
        assert answer == right


def test_a_loss_scale_multiplies_the_balance_terms_too():
    """fp16 makes all gradients times the scale, and the optimizer divides all: a term outside of that would all but vanish."""
    made = engine(SMALL | {"aux_loss": 1.0, "score": "sigmoid"}, precision="fp32")
    (layer,), mine = layers(made), batches(made, 0)

    def router(scale: float):
        made.build.loss_scale = made.loss_scale = LossScale(LossScaleConfig(), scale)
        made.gradients(mine, made.count_tokens(mine))
        return layer.router.weight.grad_sum.clone()

    plain = router(1.0)
    assert torch.equal(router(2.0**10), plain)  # a power of two changes no bit
    layer.moe = layer.moe.model_copy(update={"aux_loss": 0.0})
    made.build.loss_scale = made.loss_scale = None
    made.gradients(mine, made.count_tokens(mine))
    assert not torch.equal(layer.router.weight.grad_sum, plain)  # the term has a part in it
