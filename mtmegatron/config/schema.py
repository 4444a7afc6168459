"""Everything that a run can be told, as pydantic models with a docstring under each field (`mtm config --schema` prints them for editors).

Notable: unknown keys are refused, every value has one place, and nothing here knows of processes or devices. What one field alone can say
wrong is refused by its type; what two fields say against each other is in `constraints.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dropped = Annotated[float, Field(ge=0.0, lt=1.0)]
Retained = Annotated[float, Field(ge=0.0, lt=1.0)]  # of 1, a moment would keep its first value, zero, for ever


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    """A decoder-only transformer."""

    layers: PositiveInt
    """Transformer blocks."""
    width: PositiveInt
    """Size of the residual stream (D)."""
    heads: PositiveInt
    """Query heads (N)."""
    kv_heads: PositiveInt | None = None
    """Key/value heads (K); default: as many as query heads. Fewer: grouped-query attention."""
    head_size: PositiveInt | None = None
    """Channels of a head (H); default: width / heads."""
    ffn: PositiveInt | None = None
    """Width of the feed-forward layer (F); default: 4 x width."""
    vocab: PositiveInt | None = None
    """Vocabulary size (V); default: the tokenizer's."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of normalisation."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance (or the mean square) before the root."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How a token knows its place."""
    max_positions: PositiveInt | None = None
    """Longest sequence; the number of rows of a learned position table."""
    rope_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Part of a head's channels that is rotated."""
    rope_scaling: dict[str, Any] | None = None
    """Scaling of the rotary frequencies, in Hugging Face's words (`rope_type: llama3`, ...)."""
    activation: Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "squared_relu"] = "swiglu"
    """Of the feed-forward layer; the -glu kinds have a gate."""
    bias_qkv: bool = False
    """Bias on the query, key and value projections."""
    bias_attention_out: bool = False
    """Bias on the output projection of attention."""
    bias_mlp: bool = False
    """Bias on the projections of the feed-forward layer."""
    tied: bool = False
    """The output projection is the embedding table."""
    dropout_embedding: Dropped = 0.0
    """Part of the embeddings that training sets to zero."""
    dropout_attention: Dropped = 0.0
    """Part of the attention weights that training sets to zero."""
    dropout_residual: Dropped = 0.0
    """Part of what attention and feed-forward add to the residual stream that training sets to zero."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the first weights."""
    init_scaled: bool = True
    """Divide it by sqrt(2 x layers) for the projections that write to the residual stream."""


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


class OptimizerConfig(Section):
    """AdamW with linear warm-up and a decay to `min_lr`."""

    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the last step."""
    warmup: NonNegativeInt = 0
    """Length of the linear warm-up, in `unit`; the first update already uses peak / warmup."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    decay_length: PositiveInt | None = None
    """Where `min_lr` is reached, in `unit`; default: the end of the run."""
    unit: Literal["steps", "samples"] = "steps"
    """What warm-up and decay are counted in."""
    beta1: Retained = 0.9
    """Decay of the first moment."""
    beta2: Retained = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of what decays: matrices, not norms, biases or embeddings."""
    decay_embeddings: bool = False
    """Whether embedding tables decay too."""
    clip: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0: never."""


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


class TrainConfig(Section):
    """The run itself."""

    folder: str = "runs/default"
    """Where metrics, checkpoints and pictures go."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    global_batch: PositiveInt = 8
    """Sequences of one optimizer step, over all ranks."""
    micro_batch: PositiveInt = 1
    """Sequences of one forward pass on one rank."""
    seed: int = 1234
    """First weights and the order of the data."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16 keeps fp32 master weights and gradients; fp64 is for proofs."""
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
    """Steps in a row with a loss or gradient that is not finite, after which the run stops."""
    timeline: PositiveInt | None = None
    """Step whose pipeline actions are timed and drawn, to timeline.json and timeline.png in `folder`; default: none."""
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
