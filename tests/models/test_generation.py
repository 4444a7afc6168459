"""Generation: cache, neighbours and layout change nothing, and each option does what it says.

Notable: the right tokens come from a plain loop that runs the model on the whole sequence again for every token. Models
are small and random, in double precision where tokens are compared, so that no two logits lie within rounding.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtmegatron.batch import Batch, Bounds
from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import save
from mtmegatron.checkpoint.store import Store
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError
from mtmegatron.layers.attention import Cache
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.generation import (
    Options,
    draw,
    generate,
    generation_config,
    load_model,
    next_logits,
    probabilities,
    through_stages,
)  # fmt: skip
from mtmegatron.train.engine import Engine
from mtmegatron.verify.protocol import FACTOR

VOCAB = 37
DRAWN = Options(max_new_tokens=12, temperature=1.3, top_k=30, top_p=0.95, seed=3)
LLAMA = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "init_std": 0.4}
GPT = {
    "layers": 2, "width": 32, "heads": 4, "vocab": VOCAB, "init_std": 0.4, "positions": "learned", "max_positions": 64,
    "norm": "layernorm", "activation": "gelu", "tied": True, "bias_qkv": True, "bias_mlp": True,
    "bias_attention_out": True,
}  # fmt: skip
LAYOUTS = [
    {"tensor": 2}, {"tensor": 2, "sequence": False}, {"tensor": 4}, {"pipeline": 2}, {"pipeline": 4},
    {"tensor": 2, "pipeline": 2}, {"tensor": 2, "data": 2},
]  # fmt: skip


def prompts_of(*lengths: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (n,), generator=made).tolist() for n in lengths]


def configuration(model: dict, precision: str = "fp64") -> Config:
    return Config.model_validate({"model": model, "data": {"sequence": 64}, "train": {"precision": precision}})


def saved(folder: Path, config: Config, change=lambda model: None) -> Store:
    """A checkpoint of a model with first weights, changed by `change`."""
    config = check(config, 1)
    engine = Engine(config, Mesh(layout_of(config)))
    with torch.no_grad():
        change(engine.model)
    engine.optimizer.refresh_masters()
    extra = {"config": config.model_dump(mode="json"), "tokenizer": "bytes"}
    save(Folder(folder), 1, engine.optimizer, engine.mesh, extra)
    return Folder(folder).open(1)


def model_of(store: Store, layout: dict | None = None, rank: int = 0, precision: str | None = None) -> Decoder:
    config = generation_config(store, layout or {}, precision)
    mesh = Mesh(layout_of(config), rank, connect=layout_of(config).world > 1)
    return load_model(store, config, mesh)


def whole_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits of every token of one sequence, without a cache; on one process."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        return model.logits(model(None, Batch(ids, ids, torch.arange(len(ids)), Bounds((0, len(ids))))))


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(whole_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def in_layout(rank: int, world: int, folder: Path, layout: dict, prompts: list, options: list[Options]) -> list:
    """What one rank of a layout generates, for each of the options."""
    model = model_of(Store(folder), layout, rank)
    return [generate(model, prompts, o) for o in options]


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Store]:
    models = {"llama": LLAMA, "gpt": GPT}
    return {name: saved(tmp_path_factory.mktemp(name), configuration(model)) for name, model in models.items()}


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_cache_and_neighbours_change_no_token(stores, name):
    """G05: prompts of lengths 1, 3, 17 and 40 together, alone, and without a cache."""
    model, prompts = model_of(stores[name]), prompts_of(1, 3, 17, 40)
    options = Options(max_new_tokens=20)
    right = [greedy(model, prompt, 20) for prompt in prompts]
    assert generate(model, prompts, options) == right
    assert [generate(model, [prompt], options)[0] for prompt in prompts] == right
    assert len({tuple(tokens) for tokens in right}) == 4, "a model that always says the same proves little"
    assert all(len(set(tokens)) > 3 for tokens in right), "and so does one that repeats itself"


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_logits_with_cache_are_those_without(stores, precision):
    """Rounding is what fp32 without a cache is off; the cache, in its own units, may be off FACTOR times that."""
    prompts = prompts_of(4, 17)
    exact, single, model = (model_of(stores["llama"], precision=p) for p in ("fp64", "fp32", precision))
    whole = [whole_logits(exact, prompt) for prompt in prompts]
    rounding = max(float((whole_logits(single, p).double() - right).abs().max()) for p, right in zip(prompts, whole))
    bound = FACTOR * rounding * torch.finfo(model.build.dtype).eps / torch.finfo(torch.float32).eps
    cache = Cache(2)
    for start, end in (((0, 0), (2, 9)), ((2, 9), (3, 16)), ((3, 16), (4, 17))):  # the pieces differ in length
        with torch.no_grad():
            mine = next_logits(model, [p[a:b] for p, a, b in zip(prompts, start, end)], list(start), cache)
        for row, right, b in zip(mine, whole, end):
            assert (row - right[b - 1]).abs().max() <= bound


def test_cache_keeps_what_goes_on_and_grows_in_place():
    cache = Cache(2)
    rows = torch.arange(7.0).view(7, 1, 1)
    cache.extend(0, rows[:5], -rows[:5], (2, 3))
    cache.extend(0, rows[5:], -rows[5:], (1, 1))
    storage = cache.entries[0][1][0].storage
    found = cache.extend(0, rows[:2], rows[:2], (1, 1))
    assert [k.flatten().tolist() for k, _ in found] == [[0, 1, 5, 0], [2, 3, 4, 6, 1]]
    assert cache.entries[0][1][0].storage is storage and cache.longest == 5
    cache.keep([1])
    found = cache.extend(0, rows[:3], rows[:3], (1, 2))  # the second document only fills up
    assert [k.flatten().tolist() for k, _ in found] == [[2, 3, 4, 6, 1, 0], [1, 2]]
    assert [v.flatten().tolist() for _, v in found] == [[-2, -3, -4, -6, 1, 0], [1, 2]]
    assert len(cache.entries[0]) == 1 and cache.longest == 6


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: ",".join(f"{k}={v}" for k, v in layout.items()))
def test_every_layout_gives_the_tokens_of_one_process(stores, pool, name, layout):
    store, prompts, options = stores[name], prompts_of(1, 3, 17), [Options(max_new_tokens=12), DRAWN]
    right = [generate(model_of(store), prompts, o) for o in options]
    world = math.prod(int(n) for n in layout.values())
    for answer in pool.run(in_layout, world, store.folder, layout, prompts, options):
        assert answer == right


def test_sequences_that_end_at_different_times_leave_the_rest_as_it_was(stores, pool):
    """With tensor=2 and an odd number of live sequences, filling comes and goes."""
    model, prompts = model_of(stores["llama"]), prompts_of(1, 3, 17)
    whole = generate(model, prompts, Options(max_new_tokens=12))
    stop = (whole[0][4], whole[2][7])
    right = [list(itertools.takewhile(lambda token: token not in stop, tokens)) for tokens in whole]
    assert len({len(tokens) for tokens in right}) > 1
    options = Options(max_new_tokens=12, stop_ids=stop)
    assert generate(model, prompts, options) == right
    for layout in ({"tensor": 2}, {"pipeline": 2}):
        assert pool.run(in_layout, 2, stores["llama"].folder, layout, prompts, [options]) == [[right]] * 2


def chain(model: Decoder) -> None:
    """Token i is followed by i + 1: the blocks add nothing, and the best row of the head is the next token's.

    All logits are negative, so a padding row of zeros, if there were one, would win."""
    for name, param in model.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            param.zero_()
    model.embedding.weight.copy_(torch.eye(VOCAB, model.config.model.width))
    model.head.weight.copy_(torch.eye(VOCAB, model.config.model.width).roll(1, 0) - 2)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 4, "sequence": False}])
def test_best_token_is_found_in_every_vocabulary_shard(tmp_path, pool, layout):
    """G02: a walk over all 37 tokens, shards of 19 + 18 and of 10 + 9 + 9 + 9 rows."""
    store = saved(tmp_path, configuration(LLAMA | {"width": 40}), chain)
    options = [Options(max_new_tokens=VOCAB)]
    right = [[[(first + i + 1) % VOCAB for i in range(VOCAB)] for first in (0, 20)]]
    world = layout["tensor"]
    assert pool.run(in_layout, world, store.folder, layout, [[0], [20]], options) == [right] * world


def test_each_stop_id_ends_at_its_first_occurrence_and_is_left_out(tmp_path):
    """G03: several ids."""
    model = model_of(saved(tmp_path, configuration(LLAMA | {"width": 40}), chain))
    options = Options(max_new_tokens=15, stop_ids=(2, 11))
    assert generate(model, [[8], [0], [1], [11]], options) == [[9, 10], [1], [], list(range(12, 27))]
    assert generate(model, [[8]], Options(max_new_tokens=5), lambda new: new[-2:] == [10, 11]) == [[9, 10, 11]]


def log_likelihood(rank: int, world: int, folder: Path, layout: dict, context: list, targets: list) -> list[float]:
    """Sum of log p(target), from logits and as the loss has it; on the last stage."""
    model = model_of(Store(folder), layout, rank)
    tokens = (context + targets)[:-1]
    ids, labels = torch.tensor(tokens), torch.full((len(tokens),), -100)
    labels[-len(targets) :] = torch.tensor(targets)
    batch = Batch(ids, labels, torch.arange(len(ids)), Bounds((0, len(ids))))
    with torch.no_grad():
        hidden = through_stages(model, batch, None)
        if not model.last:
            return []
        log_p = model.logits(hidden).log_softmax(1)[-len(targets) :]
        return [float(log_p.gather(1, torch.tensor(targets)[:, None]).sum()), -float(model.loss(hidden, batch, 1.0)[1])]


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}])
def test_log_likelihood_of_hand_made_probabilities(tmp_path, pool, layout):
    """G09: p = 1/4 for each of 3 targets, the context has no part: 3 ln(1/4), perplexity 4."""
    store = saved(tmp_path, configuration(LLAMA | {"vocab": 4}), lambda model: model.head.weight.zero_())
    world = math.prod(layout.values())
    found = pool.run(log_likelihood, world, store.folder, layout, [0, 1], [3, 2, 0])[-1]
    assert found == pytest.approx([3 * math.log(1 / 4)] * 2, rel=1e-15)
    assert math.exp(-found[0] / 3) == pytest.approx(4.0, rel=1e-14)


def reference_probabilities(logits: list[float], temperature: float, top_k: int | None, top_p: float) -> list[float]:
    """By the words of the definition."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(logits)}
    kept = sorted(weights, key=lambda i: (-weights[i], i))[:top_k]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1e-9, 0.37, 0.9, 1.0])
