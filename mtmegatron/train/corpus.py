"""What a run trains on: tokenizer, vocabulary, training and validation samples, all checked before any process group exists.
"""

from dataclasses import dataclass
from pathlib import Path

from mtmegatron.config.ramp import samples_before
from mtmegatron.config.schema import Config, Source
from mtmegatron.data.gpt import (
    BlendedDataset,
    build_dataset,
    check_tokenizer,
    check_vocabulary,
)
from mtmegatron.data.indexed import IndexedReader
from mtmegatron.data.tokenizers import Tokenizer, load_tokenizer
from mtmegatron.errors import UserError


@dataclass
class Corpus:
    """Samples of a run. `valid` is None when there are none."""

    train: BlendedDataset
    valid: BlendedDataset | None
    tokenizer: Tokenizer | None

    @property
    def epochs(self) -> int:
        """Passes over the shortest source that the run begins."""
        return max(dataset.epochs for dataset in self.train.datasets)


def with_vocabulary(config: Config) -> Config:
    """The configuration with `model.vocab` filled from the tokenizer; checks that they agree."""
    if config.data.tokenizer is None:
        if config.model.vocab is None:
            raise UserError("neither `model.vocab` nor `data.tokenizer` is given: give one of them")
        return config
    size = load_tokenizer(config.data.tokenizer).vocab_size
    vocab = config.model.vocab or size
    if vocab < size:
        raise UserError(f"`model.vocab: {vocab}` is less than the {size} ids of `data.tokenizer: {config.data.tokenizer}`: leave it out or enlarge it")
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab": vocab})})


def open_corpus(config: Config) -> Corpus:
    """Opens, checks and indexes the data of a resolved configuration. Raises UserError."""
    data, train = config.data, config.train
    if data.train is None:
        raise UserError("`data.train` is not given: name the prefix of a .bin/.idx pair (made by `mtm data prepare`)")
    tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else None
    sources, held_out = _sources(data.train), _sources(data.valid)
    cache = Path(data.cache) if data.cache else Path(sources[0].path).parent / "cache"
    for source in sources + held_out:
        reader = IndexedReader(source.path)
        check_vocabulary(reader, config.model.vocab, cache)
        if tokenizer is not None:
            check_tokenizer(reader, tokenizer)
    ahead = config.model.prediction.depth if config.model.prediction else 0
    common = {"sequence": data.sequence, "seed": train.seed, "cache": cache, "ahead": ahead}
    whole = (1.0, 0.0, 0.0)
    training = build_dataset(
        _pairs(sources), samples=samples_before(train, train.steps), split=whole if held_out else data.split, wrap=data.wrap, **common
    )
    valid, samples = None, train.eval_batches * train.global_batch
    if held_out:
        valid = build_dataset(_pairs(held_out), samples=samples, split=whole, **common)
    elif data.split[1] > 0:
        valid = build_dataset(_pairs(sources), samples=samples, split=data.split, split_name="valid", **common)
    return Corpus(training, valid, tokenizer)


def _sources(given: str | list[Source] | None) -> list[Source]:
    if given is None:
        return []
    return [Source(path=given)] if isinstance(given, str) else given


def _pairs(sources: list[Source]) -> list[tuple[float, str]]:
    return [(source.weight, source.path) for source in sources]
