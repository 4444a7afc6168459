"""Multi-token prediction is the equations of DeepSeek-V3 (2412.19437, 21 to 25), written here once more in plain torch; its tokens and labels, its
blocks and their names, and each fault that the original system had in it."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, embedding, rms_norm, silu

from mtmegatron.batch import IGNORE
from mtmegatron.config.constraints import check
from mtmegatron.config.model import (
    LatentConfig,
    ModelConfig,
    MoEConfig,
    PredictionConfig,
)
from mtmegatron.data.gpt import GPTDataset, Sample
from mtmegatron.data.indexed import IndexedReader
from mtmegatron.data.loader import assemble, micro_batches
from mtmegatron.device import Device
from mtmegatron.models.generation import generate
from mtmegatron.models.size import parameters, prediction_parameters
from mtmegatron.parallel.context import ContextSplit
from mtmegatron.parallel.offload import Offload
from mtmegatron.plan.account import account, on_meta
from mtmegatron.verify.protocol import RandomSamples, batches
from tests.data.test_indexed import write
from tests.field.training import engine_of, lines_of, run, same_bits, state_of
from tests.tiny import GPT2, tiny

S = 16
SMALL = {
    "model": {"layers": 2, "width": 32, "ffn": 88, "vocab": 131, "prediction": {"depth": 2}},
    "data": {"sequence": S}, "train": {"global_batch": 4, "micro_batch": 2, "steps": 4}, "parallel": {"bucket_mb": 0.02},
}  # fmt: skip
WITHOUT = {"model": SMALL["model"] | {"prediction": None}}
EPS = 2.0**-52


def samples_of(config) -> list[Sample]:
    """Random samples of a global batch with as many tokens as the depths see, except for the last, at the end of a corpus."""
    depth = config.model.prediction.depth
    made = [RandomSamples(config.model.vocab, S + depth, 7)[i] for i in range(4)]
    return [*made[:3], Sample(made[3].tokens[: S + 1], made[3].starts[made[3].starts <= S])]


# ---- the equations ----


def attended(x: torch.Tensor, w: dict, starts: list[int], heads: int, kv_heads: int) -> torch.Tensor:
    """Causal attention inside the documents that begin at `starts`, rotary positions from each start on."""
    size, length = x.shape[1] // heads, len(x)
    document = torch.tensor([sum(s <= i for s in starts) for i in range(length)])
    position = torch.tensor([i - max(s for s in starts if s <= i) for i in range(length)], dtype=x.dtype)
    angles = position[:, None] * 10000.0 ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    cos, sin = (f(angles)[:, None] for f in (torch.cos, torch.sin))

    def turned(heads: torch.Tensor) -> torch.Tensor:
        a, b = heads.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    query, key, value = ((x @ w[f"attention.{n}.weight"].T).unflatten(1, (-1, size)) for n in ("query", "key", "value"))
    query, key = turned(query), turned(key)
    key, value = (t.repeat_interleave(heads // kv_heads, 1) for t in (key, value))
    scores = torch.einsum("inh,jnh->nij", query, key) / size**0.5
    seen = (document[:, None] == document) & torch.ones(length, length).tril().bool()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("nij,jnh->inh", weights, value).flatten(1) @ w["attention.out.weight"].T


def block(x: torch.Tensor, w: dict, m, starts: list[int]) -> torch.Tensor:
    x = x + attended(normed(x, w["attention_norm.weight"], m), w, starts, m.heads, m.kv_heads)
    y = normed(x, w["mlp_norm.weight"], m)
    return x + (silu(y @ w["mlp.gate.weight"].T) * (y @ w["mlp.up.weight"].T)) @ w["mlp.down.weight"].T


def normed(x: torch.Tensor, weight: torch.Tensor, m) -> torch.Tensor:
    return rms_norm(x, (m.width,), weight, m.norm_eps)


def under(weights: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def label(sample: Sample, i: int, k: int, masked: bool) -> int:
    """t_{i+k+1}, or IGNORE where there is none or it is of another document."""
    crosses = masked and any(i < s <= i + k + 1 for s in sample.starts)
    return IGNORE if crosses or i + k + 1 >= len(sample.tokens) else int(sample.tokens[i + k + 1])


def reference(config, weights: dict, samples: list[Sample]) -> list[torch.Tensor]:
    """The losses of the model and of each depth, each a mean over its valid labels."""
    m, data, train = config.model, config.data, config.train
    head = weights.get("head.weight", weights["embedding.weight"])
    depths = range(m.prediction.depth + 1)
    logits, labels = [[] for _ in depths], [[] for _ in depths]
    for sample in samples:
        tokens = torch.from_numpy(np.concatenate([sample.tokens, np.zeros(len(depths), np.int64)]))
        starts = [int(s) for s in sample.starts if s < S] if data.mask_documents else [0]
        h = embedding(tokens[:S], weights["embedding.weight"])
        for layer in range(m.layers):
            h = block(h, under(weights, f"layers.{layer}."), m, starts)
        for k in depths:
            own = under(weights, f"prediction.{k}.")
            if k:
                e = embedding(tokens[k : k + S], weights["embedding.weight"])
                both = torch.cat([normed(h, own["hidden_norm.weight"], m), normed(e, own["embedding_norm.weight"], m)], 1)
                h = block(both @ own["project.weight"].T, under(own, "block."), m, starts)
            logits[k].append(normed(h, own.get("norm.weight", weights["norm.weight"]), m) @ head.T)
            masked = data.mask_boundary_loss or (k > 0 and data.mask_documents)
            labels[k] += [label(sample, i, k, masked) for i in range(S)]
    return [mean_loss(torch.cat(z), torch.tensor(y), train) for z, y in zip(logits, labels)]


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, train) -> torch.Tensor:
    """Cross entropy with the z term, over valid labels."""
    z_term = logits.logsumexp(-1)[labels != IGNORE].square().mean()
    return cross_entropy(logits, labels, label_smoothing=train.label_smoothing) + train.z_loss * z_term


KINDS = {
    "joined": {"data": {"mask_boundary_loss": False}},
    "joined, boundaries masked": {},
    "packed, tied": {"model": {"tied": True}, "data": {"mask_documents": True, "mask_boundary_loss": False}},
    "smoothed": {"data": {"mask_documents": True}, "train": {"label_smoothing": 0.1, "z_loss": 1e-2}},
    "heavy": {"model": {"prediction": {"depth": 3, "coefficient": 2.0}}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_all_gradients_are_those_of_the_equations(kind):
    engine, other = (engine_of(tiny(SMALL, KINDS[kind]), {}) for _ in range(2))
    config, samples = engine.config, samples_of(engine.config)
    mine = micro_batches(config, samples, engine.mesh, 0)
    loss, z_loss, norm = engine.gradients(mine, engine.count_tokens(mine))
    weights = {name: p.detach().clone().requires_grad_() for p, name in engine.names.items()}
    main, *ahead = reference(config, weights, samples)
    share = config.model.prediction.coefficient / config.model.prediction.depth
    gradients = dict(zip(weights, torch.autograd.grad(main + share * sum(ahead), list(weights.values()))))
    # a sum over the tokens of the batch of products of up to V terms, in another order: a random walk of roundings, some of them in a row
    bound = 8 * EPS * math.sqrt(4 * S * config.model.vocab)
    assert loss + z_loss == pytest.approx(main.item(), rel=bound)
    if not config.train.z_loss:  # which is in the losses here, and not in those that are told
        assert other.step(mine, 0).ahead == pytest.approx([x.item() for x in ahead], rel=bound)
    assert norm == pytest.approx(float(torch.stack([g.norm() for g in gradients.values()]).norm()), rel=bound)
    for param, name in engine.names.items():
        assert float((param.grad_sum - gradients[name]).norm() / gradients[name].norm()) < bound, name


def test_the_factor_on_the_losses_is_divided_by_the_depths_and_the_model_itself_stays():
    """Defects 1 and 5: with a weight of next to nothing the model's gradients are those without, to that weight times gradients below 10."""
    with_depths = tiny(SMALL, model=SMALL["model"] | {"prediction": {"depth": 2, "coefficient": 1e-12}})
    found = {}
    for name, config in {"with": with_depths, "without": tiny(SMALL, WITHOUT)}.items():
        engine = engine_of(config, {})
        mine = batches(engine, 0)
        result = engine.evaluate(mine), engine.gradients(mine, engine.count_tokens(mine))[0]
        found[name] = result, {n: p.grad_sum for p, n in engine.names.items()}
    (with_result, with_gradients), (result, gradients) = found["with"], found["without"]
    assert with_result == result  # evaluation is that of the main loss
    assert set(with_gradients) - set(gradients) == {n for n in with_gradients if n.startswith("prediction.")}
    for name, gradient in gradients.items():
        torch.testing.assert_close(with_gradients[name], gradient, rtol=0, atol=1e-12 * 10)


