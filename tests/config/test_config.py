"""Configuration: faults are told all at once, in the words of the file, and each repair that is suggested repairs."""

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.config import rules
from mtmegatron.config.constraints import check, faults, resolve
from mtmegatron.config.derived import layout_of
from mtmegatron.config.load import load, validate, values
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError
from tests.tiny import tiny

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
BASE = "model: {layers: 2, width: 64, heads: 4, vocab: 259}\n"


@pytest.fixture
def file(tmp_path):
    """Writes text as a configuration file; its path."""

    def write(text: str = BASE) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    return str(caught.value).splitlines()


# ---- from text to values ----


def test_all_faults_of_a_file_are_told_at_once_with_the_nearest_name(file):
    text = "model: {layers: 2, width: 64}\nparallel: {tensr: 2}\noptimizer: {lr: fast, warm: 3}\n"
    text += "train: {steps: 0}\nspeed: 9\n"
    head, *lines = refused(file(text))
    assert head.endswith("run.yaml: 6 faults")
    told = "\n".join(lines)
    for words in (
        "model.heads: must be given",
        "parallel.tensr: unknown key; did you mean tensor?",
        "optimizer.lr: 'fast' is refused",
        "optimizer.warm: unknown key; did you mean warmup?",
        "train.steps: 0 is refused",
        "speed: unknown key",
    ):
        assert words in told, words


def test_an_unknown_key_without_a_near_name_lists_those_there_are(file):
    (_, line) = refused(file(BASE + "log: {zzz: 1}\n"))
    assert "known here: every, tensorboard, wandb" in line
    (_, line) = refused(file(BASE + "data: {train: [{path: a, wieght: 2}]}\n"))
    assert "data.train.0.wieght: unknown key; did you mean weight?" in line
    (_, line) = refused(file(BASE + "data: {train: 3}\n"))
    assert "data.train: 3 is refused" in line


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("train.steps=1e3", "train.steps", 1000),
        ("model.tied=true", "model.tied", True),
        ("data.split=[0.9, 0.1, 0]", "data.split", (0.9, 0.1, 0.0)),
        ("model.kv_heads=null", "model.kv_heads", None),
        ("data.tokenizer=folder/tokenizer.json", "data.tokenizer", "folder/tokenizer.json"),
        ("train.folder=runs/a=b", "train.folder", "runs/a=b"),
        (
            "model.rope_scaling={rope_type: linear, factor: 2.0}",
            "model.rope_scaling",
            {"rope_type": "linear", "factor": 2.0},
        ),
        ("parallel.pipeline_layers=[1, 1]", "parallel.pipeline_layers", [1, 1]),
        ("optimizer.min_lr=1.5e-05", "optimizer.min_lr", 1.5e-5),
    ],
)
def test_overrides_have_the_types_of_their_fields(override, key, value, file):
    loaded = load(file(), [override])
    assert values(loaded.config)[key] == value
    assert {origin for place, origin in loaded.origins.items() if place.startswith(key)} == {"override"}


@pytest.mark.parametrize(
    "override, words",
    [
        ("lr", "section.key=value"),
        ("=3", "section.key=value"),
        ("model.width.x=3", "width is a value, not a section"),
        ("optimizer.lr=0", "optimizer.lr"),
        ("optimizer.lr=nan", "optimizer.lr"),
        ("optimizer.lr=.inf", "optimizer.lr"),
        ("optimizer.clip=.nan", "optimizer.clip"),
        ("optimizer.beta1=1.0", "optimizer.beta1"),
        ("train.steps=2.5", "train.steps"),
        ("parallel.zero=4", "parallel.zero"),
        ("train.precision=int8", "train.precision"),
        ("model.activation=relu6", "model.activation"),
        ("device=tpu", "device"),
    ],
)
def test_overrides_that_cannot_be(override, words, file):
    assert words in "\n".join(refused(file(), override))


def test_origins_tell_file_and_override_and_the_last_override_wins(file):
    path = file(BASE + "optimizer: {lr: 1e-3, warmup: 5}\n")
    loaded = load(path, ["optimizer.lr=2e-3", "optimizer.lr=4e-3"])
    assert loaded.config.optimizer.lr == 4e-3 and loaded.config.optimizer.warmup == 5
    assert loaded.origins["optimizer.lr"] == "override" and loaded.origins["optimizer.warmup"] == f"file {path}"
    assert "train.steps" not in loaded.origins


