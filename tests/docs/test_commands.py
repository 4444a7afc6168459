"""Every command of README.md and docs/ runs, and what the pages name exists.

Notable: a page's commands run in order in a folder of its own that looks like the repository, so a page has to make
what it uses. `mtm ...` runs in this process, all else in bash. Runs are made small through their configuration: where a
command trains or verifies, the files in `configs/` are shrunken ones; everywhere else the true ones. What cannot run in
a test is in `INSTEAD`, with the reason. A line that ends with `# exit code N` has to end with that code.
"""

import glob
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mtmegatron.cli import quickstart
from mtmegatron.cli.quickstart import collect
from mtmegatron.config.load import read_yaml, validate
from tests.cli.mtm import mtm

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"# exit code (\d+)$")
HEAVY = re.compile(r"\b(train|verify|quickstart)\b")

# beginning of a command -> (why it does not run here, what runs in its place); `make` is asked for its plan (`make -n`)
INSTEAD = {
    "git clone": ("needs the network", None),
    "cd ": ("commands run at the root", None),
    "source .venv/bin/activate": ("this environment is active", None),
    "make quickstart": ("would install, and train for minutes", "mtm quickstart"),
    "make": ("would install, or run this suite in itself", None),
    "python3 -m venv": ("would install", None),
    "pip install": ("would install", None),
}
SMALL_MODEL = {"width": 64, "head_size": 8, "ffn": 96}
SMALL_RUN = {"steps": 4, "eval_every": 2, "eval_batches": 1, "global_batch": 8, "micro_batch": 2}


def ids(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


def blocks(page: Path, language: str) -> list[str]:
    """Contents of a page's fenced blocks of a language."""
    return [content for _, name, content in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, continued lines joined."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.strip().startswith("#"):
                yield line.strip().replace(".venv/bin/", "") if "activate" not in line else line.strip()


def shrunken(tree: dict) -> dict:
    """A configuration of the same shape that takes a second; those that are small already stay."""
    model = tree["model"]
    if model["width"] <= 64:
        return tree
    small = model | SMALL_MODEL | {"layers": min(model["layers"], 6)} | ({"vocab": 512} if "vocab" in model else {})
    data = tree.get("data", {}) | {"sequence": 32}
    run = tree.get("train", {}) | SMALL_RUN
    optimizer = tree.get("optimizer", {}) | {"warmup": 1}
    return tree | {"model": small, "data": data, "train": run, "optimizer": optimizer, "checkpoint": {"every": 2}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: the repository by links, without runs; this interpreter's commands come first."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("runs", "build", "configs"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "runs").mkdir()
    small = tmp_path / ".small"
    small.mkdir()
    for path in (ROOT / "configs").glob("*.yaml"):
        (small / path.name).write_text(yaml.safe_dump(shrunken(read_yaml(path))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(quickstart, "collect", lambda: collect()[:60])
    return tmp_path


def choose_configs(folder: Path, command: str) -> None:
    """Puts the true configurations in place, or the shrunken ones for a command that trains."""
    link = folder / "configs"
    link.unlink(missing_ok=True)
    link.symlink_to(folder / ".small" if HEAVY.search(command) else ROOT / "configs")


def run(command: str, folder: Path) -> None:
    """Runs one command of a page, or what stands for it, and checks its exit code."""
    start = next((start for start in INSTEAD if command.startswith(start)), None)
    if start is not None:
        check_unrun(command)
        command = INSTEAD[start][1]
    if command is None:
        return
    choose_configs(folder, command)
    expected = CODE.search(command)
    code, told = in_process(command) if is_plain_mtm(command) else in_bash(command)
    assert code == (int(expected[1]) if expected else 0), f"{command}\n{told}"


def check_unrun(command: str) -> None:
    """What can be said of a command without running it."""
    if command.startswith("make"):
        words = [word for word in shlex.split(command, comments=True)[1:] if word != "-n"]
        dry = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
        assert dry.returncode == 0, f"{command}\n{dry.stderr}"
    if command.startswith("pip install"):
        assert "-c constraints.txt" in command, f"{command}: takes releases that nobody tested"


def is_plain_mtm(command: str) -> bool:
    """Whether a command is `mtm` and its words, without pipes or redirection."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    return words[0] == "mtm" and not any(set(word) <= set("();<>|&") for word in words if word)


def in_process(command: str) -> tuple[int, str]:
    words = [match for word in shlex.split(command, comments=True)[1:] for match in (sorted(glob.glob(word)) or [word])]
    code, out, err = mtm(*words)
    return code, out[-2000:] + err


def in_bash(command: str) -> tuple[int, str]:
    """Without a `| head` at the end, which would end the command before it has ended by itself."""
    whole = re.sub(r"\| *head\b[^|]*$", "", command)
    done = subprocess.run(["bash", "-o", "pipefail", "-c", whole], capture_output=True, text=True, timeout=100)
    return done.returncode, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_command_of_a_page_runs(page, folder):
    for command in dict.fromkeys(commands(page)):
        run(command, folder)


def test_commands_are_found():
    found = {page.stem for page in PAGES if list(commands(page))}
    assert found >= {"configuration", "data", "layouts", "verify", "checkpoints"}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_yaml_blocks_are_configurations(page):
    for block in blocks(page, "yaml"):
        tree = yaml.safe_load(block)
        validate({"model": {"layers": 2, "width": 64, "heads": 4}} | tree, page.name)


def named_files(page: Path) -> Iterator[str]:
    """Paths in a page's code spans that are the repository's: in a folder that is here, or of a source file."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for span in re.findall(r"`([\w.-]+(?:/[\w.*-]+)+/?)`", text):
        first = span.split("/")[0]
        source = Path(span).suffix in (".py", ".md", ".yaml", ".txt", ".toml")
        if first not in ("..", ".venv", "runs") and (source or (ROOT / first).is_dir()):
            yield span


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_files_that_a_page_names_exist(page):
    missing = [name for name in named_files(page) if not glob.glob(str(ROOT / name))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_relative_links_resolve(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not re.match(r"\w+:", link) and not (page.parent / link).exists()]
    assert missing == []


def test_make_offers_what_is_documented():
    for target in ("env", "quickstart", "test", "clean"):
        check_unrun(f"make {target}")
