"""What one sees of experts: numbers of every layer, the heat map of loads, and that the small models learn."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from mtmegatron.config.constraints import check
from mtmegatron.config.load import read_yaml
from mtmegatron.errors import UserError
from mtmegatron.plan.collectives import step_counts
from mtmegatron.train.experts import Load, numbers_of
from mtmegatron.train.loads import COLUMNS, LoadHistory, draw
from mtmegatron.train.metrics import read_metrics
from mtmegatron.verify.protocol import batches, laid_out
from tests.cli.mtm import mtm
from tests.field.training import engine_of, lines_of, run
from tests.tiny import tiny

MOE = {
    "experts": 4, "ffn": 24, "pattern": [False, True, True], "score": "sigmoid", "bias_rate": 0.01, "aux_loss": 0.01, "z_loss": 1e-3, "capacity": 0.9,
}  # fmt: skip
RUN = {"train": {"steps": 4, "global_batch": 4, "micro_batch": 1}, "checkpoint": {"every": 2}}
CONFIG = tiny(RUN, model={"layers": 3, "init_std": 0.1, "moe": MOE})
NAMES = {"load_highest", "load_lowest", "entropy", "dropped", "aux_loss", "z_loss", "bias_lowest", "bias_highest"}
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def load(*counts: int) -> Load:
    return Load(list(counts), 0.0, 1.0, {}, None)


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory) -> Path:
    """A run of two stages, each with one layer of experts."""
    made = tmp_path_factory.mktemp("run")
    run(pool, CONFIG, {"pipeline": 2, "pipeline_layers": [2, 1]}, made)
    return made


# ---- numbers ----


def test_every_layer_has_every_number_on_each_line(folder):
    engine = engine_of(CONFIG, {}, precision="fp32")
    for step, line in enumerate(lines_of(folder)):
        assert {key for key in line if key.startswith("experts_")} == {"experts_load_highest"} | {f"experts_{i}_{n}" for i in (1, 2) for n in NAMES}
        seen = engine.step(batches(engine, step), step).experts.read()
        assert line["experts_load_highest"] == max(line[f"experts_{i}_load_highest"] for i in (1, 2))
        assert all(line[f"experts_{i}_dropped"] == pytest.approx(seen[i].dropped) for i in (1, 2))
        assert all(line[key] == pytest.approx(value, rel=1e-3) for key, value in numbers_of(seen).items())
    assert line["experts_2_bias_lowest"] < 0 < line["experts_2_bias_highest"] and line["experts_1_aux_loss"] > 0


def test_loads_are_relative_to_the_mean():
    seen = load(6, 2, 0, 4)
    assert seen.relative == [2.0, pytest.approx(2 / 3), 0.0, pytest.approx(4 / 3)] and (seen.highest, seen.lowest) == (2.0, 0.0)


def test_trackers_show_numbers_and_the_heat_map(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert {f"experts/{i}_{n}" for i in (1, 2) for n in NAMES} <= set(events.Tags()["scalars"])
    assert [image.step for image in events.Images("experts/load")] == [2, 4]


@pytest.mark.parametrize("layout", [{"data": 2, "expert": 2}, {"pipeline": 2}], ids=str)
def test_all_layers_share_one_collective_a_step(layout):
    counts = step_counts(check(laid_out(CONFIG, layout, "fp32"), 2), 0)
    table = {(k.axis, k.operation): n for k, n in counts.items() if k.when == "update" and k.dtype == "float64"}
    assert table == {("dataxcontextxtensorxpipeline", "all_reduce"): 1}


# ---- the heat map ----


def test_a_resumed_run_has_the_loads_of_an_uninterrupted_one(folder, pool, tmp_path):
    for _ in range(2):
        run(pool, CONFIG, {}, tmp_path, stop=2)  # cut off in the third step, and once more after going on
    run(pool, CONFIG, {}, tmp_path)
    whole, cut = LoadHistory(folder, 4), LoadHistory(tmp_path, 4)
    assert [c.step for c in cut.columns] == [1, 2, 3, 4] and cut.blocks == [1, 2] == whole.blocks
    for a, b in zip(whole.columns, cut.columns):
        np.testing.assert_allclose(a.total, b.total, atol=1e-6)
    assert (tmp_path / "loads.png").stat().st_size > 5000
    assert [c.step for c in LoadHistory(folder, 3).columns] == [1, 2, 3] and not LoadHistory(folder, 0).columns


def test_a_long_run_keeps_its_mean_in_a_bounded_number_of_columns(tmp_path):
    history = LoadHistory(tmp_path, 0)
    for step in range(1, 4 * COLUMNS + 4):
        history.add(step, {3: load(step, 0, 2 * COLUMNS * 10 - step)})
    assert len(history.columns) <= COLUMNS and sum(c.count for c in history.columns) == 4 * COLUMNS + 3
    assert [c.step for c in history.columns] == [*range(8, 4 * COLUMNS + 1, 8), 4 * COLUMNS + 3]
    steps = np.arange(1, 9)
    np.testing.assert_allclose(history.columns[0].total[0, 0], (steps * 3 / (2 * COLUMNS * 10)).sum(), rtol=1e-6)


def test_the_picture_is_red_where_too_much_goes_and_blue_where_nothing_goes(tmp_path):
    history = LoadHistory(tmp_path, 0)
    for step in range(5, 15):
        history.add(step, {0: load(4, 0), 2: load(2, 2)})
    pixels = history.write()
    (mesh,) = draw(history).axes[0].collections[:1]
    colours = mesh.to_rgba(mesh.get_array())
    red, blue = colours[0, 0, :3], colours[1, 0, :3]
    assert red[0] > 2 * red[2] and blue[2] > 2 * blue[0] and (colours[2:, :, :3] > 0.95).all()
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3 and (tmp_path / "loads.png").read_bytes()[:4] == b"\x89PNG"


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "loads.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(UserError, match="loads.npz cannot be read.*remove it"):
        LoadHistory(tmp_path, 3)


# ---- they learn ----


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    text = tmp_path_factory.mktemp("corpus") / "text.txt"
    text.write_text("\n".join(f"{a} times {b} is {a * b}." for a in range(40) for b in range(40)))
    assert mtm("data", "prepare", text, "--output", text.with_suffix(""), "--tokenizer", "bytes").code == 0
    return text.with_suffix("")


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("tiny-*.yaml")), ids=lambda file: file.stem)
def test_the_loss_of_small_models_falls(file, corpus, tmp_path):
    tree = {key: value for key, value in read_yaml(file).items() if key not in ("parallel", "checkpoint")}
    tree["data"] = {"train": str(corpus), "tokenizer": "bytes", "sequence": 64, "split": [1.0, 0.0, 0.0]}
    tree["train"] = {"folder": str(tmp_path / "run"), "steps": 12, "global_batch": 8, "micro_batch": 4}
    tree["optimizer"] = {"lr": 3e-3, "warmup": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    done = mtm("train", tmp_path / "run.yaml")
    assert done.code == 0, done
    lines = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    first, *_, last = [line["loss"] for line in lines]
    assert first == pytest.approx(np.log(257), rel=0.1) and last < 0.75 * first, "of a uniform guess, then of a text of few words"
    assert all(line["experts_load_highest"] >= 1 for line in lines)