@pytest.mark.parametrize("text", ["", "- 1\n", "model\n", "model: [\n", "\0", "{[1]: 2}\n"], ids=repr)
def test_files_that_are_no_configuration_are_named(text, file):
    path = file(text)
    assert str(path) in refused(path)[0]


def test_a_file_that_is_absent_or_a_folder_is_named(tmp_path):
    assert "absent.yaml" in refused(tmp_path / "absent.yaml")[0]
    assert str(tmp_path) in refused(tmp_path)[0]


@pytest.mark.parametrize(
    "text", [BASE + "train: {steps: 5}\ntrain: {seed: 1}\n", BASE + "train:\n  steps: 5\n  steps: 6\n"]
)
def test_a_key_that_is_given_twice_is_refused(text, file):
    told = "\n".join(refused(file(text)))
    assert "is given twice" in told and "line" in told


def test_every_field_is_explained_in_the_schema():
    schema = json.loads(json.dumps(Config.model_json_schema()))
    sections = {"Config": schema} | schema["$defs"]
    missing = [
        f"{s}.{k}"
        for s, body in sections.items()
        for k, field in body["properties"].items()
        if not field.get("description")
    ]
    # the sections themselves carry the docstring of their class
    assert set(missing) <= {f"Config.{name}" for name in schema["properties"]} and all(
        body["description"] for body in sections.values()
    )
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_that_are_shipped_are_sound(path):
    config = load(path).config
    p = config.parallel
    if config.model.vocab is None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"vocab": 259})})
    world = p.tensor * p.context * p.pipeline * (p.data or 1)
    assert layout_of(check(config, world)).world == world


