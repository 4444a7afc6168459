"""Tokenizers behind one small interface: bytes, Hugging Face (`tokenizer.json`, or `vocab.json` + `merges.txt`),
SentencePiece, and BPE trained here.

Notable: `encode` never adds a special token, and never reads one out of text: a document that contains the letters
"<|endoftext|>" stays text. Who wants a document to begin or end with a special id appends `begin` or
`end_of_document` himself, once. Truncation and padding that a `tokenizer.json` may carry are switched off: they lose
text silently. `vocab_size` is the largest id plus one, added tokens included.
"""

import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers as hf

from mtmegatron.errors import UserError

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>")
CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins


class Tokenizer(ABC):
    """Text to ids and back.

    `vocab_size`: ids are below it. `begin`: id of the beginning-of-document token or None. `hash`: sha256 of what
    decides the ids. `spec`: what `load_tokenizer` made it from; a tokenizer travels to another process as its spec.
    """

    spec: str
    name: str
    vocab_size: int
    begin: int | None
    hash: str
    _end: int | None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special token."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self.encode(text) for text in texts]

    @property
    def end_of_document(self) -> int:
        """Id that ends a document. Raises UserError when the tokenizer has none."""
        if self._end is None:
            raise UserError(
                f"{self.spec}: has no end-of-document token: name one as `eos_token` in tokenizer_config.json beside it"
            )
        return self._end

    def __reduce__(self) -> tuple:
        return load_tokenizer, (self.spec,)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0 to 255, end of document is 256."""

    def __init__(self):
        self.spec = self.name = "bytes"
        self.vocab_size, self.begin, self._end = 257, None, 256
        self.hash = hashlib.sha256(b"bytes 257").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; the end-of-document id has no text, bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i != 256).decode(errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    `content` (JSON values) is all that the tokenizer was made from, `config` names its special tokens as
    `tokenizer_config.json` does.
    """

    def __init__(self, tokenizer: hf.Tokenizer, content: object, config: dict, spec: str):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # special tokens in text are encoded as the text they are
        self._tokenizer, self.spec, self.name = tokenizer, spec, _name(spec)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._end = _special_id(config, "eos_token", vocabulary, spec)
        if self._end is None:
            special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
            found = [name for name in END_NAMES if name in special] + [name for name in END_NAMES if name in vocabulary]
            self._end = vocabulary[found[0]] if found else None
        self.begin = _special_id(config, "bos_token", vocabulary, spec)
        self.hash = hashlib.sha256(json.dumps([content, self._end, self.begin], sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; the space that it puts before a text is part of its ids and goes away in `decode`."""

    def __init__(self, path: Path, spec: str):
        self.spec, self.name = spec, _name(spec)
        content = path.read_bytes()
        self._model = _sentencepiece(content, path)
        self.vocab_size = self._model.vocab_size()
        self.begin = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self._end = self._model.eos_id() if self._model.eos_id() >= 0 else None
        self.hash = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_bos=False, add_eos=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens (begin, end) have no text."""
        return self._model.decode([int(i) for i in ids])


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer of "bytes", a `tokenizer.json`, a SentencePiece `.model`, or a folder with either or with
    `vocab.json` and `merges.txt`.

    Raises UserError for anything else, and for a vocabulary and merges that do not belong together.
    """
    path, spec = Path(spec), str(spec)
    if spec == "bytes":
        return ByteTokenizer()
    if path.is_dir():
        return _from_folder(path, spec)
    if not path.is_file():
        raise UserError(
            f'{spec}: no such tokenizer: give "bytes", a tokenizer.json, a folder with one, or a SentencePiece .model'
        )
    if path.suffix == ".json":
        return HuggingFaceTokenizer(*_from_json(path), _config(path.parent), spec)
    return SentencePieceTokenizer(path, spec)


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train byte-level BPE and save it as `tokenizer.json` (at `path`, or inside it where it does not end in .json).

    `<|endoftext|>` is id 0, the 256 bytes follow, then merges by falling count: the same texts give the same file.
    Sennrich et al. 2016. Too few texts give fewer ids than asked for; the result says how many.
    """
    if vocab_size < 257:
        raise UserError(
            f"vocabulary of {vocab_size}: byte-level BPE needs at least 257 ids (256 bytes and {END_OF_TEXT})"
        )
    tokenizer = _byte_level(hf.models.BPE())
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    path = Path(path) if Path(path).suffix == ".json" else Path(path) / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        os.replace(f"{folder}/tokenizer.json", path)
    return load_tokenizer(path)


def _from_folder(folder: Path, spec: str) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        return HuggingFaceTokenizer(*_from_json(folder / "tokenizer.json"), _config(folder), spec)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return HuggingFaceTokenizer(*_from_pair(folder), _config(folder), spec)
    if (folder / "tokenizer.model").exists():
        return SentencePieceTokenizer(folder / "tokenizer.model", spec)
    raise UserError(
        f"{spec}: no tokenizer in this folder: it needs tokenizer.json, vocab.json and merges.txt, or tokenizer.model"
    )


def _from_json(path: Path) -> tuple[hf.Tokenizer, dict]:
    content = _json(path)
    try:
        tokenizer = hf.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(
            f"{path}: not a usable tokenizer.json ({error}): save it again with the `tokenizers` library"
        ) from error
    return tokenizer, {key: value for key, value in content.items() if key not in ("truncation", "padding")}


def _from_pair(folder: Path) -> tuple[hf.Tokenizer, list]:
    """Byte-level BPE of vocab.json and merges.txt; special_tokens.txt and added_tokens.json add ids after those."""
    vocabulary = _json(folder / "vocab.json")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    for number, merge in enumerate(merges, 1):
        missing = [token for token in (*merge, "".join(merge)) if token not in vocabulary]
        if missing or len(merge) != 2:
            raise UserError(
                f"{folder}: merge {number} of merges.txt, {' '.join(merge)!r}, needs the token {''.join(missing[:1])!r}"
                " that vocab.json lacks: the two files do not belong together, take both from one release"
            )
    tokenizer = _byte_level(hf.models.BPE(vocab=vocabulary, merges=merges))
    added = _json(folder / "added_tokens.json")
    names = sorted(added, key=added.get)
    if (folder / "special_tokens.txt").exists():
        names += (folder / "special_tokens.txt").read_text(encoding="utf-8").split()
    tokenizer.add_special_tokens(names)
    return tokenizer, [vocabulary, merges, names]


def _byte_level(model: hf.models.Model) -> hf.Tokenizer:
    tokenizer = hf.Tokenizer(model)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    return tokenizer


def _sentencepiece(content: bytes, path: Path):
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError(f"{path}: reading it needs a package: `pip install sentencepiece`") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise UserError(
            f"{path}: not a SentencePiece model (a tiktoken file?): convert it to a tokenizer.json with transformers"
        ) from error


def _config(folder: Path) -> dict:
    found: dict = {}
    for name in CONFIGS:
        found |= {key: value for key, value in _json(folder / name).items() if value is not None}
    return found


def _json(path: Path) -> dict:
    """Content of a JSON object file; empty when there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}): take it from the tokenizer's release again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object: take it from the tokenizer's release again")
    return content


def _special_id(config: dict, role: str, vocabulary: dict[str, int], spec: str) -> int | None:
    token = config.get(role)
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return None
    if token not in vocabulary:
        raise UserError(
            f"{spec}: {role} {token!r} of its configuration is not in its vocabulary: correct tokenizer_config.json"
        )
    return vocabulary[token]


def _name(spec: str) -> str:
    path = Path(spec).absolute()
    return path.parent.name if path.stem == "tokenizer" else path.name
