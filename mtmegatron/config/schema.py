"""Everything that a run can be told, as pydantic models with a docstring under each field (`mtm config --schema` prints them for editors).

Notable: unknown keys are refused, every value has one place, and nothing here knows of processes or devices. What one field alone can say
wrong is refused by its type; what two fields say against each other is in `constraints.py`.
"""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from mtmegatron.config.model import Fraction, ModelConfig, Retained, Section


class ParallelConfig(Section):
    """How the run executes; it never changes what the run computes."""

    tensor: PositiveInt = 1
    """Ranks that share each matrix."""
    sequence: bool | None = None
    """Sequence parallel: tensor ranks share the tokens between the matrices; default: when tensor > 1."""
    context: PositiveInt = 1
    """Ranks that share the tokens of each sequence, in attention too."""
    context_kind: Literal["allgather", "ring", "ulysses", "ring-ulysses"] | None = None
    """How attention sees the whole sequence; default: allgather. `docs/layouts.md` compares them."""
    ulysses: PositiveInt | None = None
    """ring-ulysses: ranks of the context degree that exchange heads; the others form the ring."""
    pipeline: PositiveInt = 1
    """Stages that share the layers."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"] = "1f1b"
    """Order of forwards and backwards in the pipeline; `mtm schedule` compares them."""
    chunks: PositiveInt | None = None
    """Model chunks on each pipeline rank; default: 2 for interleaved, zb-v and dualpipe-v, else 1."""
    pipeline_layers: list[NonNegativeInt] | None = None
    """Layers of each chunk, from the first of the model to the last; default: balanced by cost, embedding and head counted."""
    expert: PositiveInt = 1
    """Ranks of a stage (tensor x context x data) that share the experts of a block."""
    expert_tensor: PositiveInt = 1
    """Ranks of a stage that share the matrices of one expert."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts."""
    dispatch_parts: PositiveInt = 1
    """alltoall: parts in which tokens travel, so that one part travels while the experts work on another."""
    data: PositiveInt | None = None
    """Replicas that share the batch; default: what the number of processes leaves."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 0 keeps everything whole on each data rank; 1 shards the optimizer state, 2 also gradients, 3 also weights."""
    shard: PositiveInt | None = None
    """Data ranks that share one sharded copy of the state (hybrid sharding); default: all."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """What gradients travel in; they are always accumulated and summed in fp32."""
    bucket_mb: PositiveFloat = 25.0
    """Gradients are reduced in buckets of about this size (MiB)."""
    overlap: bool = True
    """Reduce gradients while backward still runs, gather weights ahead of their use."""
    shared_memory: bool = True
    """Ranks of one host exchange through shared memory where the device is a CPU."""


class RecomputeConfig(Section):
    """What forward does not keep and backward computes again, to save memory; results have the same bits."""

    mode: Literal["none", "selective", "full"] = "none"
    """selective: the named parts of each block; full: whole blocks."""
    parts: list[Literal["attention", "norm", "activation", "up"]] = ["attention", "norm", "activation"]
    """selective: attention core, inputs of the projections after a norm, product of the activation, up-projections."""
    every: PositiveInt = 1
    """full: every so many blocks of a chunk."""
    first: PositiveInt | None = None
    """full: only the first so many blocks of a chunk."""
    offload: bool = False
    """Keep what backward needs in host memory until then, where the device has a memory of its own."""


class GroupConfig(Section):
    """Parameters that are treated in their own way; of several groups the first whose pattern fits a name counts."""

    match: str
    """Pattern of parameter names, with `*`, `?` and `[..]` as in a shell: `*norm.weight`, `layers.0.*`."""
    lr: NonNegativeFloat = 1.0
    """Factor on the learning rate."""
    decay: NonNegativeFloat | None = None
    """Factor on the weight decay; default: 1 for what decays (matrices), 0 for the rest."""
    frozen: bool = False
    """Never updated, without optimizer state, not in the gradient norm."""
    kind: Literal["adamw", "adam", "sgd", "lion", "lamb", "muon"] | None = None
    """Optimizer of these parameters; default: optimizer.kind."""


class OneBitConfig(Section):
    """When the optimizers of one bit compress what they send; all but the first for zeroone-adam."""

    freeze: PositiveInt
    """Updates of the warm-up, after which the variance stays as it is; a fifth of the run is usual."""
    variance_interval: PositiveInt = 16
    """Updates of the variance after which the gap between two of them doubles, up to `freeze`."""
    local_steps: PositiveInt = 16
    """The largest gap between two synchronisations after `freeze`; 1: one at each update."""
    local_interval: PositiveInt | None = None
    """Updates after which that gap doubles, from 1 on."""


class OptimizerConfig(Section):
    """The optimizer, with warm-up, a decay to `min_lr`, clipping; `docs/optimizers.md` has the equations."""

    kind: Literal["adamw", "adam", "sgd", "lion", "lamb", "muon", "onebit-adam", "onebit-lamb", "zeroone-adam"] = "adamw"
    """muon takes the matrices between embedding and head, and adamw the rest."""
    onebit: OneBitConfig | None = None
    """For the kinds of one bit, whose ranks exchange signs."""
    groups: list[GroupConfig] = []
    """Parameters that are treated in their own way."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the last step."""
    warmup: NonNegativeInt = 0
    """Length of the linear warm-up, in `unit`; the first update already uses peak / warmup."""
    warmup_from: NonNegativeFloat = 0.0
    """Learning rate that the warm-up begins above."""
    decay: Literal["cosine", "linear", "constant", "inverse-sqrt", "polynomial", "wsd"] = "cosine"
    """Shape after the warm-up; wsd: constant (stable), then a decay."""
    decay_length: PositiveInt | None = None
    """Where `min_lr` is reached, in `unit`; default: the end of the run."""
    power: PositiveFloat = 2.0
    """polynomial: exponent of what is left of the way."""
    wsd_length: PositiveInt | None = None
    """wsd: length of the decay, the last part of `decay_length`, in `unit`."""
    wsd_shape: Literal["linear", "cosine", "exponential", "minus-sqrt"] = "linear"
    """wsd: shape of the decay."""
    unit: Literal["steps", "samples", "tokens"] = "steps"
    """What warm-up and decay are counted in."""
    beta1: Retained = 0.9
    """Decay of the first moment."""
    beta2: Retained = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    momentum: Retained | None = None
    """Of sgd and muon; default: 0.9 and 0.95."""
    nesterov: bool | None = None
    """Whether sgd and muon look one step ahead; default: false and true."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of what decays: matrices, not norms, biases or embeddings. Decoupled, except with adam and sgd (L2)."""
    weight_decay_end: NonNegativeFloat | None = None
    """Weight decay at `decay_length`; default: it stays as it is."""
    weight_decay_shape: Literal["linear", "cosine"] = "linear"
    """How it gets there."""
    decay_embeddings: bool = False
    """Whether embedding tables decay too."""
    clip: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0: never."""
    clip_value: PositiveFloat | None = None
    """Size to which each element of a gradient is cut, in place of `clip`; default: none."""
    skip_norm: PositiveFloat | None = None
    """Global gradient norm above which a step is skipped; default: none."""
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    """What moments are kept in between updates, which compute in fp32; fewer bits are rounded to at random, in the same way in every layout.
    fp8: the first in e4m3 with a scale for each parameter, the second in bf16."""
    masters: bool = True
    """Whether bf16 weights have fp32 masters; without them an update is rounded at random into the weights themselves."""
    compiled: bool = False
    """Clip, update and rounding in one pass over memory that torch.compile makes, some seconds at the start; on a CPU it needs a C++ compiler."""
    ema: Retained | None = None
    """Decay of an exponential moving average of the weights, kept in fp32 and in checkpoints; default: none."""


class Source(Section):
    """One corpus of a blend."""

    path: str
    """Prefix of a .bin/.idx pair."""
    weight: PositiveFloat = 1.0
    """Share of the samples, relative to the other sources."""


class DataConfig(Section):
    """Where tokens come from."""

    train: str | list[Source] | None = None
    """Prefix of a .bin/.idx pair, or a blend of several."""
    valid: str | list[Source] | None = None
    """Held-out data; default: a part of `train` by `split`."""
    split: tuple[Fraction, Fraction, Fraction] = (0.98, 0.02, 0.0)
    """Parts of the documents for training, validation and test, where `valid` is not given."""
    tokenizer: str | None = None
    """`bytes`, a tokenizer.json, a folder, or a SentencePiece model."""
    sequence: PositiveInt = 1024
    """Tokens of a sample (S)."""
    mask_documents: bool = False
    """Attention stays inside a document and positions restart in each."""
    mask_boundary_loss: bool = False
    """The first token of a document is not predicted from the document before it."""
    wrap: bool = True
    """A corpus shorter than the run starts a new epoch; false: refuse to start."""
    cache: str | None = None
    """Folder of the sample index; default: `cache` beside the data."""


class CheckpointConfig(Section):
    """When the run is saved."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: PositiveInt = 2
    """How many of the newest stay."""
    at_end: bool = True
    """Save after the last step."""
    asynchronous: bool = False
    """Write in the background while training goes on, from a copy in host memory."""


