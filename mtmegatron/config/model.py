"""What a model is, as the user says it; the rest of a run is in `schema.py`."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Dropped = Annotated[float, Field(ge=0.0, lt=1.0)]
Retained = Annotated[float, Field(ge=0.0, lt=1.0)]  # of 1, a moment would keep its first value, zero, for ever


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class MoEConfig(Section):
    """Mixture of experts in place of the feed-forward layer of some blocks."""

    experts: PositiveInt
    """Routed experts (E)."""
    top_k: PositiveInt = 2
    """Experts of each token."""
    ffn: PositiveInt | None = None
    """Width of one expert; default: model.ffn."""
    shared: NonNegativeInt = 0
    """Experts that every token takes; they are one layer of so many times the width of an expert."""
    shared_ffn: PositiveInt | None = None
    """Width of that layer; default: shared x ffn."""
    shared_gate: bool = False
    """What the shared experts give is multiplied by the sigmoid of one more output of the router."""
    every: PositiveInt = 1
    """Every so many blocks has experts, counted after the first dense ones."""
    first_dense: NonNegativeInt = 0
    """So many blocks at the beginning have none."""
    pattern: list[bool] | None = None
    """For each block whether it has experts, instead of `every` and `first_dense`."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become scores."""
    score_after: bool = False
    """Scores of the chosen experts alone (softmax over the top k) rather than of all."""
    groups: PositiveInt = 1
    """Equal groups of neighbouring experts; a property of the model, not of the machines."""
    groups_kept: PositiveInt | None = None
    """Groups a token may choose from, the best by `group_score`; default: all."""
    group_score: Literal["sum", "max"] = "sum"
    """Score of a group: sum of its best top_k / groups_kept experts, or its best one."""
    renormalise: bool = False
    """Divide the weights of the chosen experts by their sum."""
    scale: PositiveFloat = 1.0
    """Factor on the weights after that."""
    bias_rate: NonNegativeFloat = 0.0
    """Step of the selection bias that balances the load without a loss (gamma); 0: no bias."""
    jitter: Fraction = 0.0
    """In training the router sees its input times uniform noise from [1 - jitter, 1 + jitter]."""
    logits: Literal["fp32", "fp64"] = "fp32"
    """Precision of the router."""
    sinkhorn: bool = False
    """Training chooses experts by the Sinkhorn-balanced logits."""
    aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the balance loss over a micro-batch's tokens of each data rank (Switch, GShard)."""
    sequence_loss: NonNegativeFloat = 0.0
    """Coefficient of the balance loss within each sequence."""
    complementary: bool = False
    """The sequence loss takes scores divided by their sum over all experts (DeepSeek-V3)."""
    global_loss: NonNegativeFloat = 0.0
    """Coefficient of the balance loss over all tokens of the global batch."""
    device_loss: NonNegativeFloat = 0.0
    """Coefficient of the balance loss between groups of experts."""
    communication_loss: NonNegativeFloat = 0.0
    """Coefficient of the balance loss of tokens sent to each group."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits."""
    capacity: PositiveFloat | None = None
    """Tokens an expert takes at most, as a factor on tokens x top_k / experts; default: all of them (dropless)."""
    capacity_of: Literal["expert", "group"] = "expert"
    """Who has the capacity: each expert, or each group of experts together."""
    drop: Literal["weight", "position"] = "weight"
    """Who stays when there are too many: the tokens of the highest weight, or the earliest."""
    pad: bool = False
    """Experts get exactly their capacity, filled up with tokens of weight 0."""


class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values are made from one short vector a token."""

    query_rank: PositiveInt | None = None
    """Size of the compressed query; default: queries are not compressed."""
    kv_rank: PositiveInt = 512
    """Size of the compressed key and value."""
    nope: PositiveInt = 128
    """Channels of a head without position."""
    rope: PositiveInt = 64
    """Channels of a head that are rotated; their key is shared by all heads."""
    value: PositiveInt = 128
    """Channels of a head's value."""
    interleaved: bool = True
    """Rotated pairs are neighbouring channels, as in DeepSeek's published weights; false: first and second half."""


class PredictionConfig(Section):
    """Multi-token prediction (DeepSeek-V3, section 2.2): a chain of further blocks, each of which predicts one token more."""

    depth: PositiveInt = 1
    """Further tokens that are predicted."""
    coefficient: NonNegativeFloat = 0.3
    """Weight (lambda) of the mean of their losses."""


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
    qk_norm: bool = False
    """RMSNorm over each head's query and key, before the rotation."""
    bias_attention_out: bool = False
    """Bias on the output projection of attention."""
    bias_mlp: bool = False
    """Bias on the projections of the feed-forward layer."""
    tied: bool = False
    """The output projection is the embedding table."""
    moe: MoEConfig | None = None
    """Mixture of experts; default: none."""
    latent: LatentConfig | None = None
    """Multi-head latent attention; default: keys and values of their own for each head."""
    prediction: PredictionConfig | None = None
    """Multi-token prediction; default: none."""
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
