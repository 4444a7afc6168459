"""Parameters and FLOPs of a model from its configuration alone, and the split of its layers into stages of equal cost.

Notable: FLOPs are those of the matrix products and of causal attention (half of the square), 2 per multiply-add, backward twice the forward;
recomputation and padding never count.
"""

from mtmegatron.config.constraints import gated
from mtmegatron.config.schema import ModelConfig


def layer_parameters(m: ModelConfig) -> int:
    """Parameters of one block."""
    q, kv, ups = m.heads * m.head_size, m.kv_heads * m.head_size, 2 if gated(m) else 1
    weights = m.width * (q + 2 * kv) + q * m.width + (ups + 1) * m.width * m.ffn
    biases = m.bias_qkv * (q + 2 * kv) + m.bias_attention_out * m.width + m.bias_mlp * (ups * m.ffn + m.width)
    return weights + biases + 2 * norm_parameters(m)


def norm_parameters(m: ModelConfig) -> int:
    return m.width * (2 if m.norm == "layernorm" else 1)


def parameters(m: ModelConfig) -> int:
    """Parameters of the whole model, a tied table counted once."""
    tables = m.vocab * m.width * (1 if m.tied else 2) + (m.max_positions * m.width if m.positions == "learned" else 0)
    return m.layers * layer_parameters(m) + tables + norm_parameters(m)


def layer_flops(m: ModelConfig, sequence: int) -> float:
    """Forward FLOPs of one block per token, at a sequence length."""
    q, kv, ups = m.heads * m.head_size, m.kv_heads * m.head_size, 2 if gated(m) else 1
    products = m.width * (q + 2 * kv) + q * m.width + (ups + 1) * m.width * m.ffn
    return 2.0 * products + 4.0 * q * (sequence + 1) / 2


def head_flops(m: ModelConfig) -> float:
    """Forward FLOPs of the output projection per token."""
    return 2.0 * m.width * m.vocab


def training_flops(m: ModelConfig, sequence: int) -> float:
    """FLOPs of forward and backward per token."""
    return 3.0 * (m.layers * layer_flops(m, sequence) + head_flops(m))


def split_layers(m: ModelConfig, stages: int, sequence: int, given: list[int] | None = None) -> list[range]:
    """The blocks of each stage: as given, or such that the dearest stage is as cheap as possible.

    The head costs its FLOPs, the embedding a tenth of a block (it moves memory and multiplies nothing). Ties go to later stages, whose activations
    live shorter."""
    counts = given or _balanced(m, stages, sequence)
    starts = [sum(counts[:i]) for i in range(stages + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:])]


def _balanced(m: ModelConfig, stages: int, sequence: int) -> list[int]:
    block, head = layer_flops(m, sequence), head_flops(m)
    extra = [0.0] * stages
    extra[0] += 0.1 * block
    extra[-1] += head
    counts = [0] * stages
    for _ in range(m.layers):
        cheapest = min(range(stages), key=lambda s: (extra[s] + (counts[s] + 1) * block, -s))
        counts[cheapest] += 1
    return counts
