"""The commands as a user meets them: help, origins of values, one message a fault, a run from text to checkpoint."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mtmegatron.data.prepare import prepare
from tests.cli.mtm import mtm

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("train", "data prepare", "data merge", "data tokenizer", "generate", "verify", "config", "info", "schedule", "quickstart")
TINY = "configs/tiny.yaml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: the repository's configurations, and the corpus that tiny.yaml reads."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"document {i} counts to {i}. " * 60)
    prepare([f"{i}.txt" for i in range(8)], "runs/tiny/data/docs", "bytes")
    return tmp_path


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# ---- help ----


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_of_the_command(command):
    result = mtm(*command.split(), "--help")
    assert result.code == 0
    text = " ".join(result.out.split())
    assert f"Example: mtm {command}" in text


def test_merge_lays_corpora_end_to_end(folder):
    made = mtm("data", "merge", "runs/tiny/data/docs", "runs/tiny/data/docs", "--output", "twice")
    assert made.code == 0 and "twice.bin: 16 documents" in made.out


def test_help_needs_no_torch():
    program = "import sys, mtmegatron.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_misspelt_option_is_refused():
    assert mtm("train", TINY, "--nprc", 2).code == 2


# ---- config ----


def test_config_prints_the_origin_of_each_value(folder):
    result = mtm("config", TINY, "parallel.tensor=2", "--nproc", 4)
    assert result.code == 0, result.err
    origins = {line.split(":")[0]: line.split("# ")[-1] for line in result.out.splitlines()}
    assert origins["model.layers"] == f"file {TINY}"
    assert origins["parallel.tensor"] == "override"
    assert origins["parallel.data"] == origins["model.head_size"] == "derived"
    assert origins["optimizer.clip"] == "default"
    assert "parallel.data: 2 " in result.out


def test_config_lists_all_faults_with_their_repair(folder):
    result = mtm("config", TINY, "parallel.tensor=3", "train.global_batch=7", "--nproc", 3)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "use 1, 2 or 4" in result.err and "`train.global_batch: 7`" in result.err


KINDS = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def schema_faults(value: object, schema: dict, definitions: dict, where: str = "") -> list[str]:
    """What a JSON value breaks of a JSON schema: the keywords that `mtm config --schema` uses."""
    schema = definitions[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    if "anyOf" in schema:
        fits = any(not schema_faults(value, choice, definitions) for choice in schema["anyOf"])
        return [] if fits else [f"{where}: fits no choice"]
    if "type" in schema and type(value) not in KINDS[schema["type"]]:
        return [f"{where}: not a {schema['type']}"]
    faults = [f"{where}: not one of the choices"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, dict) and "properties" in schema:
        faults += [f"{where}.{key}: missing" for key in schema.get("required", []) if key not in value]
        unknown = value.keys() - schema["properties"].keys() if schema["additionalProperties"] is False else ()
        faults += [f"{where}.{key}: unknown" for key in unknown]
        for key in value.keys() & schema["properties"].keys():
            faults += schema_faults(value[key], schema["properties"][key], definitions, f"{where}.{key}")
    return faults


def test_schema_fits_every_configuration_and_refuses_others(folder):
    schema = json.loads(mtm("config", "--schema").out)
    definitions = schema["$defs"]
    for path in (ROOT / "configs").glob("*.yaml"):
        assert schema_faults(yaml.safe_load(path.read_text()), schema, definitions) == [], path
    good = yaml.safe_load(Path(TINY).read_text())
    for section, key, value in (("model", "layers", "two"), ("model", "norm", "batch"), ("train", "stepz", 1)):
        bad = good | {section: good[section] | {key: value}}
        assert len(schema_faults(bad, schema, definitions)) == 1, key
    assert schema_faults({"train": {}}, schema, definitions) == [".model: missing"]


def test_schema_documents_every_field():
    schema = json.loads(mtm("config", "--schema").out)
    sections = schema["$defs"].items()
    fields = {f"{name}.{key}": field for name, part in sections for key, field in part["properties"].items()}
    assert {"ModelConfig.layers", "TrainConfig.steps"} <= fields.keys()
    assert [name for name, field in fields.items() if "description" not in field] == []


# ---- faults ----


def break_index(folder: Path) -> None:
    index = folder / "runs/tiny/data/docs.idx"
    index.write_bytes(index.read_bytes()[:-3])


def remove_data(folder: Path) -> None:
    (folder / "runs/tiny/data/docs.idx").unlink()


FAULTS = {
    "no file": ("train configs/none.yaml", None, "no configuration file configs/none.yaml"),
    "unknown key": (f"train {TINY} train.stepz=3", None, "train.stepz: unknown key; did you mean steps?"),
    "no such data": (f"train {TINY} data.train=nowhere", None, "nowhere.idx: no such file"),
    "data removed": (f"train {TINY}", remove_data, "docs.idx: no such file"),
    "damaged index": (f"train {TINY}", break_index, "docs.idx: "),
    "degree": (f"train {TINY} parallel.tensor=3 --nproc 3", None, "does not divide `model.heads: 4`: use 1, 2 or 4"),
    "folder": (f"train {TINY} train.folder=0.txt", None, "`train.folder: 0.txt` cannot be written"),
    "nothing to resume": (f"train {TINY} train.resume=must", None, "`train.resume: must`"),
    "layout": (f"verify {TINY} --layouts tensor=3", None, "use 1, 2 or 4"),
    "layout text": (f"verify {TINY} --layouts tensor", None, "write it as tensor=2,pipeline=2"),
    "precision": (f"verify {TINY} --precisions fp8", None, "precision fp8: use "),
    "info": ("info configs/none.yaml", None, "no configuration file configs/none.yaml"),
    "no checkpoint": ("generate runs/none --prompt a", None, "runs/none"),
    "input": ("data prepare none.txt --output x --tokenizer bytes", None, "none.txt: no such file or folder"),
    "tokenizer": ("data prepare 0.txt --output x --tokenizer none.json", None, "none.json: no such tokenizer"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_message_and_exit_code_2(folder, name):
    command, damage, text = FAULTS[name]
    if damage:
        damage(folder)
    result = mtm(*shlex.split(command))
    assert result.code == 2
    assert result.err.startswith("error: ") and result.err.count("error: ") == 1
    assert text in result.err
    assert "Traceback" not in result.err + result.out


# ---- verify, info ----


def test_verify_passes_and_prints_json(folder):
    result = mtm("verify", TINY, "--layouts", "tensor=2", "--json")
    assert result.code == 0, result.err
    checks = [json.loads(line) for line in result.out.splitlines()]
    assert {check["precision"] for check in checks} == {"fp64", "fp32"}
    assert {check["layout"] for check in checks} == {"tensor=2"}
    assert all(check["passed"] and check["error"] <= check["bound"] for check in checks)


def test_info_counts_the_parameters(folder):
    facts = json.loads(mtm("info", TINY, "--json").out)
    width, ffn, vocab = 64, 176, 257
    attention, mlp, norms = 2 * width * width + 2 * width * 32, 3 * width * ffn, 2 * width
    block = attention + mlp + norms
    assert facts["parameters"]["total"] == 2 * block + width + 2 * vocab * width


# ---- train ----

LENGTH = "optimizer.decay_length=6"  # so that the learning rate does not depend on where a run ends


def test_train_writes_metrics_picture_and_checkpoints(folder):
    result = mtm("train", TINY, "train.steps=3", "checkpoint.every=2")
    assert result.code == 0, result.err
    run = folder / "runs/tiny"
    lines = lines_of(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert "valid_loss" in lines[-1] and lines[-1]["loss"] < lines[0]["loss"]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert list((run / "tensorboard").iterdir())
    refused = mtm("train", TINY, "train.steps=4")
    assert refused.code == 2 and "train.steps: 3 in the checkpoint, 4 now" in refused.err
    again = mtm("train", TINY, "train.steps=3")
    assert again.code == 0 and "nothing to do" in again.out


def test_a_resumed_run_repeats_the_uninterrupted_one(folder):
    assert mtm("train", TINY, LENGTH, "train.steps=6", "train.folder=whole").code == 0
    assert mtm("train", TINY, LENGTH, "train.steps=4", "train.folder=parts").code == 0
    longer = mtm("train", TINY, LENGTH, "train.steps=6", "train.folder=parts", "train.accept_changes=[train.steps]")
    assert longer.code == 0, longer.err
    assert "resumed from step 4" in longer.out
    whole, parts = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in lines_of(folder / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    )
    assert len(whole) == 6 and parts == whole


def test_two_processes_go_on_where_one_stopped(folder):
    assert mtm("train", TINY, LENGTH, "train.steps=2").code == 0
    words = ("train.steps=4", "train.accept_changes=[train.steps]", "parallel.tensor=2", "--nproc", 2)
    assert mtm("train", TINY, LENGTH, *words).code == 0
    lines = lines_of(folder / "runs/tiny/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[2]["loss"] < lines[0]["loss"]
    manifest = json.loads((folder / "runs/tiny/checkpoints/step-00000004/manifest.json").read_text())
    assert manifest["extra"]["layout"] == "tensor=2"
    assert {rectangle["file"] for tensor in manifest["tensors"].values() for rectangle in tensor["rectangles"]} == {
        "rank-00000.safetensors", "rank-00001.safetensors"
    }  # fmt: skip
