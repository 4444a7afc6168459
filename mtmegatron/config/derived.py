"""Facts that follow from a configuration: its layout, the names of its layers, which optimizers it has."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from mtmegatron.config.model import ModelConfig
from mtmegatron.config.schema import Config, OptimizerConfig, TrainConfig
from mtmegatron.layout import Layout

WARM_UP = {"onebit-adam": "adamw", "onebit-lamb": "lamb", "zeroone-adam": "adamw"}  # kinds of one bit, and what they are before they compress
TWO_MOMENTS = {"adamw", "adam", "lamb", "muon", *WARM_UP}  # kinds of optimizer with a second moment; muon's are those of its tables and vectors


def optimizers(o: OptimizerConfig) -> set[str]:
    """Kinds of optimizer that a run has."""
    return {o.kind, *(group.kind for group in o.groups if group.kind)}


def layout_of(config: Config) -> Layout:
    """The layout of a resolved configuration."""
    p = config.parallel
    sequence, parts = p.sequence and p.tensor > 1, min(config.model.kv_heads, p.tensor)
    expert = p.expert if config.model.moe else 0
    return Layout(p.tensor, p.context, p.data, p.pipeline, sequence, parts, p.ulysses, p.shard, expert, p.expert_tensor)


def depends_on_micro_batch(config: Config) -> bool:
    """Whether `train.micro_batch` is part of what is computed: some choices and balance terms, and the scales of fp8, are those of a micro-batch."""
    moe = config.model.moe
    return config.train.precision.startswith("fp8-") or moe is not None and bool(moe.capacity or moe.aux_loss or moe.sinkhorn)


def idle_in(precision: str) -> dict[str, str]:
    """Settings of `train` that have no effect in a precision, each with those that it needs."""
    fp8, fp16 = precision.startswith("fp8-"), precision == "fp16"
    needs = {"fp8": (fp8, "an fp8 precision"), "loss_scale": (fp16, "fp16"), "residual": (fp8 or fp16 or precision == "bf16", "bf16, fp16 or fp8")}
    return {name: other for name, (used, other) in needs.items() if not used}


def idle_defaults(precision: str) -> dict[str, object]:
    """The same settings as they are where nobody gives them: what a run in another precision than its configuration's has."""
    return {name: TrainConfig.model_fields[name].default for name in idle_in(precision)}


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def linear_layers(model: ModelConfig) -> list[str]:
    """Names of what can multiply in fp8 in such a model: linear layers and matrices of experts, which some blocks have and others perhaps not."""
    attention = ["query", "key", "value", "out"]
    if model.latent:
        attention = [*(["query_down", "query_up"] if model.latent.query_rank else ["query"]), "kv_down", "kv_up", "out"]
    feed_forward = ["gate", "up", "down"] if gated(model) else ["up", "down"]
    if model.moe:
        parts = ["experts", "shared"] if model.moe.shared or model.moe.shared_ffn else ["experts"]
        feed_forward += [f"{part}.{name}" for part in parts for name in feed_forward]
    depths = [f"prediction.{k}" for k in range(1, model.prediction.depth + 1)] if model.prediction else []
    blocks = [f"layers.{i}" for i in range(model.layers)] + [f"{depth}.block" for depth in depths]
    inner = [f"attention.{name}" for name in attention] + [f"mlp.{name}" for name in feed_forward]
    return [f"{block}.{name}" for block in blocks for name in inner] + [f"{depth}.project" for depth in depths]


def high_precision(config: Config) -> list[str]:
    """Patterns of the linear layers that stay in bf16 under fp8."""
    given = config.train.fp8.high_precision
    return ["*.shared_gate", *(["layers.0.*", f"layers.{config.model.layers - 1}.*"] if given is None else given)]


def rotated(model: ModelConfig) -> int:
    """Channels of a head that rotary positions turn."""
    return model.latent.rope if model.latent else int(model.head_size * model.rope_fraction)


def gated(model: ModelConfig) -> bool:
    """Whether the feed-forward layer has a gate."""
    return "glu" in model.activation