def test_a_configuration_survives_its_json():
    config = check(tiny(model={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, parallel={"tensor": 2}), 4)
    assert Config.model_validate(json.loads(config.model_dump_json())) == config


# ---- what does not fit together ----

# one configuration for each rule of constraints.py: (changes, processes, words that only this rule says)
RULES = [
    ({"model": {"width": 66}}, 1, "`model.heads: 4` does not divide `model.width: 66`"),
    ({"model": {"kv_heads": 3}}, 1, "`model.kv_heads: 3` does not divide `model.heads: 4`"),
    ({"model": {"positions": "learned", "max_positions": 16}}, 1, "is longer than `model.max_positions: 16`"),
    ({"model": {"positions": "learned", "rope_fraction": 0.5}}, 1, "`model.rope_*` has no effect"),
    ({"model": {"head_size": 15}}, 1, "turn 15 channels"),
    ({"model": {"kv_heads": None, "latent": {}, "positions": "learned"}}, 1, "`model.latent` with `model.positions: learned`"),
    ({"model": {"kv_heads": 2, "latent": {}}}, 1, "`model.kv_heads: 2` has no effect with `model.latent`"),
    ({"model": {"prediction": {"coefficient": 0}}}, 1, "`model.prediction.coefficient: 0`"),
    ({"parallel": {"tensor": 2, "data": 2}}, 3, "is 4, but there are 3 processes"),
    ({"parallel": {"tensor": 2}}, 3, "is 2, which does not divide the 3 processes"),
    ({"parallel": {"sequence": True}}, 1, "`parallel.sequence: true` needs `parallel.tensor` of 2 or more"),
    ({"parallel": {"tensor": 3, "sequence": False}}, 3, "`parallel.tensor: 3` does not divide `model.heads: 4`"),
    (
        {"model": {"heads": 12, "kv_heads": 4, "width": 96}, "parallel": {"tensor": 6, "sequence": False}},
        6,
        "one must divide the other",
    ),
    ({"model": {"ffn": 1}, "parallel": {"tensor": 2}}, 2, "is more than `model.ffn: 1`"),
    ({"parallel": {"pipeline": 2, "pipeline_layers": [4]}}, 2, "names 1 chunks, the pipeline has 2"),
    ({"parallel": {"pipeline": 2, "pipeline_layers": [1, 2]}}, 2, "adds up to 3 layers"),
    ({"parallel": {"pipeline": 7}, "train": {"global_batch": 2}}, 7, "leaves some with nothing to do"),
    (
        {"data": {"sequence": 31}, "train": {"micro_batch": 1}, "parallel": {"tensor": 2}},
        2,
        "does not divide the 31 tokens",
    ),
    ({"parallel": {"pipeline": 2, "schedule": "zb-v", "chunks": 1}}, 2, "`parallel.chunks: 1` with `schedule: zb-v`"),
    ({"parallel": {"pipeline": 2, "chunks": 2}}, 2, "`parallel.chunks: 2` has no effect"),
    ({"parallel": {"context": 2}, "data": {"sequence": 30}}, 2, "cuts a sequence in 4 equal parts"),
    ({"parallel": {"context_kind": "ring"}}, 1, "have no effect with `parallel.context: 1`"),
    ({"parallel": {"context": 4, "context_kind": "ring-ulysses"}}, 4, "needs `parallel.ulysses`"),
    ({"parallel": {"context": 4, "ulysses": 2}}, 4, "`parallel.ulysses: 2` has no effect"),
    ({"model": {"heads": 2}, "parallel": {"context": 4, "context_kind": "ulysses"}}, 4, "shares 2 heads per tensor rank"),
    ({"model": {"dropout_attention": 0.1}, "parallel": {"context": 2}}, 2, "`model.dropout_attention` with `parallel.context`"),
    ({"parallel": {"zero": 1, "shard": 3}}, 4, "`parallel.shard: 3` does not divide the 4 data ranks"),
    ({"parallel": {"shard": 2}}, 4, "`parallel.shard: 2` has no effect"),
    ({"parallel": {"reduce": "bf16"}, "train": {"precision": "fp64"}}, 1, "`parallel.reduce: bf16`"),
    ({"recompute": {"every": 2}}, 1, "`recompute.every` and `first` have no effect"),
    ({"recompute": {"mode": "full", "parts": ["norm"]}}, 1, "`recompute.parts` has no effect"),
    ({"recompute": {"mode": "selective", "parts": []}}, 1, "with no `recompute.parts`"),
    ({"device": "cpu", "recompute": {"offload": True}}, 1, "`recompute.offload` has no effect"),
    ({"train": {"global_batch": 9}}, 1, "`train.global_batch: 9` is not a multiple"),
    ({"optimizer": {"warmup": 21}}, 1, "`optimizer.warmup: 21` steps is longer"),
    ({"optimizer": {"decay": "wsd"}}, 1, "needs `wsd_length` of at most 20 steps"),
    ({"optimizer": {"decay": "constant", "decay_length": 5}}, 1, "`optimizer.decay_length` has no effect"),
    ({"optimizer": {"decay": "constant", "min_lr": 1e-4}}, 1, "`optimizer.min_lr` has no effect"),
    ({"optimizer": {"min_lr": 1.0}}, 1, "is above `optimizer.lr: 0.01`"),
    ({"optimizer": {"clip_value": 0.5}}, 1, "`optimizer.clip_value: 0.5` cuts elements"),
    ({"optimizer": {"groups": [{"match": "*"}]}}, 1, "`optimizer.groups.0` (*) has settings without effect, it changes nothing"),
    ({"optimizer": {"kind": "onebit-adam"}}, 1, "`optimizer.kind: onebit-adam` begins with a warm-up"),
    ({"optimizer": {"kind": "onebit-adam", "onebit": {"freeze": 20}}}, 1, "`optimizer.onebit.freeze: 20` leaves nothing"),
    ({"optimizer": {"kind": "onebit-adam", "onebit": {"freeze": 4}}, "parallel": {"zero": 2}}, 2, "`parallel.zero: 2` with `optimizer.kind: onebit-adam`"),
    ({"optimizer": {"kind": "zeroone-adam", "onebit": {"freeze": 4, "local_interval": 2}}, "parallel": {"zero": 1}}, 2, "`parallel.zero: 1` with `optimizer.onebit.local_steps: 16`"),
    ({"optimizer": {"kind": "zeroone-adam", "onebit": {"freeze": 4, "local_interval": 2, "local_steps": 6}}}, 2, "`optimizer.onebit.local_steps: 6` is no power of two"),
    ({"optimizer": {"kind": "zeroone-adam", "onebit": {"freeze": 4}}}, 2, "`optimizer.onebit.local_interval: None` must be less than the 16 updates"),
    ({"train": {"ramp": {"start": 3, "increment": 2, "samples": 9}}}, 1, "`train.ramp` from 3 in steps of 2 does not reach"),
    ({"train": {"ramp": {"start": 4, "increment": 1, "samples": 9}}}, 1, "`train.ramp` has batches that are no multiple"),
    ({"model": {"moe": {"experts": 4}}, "train": {"ramp": {"start": 4, "increment": 4, "samples": 9}}}, 1, "`train.ramp` with `model.moe`"),
    ({"train": {"timeline": 21}}, 1, "`train.timeline: 21` is after the last"),
    ({"data": {"split": [0.9, 0.2, 0.0]}}, 1, "`data.split` adds up to 1.1"),
    ({"checkpoint": {"asynchronous": True}}, 1, "`checkpoint.asynchronous` has no effect"),
    ({"model": {"moe": {"experts": 4, "groups": 3, "groups_kept": 2, "top_k": 1}}}, 1, "`model.moe.groups: 3` does not divide `experts: 4`"),
    ({"model": {"moe": {"experts": 4, "top_k": 5}}}, 1, "`model.moe.top_k: 5` experts cannot be chosen among 4"),
    ({"model": {"moe": {"experts": 4, "top_k": 1, "score_after": True}}}, 1, "weights of 1, which train no router"),
    ({"model": {"moe": {"experts": 4, "pad": True}}}, 1, "`model.moe.pad: true` has no effect without a capacity"),
    ({"parallel": {"expert": 2}}, 2, "`parallel.expert: 2` has no effect without model.moe"),
    ({"model": {"moe": {"experts": 4}}, "parallel": {"expert": 3}}, 4, "does not divide the 4 ranks of a stage"),
    ({"model": {"moe": {"experts": 2}}, "parallel": {"expert": 4}}, 4, "`parallel.expert: 4` is more than there is to share"),
    ({"model": {"moe": {"experts": 4}}, "parallel": {"tensor": 2, "sequence": False}}, 2, "`parallel.sequence: false` with `model.moe`"),
    ({"model": {"moe": {"experts": 4}}, "parallel": {"zero": 1, "shard": 2}}, 4, "`parallel.shard: 2` with `model.moe`"),
    ({"model": {"moe": {"experts": 4}, "bias_mlp": True}}, 1, "`model.bias_mlp: true` with `model.moe`"),
    ({"model": {"moe": {"experts": 4, "capacity": 1.0, "pad": True}}, "parallel": {"expert": 2, "dispatch_parts": 2}}, 2, "`model.moe.pad` with `parallel.dispatch_parts`"),
    ({"model": {"moe": {"experts": 4, "first_dense": 4}}}, 1, "no block that has experts"),
    ({"model": {"moe": {"experts": 4, "pattern": [True, False]}}}, 1, "`model.moe.pattern` names 2 blocks"),
    ({"model": {"moe": {"experts": 4, "pattern": [True, False, True, True], "every": 2}}}, 1, "`model.moe.every` and `first_dense` have no effect"),
    ({"train": {"fp8": {"format": "hybrid"}}}, 1, "`train.fp8` has no effect with `train.precision: fp32`"),
    ({"train": {"precision": "fp8-rowwise", "fp8": {"margin": 1}}}, 1, "`train.fp8.margin` has no effect with `train.precision: fp8-rowwise`"),
    ({"train": {"precision": "fp8-delayed", "fp8": {"history": 2, "interval": 3}}}, 1, "`train.fp8.interval: 3` is longer"),
    ({"train": {"precision": "fp8-mxfp8", "fp8": {"high_precision": ["layers.7.*"]}}}, 1, "`train.fp8.high_precision: layers.7.*` matches no"),
    ({"model": {"layers": 2}, "train": {"precision": "fp8-mxfp8"}}, 1, "leaves no linear layer in fp8 (`model.layers: 2`)"),
    ({"train": {"precision": "fp16", "loss_scale": {"initial": 1, "minimum": 2}}}, 1, "`train.loss_scale.initial: 1` is below"),
    ({"optimizer": {"kind": "lamb", "compiled": True}}, 1, "`optimizer.compiled: true` with `optimizer.kind: lamb`"),
    ({"optimizer": {"kind": "muon", "moments": "fp8"}}, 1, "`optimizer.moments: fp8` with `optimizer.kind: muon`"),
    ({"train": {"blocks": 2}}, 1, "`train.blocks: 2` has no effect"),
    ({"train": {"numerics": "canonical", "blocks": 2}, "parallel": {"tensor": 4}, "model": {"kv_heads": 4}}, 4, "which `parallel.tensor: 4` does not divide"),
    ({"train": {"numerics": "canonical"}, "parallel": {"tensor": 4}, "model": {"kv_heads": 2}}, 4, "would cut one of `model.kv_heads: 2`"),
    ({"train": {"numerics": "canonical"}, "data": {"sequence": 36}}, 1, "is not a multiple of 2 x `train.blocks: 4`"),
    ({"train": {"numerics": "canonical", "precision": "fp64"}}, 1, "is not there for `train.precision: fp64`"),
]


@pytest.mark.parametrize("changes, world, words", RULES, ids=[words[:40] for _, _, words in RULES])
def test_each_rule_fires_alone_and_tells_a_repair(changes, world, words):
    (line,) = faults(tiny(changes), world)
    assert words in line and re.search(r": (use|give|start|make|remove|shorten|change|swap|there is nobody)", line), (
        line
    )
    with pytest.raises(UserError, match="1 fault in the configuration"):
        check(tiny(changes), world)


def test_the_table_above_has_every_rule():
    trees = [ast.parse(path.read_text()) for path in Path(rules.__file__).parent.glob("*.py")]
    yields = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    assert len(RULES) == len(yields)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"head_size": 16}, "`model.head_size: 16` has no effect"),
        ({"rope_fraction": 0.5}, "`model.rope_fraction: 0.5` has no effect"),
        ({"bias_qkv": True}, "`model.bias_qkv: true` has no effect"),
        ({"qk_norm": True}, "`model.qk_norm: true` has no effect"),
        ({"latent": {"rope": 7}}, "turn 7 channels of a head, an odd number: change model.latent.rope"),
    ],
)
def test_what_says_something_of_heads_beside_latent_attention(changes, words):
    (line,) = faults(tiny(model={"kv_heads": None, "latent": {}} | changes), 1)
    assert words in line


