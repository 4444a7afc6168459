"""What does not fit together, as one table: each rule yields lines `fact: reason: repair`. Checked before any process group exists.

Notable: every rule runs, so a user sees all faults at once; `resolve` fills what the configuration leaves open (degrees from the number of
processes, defaults that depend on other values) and is the only place that does.
"""

from collections.abc import Iterator
from math import gcd, lcm

from mtmegatron.config.schema import Config, ModelConfig
from mtmegatron.errors import UserError
from mtmegatron.layout import Layout


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def one_of(values: list[int]) -> str:
    head = [str(v) for v in values]
    if len(head) > 8:
        head = head[:7] + ["..", head[-1]]
        return ", ".join(head)
    return head[0] if len(head) == 1 else f"{', '.join(head[:-1])} or {head[-1]}"


def resolve(config: Config, world: int | None = None) -> Config:
    """Fills defaults that depend on other values; `world` (number of processes) gives the data degree."""
    model, parallel = config.model, config.parallel
    width = {
        "kv_heads": model.kv_heads or model.heads,
        "head_size": model.head_size or max(model.width // model.heads, 1),
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
    for rule in (_model, _world, _heads, _layers, _tokens, _context, _batch, _sharding, _recompute, _training):
        yield from rule(config, resolved, world)


def _model(config: Config, resolved: Config, world: int) -> Iterator[str]:
    model = config.model
    if model.head_size is None and model.width % model.heads:
        yield f"`model.heads: {model.heads}` does not divide `model.width: {model.width}`: use {one_of(divisors(model.width))}, or give model.head_size"
    kv = resolved.model.kv_heads
    if model.heads % kv:
        yield f"`model.kv_heads: {kv}` does not divide `model.heads: {model.heads}`: use {one_of(divisors(model.heads))}"
    if model.positions == "learned" and (config.data.sequence > resolved.model.max_positions):
        yield f"`data.sequence: {config.data.sequence}` is longer than `model.max_positions: {model.max_positions}`: shorten the sequence or enlarge the table"
    if model.positions == "learned" and (model.rope_scaling or model.rope_fraction != 1.0):
        yield "`model.rope_*` has no effect with `model.positions: learned`: remove it"
    rotated = int(resolved.model.head_size * model.rope_fraction)
    if model.positions == "rotary" and rotated % 2:
        yield f"rotary positions turn {rotated} channels of a head, an odd number: change model.head_size or model.rope_fraction"


def _world(config: Config, resolved: Config, world: int) -> Iterator[str]:
    p = config.parallel
    product = p.tensor * p.context * p.pipeline * (p.data or 1)
    factors = [("context", p.context if p.context > 1 else None), ("pipeline", p.pipeline), ("data", p.data)]
    equation = f"`parallel.tensor: {p.tensor}`" + "".join(f" x `{name}: {size}`" for name, size in factors if size)
    if p.data and product != world:
        yield f"{equation} is {product}, but there are {world} processes: start {product} (--nproc {product}), or leave out parallel.data"
    elif not p.data and world % product:
        near = max(world // product, 1) * product
        yield f"{equation} is {product}, which does not divide the {world} processes: start {near} or {near + product}"
    if p.sequence and p.tensor == 1:
        yield "`parallel.sequence: true` needs `parallel.tensor` of 2 or more: there is nobody to share the tokens with"


def _heads(config: Config, resolved: Config, world: int) -> Iterator[str]:
    t, model = config.parallel.tensor, resolved.model
    fit = [d for d in divisors(model.heads) if model.kv_heads % d == 0 or d % model.kv_heads == 0]
    if model.heads % t:
        yield f"`parallel.tensor: {t}` does not divide `model.heads: {model.heads}`: use {one_of(fit)}"
    elif t not in fit:
        yield f"`parallel.tensor: {t}` and `model.kv_heads: {model.kv_heads}`: one must divide the other: use tensor {one_of(fit)}"
    for name, size in (("ffn", model.ffn), ("vocab", model.vocab)):
        if size is not None and size < t:
            yield f"`parallel.tensor: {t}` is more than `model.{name}: {size}`: use at most {size}"


def _layers(config: Config, resolved: Config, world: int) -> Iterator[str]:
    p, layers = config.parallel, config.model.layers
    stages, chunks = p.pipeline * resolved.parallel.chunks, resolved.parallel.chunks
    if p.schedule in ("zb-v", "dualpipe-v") and chunks != 2:
        yield f"`parallel.chunks: {chunks}` with `schedule: {p.schedule}`: use 2, or leave it out"
    elif p.schedule in ("1f1b", "gpipe", "zb-h1") and chunks != 1:
        yield f"`parallel.chunks: {chunks}` has no effect with `schedule: {p.schedule}`: use interleaved, or leave it out"
    if p.pipeline_layers is not None and len(p.pipeline_layers) != stages:
        yield f"`parallel.pipeline_layers` names {len(p.pipeline_layers)} chunks, the pipeline has {stages} ({p.pipeline} ranks x {chunks}): give one number for each"
    if p.pipeline_layers is not None and sum(p.pipeline_layers) != layers:
        yield f"`parallel.pipeline_layers` adds up to {sum(p.pipeline_layers)} layers, `model.layers` is {layers}: make them equal"
    if stages > layers + 2:
        yield f"`parallel.pipeline: {p.pipeline}` x {chunks} chunks leaves some with nothing to do: use at most {layers + 2} (layers, embedding, head)"


def _tokens(config: Config, resolved: Config, world: int) -> Iterator[str]:
    t, c, sequence, micro = config.parallel.tensor, config.parallel.context, config.data.sequence, config.train.micro_batch
    chunks = 2 * c if c > 1 else 1  # each sequence is cut in so many equal parts
    step = lcm(chunks, t * c // gcd(t * c, micro)) if resolved.parallel.sequence else chunks
    if sequence % step == 0:
        return
    near = max(sequence // step, 1) * step
    use = f"use data.sequence {near} or {near + step}"
    if sequence % chunks:
        yield f"`parallel.context: {c}` cuts a sequence in {chunks} equal parts, which `data.sequence: {sequence}` does not allow: {use}"
    else:
        yield (
            f"`parallel.tensor: {t}` does not divide the {sequence * micro // c} tokens of a micro-batch (`data.sequence: {sequence}` x "
            f"`train.micro_batch: {micro}`" + (f" / `context: {c}`" if c > 1 else "") + f"): {use}, or parallel.sequence: false"
        )


def _context(config: Config, resolved: Config, world: int) -> Iterator[str]:
    p, r, heads = config.parallel, resolved.parallel, config.model.heads // config.parallel.tensor
    if p.context == 1 and (p.context_kind or p.ulysses):
        yield "`parallel.context_kind` and `ulysses` have no effect with `parallel.context: 1`: remove them"
        return
    if p.context_kind == "ring-ulysses" and not (p.ulysses and 1 < p.ulysses < p.context and p.context % p.ulysses == 0):
        inner = [d for d in divisors(p.context) if 1 < d < p.context]
        yield "`parallel.context_kind: ring-ulysses` needs `parallel.ulysses`: " + (f"use {one_of(inner)}" if inner else "a context degree with a divisor")
    elif p.context_kind != "ring-ulysses" and p.ulysses:
        yield f"`parallel.ulysses: {p.ulysses}` has no effect with `context_kind: {r.context_kind}`: use ring-ulysses, or leave it out"
    elif heads % r.ulysses:
        yield f"`parallel.context_kind: {r.context_kind}` shares {heads} heads per tensor rank among {r.ulysses}: use {one_of(divisors(heads))}"
    if p.context > 1 and config.model.dropout_attention:
        yield "`model.dropout_attention` with `parallel.context` above 1: attention runs in blocks that keep no weights to drop: use context 1 or no such dropout"


def _batch(config: Config, resolved: Config, world: int) -> Iterator[str]:
    train, data = config.train, resolved.parallel.data
    unit = train.micro_batch * data
    if train.global_batch % unit:
        near = max(train.global_batch // unit, 1) * unit
        yield (
            f"`train.global_batch: {train.global_batch}` is not a multiple of `train.micro_batch: {train.micro_batch}` x data ranks {data}: "
            f"use {near} or {near + unit}"
        )


def _sharding(config: Config, resolved: Config, world: int) -> Iterator[str]:
    p, data = config.parallel, resolved.parallel.data
    if p.shard and data % p.shard:
        yield f"`parallel.shard: {p.shard}` does not divide the {data} data ranks: use {one_of(divisors(data))}"
    if p.shard and p.zero == 0:
        yield f"`parallel.shard: {p.shard}` has no effect with `parallel.zero: 0`: use zero 1, 2 or 3, or leave it out"
    if p.reduce == "bf16" and config.train.precision == "fp64":
        yield "`parallel.reduce: bf16` with `train.precision: fp64` rounds what the run is to prove: remove it"


def _recompute(config: Config, resolved: Config, world: int) -> Iterator[str]:
    r, default = config.recompute, type(config.recompute)()
    if r.mode != "full" and (r.every, r.first) != (default.every, default.first):
        yield f"`recompute.every` and `first` have no effect with `recompute.mode: {r.mode}`: use full, or leave them out"
    if r.mode != "selective" and r.parts != default.parts:
        yield f"`recompute.parts` has no effect with `recompute.mode: {r.mode}`: use selective, or leave it out"
    if r.mode == "selective" and not r.parts:
        yield "`recompute.mode: selective` with no `recompute.parts`: give some, or use mode none"


def _training(config: Config, resolved: Config, world: int) -> Iterator[str]:
    o, train, data = config.optimizer, config.train, config.data
    length = o.decay_length or (train.steps if o.unit == "steps" else train.steps * train.global_batch)
    if o.warmup > length:
        yield f"`optimizer.warmup: {o.warmup}` {o.unit} is longer than the decay of {length}: shorten it"
    if o.decay == "constant" and o.decay_length:
        yield "`optimizer.decay_length` has no effect with `optimizer.decay: constant`: remove it"
    if o.decay == "constant" and o.min_lr:
        yield "`optimizer.min_lr` has no effect with `optimizer.decay: constant`: remove it"
    elif o.min_lr > o.lr:
        yield f"`optimizer.min_lr: {o.min_lr}` is above `optimizer.lr: {o.lr}`: swap them or lower it"
    if train.timeline and train.timeline > train.steps:
        yield f"`train.timeline: {train.timeline}` is after the last of `train.steps: {train.steps}`: use at most {train.steps}"
    if abs(sum(data.split) - 1.0) > 1e-6:
        yield f"`data.split` adds up to {sum(data.split):g}: make it 1"
    if config.checkpoint.asynchronous and not config.checkpoint.every:
        yield "`checkpoint.asynchronous` has no effect with `checkpoint.every: 0`, nothing is saved while training goes on: give checkpoint.every, or remove it"


def layout_of(config: Config) -> Layout:
    """The layout of a resolved configuration."""
    p = config.parallel
    sequence, parts = p.sequence and p.tensor > 1, min(config.model.kv_heads, p.tensor)
    return Layout(p.tensor, p.context, p.data, p.pipeline, sequence, parts, p.ulysses, p.shard)


def gated(model: ModelConfig) -> bool:
    """Whether the feed-forward layer has a gate."""
    return "glu" in model.activation
