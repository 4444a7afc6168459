"""Rules of training: learning rates, optimizers, batches, data, precision."""

from collections.abc import Iterator

from mtmegatron.config.derived import (
    TWO_MOMENTS,
    WARM_UP,
    fits,
    high_precision,
    idle_in,
    linear_layers,
    optimizers,
)
from mtmegatron.config.ramp import batch_sizes, samples_before
from mtmegatron.config.rules import idle
from mtmegatron.config.schema import Config, OptimizerConfig, ParallelConfig


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
    yield from idle("optimizer", o, active)


def _optimizer(config: Config, resolved: Config, world: int) -> Iterator[str]:
    o, kinds = config.optimizer, optimizers(config.optimizer)
    adam, momentum = kinds & TWO_MOMENTS, kinds & {"sgd", "muon"}
    betas = adam or "lion" in kinds
    yield from idle("optimizer", o, {
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
    yield from idle("optimizer", o, {
        "moments": (kept, "an optimizer that has some"), "masters": (precision == "bf16" or precision.startswith("fp8-"), "weights in bf16"),
    })  # fmt: skip


def _onebit(config: Config, resolved: Config, world: int) -> Iterator[str]:
    o, p, steps = config.optimizer, resolved.parallel, config.train.steps
    if o.kind not in WARM_UP:
        yield from idle("optimizer", o, {"onebit": (False, "a kind of one bit")})
        return
    if o.onebit is None:
        yield f"`optimizer.kind: {o.kind}` begins with a warm-up: give its updates, `optimizer.onebit.freeze`, about {max(steps // 5, 1)}"
    elif o.onebit.freeze >= steps:
        yield f"`optimizer.onebit.freeze: {o.onebit.freeze}` leaves nothing of `train.steps: {steps}`: use about {max(steps // 5, 1)}, or another kind"
    else:
        yield from _local_steps(o, p, steps)
    refused = {
        f"parallel.zero: {p.zero}": (p.zero >= 2, "a rank's own gradient must stay whole"),
        f"parallel.shard: {p.shard}": (p.shard < p.data, "shards in groups would be summed a second time"),
        "optimizer.clip_value": (o.clip_value is not None, "no rank has the sum whose elements it cuts"),
        "optimizer.groups with a kind": (any(group.kind for group in o.groups), "a bucket is compressed as a whole"),
    }  # fmt: skip
    for name, (used, reason) in refused.items():
        if used:
            yield f"`{name}` with `optimizer.kind: {o.kind}`: {reason}: remove that, or use another kind"


def _local_steps(o: OptimizerConfig, p: ParallelConfig, steps: int) -> Iterator[str]:
    one, zeroone = o.onebit, o.kind == "zeroone-adam"
    local, left = zeroone and one.local_steps > 1, steps - one.freeze
    yield from idle("optimizer.onebit", one, {
        "variance_interval": (zeroone, "zeroone-adam"), "local_steps": (zeroone, "zeroone-adam"), "local_interval": (local, "local steps of zeroone-adam"),
    })  # fmt: skip
    for name, degree, most in (("zero", p.zero, 0), ("context", p.context, 1)):
        if local and degree > most:
            yield f"`parallel.{name}: {degree}` with `optimizer.onebit.local_steps: {one.local_steps}`: a data rank has whole weights of its own between two synchronisations: use local_steps 1, or {name} {most}"
    if local and one.local_steps & (one.local_steps - 1):
        yield f"`optimizer.onebit.local_steps: {one.local_steps}` is no power of two, and gaps double: use {2 ** (one.local_steps.bit_length() - 1)}"
    if local and (one.local_interval is None or one.local_interval >= left):
        yield f"`optimizer.onebit.local_interval: {one.local_interval}` must be less than the {left} updates after `freeze`, or no step is local: give about {max(left // 8, 1)}, or local_steps 1"


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
    fp8 = train.precision.startswith("fp8-")
    for name, needed in idle_in(train.precision).items():
        if getattr(train, name) != type(train).model_fields[name].default:
            yield f"`train.{name}` has no effect with `train.precision: {train.precision}`: use {needed}, or leave it out"
    given = [name for name in delayed if getattr(train.fp8, name) != type(train.fp8).model_fields[name].default]
    if fp8 and train.precision != "fp8-delayed" and given:
        yield f"`train.fp8.{given[0]}` has no effect with `train.precision: {train.precision}`: use fp8-delayed, or leave it out"
    if train.fp8.interval > train.fp8.history:
        yield f"`train.fp8.interval: {train.fp8.interval}` is longer than `history: {train.fp8.history}`: make it shorter"
    names, high = linear_layers(resolved.model), high_precision(resolved)
    unmatched = [pattern for pattern in train.fp8.high_precision or () if not any(fits(name, [pattern]) for name in names)]
    if fp8 and unmatched:
        yield f"`train.fp8.high_precision: {unmatched[0]}` matches no linear layer: use names as {names[0]}, with * for any characters"
    elif fp8 and all(fits(name, high) for name in names):
        yield f"`train.precision: {train.precision}` leaves no linear layer in fp8 (`model.layers: {model.layers}`): give train.fp8.high_precision fewer, or []"
    if train.loss_scale.initial < train.loss_scale.minimum:
        yield f"`train.loss_scale.initial: {train.loss_scale.initial:g}` is below `minimum: {train.loss_scale.minimum:g}`: swap them or lower it"


RULES = (_schedule, _optimizer, _storage, _onebit, _ramp, _training, _precision)