def test_probabilities_are_those_of_the_definition(temperature, top_k, top_p):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)).tolist()
    mine = probabilities(torch.tensor(logits, dtype=torch.float64), temperature, top_k, top_p)
    assert mine.tolist() == pytest.approx(reference_probabilities(logits, temperature, top_k, top_p), rel=1e-13)
    assert float(mine.sum()) == pytest.approx(1.0, rel=1e-14)


def test_top_k_of_equal_logits_keeps_k_and_top_p_reached_exactly_keeps_no_more():
    equal = torch.zeros(8, dtype=torch.float64)
    assert probabilities(equal, 1.0, 3, 1.0).tolist() == pytest.approx([1 / 3] * 3 + [0] * 5)
    assert probabilities(equal, 1.0, None, 0.5).tolist() == [0.25] * 4 + [0] * 4


def test_draws_follow_the_probabilities_and_never_take_what_has_none():
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0], dtype=torch.float64)
    generator, count = torch.Generator().manual_seed(0), 4000
    found = torch.bincount(torch.tensor([draw(p, generator) for _ in range(count)]), minlength=6) / count
    assert found[p == 0].sum() == 0
    assert ((found - p).abs() <= 4 * (p * (1 - p) / count).sqrt()).all()  # four standard deviations, with a fixed seed


