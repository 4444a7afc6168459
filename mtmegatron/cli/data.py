"""`mtm data prepare`: text in, `.bin/.idx` out. `mtm data merge`: several into one. `mtm data tokenizer`: a BPE tokenizer trained on text."""

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(help="Prepare data.", no_args_is_help=True)


@data_app.command("prepare")
def prepare_command(
    inputs: Annotated[list[Path], typer.Argument(help="Text files, folders, .jsonl, .json, .parquet; also .gz and .zst.")],
    output: Annotated[Path, typer.Option(help="Prefix of the .bin/.idx pair.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, a tokenizer.json, a folder, or a SentencePiece model.")],
    key: Annotated[list[str] | None, typer.Option(help="Key of the text in JSON records and parquet; repeat for several outputs.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that encode; the output does not depend on their number.")] = 1,
    append_end: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    prepend_begin: Annotated[bool, typer.Option(help="Begin each document with the beginning-of-document token.")] = False,
    on_error: Annotated[str, typer.Option(help="Malformed records: refuse, or skip with a count.")] = "refuse",
) -> None:
    """Turn text into token files.

    Example: `mtm data prepare corpus.jsonl --output data/corpus --tokenizer bytes --key text --workers 2`
    """
    from mtmegatron.data.prepare import prepare
    from mtmegatron.errors import UserError

    if on_error not in ("refuse", "skip"):
        raise UserError(f"--on-error {on_error}: use refuse or skip")
    summary = prepare(
        inputs, output, tokenizer, keys=tuple(key or ["text"]), workers=workers, append_end=append_end, prepend_begin=prepend_begin, on_error=on_error
    )
    for out in summary.outputs:
        print(f"{out.prefix}.bin: {out.documents:,} documents, {out.tokens:,} tokens" + (f", {out.empty:,} empty skipped" if out.empty else ""))
    if summary.malformed:
        print(f"{summary.malformed:,} malformed records skipped, the first: {'; '.join(summary.faults)}")


@data_app.command("merge")
def merge_command(
    inputs: Annotated[list[str], typer.Argument(help="Prefixes of .bin/.idx pairs.")],
    output: Annotated[str, typer.Option(help="Prefix of the pair to write.")],
) -> None:
    """Lay corpora end to end in one.

    Example: `mtm data merge data/a data/b --output data/both`
    """
    from mtmegatron.data.indexed import merge

    made = merge(inputs, output)
    print(f"{output}.bin: {made.documents:,} documents, {made.tokens:,} tokens")


@data_app.command("tokenizer")
def tokenizer_command(
    inputs: Annotated[list[Path], typer.Argument(help="Text files, folders, .jsonl, .json, .parquet; also .gz and .zst.")],
    output: Annotated[Path, typer.Option(help="The tokenizer.json to write.")],
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 4096,
    key: Annotated[str, typer.Option(help="Key of the text in JSON records and parquet.")] = "text",
) -> None:
    """Train a byte-level BPE tokenizer.

    Example: `mtm data tokenizer corpus.jsonl --output data/tokenizer.json --vocab 4096`
    """
    from mtmegatron.data.readers import documents, list_files
    from mtmegatron.data.tokenizers import train_bpe

    texts = (document.texts[key] for document in documents(list_files(inputs), (key,)))
    made = train_bpe(texts, vocab, output)
    print(f"{output}: {made.vocab_size:,} tokens")
