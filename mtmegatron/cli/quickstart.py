"""`mtm quickstart`: from raw text to a trained model that writes Python, with nothing but this machine.

Notable: the corpus is the standard library's own sources, which every machine has. Every twentieth file is held out; the score on those is bits
per byte, beside what gzip -9 needs for the same bytes.
"""

import gzip
import hashlib
import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "ensurepip", "encodings", "pydoc_data"}
PROMPTS = ("import os\nimport sys\n\n\ndef", "class Node:\n    def __init__(self")


def quickstart_command(
    config: Annotated[Path, typer.Option(help="YAML file of the run.")] = Path("configs/quickstart.yaml"),
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as many as wanted.")] = None,
    nproc: Annotated[int, typer.Option(help="Processes to start.")] = 4,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 4096,
) -> None:
    """Collect a corpus, train a tokenizer and a model, evaluate, save, draw, generate.

    Example: `mtm quickstart`
    """
    from mtmegatron.config import load

    settings = load(config, overrides or []).config
    data = Path(settings.data.train).parent
    train_files, valid_files = split_files(collect())
    prepare_corpus(data, Path(settings.data.tokenizer), train_files, valid_files, vocab)
    mtm = [sys.executable, "-m", "mtmegatron.cli.main"]
    code = subprocess.call([*mtm, "train", str(config), *(overrides or []), "--nproc", str(nproc)])
    if code:
        raise SystemExit(code)
    print(score(Path(settings.train.folder), Path(settings.data.valid), valid_files), flush=True)
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    raise SystemExit(subprocess.call([*mtm, "generate", settings.train.folder, *prompts, "--max-new-tokens", "96", "--temperature", "0.5"]))


def collect() -> list[Path]:
    """The Python sources of the standard library, sorted by name, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.rglob("*.py")) if not LEFT_OUT & set(p.relative_to(root).parts)]
    return [p for p in files if p.stat().st_size > 0 and _is_text(p)]


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """(training, held out): a file is held out by the hash of its name, one in twenty."""
    held_out = [p for p in files if int(hashlib.sha256(p.name.encode()).hexdigest(), 16) % 20 == 0]
    return [p for p in files if p not in set(held_out)], held_out


def prepare_corpus(data: Path, tokenizer: Path, train_files: list[Path], valid_files: list[Path], vocab: int) -> None:
    """Tokenizer and token files under `data`."""
    from mtmegatron.data.prepare import prepare
    from mtmegatron.data.tokenizers import train_bpe

    data.mkdir(parents=True, exist_ok=True)
    size = sum(p.stat().st_size for p in train_files)
    print(f"corpus: {len(train_files)} files of the standard library, {size / 1e6:.1f} MB; {len(valid_files)} more are held out", flush=True)
    train_bpe((p.read_text(encoding="utf-8") for p in train_files), vocab, tokenizer)
    for name, files in (("train", train_files), ("valid", valid_files)):
        out = prepare(files, data / name, str(tokenizer)).outputs[0]
        print(f"{out.prefix}.bin: {out.documents:,} documents, {out.tokens:,} tokens", flush=True)


def score(run: Path, valid: Path, valid_files: list[Path]) -> str:
    """Bits per byte of the model on the held-out files, beside gzip -9."""
    from mtmegatron.data.indexed import IndexedReader

    text = b"".join(p.read_bytes() for p in valid_files)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [line["valid_loss"] for line in lines if "valid_loss" in line][-1]
    bits = loss / math.log(2) * IndexedReader(valid).tokens / len(text)
    packed = 8 * len(gzip.compress(text, compresslevel=9)) / len(text)
    return f"held-out files: {bits:.3f} bits per byte; gzip -9 needs {packed:.3f}"


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
        return True
    except UnicodeDecodeError:
        return False
