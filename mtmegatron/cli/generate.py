"""`mtm generate`: a checkpoint continues prompts, in this process or in as many as a layout needs.

Notable: everything the user can have said wrong is told before a process is started; the parent chooses the checkpoint,
so that all ranks read the same one even while training goes on.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtmegatron.errors import UserError

if TYPE_CHECKING:  # heavy, and `mtm --help` needs none of them
    from mtmegatron.checkpoint.store import Store
    from mtmegatron.config.schema import Config
    from mtmegatron.data.tokenizers import Tokenizer
    from mtmegatron.models.generation import Options
    from mtmegatron.process import Process


def generate_command(
    ctx: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a run, its `checkpoints`, or one `step-...` folder.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; repeat for several at once.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with one prompt per line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add to each prompt at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token; 1: draw from the model.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among the K likeliest tokens alone.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw among the fewest tokens with this probability in all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws; prompt i gives the same text in any layout.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text before which to end; repeat for several.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="Token that ends, beside end of document.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Instead of the one of the run.")] = None,
    layout: Annotated[str, typer.Option(help="e.g. tensor=2,pipeline=2; starts as many processes.")] = "tensor=1",
    device: Annotated[str, typer.Option(help="auto, cpu, or a type of accelerator.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp64; default: that of the run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines: prompt, text, tokens.")] = False,
) -> None:
    """Continue prompts with a trained model.

    Example: `mtm generate runs/quickstart --prompt "Once upon a time" --prompt "The" --temperature 0.8 --top-p 0.9`

    Generation ends at the end-of-document token, at a --stop text or a --stop-id (none of them is printed), or after
    --max-new-tokens.
    """
    from mtmegatron.launch import leave, report
    from mtmegatron.process import find_process

    process = find_process(os.environ)
    try:
        code = _generate(ctx.params, process)
    except Exception as error:
        code = report(process, error)
    leave(process, code)


@dataclass
class Request:
    """A command, checked: the model to load, and what to continue, how, until where."""

    store: "Store"
    config: "Config"
    tokenizer: "Tokenizer"
    texts: list[str]
    prompts: list[list[int]]
    options: "Options"
    stop: list[str]


def _generate(given: dict[str, Any], process: "Process") -> int:
    """Checks the command, then runs it here or in the processes of its layout; the exit code."""
    from mtmegatron.config.derived import layout_of

    request = prepare(given, process)
    world = layout_of(request.config).world
    if process.world == world:
        return _be_one(request, given, process)
    if process.origin != "single":
        raise UserError(f"--layout {given['layout']} needs {world} processes, not {process.world}: start {world}")
    from mtmegatron.launch import launch

    command = [sys.executable, "-m", "mtmegatron.cli.main", "generate"]
    return launch([*command, *arguments(given | {"checkpoint": request.store.folder.absolute()})], world)


def prepare(given: dict[str, Any], process: "Process") -> Request:
    """The command's values, read and checked. Raises UserError."""
    from mtmegatron.models.generation import Options, check_prompts, generation_config
    from mtmegatron.verify.report import parse_layouts

    def say(text: str) -> None:
        if process.rank == 0:
            print(text, file=sys.stderr)

    store = open_checkpoint(given["checkpoint"], say)
    layouts = parse_layouts(given["layout"])
    if len(layouts) != 1:
        raise UserError(f"--layout {given['layout']!r}: give one layout, e.g. tensor=2,pipeline=2")
    config = generation_config(store, layouts[0], given["precision"])
    tokenizer = open_tokenizer(store, given["tokenizer"], say)
    texts = (given["prompt"] or []) + (read_prompts(given["prompt_file"]) if given["prompt_file"] else [])
    stop_ids = (*(given["stop_id"] or ()), *_end_of_document(tokenizer))
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    options = Options(**{name: given[name] for name in names}, stop_ids=stop_ids)
    stop = given["stop"] or []
    if "" in stop:
        raise UserError("--stop '' would end every text at once: give a text, or leave it out")
    prompts = tokenizer.encode_batch(texts)
    check_prompts(config, prompts, options)
    return Request(store, config, tokenizer, texts, prompts, options, stop)