def test_latent_heads_need_not_share_the_width():
    config = check(tiny(model={"width": 66, "kv_heads": None, "latent": {"nope": 24, "rope": 8}}), 1)
    assert config.model.head_size == 32 and config.model.kv_heads == 4
    assert not [line for line in faults(config, 1) if "model." in line], "what was filled in is not refused as given"


def test_all_rules_are_told_together():
    config = tiny(
        model={"heads": 5, "kv_heads": 3, "width": 64},
        parallel={"tensor": 2},
        optimizer={"min_lr": 1.0},
        train={"global_batch": 9},
    )
    assert len(list(faults(config, 3))) >= 5
    assert not list(faults(tiny(), 4))


def numbers_after(line: str, phrase: str) -> list[int]:
    """The numbers that a fault suggests: those behind the last `phrase`."""
    return [int(n) for n in re.findall(r"\d+", line.rpartition(phrase)[2].split(", or ")[0])]


def without(config: Config, world: int, words: str) -> bool:
    return not any(words in line for line in faults(config, world))


@given(heads=st.integers(1, 48), kv=st.integers(1, 48), tensor=st.integers(1, 48))
@settings(max_examples=150, deadline=None)
def test_repairs_of_heads(heads, kv, tensor):
    def config(**changes):
        return tiny(
            model={"heads": heads, "kv_heads": kv, "head_size": 4, "ffn": 64} | changes.get("model", {}),
            parallel={"tensor": changes.get("tensor", tensor), "sequence": False},
        )

    lines = list(faults(config(), tensor))
    assert bool(lines) == bool(heads % kv or heads % tensor or (kv % tensor and tensor % kv))
    for line in lines:
        (suggested,) = {"kv_heads", "tensor"} & {re.match(r"`(?:model|parallel)\.(\w+)", line)[1]}
        for fit in numbers_after(line, ": use "):
            # a repair of the model is one of the model alone: which degrees fit is told once the model is sound
            changed = config(model={"kv_heads": fit}, tensor=1) if suggested == "kv_heads" else config(tensor=fit)
            assert without(changed, changed.parallel.tensor, f".{suggested}: {fit}`"), (line, fit)


