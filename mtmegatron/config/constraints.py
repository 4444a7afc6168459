"""What does not fit together, as one table: each rule yields lines `fact: reason: repair`. Checked before any process group exists.

Notable: every rule runs, so a user sees all faults at once; `resolve` fills what the configuration leaves open (degrees from the number of
processes, defaults that depend on other values) and is the only place that does.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import gcd, lcm

from mtmegatron.config.derived import high_precision, linear_layers, optimizers, rotated
from mtmegatron.config.ramp import batch_sizes, samples_before
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError

WARM_UP = {"onebit-adam": "adamw", "onebit-lamb": "lamb"}  # kinds of one bit, and what they are before they compress
TWO_MOMENTS = {"adamw", "adam", "lamb", "muon", *WARM_UP}  # kinds of optimizer with a second moment; muon's are those of its tables and vectors


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
    for rule in (_model, _latent, _prediction, _world, _heads, _layers, _tokens, _context, _batch, _sharding, _recompute, _schedule, _optimizer, _storage, _onebit, _ramp, _training, _precision, _canonical, _router, _experts):
        yield from rule(config, resolved, world)


def _model(config: Config, resolved: Config, world: int) -> Iterator[str]:
    model = config.model
    if model.head_size is None and model.latent is None and model.width % model.heads:
        yield f"`model.heads: {model.heads}` does not divide `model.width: {model.width}`: use {one_of(divisors(model.width))}, or give model.head_size"
    kv = resolved.model.kv_heads
    if model.heads % kv:
        yield f"`model.kv_heads: {kv}` does not divide `model.heads: {model.heads}`: use {one_of(divisors(model.heads))}"
    if model.positions == "learned" and (config.data.sequence > resolved.model.max_positions):
        yield f"`data.sequence: {config.data.sequence}` is longer than `model.max_positions: {model.max_positions}`: shorten the sequence or enlarge the table"
    if model.positions == "learned" and (model.rope_scaling or model.rope_fraction != 1.0):
        yield "`model.rope_*` has no effect with `model.positions: learned`: remove it"
    turned = rotated(resolved.model)
    if model.positions == "rotary" and turned % 2:
        repair = "model.latent.rope" if model.latent else "model.head_size or model.rope_fraction"
        yield f"rotary positions turn {turned} channels of a head, an odd number: change {repair}"


def _latent(config: Config, resolved: Config, world: int) -> Iterator[str]:
    model = config.model
    if model.latent is None:
        return
    if model.positions != "rotary":
        yield f"`model.latent` with `model.positions: {model.positions}`: its heads have a rotated part: use positions rotary"
    size, heads = resolved.model.latent.nope + resolved.model.latent.rope, (None, model.heads)
    fits = {"head_size": (None, size), "kv_heads": heads, "rope_fraction": (1.0,), "bias_qkv": (False,), "qk_norm": (False,)}
    for name, values in fits.items():
        if getattr(model, name) not in values:
            yield f"`model.{name}: {str(getattr(model, name)).lower()}` has no effect with `model.latent`, which says what heads are: remove it"


def _prediction(config: Config, resolved: Config, world: int) -> Iterator[str]:
    prediction = config.model.prediction
    if prediction and prediction.coefficient == 0:
        yield "`model.prediction.coefficient: 0` trains no block of multi-token prediction: give it a weight, or remove model.prediction"


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


def _schedule(config: Config, resolved: Config, world: int) -> Iterator[str]:
    o, train = config.optimizer, config.train
    whole = {"steps": train.steps, "samples": samples_before(train, train.steps)}
    length = o.decay_length or whole.get(o.unit, whole["samples"] * config.data.sequence)
    if o.warmup > length:
        yield f"`optimizer.warmup: {o.warmup}` {o.unit} is longer than the decay of {length}: shorten it"
    elif o.decay == "wsd" and not (o.wsd_length and o.warmup + o.wsd_length <= length):
        yield f"`optimizer.decay: wsd` needs `wsd_length` of at most {length - o.warmup} {o.unit}, what lies between warm-up and end: give that of its last part"
    if o.decay in ("constant", "inverse-sqrt") and o.decay_length and o.weight_decay_end is None:
        yield f"`optimizer.decay_length` has no effect with `optimizer.decay: {o.decay}`: remove it"
    if o.decay == "constant" and o.min_lr:
        yield "`optimizer.min_lr` has no effect with `optimizer.decay: constant`: remove it"
    elif o.min_lr > o.lr:
        yield f"`optimizer.min_lr: {o.min_lr}` is above `optimizer.lr: {o.lr}`: swap them or lower it"
    wsd, polynomial = (o.decay == kind for kind in ("wsd", "polynomial"))
    active = {
        "warmup_from": (o.warmup, "warmup"), "power": (polynomial, "decay: polynomial"), "wsd_length": (wsd, "decay: wsd"),
        "wsd_shape": (wsd, "decay: wsd"), "weight_decay_shape": (o.weight_decay_end is not None, "weight_decay_end"),
    }  # fmt: skip
    yield from _idle("optimizer", o, active)


def _optimizer(config: Config, resolved: Config, world: int) -> Iterator[str]:
    o, kinds = config.optimizer, optimizers(config.optimizer)
    adam, momentum = kinds & TWO_MOMENTS, kinds & {"sgd", "muon"}
    betas = adam or "lion" in kinds
    yield from _idle("optimizer", o, {
        "beta1": (betas, "an optimizer of two moments, or lion"), "beta2": (betas, "an optimizer of two moments, or lion"),
        "eps": (adam, "an optimizer of two moments"), "momentum": (momentum, "sgd or muon"), "nesterov": (momentum, "sgd or muon"),
    })  # fmt: skip
    if o.clip_value is not None and o.clip:
        yield f"`optimizer.clip_value: {o.clip_value}` cuts elements in place of a clip of the norm, which is {o.clip}: use clip 0, or remove clip_value"
    for i, group in enumerate(o.groups):
        changes = [name for name in ("lr", "decay", "kind") if getattr(group, name) != type(group).model_fields[name].default]
        if group.frozen == bool(changes):
            what = f"frozen parameters have no {', '.join(changes)}" if changes else "it changes nothing"
            yield f"`optimizer.groups.{i}` ({group.match}) has settings without effect, {what}: remove them, or the group"


def _storage(config: Config, resolved: Config, world: int) -> Iterator[str]:
    o, kinds, precision = config.optimizer, optimizers(config.optimizer), config.train.precision
    given = [f"{name}: {str(getattr(o, name)).lower()}" for name in ("moments", "masters") if getattr(o, name) != type(o).model_fields[name].default]
    others = sorted(kinds & {"muon", "lamb", *WARM_UP})
    if given and others:
        yield f"`optimizer.{given[0]}` with `optimizer.kind: {others[0]}`, which updates whole parameters in fp32: use adamw, adam, lion or sgd, or leave it out"
    if o.compiled and (others or given):
        yield f"`optimizer.compiled: true` with `optimizer.{given[0] if given else f'kind: {others[0]}'}`, which is not a rule for single elements in fp32: remove one of them"
    kept = kinds != {"sgd"} or o.momentum != 0
    yield from _idle("optimizer", o, {
        "moments": (kept, "an optimizer that has some"), "masters": (precision == "bf16" or precision.startswith("fp8-"), "weights in bf16"),
    })  # fmt: skip


def _onebit(config: Config, resolved: Config, world: int) -> Iterator[str]:
    o, p, steps = config.optimizer, resolved.parallel, config.train.steps
    if o.kind not in WARM_UP:
        yield from _idle("optimizer", o, {"onebit": (False, "a kind of one bit")})
        return
    if o.onebit is None:
        yield f"`optimizer.kind: {o.kind}` begins with a warm-up: give its updates, `optimizer.onebit.freeze`, about {max(steps // 5, 1)}"
    elif o.onebit.freeze >= steps:
        yield f"`optimizer.onebit.freeze: {o.onebit.freeze}` leaves nothing of `train.steps: {steps}`: use about {max(steps // 5, 1)}, or another kind"
    refused = {
        f"parallel.zero: {p.zero}": (p.zero >= 2, "a rank's own gradient must stay whole"),
        f"parallel.shard: {p.shard}": (p.shard < p.data, "shards in groups would be summed a second time"),
        "optimizer.clip_value": (o.clip_value is not None, "no rank has the sum whose elements it cuts"),
        "optimizer.groups with a kind": (any(group.kind for group in o.groups), "a bucket is compressed as a whole"),
    }  # fmt: skip
    for name, (used, reason) in refused.items():
        if used:
            yield f"`{name}` with `optimizer.kind: {o.kind}`: {reason}: remove that, or use another kind"


def _idle(section: str, given: object, active: dict[str, tuple[object, str]]) -> Iterator[str]:
    """A line for each value that was changed and takes no part; `active`: for each name whether it does, and with what it would."""
    for name, (used, other) in active.items():
        if not used and getattr(given, name) != type(given).model_fields[name].default:
            yield f"`{section}.{name}: {str(getattr(given, name)).lower()}` has no effect without {other}: remove it, or set that"


def _ramp(config: Config, resolved: Config, world: int) -> Iterator[str]:
    train, unit = config.train, config.train.micro_batch * resolved.parallel.data
    if train.ramp is None:
        return
    if train.ramp.start >= train.global_batch or (train.global_batch - train.ramp.start) % train.ramp.increment:
        yield f"`train.ramp` from {train.ramp.start} in steps of {train.ramp.increment} does not reach `train.global_batch: {train.global_batch}`: change one of them"
    elif any(size % unit for size in batch_sizes(train)):
        yield f"`train.ramp` has batches that are no multiple of `train.micro_batch: {train.micro_batch}` x data ranks {resolved.parallel.data}: use multiples of {unit}"
    if config.model.moe is not None:
        yield "`train.ramp` with `model.moe`: balance terms count on a batch of one size: use another warm-up, or no experts"


def _training(config: Config, resolved: Config, world: int) -> Iterator[str]:
    train, data = config.train, config.data
    if train.timeline and train.timeline > train.steps:
        yield f"`train.timeline: {train.timeline}` is after the last of `train.steps: {train.steps}`: use at most {train.steps}"
    if abs(sum(data.split) - 1.0) > 1e-6:
        yield f"`data.split` adds up to {sum(data.split):g}: make it 1"
    if config.checkpoint.asynchronous and not config.checkpoint.every:
        yield "`checkpoint.asynchronous` has no effect with `checkpoint.every: 0`, nothing is saved while training goes on: give checkpoint.every, or remove it"


def _precision(config: Config, resolved: Config, world: int) -> Iterator[str]:
    train, delayed, model = config.train, ("history", "margin", "interval"), config.model
    uses = {"fp8": train.precision.startswith("fp8-"), "loss_scale": train.precision == "fp16"}
    for section, needed in (("fp8", "an fp8 precision"), ("loss_scale", "fp16")):
        if not uses[section] and getattr(train, section) != type(getattr(train, section))():
            yield f"`train.{section}` has no effect with `train.precision: {train.precision}`: use {needed}, or leave it out"
    given = [name for name in delayed if getattr(train.fp8, name) != type(train.fp8).model_fields[name].default]
    if uses["fp8"] and train.precision != "fp8-delayed" and given:
        yield f"`train.fp8.{given[0]}` has no effect with `train.precision: {train.precision}`: use fp8-delayed, or leave it out"
    if train.fp8.interval > train.fp8.history:
        yield f"`train.fp8.interval: {train.fp8.interval}` is longer than `history: {train.fp8.history}`: make it shorter"
    names, high = linear_layers(resolved.model), high_precision(resolved)
    idle = [pattern for pattern in train.fp8.high_precision or () if not any(fnmatchcase(name, pattern) for name in names)]
    if uses["fp8"] and idle:
        yield f"`train.fp8.high_precision: {idle[0]}` matches no linear layer: use names as {names[0]}, with * for any characters"
    elif uses["fp8"] and all(any(fnmatchcase(name, pattern) for pattern in high) for name in names):
        yield f"`train.precision: {train.precision}` leaves no linear layer in fp8 (`model.layers: {model.layers}`): give train.fp8.high_precision fewer, or []"
    if train.loss_scale.initial < train.loss_scale.minimum:
        yield f"`train.loss_scale.initial: {train.loss_scale.initial:g}` is below `minimum: {train.loss_scale.minimum:g}`: swap them or lower it"


def _canonical(config: Config, resolved: Config, world: int) -> Iterator[str]:
    p, m, train = resolved.parallel, resolved.model, config.train
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
        "optimizer.compiled: true": config.optimizer.compiled, "optimizer.moments: bf16": config.optimizer.moments == "bf16", "optimizer.masters: false": not config.optimizer.masters,
        "optimizer.kind: lamb, muon or of one bit": bool({"lamb", "muon", *WARM_UP} & optimizers(config.optimizer)),
    }  # fmt: skip
    for name, used in refused.items():
        if used:
            yield f"`train.numerics: canonical` is not there for `{name}` (docs/numerics.md says why): use fast, or leave that out"


def _router(config: Config, resolved: Config, world: int) -> Iterator[str]:
    moe = config.model.moe
    if moe is None:
        return
    if moe.experts % moe.groups:
        yield f"`model.moe.groups: {moe.groups}` does not divide `experts: {moe.experts}`: use {one_of(divisors(moe.experts))}"
    kept = min(moe.groups_kept or moe.groups, moe.groups)
    if moe.top_k > kept * moe.experts // moe.groups:
        yield f"`model.moe.top_k: {moe.top_k}` experts cannot be chosen among {kept * moe.experts // moe.groups}: use at most that, or keep more groups"
    if moe.top_k == 1 and (moe.renormalise or moe.score_after and moe.score == "softmax"):
        yield "`model.moe.top_k: 1` with `score_after` or `renormalise` has weights of 1, which train no router: make both false"
    grouped, limited, capacity = moe.groups > 1, kept < moe.groups, moe.capacity is not None
    grouping = limited or moe.device_loss or moe.capacity_of == "group" and capacity
    active = {
        "groups": (grouping, "groups_kept, device_loss or a capacity_of group"), "groups_kept": (limited, "more groups than that"),
        "group_score": (limited, "groups_kept"), "device_loss": (grouped, "groups"), "communication_loss": (limited, "groups_kept"),
        "complementary": (moe.sequence_loss and moe.score == "sigmoid", "sequence_loss and sigmoid scores"),
        "score_after": (moe.score == "softmax" or moe.bias_rate or limited, "softmax scores, bias_rate or groups_kept"), "bias_rate": (not moe.sinkhorn, "a choice by scores (sinkhorn: false)"),
        "renormalise": (not moe.score_after or moe.score == "sigmoid", "score_after: false"), "shared_gate": (moe.shared or moe.shared_ffn, "shared"),
        "capacity_of": (capacity and grouped, "capacity and groups"), "drop": (capacity, "capacity"),
        "pad": (capacity and moe.capacity_of == "expert", "a capacity of each expert"),
    }  # fmt: skip
    yield from _idle("model.moe", moe, active)


def _experts(config: Config, resolved: Config, world: int) -> Iterator[str]:
    m, p, moe = resolved.model, resolved.parallel, config.model.moe
    degrees, stage = p.expert * p.expert_tensor, p.tensor * p.context * p.data
    held = {
        "expert": (p.expert, moe is not None, "model.moe"), "expert_tensor": (p.expert_tensor, moe is not None, "model.moe"),
        "dispatcher": (p.dispatcher, moe and degrees > 1, "parallel.expert or expert_tensor"),
        "dispatch_parts": (p.dispatch_parts, moe and p.expert > 1 and p.dispatcher == "alltoall", "parallel.expert and the alltoall dispatcher"),
    }  # fmt: skip
    for name, (value, used, other) in held.items():
        if not used and value != type(p).model_fields[name].default:
            yield f"`parallel.{name}: {value}` has no effect without {other}: remove it, or set that"
    if moe is None:
        return
    if stage % degrees:
        yield f"`parallel.expert: {p.expert}` x `expert_tensor: {p.expert_tensor}` does not divide the {stage} ranks of a stage (tensor x context x data): use a product of {one_of(divisors(stage))}"
    for name, degree, most in (("expert", p.expert, moe.experts), ("expert_tensor", p.expert_tensor, moe.ffn or m.ffn)):
        if degree > most:
            yield f"`parallel.{name}: {degree}` is more than there is to share: use at most {most}"
    if p.tensor > 1 and not p.sequence:
        yield "`parallel.sequence: false` with `model.moe`: each tensor rank sends tokens of its own to experts: use sequence true, or tensor 1"
    if p.shard < p.data:
        yield f"`parallel.shard: {p.shard}` with `model.moe`: experts are shared by other ranks than the data ranks: use {p.data}, or leave it out"
    if m.bias_mlp:
        yield "`model.bias_mlp: true` with `model.moe`: experts have no biases: use false"
    if moe.pad and p.dispatch_parts > 1:
        yield "`model.moe.pad` with `parallel.dispatch_parts` would fill each part up to the whole capacity: use dispatch_parts 1, or no pad"
    yield from _expert_blocks(config)


def _expert_blocks(config: Config) -> Iterator[str]:
    layers, moe = config.model.layers, config.model.moe
    if moe.pattern is None and moe.first_dense >= layers or moe.pattern is not None and not any(moe.pattern):
        yield "`model.moe` with no block that has experts: change first_dense or pattern, or remove model.moe"
    if moe.pattern is not None and len(moe.pattern) != layers:
        yield f"`model.moe.pattern` names {len(moe.pattern)} blocks, `model.layers` is {layers}: give one value for each"
    if moe.pattern is not None and (moe.every, moe.first_dense) != (1, 0):
        yield "`model.moe.every` and `first_dense` have no effect with `model.moe.pattern`: remove them"
