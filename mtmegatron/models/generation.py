"""Text generation: prompts in, new tokens out, on one process or in any layout.

Notable:
- All prompts are read in one packed micro-batch, then each step feeds one token per sequence; a finished sequence
  leaves the batch. There is no padding that a neighbour could see. Under sequence parallel, where the tensor degree
  must divide the tokens, the missing ones are one more document, which the cache does not keep.
- One rank, the first of the last stage, chooses; the others are told. So all agree on every token.
- A draw depends on (seed, number of the prompt, number of the token) alone: one uniform number per token, looked up in
  the cumulative distribution in the order of the vocabulary, whose bounds another layout moves by rounding alone.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from mtmegatron.batch import IGNORE, Batch, Bounds
from mtmegatron.checkpoint.state import load_weights
from mtmegatron.checkpoint.store import Store
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import idle_defaults
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config, OptimizerConfig
from mtmegatron.errors import UserError
from mtmegatron.layers.attention import Cache
from mtmegatron.layers.build import Build
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.stages import build_chunks
from mtmegatron.precision.gemm import Gemm
from mtmegatron.precision.types import TYPES

NOT_FINITE = -1  # told in place of a token


@dataclass(frozen=True)
class Options:
    """How to continue. Raises UserError for values that make no sense, also together.

    max_new_tokens: per prompt. temperature: 0 takes the likeliest token, else logits are divided by it and a token is
    drawn. top_k: only the k likeliest can be drawn. top_p: of those, only the fewest that together have this
    probability (Holtzman et al. 2020, 1904.09751). stop_ids: tokens that end a sequence."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {self.max_new_tokens} is refused: use 1 or more")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature: {self.temperature} is refused: use 0 (the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k: {self.top_k} is refused: use 1 or more, or leave it out to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: {self.top_p} is refused: use a probability above 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise UserError("top_k and top_p have no effect at temperature 0: remove them, or set a temperature")


@dataclass
class _Sequence:
    """One prompt under way: where its randomness comes from, what the model has yet to see, what was generated."""

    prompt: list[int]
    generator: torch.Generator
    unseen: list[int]
    new: list[int] = field(default_factory=list)

    @property
    def seen(self) -> int:
        return len(self.prompt) + len(self.new) - len(self.unseen)

    def goes_on(self, token: int, stop_ids: tuple[int, ...], stops: Callable[[list[int]], bool] | None) -> bool:
        """Takes a token; whether another one is wanted."""
        if token in stop_ids:
            return False
        self.new.append(token)
        self.unseen = [token]
        return stops is None or not stops(self.new)


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    options: Options = Options(),
    stops: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, without the stop token. All ranks of the model's mesh call it and get the same.

    `stops`, a pure function, sees the new tokens of a sequence after each one and says whether they end it.
    Raises UserError on every rank for prompts that the model cannot take, and when its logits are not finite."""
    check_prompts(model.config, prompts, options)
    sequences = [_Sequence(prompt, _generator(options.seed, i), prompt) for i, prompt in enumerate(prompts)]
    live, cache = sequences, Cache(len(sequences))
    for _ in range(options.max_new_tokens):
        logits = next_logits(model, [s.unseen for s in live], [s.seen for s in live], cache)
        chosen = _choose(logits, live, options) if logits is not None and _decides(model.build.mesh) else None
        tokens = _tell(model.build.mesh, chosen, len(live))
        stay = [i for i, (s, token) in enumerate(zip(live, tokens)) if s.goes_on(token, options.stop_ids, stops)]
        if not stay:
            break
        live = [live[i] for i in stay]
        cache.keep(stay)
    return [s.new for s in sequences]


def check_prompts(config: Config, prompts: list[list[int]], options: Options) -> None:
    """UserError for no prompt, an empty one, ids outside the vocabulary, more tokens than learned positions."""
    model = config.model
    if not prompts:
        raise UserError("there is no prompt: give at least one")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} has no tokens: give at least one")
        outside = [token for token in prompt if not 0 <= token < model.vocab]
        if outside:
            raise UserError(
                f"prompt {number} has token {outside[0]}, but the model's ids are 0 to {model.vocab - 1}: "
                "use the tokenizer that it was trained with"
            )
        total = len(prompt) + options.max_new_tokens
        if model.positions == "learned" and total > model.max_positions:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens and {options.max_new_tokens} new ones make {total}, but the "
                f"model knows {model.max_positions} positions: shorten the prompt or lower max_new_tokens"
            )


# --- one step of the model ---


def next_logits(model: Decoder, pieces: list[list[int]], seen: list[int], cache: Cache) -> Tensor | None:
    """Logits of the token after each sequence, on the last stage; None on the others.

    `pieces`: the next tokens of each sequence; `seen`: how many the cache has of it already.
    Shapes: B sequences -> [B, V]."""
    batch = _pack(pieces, seen, _token_parts(model), model.build.mesh.device)
    hidden = through_stages(model, batch, cache)
    if not model.last:
        return None
    return _logits_at(model, hidden, [start - 1 for start in batch.bounds.starts[1 : len(pieces) + 1]])


def _pack(pieces: list[list[int]], seen: list[int], parts: int, device: torch.device) -> Batch:
    """The pieces end to end, and where `parts` does not divide their tokens one more document that fills up."""
    fill = -sum(map(len, pieces)) % parts
    tokens = [token for piece in pieces for token in piece] + [0] * fill
    positions = [start + i for piece, start in zip(pieces, seen) for i in range(len(piece))] + [0] * fill
    lengths = [len(piece) for piece in pieces] + [fill] * (fill > 0)
    given = torch.tensor([tokens, positions], device=device)
    return Batch(given[0], torch.full_like(given[0], IGNORE), given[1], Bounds((0, *accumulate(lengths))))


def through_stages(model: Decoder, batch: Batch, cache: Cache | None) -> Tensor:
    """Hidden states after this stage, which gets its input from the stage before and sends its output to the next.

    Shapes: T tokens -> [T', D], T' = T / tensor under sequence parallel."""
    build, axis = model.build, model.build.mesh["pipeline"]
    x = None
    if not model.first:
        shape = batch.bounds.total // _token_parts(model), model.config.model.width
        x = torch.empty(shape, dtype=model.stream, device=build.mesh.device)
        dist.recv(x, axis.ranks[axis.rank - 1], group=axis.group)
    x = model(x, batch, cache)
    if not model.last:
        dist.send(x.contiguous(), axis.ranks[axis.rank + 1], group=axis.group)
    return x


def _token_parts(model: Decoder) -> int:
    """In how many parts the tokens between blocks are cut."""
    return model.build.tensor.size if model.build.layout.sequence else 1


def _logits_at(model: Decoder, hidden: Tensor, rows: list[int]) -> Tensor:
    """Logits of some tokens alone: a whole prompt's would be V numbers for each token. Shapes: [T', D] -> [rows, V]."""
    axis = model.build.tensor
    if not model.build.layout.sequence:
        return model.logits(hidden[rows])
    fill = -len(rows) % axis.size
    chosen = axis.all_gather(hidden)[rows + rows[-1:] * fill]
    return model.logits(chosen.chunk(axis.size)[axis.rank])[: len(rows)]


# --- the choice of a token ---


def probabilities(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """softmax(logits / temperature) of the k likeliest tokens, then of the fewest of those whose mass is at least p.

    Zero elsewhere. Among equal logits the lower id comes first. Shapes: [V] -> [V], fp64, sums to 1."""
    p = torch.softmax(logits.to(torch.float64) / temperature, 0)
    if top_k is None and top_p == 1:
        return p
    sorted_p, order = p.sort(descending=True, stable=True)
    kept = min(top_k or len(p), len(p))
    mass = sorted_p[:kept].cumsum(0)
    if top_p < 1:
        kept = min(int((mass < top_p * mass[-1]).sum()) + 1, kept)
    return torch.zeros_like(p).index_copy_(0, order[:kept], sorted_p[:kept] / mass[kept - 1])


def draw(p: Tensor, generator: torch.Generator) -> int:
    """The token whose part of the cumulative distribution holds a uniform number. Shapes: [V], on the CPU."""
    bounds = p.cumsum(0)
    u = torch.rand(1, generator=generator, dtype=torch.float64) * bounds[-1]
    return int(torch.searchsorted(bounds, u, right=True))  # right: a token of probability 0 has no part to hit


def _choose(logits: Tensor, sequences: list[_Sequence], options: Options) -> list[int]:
    """The next token of each sequence, or NOT_FINITE."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    good = logits.isfinite().all(1).tolist()
    if options.temperature == 0:
        tokens = logits.argmax(1).tolist()
    else:
        rule = options.temperature, options.top_k, options.top_p
        rows = logits.cpu().nan_to_num()  # those that are not finite are refused below
        tokens = [draw(probabilities(row, *rule), s.generator) for row, s in zip(rows, sequences)]
    return [token if fine else NOT_FINITE for token, fine in zip(tokens, good)]


def _decides(mesh: Mesh) -> bool:
    """Whether this is the first rank of the last stage."""
    return mesh.rank == mesh.layout.world - mesh.layout.stage


def _tell(mesh: Mesh, chosen: list[int] | None, count: int) -> list[int]:
    """What the deciding rank chose, on all ranks: a sum in which all others have zeros."""
    tokens = torch.tensor([0] * count if chosen is None else chosen, dtype=torch.int64, device=mesh.device)
    told = mesh.world.all_reduce(tokens).tolist()
    if NOT_FINITE in told:
        raise UserError(
            "the model's logits are not finite: its run diverged; use an earlier checkpoint, or another precision"
        )
    return told


def _generator(seed: int, prompt: int) -> torch.Generator:
    key = int.from_bytes(hashlib.sha256(f"{seed}/{prompt}".encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(key)


# --- a model without an optimizer ---


def generation_config(store: Store, layout: dict[str, object], precision: str | None = None) -> Config:
    """The configuration of a checkpoint's model under another layout, checked; what only training reads is made to fit.

    `layout`: values of the section `parallel`; data is 1 when not given. Raises UserError."""
    if "config" not in store.extra:
        raise UserError(f"{store.folder} does not say which model it holds: use a checkpoint of `mtm train`")
    saved = validate(store.extra["config"], f"{store.folder}")
    parallel = validate({"model": store.extra["config"]["model"], "parallel": layout}, "layout").parallel
    t, p, d = parallel.tensor, parallel.pipeline, parallel.data or 1
    if precision not in (None, *TYPES):
        raise UserError(f"precision {precision}: use {', '.join(TYPES)}")
    train = {"precision": precision or saved.train.precision, "micro_batch": t, "global_batch": t * d}
    train |= idle_defaults(train["precision"])
    update = {
        "parallel": parallel.model_copy(update={"data": d}),
        "optimizer": OptimizerConfig(),
        "train": saved.train.model_copy(update=train),
    }
    return check(saved.model_copy(update=update), t * p * d)


def load_model(store: Store, config: Config, mesh: Mesh, native_bf16: bool = True) -> Decoder:
    """This rank's part of the model of a checkpoint, for inference. Raises UserError when it is damaged."""
    build = Build(mesh, TYPES[config.train.precision].compute, Gemm(native_bf16))
    model = build_chunks(config, build)[0]
    load_weights(store, model.requires_grad_(False), mesh)
    return model