class LogConfig(Section):
    """What is written about the run."""

    every: PositiveInt = 1
    """Steps between two lines of metrics."""
    tensorboard: bool = True
    """Write event files."""
    wandb: str | None = None
    """Weights & Biases project to log to."""


class RampConfig(Section):
    """The global batch grows in equal stages from `start` to train.global_batch."""

    start: PositiveInt
    """Sequences of the first steps."""
    increment: PositiveInt
    """Sequences that each stage adds."""
    samples: PositiveInt
    """Sequences over which it grows; each stage has an equal share."""


class Fp8Config(Section):
    """Products of 8-bit floats."""

    format: Literal["e4m3", "hybrid"] = "e4m3"
    """e4m3 for all operands; hybrid: e5m2, which has more range and less precision, for gradients of activations."""
    high_precision: list[str] | None = None
    """Patterns of names of linear layers that stay in bf16, as `layers.0.*`, `*.mlp.down`, or for the matrices of experts `*.mlp.experts.*`; default:
    those of the first and the last block. Head, router, embedding, norms, and weight gradients of experts always do."""
    history: PositiveInt = 1024
    """delayed: steps whose largest numbers are remembered."""
    margin: NonNegativeInt = 0
    """delayed: scales leave room for numbers 2^margin times as large."""
    interval: PositiveInt = 1
    """delayed: steps between two changes of the scales."""


