"""Upcycling: from any dense checkpoint, in any layout, the output of the model with experts is that of the dense one."""

from pathlib import Path

import pytest
import torch

from mtmegatron.batch import Batch, Bounds
from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load_weights
from mtmegatron.checkpoint.store import Store
from mtmegatron.checkpoint.upcycle import upcycle
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError
from mtmegatron.models.stages import parameters_of
from mtmegatron.verify.protocol import batches
from tests.cli.mtm import mtm
from tests.field.training import engine_of, lines_of, loop_of, name, run
from tests.tiny import tiny

EPS = torch.finfo(torch.float64).eps
LAYERS, TOP_K = 3, 2
RUN = {"train": {"steps": 2, "global_batch": 4, "micro_batch": 1}, "log": {"tensorboard": False}}
DENSE = tiny(RUN, model={"layers": LAYERS, "init_std": 0.1})
MIXTRAL = {"experts": 4, "top_k": TOP_K, "score_after": True}
# each block's output has the rounding of a sum of k weighted copies; a norm makes of a relative error one of about the same size
ROUNDING = 8 * LAYERS * (TOP_K + 4) * EPS
ROUTERS = {
    "mixtral": MIXTRAL, "some blocks": MIXTRAL | {"pattern": [True, False, True]},
    "deepseek": {"experts": 8, "score": "sigmoid", "groups": 4, "groups_kept": 2, "renormalise": True, "scale": 2.5, "bias_rate": 0.1},
    "shared": MIXTRAL | {"shared": 2, "shared_gate": True}, "room for all": MIXTRAL | {"capacity": 2.0, "jitter": 0.1},
}  # fmt: skip
MODELS = {"llama": {}, "ungated": {"activation": "gelu", "tied": True}}


def with_experts(moe: dict, **model) -> Config:
    return tiny(RUN, model={"layers": LAYERS, "init_std": 0.1, "moe": moe} | model)


def dense(pool, folder: Path, layout: dict, **model) -> Store:
    run(pool, tiny(RUN, model={"layers": LAYERS, "init_std": 0.1} | model), layout, folder, "fp64")
    return Folder(folder / "checkpoints").open(2)


@pytest.fixture(scope="module")
def source(pool, tmp_path_factory) -> Store:
    """A dense checkpoint of two ranks."""
    return dense(pool, tmp_path_factory.mktemp("dense"), {"tensor": 2, "zero": 0})


def upcycled(store: Store, config: Config, folder: Path) -> Store:
    """Step 0 of a run of this configuration."""
    target = Folder(folder / "checkpoints")
    own = loop_of(config, {}, "fp64", folder).config
    upcycle(store, own, parameters_of(own), target)
    return target.open(0)


def logits(store: Store, config: Config) -> torch.Tensor:
    engine = engine_of(config, {})
    load_weights(store, engine.model, engine.mesh)
    tokens = torch.arange(64) * 4
    batch = Batch(tokens, tokens, torch.arange(64), Bounds((0, 40, 64)))
    with torch.no_grad():
        return engine.model.logits(engine.model(None, batch))


def loss_of_step(store: Store, config: Config) -> float:
    """Of the first step that a run makes."""
    engine = engine_of(config, {})
    load_weights(store, engine.model, engine.mesh)
    engine.optimizer.refresh_masters()
    return engine.step(batches(engine, 0), 0).loss


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("router", ROUTERS)
def test_logits_are_those_of_the_dense_model(router, model, pool, tmp_path):
    config = with_experts(ROUTERS[router], **MODELS[model])
    store = dense(pool, tmp_path / "dense", {}, **MODELS[model])
    right = logits(store, tiny(RUN, model={"layers": LAYERS} | MODELS[model]))
    made = upcycled(store, config, tmp_path / "moe")
    made.verify()
    assert (logits(made, config) - right).norm() <= ROUNDING * right.norm()
    router = made.read(f"weight/layers.{LAYERS - 1}.mlp.router.weight")
    assert router.std() > 0.05 and router.dtype == torch.float64, "the router begins with its own first values"


@pytest.mark.parametrize("layout", [{"data": 2, "expert": 2, "zero": 1}, {"tensor": 2, "expert_tensor": 2}, {"pipeline": 2}], ids=name)
def test_any_layout_goes_on_from_a_checkpoint_of_any_layout(layout, source, pool, tmp_path):
    config = with_experts(MIXTRAL)
    upcycled(source, config, tmp_path)
    run(pool, config, layout, tmp_path, "fp64")
    assert lines_of(tmp_path)[0]["loss"] == pytest.approx(loss_of_step(source, DENSE), rel=ROUNDING)
    assert Folder(tmp_path / "checkpoints").steps() == [0, 2]


REFUSED = {
    "weights that do not add up": ({"experts": 4}, {}, "model.moe.renormalise: true"),
    "sigmoids as they are": ({"experts": 4, "score": "sigmoid", "score_after": True, "bias_rate": 0.01}, {}, "model.moe.renormalise: true"),
    "another width": (MIXTRAL | {"ffn": 40}, {}, "another width than the feed-forward layer's 176: leave it out"),
    "dropped tokens": (MIXTRAL | {"capacity": 1.5}, {}, "use at least 2"),
    "another model": (MIXTRAL, {"norm_eps": 1e-3}, "`model.norm_eps: 0.001` is 1e-05 in the checkpoint"),
    "no experts": (None, {}, "`model.moe` is not given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_equal_is_refused_with_the_repair(case, source, tmp_path):
    moe, model, told = REFUSED[case]
    with pytest.raises(UserError, match="cannot become this model") as refusal:
        upcycled(source, with_experts(moe, **model), tmp_path)
    assert told in str(refusal.value) and not Folder(tmp_path / "checkpoints").steps()


def test_experts_are_not_upcycled_again_nor_a_run_overwritten(source, tmp_path):
    made = upcycled(source, with_experts(MIXTRAL), tmp_path)
    for store, told in ((made, "has experts already"), (source, "choose another train.folder")):
        with pytest.raises(UserError, match=told):
            upcycled(store, with_experts(MIXTRAL), tmp_path)


def test_the_command_makes_what_train_goes_on_from(tmp_path):
    text, data = tmp_path / "text.txt", tmp_path / "text"
    text.write_text("the cat sat on the mat. " * 400)
    assert mtm("data", "prepare", text, "--output", data, "--tokenizer", "bytes").code == 0
    model = "{layers: 2, width: 32, heads: 2, ffn: 64, %s}"
    common = f"data: {{train: {data}, tokenizer: bytes, sequence: 32, split: [1.0, 0.0, 0.0]}}\ntrain: {{steps: 2}}\nlog: {{tensorboard: false}}\nmodel: "
    for file, more in (("dense", "tied: true"), ("moe", "tied: true, moe: {experts: 4, score_after: true}")):
        (tmp_path / f"{file}.yaml").write_text(common + model % more)
    assert mtm("train", tmp_path / "dense.yaml", f"train.folder={tmp_path}/dense").code == 0
    done = mtm("upcycle", tmp_path / "dense", tmp_path / "moe.yaml", f"train.folder={tmp_path}/moe")
    assert done.code == 0 and "step 0 of a model of 4 experts" in done.out, done
    done = mtm("train", tmp_path / "moe.yaml", f"train.folder={tmp_path}/moe", "train.resume=must")
    assert done.code == 0 and "resumed from step 0" in done.out, done