@given(width=st.integers(1, 200), heads=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_repairs_of_the_width(width, heads):
    line = next(
        (x for x in faults(tiny(model={"width": width, "heads": heads, "kv_heads": None}), 1) if "model.width" in x),
        None,
    )
    assert (line is None) == (width % heads == 0)
    for fit in numbers_after(line, ": use ") if line else []:
        assert without(tiny(model={"width": width, "heads": fit, "kv_heads": None}), 1, "model.width")


@given(sequence=st.integers(1, 300), micro=st.integers(1, 8), tensor=st.sampled_from([2, 3, 4, 6, 8]))
@settings(max_examples=100, deadline=None)
def test_repairs_of_the_sequence(sequence, micro, tensor):
    def lines(length):
        config = tiny(
            model={"heads": 24, "kv_heads": 24, "head_size": 4},
            data={"sequence": length},
            train={"micro_batch": micro, "global_batch": 8 * micro},
            parallel={"tensor": tensor},
        )
        return list(faults(config, tensor))

    found = lines(sequence)
    assert bool(found) == (sequence * micro % tensor > 0)
    for fit in numbers_after(found[0], "data.sequence ") if found else []:
        assert not lines(fit)


@given(batch=st.integers(1, 100), micro=st.integers(1, 8), data=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_l04_repairs_of_the_batch(batch, micro, data):
    def lines(size):
        return list(faults(tiny(train={"global_batch": size, "micro_batch": micro}), data))

    found = lines(batch)
    assert bool(found) == (batch % (micro * data) > 0)
    if found:
        assert all(
            words in found[0] for words in (f"global_batch: {batch}", f"micro_batch: {micro}", f"data ranks {data}")
        )
        fits = numbers_after(found[0], ": use ")
        assert len(fits) == 2 and not any(line for fit in fits for line in lines(fit))


@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 6),
    data=st.none() | st.integers(1, 4),
    world=st.integers(1, 64),
)
@settings(max_examples=150, deadline=None)
def test_l02_repairs_of_the_number_of_processes(tensor, pipeline, data, world):
    def lines(processes):
        config = tiny(
            parallel={"tensor": tensor, "pipeline": pipeline, "data": data},
            train={"global_batch": 5760, "micro_batch": 1},
        )
        return [line for line in faults(config, processes) if "processes" in line]

    found = lines(world)
    for fit in numbers_after(found[0].replace(" (--nproc", "; (").split(";")[0], "start ") if found else []:
        assert not lines(fit)
    if not found:
        config = resolve(tiny(parallel={"tensor": tensor, "pipeline": pipeline, "data": data}), world)
        assert layout_of(config).world == world