class LossScaleConfig(Section):
    """The dynamic loss scale; `docs/precision.md` says exactly when it changes."""

    initial: PositiveFloat = 65536.0
    """First scale."""
    growth: Annotated[float, Field(gt=1.0)] = 2.0
    """Factor after `interval` steps in a row without overflow."""
    interval: PositiveInt = 1000
    """So many steps."""
    backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor at an overflow."""
    hysteresis: PositiveInt = 2
    """The scale is lowered at this overflow since it last grew and at each after it; those before only skip their step."""
    minimum: PositiveFloat = 1.0
    """An overflow at this scale stops the run."""


class TrainConfig(Section):
    """The run itself."""

    folder: str = "runs/default"
    """Where metrics, checkpoints and pictures go."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    global_batch: PositiveInt = 8
    """Sequences of one optimizer step, over all ranks."""
    ramp: RampConfig | None = None
    """Smaller batches at the beginning; default: none."""
    micro_batch: PositiveInt = 1
    """Sequences of one forward pass on one rank."""
    seed: int = 1234
    """First weights and the order of the data."""
    precision: Literal["fp32", "bf16", "fp16", "fp64", "fp8-tensorwise", "fp8-delayed", "fp8-rowwise", "fp8-blockwise", "fp8-mxfp8"] = "fp32"
    """bf16 and fp16 keep fp32 master weights and gradients; fp8 is bf16 with products of 8-bit floats, by one of the recipes; fp64 is for proofs.
    `docs/precision.md`."""
    residual: Literal["compute", "fp32"] = "compute"
    """16 bits and fp8: what the sums between blocks are kept in, and travel in between stages; compute: as activations."""
    fp8: Fp8Config = Fp8Config()
    """fp8: its format and where it is not used."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """fp16: the factor on the loss."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Continue from the newest good checkpoint in the folder: if there is one, never, or refuse to start without."""
    accept_changes: list[str] = []
    """Keys whose values may differ from those of the checkpoint that is resumed."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the end, when there is validation data."""
    eval_batches: PositiveInt = 8
    """Global batches of one evaluation."""
    label_smoothing: Fraction = 0.0
    """As in torch.nn.functional.cross_entropy."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-partition function per token."""
    max_skipped: NonNegativeInt = 3
    """Steps skipped in a row (loss or gradient not finite, norm above optimizer.skip_norm) after which the run stops."""
    timeline: PositiveInt | None = None
    """Step whose pipeline actions are timed and drawn, to timeline.json and timeline.png in `folder`; default: none."""
    numerics: Literal["fast", "canonical"] = "fast"
    """canonical: the same bits in every layout, at a price; `docs/numerics.md`."""
    blocks: PositiveInt = 4
    """canonical: parts into which each split dimension is cut in every layout; tensor and context divide it, and it is part of the bits."""
    timeout: PositiveFloat = 600.0
    """Seconds after which a collective that does not complete is an error."""


class Config(Section):
    """A run: `mtm train FILE section.key=value ...`."""

    device: Literal["auto", "cpu", "cuda", "musa"] = "auto"
    """Where the run executes."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