def test_a_draw_depends_on_seed_and_place_alone(stores):
    model, prompts = model_of(stores["llama"]), prompts_of(3, 17)
    together = generate(model, prompts, DRAWN)
    assert generate(model, prompts[:1], DRAWN)[0] == together[0]
    assert generate(model, [prompts_of(1)[0], prompts[1]], DRAWN)[1] == together[1]
    assert generate(model, [prompts[0], prompts[0]], DRAWN)[1] != together[0]
    assert generate(model, prompts, replace(DRAWN, seed=4)) != together


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1.0}, "temperature"), ({"temperature": math.nan}, "temperature"), ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"temperature": 1.0, "top_k": 0}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"), ({"top_k": 5}, "no effect at temperature 0"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(values, says):
    with pytest.raises(UserError, match=says):
        Options(**values)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([], "no prompt"), ([[1], []], "prompt 2 has no tokens"), ([[1, VOCAB]], "token 37"), ([[-1]], "token -1"),
        ([[1] * 61], "65, but the model knows 64"),
    ],
)  # fmt: skip
def test_prompts_that_the_model_cannot_take(stores, prompts, says):
    model = model_of(stores["gpt"])
    with pytest.raises(UserError, match=says):
        generate(model, prompts, Options(max_new_tokens=4))
    assert len(generate(model, [[1] * 60], Options(max_new_tokens=4))[0]) == 4


def test_logits_that_are_not_finite_are_told(tmp_path):
    model = model_of(saved(tmp_path, configuration(LLAMA), lambda model: model.norm.weight.fill_(math.nan)))
    for options in (Options(), DRAWN):
        with pytest.raises(UserError, match="not finite"):
            generate(model, [[1]], options)
