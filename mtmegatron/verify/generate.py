"""Which combinations to try: a table of what can be combined, a small set that covers it, random cases without end.

Notable:
- Silent errors sit in combinations. Nearly all need two or three particular values and no more (Kuhn, Wallace and
  Gallo 2004), so a set in which every pair of values occurs, and many triples of the dimensions that share machinery,
  finds them with some dozens of cases instead of a million.
- What fits together is asked of the table of constraints itself: a case is valid when `faults` says nothing. A pair
  that no valid case has is found and kept with the reason, never skipped in silence.
- Experts are drawn by random cases alone (`tests/parity/test_moe.py` covers them, with more kinds of router), and are checked in fp64 alone: among
  the some hundred choices of a case the two nearest scores differ by as little as 1e-7, which rounding in fp32 may turn, and in fp64 never does.
- Everything is a pure function of a seed. A case is spelled as the words of `mtm verify` that repeat it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

from mtmegatron.config.constraints import faults
from mtmegatron.config.derived import depends_on_micro_batch
from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError
from mtmegatron.verify.protocol import describe, laid_out, spell, world_of

# a vocabulary that no degree divides, layers for four chunks, buckets so small that there are several
SMALL = {
    "model": {"layers": 4, "width": 32, "heads": 4, "ffn": 88, "vocab": 131},
    "data": {"sequence": 16, "mask_boundary_loss": True},
    "train": {"global_batch": 4, "micro_batch": 1, "steps": 20},
    "optimizer": {"lr": 1e-2},
    "parallel": {"bucket_mb": 0.02},
}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
Settings = dict[str, object]  # plain keys are settings of a layout, dotted ones change the run itself
Table = dict[str, dict[str, Settings]]  # dimension -> value -> its settings; the first value is the plain one
DIMENSIONS: Table = {
    "tensor": {"1": {}, "2": {"tensor": 2}, "2, tokens whole": {"tensor": 2, "sequence": False}},
    "pipeline": {"none": {}} | {kind: {"pipeline": 2, "schedule": kind} for kind in SCHEDULES},
    "data": {"1": {}, "2": {"data": 2}, "4 in groups of 2": {"data": 4, "shard": 2}},
    "zero": {"0": {}} | {str(stage): {"zero": stage} for stage in (1, 2, 3)},
    "context": {
        "1": {}, "allgather": {"context": 2}, "ring": {"context": 2, "context_kind": "ring"},
        "ulysses": {"context": 2, "context_kind": "ulysses"},
        "ring-ulysses": {"context": 4, "context_kind": "ring-ulysses", "ulysses": 2},
    },
    "recompute": {"none": {}, "selective": {"recompute": "selective"}, "full": {"recompute": "full"}},
    "micro-batch": {"1": {}, "2": {"micro_batch": 2}},
    "overlap": {"yes": {}, "no": {"overlap": False}},
    "precision": {"fp32": {}, "bf16": {}},
    "table": {"untied": {}, "tied": {"model.tied": True}},
    "key/value heads": {"4": {}, "2": {"model.kv_heads": 2}, "1": {"model.kv_heads": 1}},
    "documents": {"joined": {}, "packed": {"data.mask_documents": True}},
    "dropout": {
        "none": {}, "residual": {"model.dropout_embedding": 0.1, "model.dropout_residual": 0.2},
        "attention": {"model.dropout_attention": 0.2, "model.dropout_residual": 0.1},
    },
    "prediction": {"none": {}, "1": {"model.prediction.depth": 1}},
}  # fmt: skip
# dimensions whose code meets in one place: triples of their values count beside the pairs
TRIPLES = (
    ("pipeline", "zero", "recompute"), ("tensor", "context", "documents"), ("tensor", "pipeline", "table"),
    ("data", "zero", "recompute"), ("context", "key/value heads", "dropout"),
)  # fmt: skip
# further values and dimensions for random cases
MORE: Table = {
    "tensor": {"4": {"tensor": 4}, "4, tokens whole": {"tensor": 4, "sequence": False}},
    "pipeline": {f"{kind} of {n}": {"pipeline": n, "schedule": kind} for n in (3, 4) for kind in SCHEDULES}
    | {"interleaved by 3": {"pipeline": 2, "schedule": "interleaved", "chunks": 3}}
    | {"uneven": {"pipeline": 2, "pipeline_layers": [3, 1]}},
    "data": {"4": {"data": 4}, "groups of 1": {"data": 2, "shard": 1}},
    "context": {f"{kind} of 4": {"context": 4, "context_kind": kind} for kind in ("allgather", "ring", "ulysses")},
    "recompute": {
        "norms": {"recompute": "selective", "parts": ["norm", "up"]},
        "attention": {"recompute": "selective", "parts": ["attention"]},
        "every second": {"recompute": "full", "every": 2}, "first": {"recompute": "full", "first": 1},
    },
    "micro-batch": {"4": {"micro_batch": 4}},
    "precision": {"fp64": {}},
    "experts": {
        "none": {},
        "softmax": {"model.moe.experts": 4, "model.moe.score_after": True, "model.moe.global_loss": 0.02, "model.moe.z_loss": 1e-3},
        "sigmoid": {
            "model.moe.experts": 6, "model.moe.ffn": 24, "model.moe.score": "sigmoid", "model.moe.renormalise": True,
            "model.moe.groups": 3, "model.moe.groups_kept": 2, "model.moe.shared": 1, "model.moe.first_dense": 1,
            "model.moe.bias_rate": 1e-2, "model.moe.sequence_loss": 0.01,
        },
    },
    "expert ranks": {
        "1": {}, "2": {"expert": 2}, "2 in parts": {"expert": 2, "dispatch_parts": 2}, "allgather": {"expert": 2, "dispatcher": "allgather"},
        "columns": {"expert_tensor": 2}, "4": {"expert": 4}, "2 x columns": {"expert": 2, "expert_tensor": 2},
    },
}  # fmt: skip

Choice = dict[str, str]  # dimension -> value
Part = tuple[tuple[str, str], ...]  # some dimensions with their values: a pair or a triple


@dataclass(frozen=True)
class Case:
    """One combination, checked in fp64 and in `precision`, which may be fp64 too.

    `layout`: as `verify.protocol` takes it; `changes`: dotted keys of the configuration."""

    choice: Choice
    layout: Settings
    changes: Settings
    precision: str

    @property
    def world(self) -> int:
        return world_of(self.layout)

    @property
    def words(self) -> str:
        """What to type after `mtm verify` to run it again."""
        changes = "".join(f"{key}={spell(value)} " for key, value in self.changes.items())
        layout = describe(self.layout) if self.layout else "tensor=1"
        return f'{changes}--layouts "{layout}" --precisions {",".join(dict.fromkeys(["fp64", self.precision]))}'


@dataclass
class Space:
    """All cases of a table that fit a configuration, on at most `most` processes.

    `seldom`: beyond so many processes a case of the covering set does not grow, unless it must."""

    base: Config = field(default_factory=lambda: validate(SMALL, "the small model"))
    table: Table = field(default_factory=lambda: DIMENSIONS)
    most: int = 8
    seldom: int = 4

    def case(self, choice: Choice) -> Case:
        settings: Settings = {}
        for dimension, value in choice.items():
            settings |= self.table[dimension][value]
        layout = {key: value for key, value in settings.items() if "." not in key}
        changes = {key: value for key, value in settings.items() if "." in key}
        return Case(choice, layout, changes, choice["precision"])

    def fault(self, choice: Choice) -> str:
        """Why a case cannot be run; empty when it can."""
        case = self.case(choice)
        if case.world > self.most:
            return f"{case.world} processes, more than {self.most}"
        if case.layout.get("zero") and int(case.layout.get("data", 1)) * int(case.layout.get("context", 1)) == 1:
            return "ZeRO without a data or context rank to share with"  # runs, and proves nothing
        config = laid_out(changed(self.base, case.changes), case.layout, "fp32")
        if (config.model.moe is not None) != (case.precision == "fp64"):
            return "experts are checked in fp64 alone, all else in another precision too"
        if depends_on_micro_batch(config) and config.train.micro_batch != self.base.train.micro_batch:
            return f"micro-batches of {config.train.micro_batch}: choices or balance terms of these experts are those of a micro-batch"
        return next(faults(config, case.world), "")

    @property
    def plain(self) -> Choice:
        return {dimension: next(iter(values)) for dimension, values in self.table.items()}

    # ---- what has to occur

    @cached_property
    def pairs(self) -> dict[Part, Choice]:
        """Every pair of values that a valid case has, with such a case."""
        return {part: found for part, found in self._completed.items() if not isinstance(found, str)}

    @cached_property
    def impossible(self) -> dict[Part, str]:
        """The pairs that no valid case has, with what the constraints say."""
        return {part: found for part, found in self._completed.items() if isinstance(found, str)}

    @cached_property
    def _completed(self) -> dict[Part, Choice | str]:
        values = [[(dimension, value) for value in self.table[dimension]] for dimension in self.table]
        return {pair: self._complete(dict(pair)) for two in combinations(values, 2) for pair in product(*two)}

    def _complete(self, part: Choice) -> Choice | str:
        """A valid case with these values and all else plain, but for one more value where that does not fit.

        Where there is none: what the constraints say."""
        plain = self.plain | part
        reason = self.fault(plain)
        if not reason:
            return plain
        others = (plain | {d: value} for d in self.table if d not in part for value in self.table[d])
        return next((choice for choice in others if not self.fault(choice)), reason)

    def triples_of(self, choice: Choice) -> set[Part]:
        """The triples of TRIPLES in a case that have no plain value."""
        parts = (tuple((dimension, choice[dimension]) for dimension in group) for group in TRIPLES if choice.keys() >= set(group))
        return {part for part in parts if not set(part) & set(self.plain.items())}

    # ---- cases

    def cover(self, seed: int = 0, tries: int = 2) -> list[Case]:
        """Cases in which every pair occurs: greedy, the best of some tries each time, where triples count too.

        Pairs that need most processes come first, because their cases cover much else by the way."""
        draw, cases = random.Random(seed), []
        left = dict(sorted(self.pairs.items(), key=lambda item: -self.case(item[1]).world))
        seen: set[Part] = set()

        def gain(choice: Choice) -> int:
            pairs = sum(pair in left for pair in combinations(choice.items(), 2))
            return 2 * pairs + len(self.triples_of(choice) - seen)

        while left:
            part = next(iter(left))
            best = max((self._grown(part, gain, draw) for _ in range(tries)), key=gain)
            for pair in combinations(best.items(), 2):
                left.pop(pair, None)
            seen |= self.triples_of(best)
            cases.append(self.case(best))
        return cases

    def _grown(self, part: Part, gain: Callable[[Choice], int], draw: random.Random) -> Choice:
        """A case with `part`: in random order each other dimension takes the value that gains most."""
        choice = self.pairs[part]
        most = max(self.seldom, self.case(choice).world)
        free = [dimension for dimension in self.table if dimension not in dict(part)]
        for dimension in draw.sample(free, len(free)):
            values = draw.sample(list(self.table[dimension]), len(self.table[dimension]))
            best_first = sorted((choice | {dimension: value} for value in values), key=gain, reverse=True)
            choice = next((c for c in best_first if self.case(c).world <= most and not self.fault(c)), choice)
        return choice

    def sample(self, seed: int) -> Case:
        """A random valid case: a model first, all as likely, then what fits it. Raises UserError when none is found."""
        draw = random.Random(seed)
        model = {dimension: draw.choice(list(self.table[dimension])) for dimension in _changing(self.table)}
        for _ in range(10_000):
            choice = {dimension: model.get(dimension) or draw.choice(list(values)) for dimension, values in self.table.items()}
            if not self.fault(choice):
                return self.case(choice)
        repair = "use a global_batch, a sequence and heads that 2 divides"
        raise UserError(f"no layout of the table fits this configuration: {repair}")


def changed(config: Config, changes: Settings) -> Config:
    """The configuration with other values for some dotted keys; a section that it lacks is made. Raises UserError."""
    if not changes:
        return config
    tree = config.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            if place.get(section, "") is None:
                place[section] = {}
            place = place.get(section)
            if not isinstance(place, dict):
                raise UserError(f"{key}={spell(value)}: there is no section {section}")
        place[name] = value
    return validate(tree, "changed configuration")


def wide(layouts_only: bool) -> Table:
    """The table for random cases; `layouts_only`: without the dimensions that change the run itself."""
    table = {dimension: DIMENSIONS.get(dimension, {}) | MORE.get(dimension, {}) for dimension in DIMENSIONS | MORE}
    return {d: values for d, values in table.items() if not (layouts_only and d in _changing(table))}


def _changing(table: Table) -> list[str]:
    """The dimensions that change the run itself."""
    return [d for d, values in table.items() if any("." in key for settings in values.values() for key in settings)]
