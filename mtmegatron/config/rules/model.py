"""Rules of the model: attention, positions, prediction, routers, experts."""

from collections.abc import Iterator

from mtmegatron.config.derived import rotated
from mtmegatron.config.rules import divisors, idle, one_of
from mtmegatron.config.schema import Config


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
    yield from idle("model.moe", moe, active)


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


RULES = (_model, _latent, _prediction, _router, _experts)
