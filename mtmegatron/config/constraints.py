"""What does not fit together, checked before any process group exists.

Notable: every rule of `config/rules/` runs, so a user sees all faults at once; `resolve` fills what the configuration leaves open (degrees from the
number of processes, defaults that depend on other values) and is the only place that does.
"""

from collections.abc import Iterator

from mtmegatron.config.rules import layout, model, training
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError

RULES = (*model.RULES, *layout.RULES, *training.RULES)


def resolve(config: Config, world: int | None = None) -> Config:
    """Fills defaults that depend on other values; `world` (number of processes) gives the data degree."""
    model, parallel = config.model, config.parallel
    width = {
        "kv_heads": model.kv_heads or model.heads,
        "head_size": model.head_size or (model.latent.nope + model.latent.rope if model.latent else max(model.width // model.heads, 1)),
        "ffn": model.ffn or 4 * model.width,
        "max_positions": model.max_positions or config.data.sequence,
    }
    others = parallel.tensor * parallel.pipeline * parallel.context
    degrees = {
        "sequence": parallel.sequence if parallel.sequence is not None else parallel.tensor > 1,
        "data": parallel.data or max((world or others) // others, 1),
        "chunks": parallel.chunks or (2 if parallel.schedule in ("interleaved", "zb-v", "dualpipe-v") else 1),
    }
    kind = parallel.context_kind or ("allgather" if parallel.context > 1 else None)
    inner = parallel.context if kind == "ulysses" else parallel.ulysses or 1
    degrees |= {"context_kind": kind, "ulysses": inner}
    degrees["shard"] = parallel.shard or degrees["data"]
    return config.model_copy(update={"model": model.model_copy(update=width), "parallel": parallel.model_copy(update=degrees)})


def check(config: Config, world: int) -> Config:
    """The resolved configuration for `world` processes; UserError lists all that does not fit."""
    found = list(faults(config, world))
    if found:
        raise UserError(f"{len(found)} fault{'s' * (len(found) > 1)} in the configuration\n" + "\n".join(f"  {line}" for line in found))
    return resolve(config, world)


def faults(config: Config, world: int) -> Iterator[str]:
    """One line per fault, each with its repair."""
    resolved = resolve(config, world)
    for rule in RULES:
        yield from rule(config, resolved, world)