@pytest.mark.parametrize("pipeline", [7, 8, 100])
def test_repairs_of_the_pipeline(pipeline):
    (line,) = (x for x in faults(tiny(parallel={"pipeline": pipeline}), pipeline) if "nothing to do" in x)
    (most, *_) = numbers_after(line, "use at most ")
    assert without(tiny(parallel={"pipeline": most}), most, "nothing to do") and not without(
        tiny(parallel={"pipeline": most + 1}), most + 1, "nothing"
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"parallel": {"sequence": True}}, "parallel.tensor"),
        ({"parallel": {"schedule": "breadth-first"}}, "parallel.schedule"),
        ({"train": {"precision": "fp16+bf16"}}, "train.precision"),
        ({"parallel": {"expert": 2}}, "parallel.expert: 2"),
        ({"train": {"recompute_layers": 9}}, "train.recompute_layers: unknown key"),
        ({"optimizer": {"warmup": 99}}, "optimizer.warmup: 99"),
    ],
)
def test_l05_illegal_pairs_are_refused_by_name_before_anything_is_built(changes, words):
    with pytest.raises(UserError) as caught:
        check(tiny(changes), 1)
    assert words in str(caught.value)


def test_resolve_fills_what_was_left_open_and_nothing_else():
    config = validate(
        {
            "model": {"layers": 2, "width": 64, "heads": 4, "vocab": 9},
            "parallel": {"tensor": 2},
            "data": {"sequence": 128},
        },
        "x",
    )
    full = resolve(config, 8)
    changed = {key: value for key, value in values(full).items() if value != values(config)[key]}
    assert changed == {
        "model.kv_heads": 4,
        "model.head_size": 16,
        "model.ffn": 256,
        "model.max_positions": 128,
        "parallel.sequence": True,
        "parallel.data": 4,
        "parallel.chunks": 1,
        "parallel.ulysses": 1,
        "parallel.shard": 4,
    }
    assert resolve(full, 8) == full
