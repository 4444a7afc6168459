"""`mtm generate`: where it finds checkpoints, prompts and tokenizers, what it prints, and the faults that it tells."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtmegatron.checkpoint.store import Store
from mtmegatron.cli import generate as command
from mtmegatron.cli.main import app
from mtmegatron.errors import UserError
from mtmegatron.launch import launch
from mtmegatron.models.generation import Options, generate
from tests.models.test_generation import LLAMA, configuration, model_of, saved


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    saved(folder / "checkpoints", configuration(LLAMA | {"vocab": 257, "init_std": 0.3}, "fp32"))
    return folder


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_command_continues_prompts_from_any_of_three_paths(run_folder):
    folder = run_folder / "checkpoints" / "step-00000001"
    common = ("--prompt", "ab", "--prompt", "xyz", "--max-new-tokens", 8, "--json")
    lines = invoke(run_folder, *common)
    assert invoke(run_folder / "checkpoints", *common) == invoke(folder, *common) == lines
    found = [json.loads(line) for line in lines.splitlines()]
    model = model_of(Store(folder))
    right = generate(model, [list(b"ab"), list(b"xyz")], Options(max_new_tokens=8, stop_ids=(256,)))
    assert [line["tokens"] for line in found] == right
    assert [line["prompt"] for line in found] == ["ab", "xyz"]


def test_command_reads_a_file_of_prompts_and_stops_at_text(run_folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("ab\nxyz\n")
    common = (run_folder, "--prompt-file", file, "--max-new-tokens", 12, "--temperature", 1, "--json")
    whole = [json.loads(line) for line in invoke(*common).splitlines()]
    text = whole[0]["text"]
    middle = text[3:5]
    stopped = [json.loads(line) for line in invoke(*common, "--stop", middle).splitlines()]
    assert stopped[0]["text"] == text[: text.index(middle)]
    assert len(stopped[0]["tokens"]) < len(whole[0]["tokens"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-new-tokens", 4), "no prompt"), (("--prompt", ""), "prompt 1 has no tokens"),
        (("--prompt-file", "nowhere"), "cannot be read"), (("--prompt", "a", "--temperature", -1), "temperature"),
        (("--prompt", "a", "--layout", "tensor=3"), "model.heads"),
        (("--prompt", "a", "--layout", "tensr=2"), "mean tensor"),
        (("--prompt", "a", "--layout", "tensor=2;pipeline=2"), "one layout"),
        (("--prompt", "a", "--stop", ""), "--stop"), (("--prompt", "a", "--precision", "fp7"), "fp64"),
        (("--prompt", "a", "--tokenizer", "nowhere"), "no such tokenizer"),
    ],
)  # fmt: skip
def test_command_tells_faults_in_one_line(run_folder, arguments, says):
    output = invoke(run_folder, *arguments, code=2)
    (error,) = [line for line in output.splitlines() if not line.startswith(("newest complete", "  "))]
    assert error.startswith("error: ") and says in output


class Spaced:
    """Decodes as SentencePiece does: a space before each word, but not before the first."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_a_space_between_prompt_and_new_text_is_kept_and_the_earliest_stop_text_cuts():
    assert command.continuation(Spaced(), [1, 2], [3, 4]) == " w3 w4"
    assert command.cut("one two three", ["three", "two"]) == "one "
    assert command.cut("one", ["two"]) == command.cut("one", []) == "one"
    stops = command.stops_at(Spaced(), ["w2 w3"])
    assert stops([1, 2, 3]) and not stops([1, 2])


def test_another_tokenizer_than_the_runs_is_refused_or_warned_of(run_folder):
    store, said = Store(run_folder / "checkpoints" / "step-00000001"), []
    assert command.open_tokenizer(store, None, said.append).spec == "bytes" and not said
    store.extra["tokenizer_hash"] = "another"
    with pytest.raises(UserError, match="has changed"):
        command.open_tokenizer(store, None, said.append)
    assert command.open_tokenizer(store, "bytes", said.append).spec == "bytes" and "warning" in said[0]
    store.extra["tokenizer"] = None
    with pytest.raises(UserError, match="names no tokenizer"):
        command.open_tokenizer(store, None, said.append)


def test_command_tells_that_there_is_no_checkpoint(tmp_path):
    assert "no complete checkpoint in" in invoke(tmp_path, "--prompt", "a", code=2)


@pytest.mark.parametrize(("content", "says"), [(b"", "is empty"), (b"a\n\nb\n", "line 2"), (b"\xff\xfe", "UTF-8")])
def test_bad_prompt_file(run_folder, tmp_path, content, says):
    (tmp_path / "prompts.txt").write_bytes(content)
    assert says in invoke(run_folder, "--prompt-file", tmp_path / "prompts.txt", code=2)


def test_arguments_give_the_same_values_to_the_processes_of_a_layout(run_folder, monkeypatch):
    """A prompt that begins with a dash, lists, values left out: the command line of the children has them all."""
    seen = []
    monkeypatch.setattr("mtmegatron.launch.launch", lambda line, count: seen.append((line, count)) or 0)
    given = ("--prompt", "-a b", "--prompt", "$c", "--temperature", 0.5, "--top-k", 7, "--json")
    invoke(run_folder, *given, "--layout", "tensor=2,pipeline=2")
    ((line, count),) = seen
    step = run_folder / "checkpoints" / "step-00000001"
    assert count == 4 and line[1:5] == ["-m", "mtmegatron.cli.main", "generate", str(step)]
    assert {"--prompt=-a b", "--prompt=$c", "--temperature=0.5", "--top-k=7", "--json"} <= set(line)
    assert "--layout=tensor=2,pipeline=2" in line
    assert not any(word.startswith(("--stop", "--precision")) for word in line)


def test_command_starts_the_processes_of_a_layout(run_folder, tmp_path, capfd):
    """Two real processes print once what one prints."""
    given = {"checkpoint": run_folder, "as_json": True, "prompt": ["ab", "xyz"], "max_new_tokens": 6}
    alone = invoke(*command.arguments(given))
    program = [sys.executable, "-m", "mtmegatron.cli.main", "generate", *command.arguments(given), "--layout=tensor=2"]
    capfd.readouterr()
    assert launch(program, 2, threads=1) == 0
    assert capfd.readouterr().out == alone