def test_micro_batches_do_not_change_the_losses():
    """E13: each depth's loss is the mean over its own valid labels of the global batch, however unequal the micro-batches are."""
    found = []
    for size in (1, 2, 4):
        engine = engine_of(tiny(SMALL, train={"micro_batch": size}), {})
        mine = micro_batches(engine.config, samples_of(engine.config), engine.mesh, 0)
        mine[0].labels[: S // 2] = IGNORE
        mine[0].ahead_labels[0, : S // 2] = IGNORE
        found.append(engine.step(mine, 0))
    for result in found[1:]:
        assert result.ahead == pytest.approx(found[0].ahead, rel=S * 4 * EPS)
        assert result.grad_norm == pytest.approx(found[0].grad_norm, rel=S * 4 * EPS)


FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
AGAIN = [FULL, FULL | {"every": 2}, FULL | {"first": 3}, SELECTIVE, SELECTIVE | {"parts": ["norm"]}]


@pytest.mark.parametrize("again", AGAIN, ids=str)
def test_recomputation_has_the_same_bits(again):
    """Defect 2: without full recomputation the original could not run it, and by twos it lost depths."""
    found = []
    for layout in ({}, again):
        engine = engine_of(tiny(SMALL), layout)
        mine = batches(engine, 0)
        engine.step(mine, 0)
        found.append((engine.step(mine, 1), {n: p.detach() for p, n in engine.names.items()}))
    (plain, weights), (result, others) = found
    assert plain == result and len(plain.ahead) == 2 and same_bits(weights, others)


def test_what_the_depths_keep_is_offloaded_too():
    blocks, offload = [], Offload(Device("cpu"), least=1)
    call = offload.call
    offload.call = lambda block, first, *x: (blocks.append(first), call(block, first, *x))[1]
    plain, engine = (engine_of(tiny(SMALL), {}) for _ in range(2))
    engine.build.offload = offload
    offload.leave(engine.names)
    mine = batches(plain, 0)
    assert plain.gradients(mine, 64) == engine.gradients(mine, 64)
    assert same_bits(*({n: p.grad_sum for p, n in e.names.items()} for e in (plain, engine)))
    assert blocks == 2 * [True, False, False, False]  # of each micro-batch: two blocks, then two depths


# ---- tokens and labels ----


def test_tokens_and_labels_are_shifted_within_the_sample_and_end_where_it_ends():
    config = check(tiny(SMALL, data={"sequence": 4, "mask_boundary_loss": False}), 1)
    whole, short = (Sample(np.arange(n, n + size), np.array([0])) for n, size in ((10, 7), (50, 5)))
    batch = assemble(config, [whole, short])
    assert batch.labels.tolist() == [11, 12, 13, 14, 51, 52, 53, 54]
    assert batch.ahead_labels.tolist() == [
        [12, 13, 14, 15, 52, 53, 54, IGNORE], [13, 14, 15, 16, 53, 54, IGNORE, IGNORE],
    ]  # fmt: skip
    assert batch.ahead_tokens[0].tolist() == batch.labels.tolist()
    assert batch.ahead_tokens[1].tolist() == [12, 13, 14, 15, 52, 53, 54, 0]  # the last has no label: any token will do


@pytest.mark.parametrize("packed, masked", [(False, False), (False, True), (True, False), (True, True)])
def test_no_label_is_of_another_document_when_documents_are_masked(packed, masked):
    """Defect 4: packed documents crossed their borders."""
    config = check(tiny(SMALL, data={"sequence": 6, "mask_documents": packed, "mask_boundary_loss": masked}), 1)
    batch = assemble(config, [Sample(np.arange(9), np.array([0, 2, 3, 7]))])  # documents 0 1 | 2 | 3 4 5 6 | 7 8
    cut = [[1, IGNORE, IGNORE, 4, 5, 6], [IGNORE] * 3 + [5, 6, IGNORE], [IGNORE] * 3 + [6, IGNORE, IGNORE]]
    plain = [[1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8]]
    assert batch.labels.tolist() == (cut if masked else plain)[0]
    assert batch.ahead_labels.tolist() == (cut if masked or packed else plain)[1:]
    assert batch.ahead_tokens.tolist() == plain[:2]


@pytest.mark.parametrize("degree", [2, 4])
def test_context_ranks_cut_what_has_been_shifted(degree):
    config = check(tiny(SMALL), 1)
    batch = assemble(config, samples_of(config))
    for rank in range(degree):
        split = ContextSplit(degree, rank)
        held, part = split.indices(4, S), split.select(batch, 4)
        for whole, own in ((batch.ahead_tokens, part.ahead_tokens), (batch.ahead_labels, part.ahead_labels)):
            assert torch.equal(own, whole[:, held])


def test_a_dataset_shows_more_tokens_without_other_samples(tmp_path):
    reader = IndexedReader(write(tmp_path / "x", [[10, 11, 12], [20], [], [30, 31, 32, 33, 34], [40, 41]]))
    plain, ahead, longer = (GPTDataset(reader, sequence=3, seed=4, samples=n, ahead=a) for n, a in ((3, 0), (3, 2), (9, 2)))
    stream = np.concatenate([reader.read(d) for d in plain._order.tolist()])
    for i in range(3):
        place = next(k for k in (0, 3, 6) if stream[k : k + 4].tolist() == plain[i].tokens.tolist())
        assert ahead[i].tokens.tolist() == stream[place : place + 6].tolist()  # one ends with the corpus, after 5
        assert longer[i].tokens.tolist() == ahead[i].tokens.tolist()
        assert [s for s in ahead[i].starts if s < 4] == plain[i].starts.tolist()
    assert sorted(len(ahead[i].tokens) for i in range(3)) == [5, 6, 6]


# ---- blocks and their place ----

PLACES = [{}, {"pipeline": 2}, {"pipeline": 3}, {"pipeline": 2, "schedule": "interleaved"}, {"pipeline": 2, "schedule": "zb-v"}]


@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("layout", PLACES, ids=str)
def test_all_blocks_of_the_model_are_there_and_the_depths_are_on_the_last_stage(layout, layers):
    """Defects 1 and 7: the last stage lost blocks to the depths, whose numbers began anew."""
    config, numbers = tiny(SMALL, model=SMALL["model"] | {"layers": layers}), []
    world = layout.get("pipeline", 1)
    for rank in range(world):
        for chunk in engine_of(config, layout, rank).chunks:
            numbers += [block.layer for block in chunk.layers.values()]
            assert bool(chunk.prediction) == chunk.last
            numbers += [depth.block.layer for depth in chunk.prediction.values()]
    assert sorted(numbers) == list(range(layers + 2))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_the_table_has_one_first_value_on_both_ends_and_counts_once(schedule, tied, zero):
    """Defect 3: its gradient was not summed over the two stages, and would have been twice where it is tied (values: tests/parity)."""
    config = tiny(SMALL, model=SMALL["model"] | {"tied": tied})
    ranks = [engine_of(config, {"pipeline": 2, "schedule": schedule, "zero": zero}, rank) for rank in range(2)]
    found = [(b, item.param) for e in ranks for b in e.buckets.buckets for item in b.items if item.name == "embedding.weight"]
    if schedule == "zb-v":  # both ends are one rank's, and one parameter
        assert len(found) == 1 and not found[0][0].leaves_stage
        return
    (bucket, first), (other, last) = found
    assert torch.equal(first, last) and first.placement == last.placement
    assert (bucket.axis.ranks, bucket.shard.stop) == ((0, 1), other.shard.start) and bucket.counted and other.counted
    assert bucket.own_gradients.numel() + other.own_gradients.numel() == bucket.values.numel()  # the norm sees each element once


KINDS_OF_MODEL = {"llama": {}, "gpt2": GPT2["model"], "tied": {"tied": True}}


@pytest.mark.parametrize("kind", KINDS_OF_MODEL)
def test_parameters_are_counted_from_the_configuration(kind):
    config = check(tiny(SMALL, model=SMALL["model"] | KINDS_OF_MODEL[kind]), 1)
    (model,), _ = on_meta(config, 0)
    counted = sum(p.numel() for name, p in model.named_parameters() if name.startswith("prediction."))
    assert counted == prediction_parameters(config.model)
    assert sum(p.numel() for p in model.parameters()) == parameters(config.model)


def test_the_module_of_deepseek_v3_has_its_published_size():
    """The published files hold 3,918,786,560 numbers in bf16 and 680,571,043,840 in fp8 (without their scales), and in fp32 a bias of 256 experts in
    59 blocks. Of embedding and head they have a second copy, for the module."""
    m = ModelConfig(
        layers=61, width=7168, heads=128, kv_heads=128, head_size=192, ffn=18432, vocab=129280, prediction=PredictionConfig(),
        latent=LatentConfig(query_rank=1536), moe=MoEConfig(experts=256, top_k=8, ffn=2048, shared=1, first_dense=3, bias_rate=1e-3),
    )  # fmt: skip
    assert parameters(m) + 2 * m.vocab * m.width == 3_918_786_560 + 680_571_043_840 + 59 * 256
    assert parameters(m) - prediction_parameters(m) == 671_026_419_200


def test_an_account_of_any_rank_has_the_depths():
    config = check(tiny(SMALL, parallel={"tensor": 2, "pipeline": 2}), 4)
    held = [account(config, rank).state.parameters for rank in range(4)]
    table = config.model.vocab * config.model.width  # on both stages
    whole_copies = sum(
        p.numel() for rank in (1, 3) for chunk in on_meta(config, rank)[0] for p in chunk.parameters() if not p.placement.split
    )
    assert sum(held) == parameters(config.model) + table + whole_copies


# ---- runs ----


def test_the_loss_of_each_depth_is_logged_and_a_checkpoint_goes_on_in_another_layout(tmp_path, pool):
    """Defects 5 and 7: nothing was logged, and checkpoints of the depths had wrong places."""
    config = tiny(SMALL, checkpoint={"every": 2})
    whole, resumed, losses = tmp_path / "whole", tmp_path / "resumed", ("loss", "prediction_1_loss", "prediction_2_loss")
    run(pool, config, {}, whole, "fp64")
    run(pool, config, {"pipeline": 2}, resumed, "fp64", stop=2)
    run(pool, config, {"tensor": 2}, resumed, "fp64")
    rounding = EPS * config.optimizer.lr / config.optimizer.eps  # what Adam makes of one in a gradient near zero
    for line, other in zip(lines_of(whole), lines_of(resumed), strict=True):
        assert [other[k] for k in losses] == pytest.approx([line[k] for k in losses], rel=rounding)
    state, other = state_of(whole, 4), state_of(resumed, 4)
    assert set(state) == set(other) and any(name.startswith("weight/prediction.2.block") for name in state)


def test_generation_has_no_use_for_the_depths():
    models = [engine_of(tiny(SMALL, *changes), {}).model for changes in ((), (WITHOUT,))]
    with_depths, without = (generate(model, [[1, 2, 3], [7]]) for model in models)
    assert with_depths == without
