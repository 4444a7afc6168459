"""Rules of the layout: degrees, what they divide, sharding, recomputation, and the layouts of canonical numerics."""

from collections.abc import Iterator
from math import gcd, lcm

from mtmegatron.config.derived import WARM_UP, optimizers
from mtmegatron.config.rules import divisors, one_of
from mtmegatron.config.schema import Config


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
    if r.offload and config.device == "cpu":
        yield "`recompute.offload` has no effect where the run executes on a CPU, whose memory is the host's: remove it"


def _canonical(config: Config, resolved: Config, world: int) -> Iterator[str]:
    p, m, train, o = resolved.parallel, resolved.model, config.train, config.optimizer
    if train.numerics == "fast":
        if train.blocks != type(train).model_fields["blocks"].default:
            yield f"`train.blocks: {train.blocks}` has no effect with `train.numerics: fast`: use canonical, or leave it out"
        return
    for name, degree in (("tensor", p.tensor), ("context", p.context)):
        if train.blocks % degree:
            yield f"`train.numerics: canonical` cuts in `train.blocks: {train.blocks}`, which `parallel.{name}: {degree}` does not divide: use {one_of(divisors(train.blocks))}"
    if m.kv_heads % p.tensor:
        yield f"`train.numerics: canonical` with `parallel.tensor: {p.tensor}` would cut one of `model.kv_heads: {m.kv_heads}`: use tensor {one_of(divisors(m.kv_heads))}"
    if config.data.sequence % (2 * train.blocks):
        near = max(config.data.sequence // (2 * train.blocks), 1) * 2 * train.blocks
        yield f"`data.sequence: {config.data.sequence}` is not a multiple of 2 x `train.blocks: {train.blocks}`: use {near} or {near + 2 * train.blocks}"
    refused = {
        f"train.precision: {train.precision}": train.precision not in ("fp32", "bf16"), "parallel.reduce: bf16": p.reduce == "bf16",
        f"parallel.context_kind: {p.context_kind}": p.context_kind not in (None, "allgather"),
        "model.dropout_attention": m.dropout_attention > 0, "model.moe": m.moe is not None, "model.latent": m.latent is not None,
        "model.prediction": m.prediction is not None,
        "optimizer.compiled: true": o.compiled, f"optimizer.moments: {o.moments}": o.moments != "fp32",
        "optimizer.masters: false": not o.masters,
        "optimizer.kind: lamb, muon or of one bit": bool({"lamb", "muon", *WARM_UP} & optimizers(config.optimizer)),
    }  # fmt: skip
    for name, used in refused.items():
        if used:
            yield f"`train.numerics: canonical` is not there for `{name}` (docs/numerics.md says why): use fast, or leave that out"


RULES = (_world, _heads, _layers, _tokens, _context, _batch, _sharding, _recompute, _canonical)