def _be_one(request: Request, given: dict[str, Any], process: "Process") -> int:
    """Generates as one process; the first one prints. The exit code."""
    from mtmegatron.config.derived import layout_of
    from mtmegatron.device import choose_device
    from mtmegatron.launch import report, start_group
    from mtmegatron.mesh import Mesh
    from mtmegatron.models.generation import generate, load_model

    device = choose_device(given["device"], process.local_rank)
    meeting = start_group(process, device, request.config.train.timeout) if process.world > 1 else None
    try:
        many, layout = process.world > 1, layout_of(request.config)
        shared = request.config.parallel.shared_memory
        sums = {"ordered_sum": device.ordered_sum, "narrow_sum": device.narrow_sum}
        mesh = Mesh(layout, process.rank, device.torch_device, connect=many, shared=shared, **sums)
        model = load_model(request.store, request.config, mesh, device.native_bf16_matmul)
        new = generate(model, request.prompts, request.options, stops_at(request.tokenizer, request.stop))
        if process.rank == 0:
            show(request, new, given["as_json"])
        return 0
    except Exception as error:
        return report(process, error, meeting)


def show(request: Request, new: list[list[int]], as_json: bool) -> None:
    """Prints each prompt with its continuation, cut before the first stop text."""
    for text, prompt, ids in zip(request.texts, request.prompts, new):
        found = cut(continuation(request.tokenizer, prompt, ids), request.stop)
        if as_json:
            print(json.dumps({"prompt": text, "text": found, "tokens": ids}, ensure_ascii=False))
        else:
            print(text + found + "\n" * (len(new) > 1))


def continuation(tokenizer: "Tokenizer", prompt: list[int], new: list[int]) -> str:
    """The text of new tokens, read after their prompt: read alone some tokenizers drop the space before the first."""
    start, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + new)
    return whole.removeprefix(start) if whole.startswith(start) else tokenizer.decode(new)


def cut(text: str, stop: list[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=None)]


def stops_at(tokenizer: "Tokenizer", stop: list[str]) -> Callable[[list[int]], bool] | None:
    """Whether the text of some tokens holds a stop text; None when there are none."""

    def stops(ids: list[int]) -> bool:
        text = tokenizer.decode(ids)
        return any(part in text for part in stop)

    return stops if stop else None


def open_checkpoint(path: Path, say: Callable[[str], None]) -> "Store":
    """The checkpoint at a path: itself, or the newest complete one of a run's folder. Raises UserError."""
    from mtmegatron.checkpoint.folder import Folder
    from mtmegatron.checkpoint.store import MANIFEST, Store

    if (path / MANIFEST).is_file():
        return Store(path)
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    notes: list[str] = []
    store = Folder(root).newest_good(notes.append)
    if store is None:
        why = "; ".join(notes)
        raise UserError(f"{path}: {why}: give the folder of a run, its `checkpoints`, or a complete `step-...` folder")
    for note in notes:
        say(note)
    return store


def open_tokenizer(store: "Store", given: str | None, say: Callable[[str], None]) -> "Tokenizer":
    """The tokenizer of the run, or the given one. Raises UserError when the run's has changed, or there is none."""
    from mtmegatron.data.tokenizers import load_tokenizer

    spec, trained = given or store.extra.get("tokenizer"), store.extra.get("tokenizer_hash")
    if not spec:
        raise UserError(f"{store.folder} names no tokenizer: give --tokenizer (bytes, a file or a folder)")
    found = load_tokenizer(spec)
    if trained in (None, found.hash):
        return found
    if not given:
        raise UserError(f"{spec} has changed since the model was trained with it: give that one with --tokenizer")
    say(f"warning: {spec} is not the tokenizer that the model was trained with")
    return found


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file. Raises UserError when it cannot be read, has none, or an empty one."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.removesuffix("\n") for line in file]
    except OSError as error:
        raise UserError(f"--prompt-file {path} cannot be read: {error.strerror}: give a text file") from None
    except UnicodeDecodeError:
        raise UserError(f"--prompt-file {path} is not UTF-8 text: convert it") from None
    empty = [number for number, line in enumerate(lines, 1) if not line]
    if empty or not lines:
        what = f"line {empty[0]} of --prompt-file {path} is empty" if empty else f"--prompt-file {path} is empty"
        raise UserError(f"{what}: write one prompt per line")
    return lines


def arguments(given: dict[str, Any]) -> list[str]:
    """The command line that has these values."""
    words = [str(given["checkpoint"])] + ["--json"] * given["as_json"]
    for name, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        if name not in ("checkpoint", "as_json"):
            words += [f"--{name.replace('_', '-')}={v}" for v in values if v is not None]
    return words


def _end_of_document(tokenizer: "Tokenizer") -> tuple[int, ...]:
    """The id that ends a document, where the tokenizer has one."""
    try:
        return (tokenizer.end_of_document,)
    except UserError:
        return ()
