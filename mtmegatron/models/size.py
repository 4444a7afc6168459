"""Parameters and FLOPs of a model from its configuration alone, and the split of its layers into parts of equal cost.

Notable: FLOPs are those of the matrix products and of causal attention (half of the square), 2 per multiply-add, backward twice the forward;
recomputation and padding never count. Of the routed experts, FLOPs and active parameters count those that a token takes. Parameters are what
published weights hold: also the bias of the choice of experts, which no gradient trains. A block of multi-token prediction is like the model's last.
"""

from collections.abc import Sequence
from itertools import accumulate, permutations

from mtmegatron.config.derived import gated
from mtmegatron.config.model import ModelConfig


def expert_blocks(m: ModelConfig) -> list[bool]:
    """For each block whether it has experts."""
    moe = m.moe
    if moe is None:
        return [False] * m.layers
    return moe.pattern or [i >= moe.first_dense and (i - moe.first_dense) % moe.every == 0 for i in range(m.layers)]


def parameters(m: ModelConfig) -> int:
    """Parameters of the whole model, a tied table counted once."""
    tables = m.vocab * m.width * (1 if m.tied else 2) + (m.max_positions * m.width if m.positions == "learned" else 0)
    blocks = sum(block_parameters(m, experts) for experts in expert_blocks(m))
    return blocks + tables + norm_parameters(m) + prediction_parameters(m)


def active_parameters(m: ModelConfig) -> int:
    """Parameters that the prediction of a token takes part in: all but its idle experts and the blocks of multi-token prediction.

    The embedding table counts, as in the 12.9 and 3.3 billion of Mixtral and Qwen3-30B-A3B; the 2.4, 21 and 37 billion of DeepSeek leave it out."""
    idle = 0 if m.moe is None else (m.moe.experts - m.moe.top_k) * feed_forward_weights(m, expert_ffn(m))
    return parameters(m) - prediction_parameters(m) - sum(expert_blocks(m)) * idle


def block_parameters(m: ModelConfig, experts: bool) -> int:
    """Parameters of one block, with or without experts."""
    heads = m.heads * m.head_size, 2 * m.kv_heads * m.head_size
    biases = m.bias_qkv * sum(heads) + m.bias_attention_out * m.width
    if experts:
        biases += m.moe.experts if m.moe.bias_rate else 0
    else:
        biases += m.bias_mlp * ((2 * m.ffn if gated(m) else m.ffn) + m.width)
    norms = 2 * norm_parameters(m) + 2 * m.qk_norm * m.head_size
    if m.latent:
        norms += (m.latent.query_rank or 0) + m.latent.kv_rank
    routed = m.moe.experts if experts else 0
    return attention_weights(m) + mlp_weights(m, routed) + biases + norms


def prediction_parameters(m: ModelConfig) -> int:
    """Parameters that multi-token prediction adds: in each depth a projection 2D -> D, three norms and a block."""
    if m.prediction is None:
        return 0
    return m.prediction.depth * (2 * m.width**2 + 3 * norm_parameters(m) + block_parameters(m, expert_blocks(m)[-1]))


def norm_parameters(m: ModelConfig) -> int:
    return m.width * (2 if m.norm == "layernorm" else 1)


def attention_weights(m: ModelConfig) -> int:
    """Elements of the matrices of attention."""
    if m.latent is None:
        return 2 * m.width * (m.heads + m.kv_heads) * m.head_size
    a, turned = m.latent, m.heads * (m.latent.nope + m.latent.rope)
    query = a.query_rank * (m.width + turned) if a.query_rank else m.width * turned
    key_value = m.width * (a.kv_rank + a.rope) + a.kv_rank * m.heads * (a.nope + a.value)
    return query + key_value + m.heads * a.value * m.width


def mlp_weights(m: ModelConfig, routed: int) -> int:
    """Elements of the matrices of the feed-forward layer: router, so many routed experts and the shared ones; 0: a dense layer."""
    if not routed:
        return feed_forward_weights(m, m.ffn)
    router = m.width * (m.moe.experts + m.moe.shared_gate)
    return router + routed * feed_forward_weights(m, expert_ffn(m)) + feed_forward_weights(m, shared_ffn(m))


def feed_forward_weights(m: ModelConfig, ffn: int) -> int:
    return (3 if gated(m) else 2) * m.width * ffn


def expert_ffn(m: ModelConfig) -> int:
    """Width of one routed expert."""
    return m.moe.ffn or m.ffn


def shared_ffn(m: ModelConfig) -> int:
    """Width of the layer of the shared experts, 0 without."""
    return m.moe.shared_ffn or m.moe.shared * expert_ffn(m)


def block_flops(m: ModelConfig, sequence: int, experts: bool) -> float:
    """Forward FLOPs of one block per token, at a sequence length."""
    products = attention_weights(m) + mlp_weights(m, m.moe.top_k if experts else 0)
    channels = m.latent.nope + m.latent.rope + m.latent.value if m.latent else 2 * m.head_size
    return 2.0 * products + 2.0 * m.heads * channels * (sequence + 1) / 2


def head_flops(m: ModelConfig) -> float:
    """Forward FLOPs of the output projection per token."""
    return 2.0 * m.width * m.vocab


def prediction_flops(m: ModelConfig, sequence: int) -> float:
    """Forward FLOPs of multi-token prediction per token: in each depth the projection 2D -> D, a block and the head."""
    if m.prediction is None:
        return 0.0
    return m.prediction.depth * (4.0 * m.width**2 + block_flops(m, sequence, expert_blocks(m)[-1]) + head_flops(m))


def training_flops(m: ModelConfig, sequence: int) -> float:
    """FLOPs of forward and backward per token."""
    blocks = sum(block_flops(m, sequence, experts) for experts in expert_blocks(m))
    return 3.0 * (blocks + head_flops(m) + prediction_flops(m, sequence))


def split_layers(m: ModelConfig, ranks: Sequence[int], sequence: int, given: list[int] | None = None) -> list[range]:
    """The blocks of each stage: as given, or such that the dearest is as cheap as possible; in a V, the dearest rank. `ranks`: that of each stage.

    The last stage has the cost of the head and of multi-token prediction; the embedding costs a tenth of a block (it moves memory and multiplies
    nothing). Ties go to later stages, whose activations live shorter."""
    if given is None:
        blocks = [block_flops(m, sequence, experts) for experts in expert_blocks(m)]
        before = [0, *accumulate(round(cost) for cost in blocks)]  # whole numbers, so that equal is equal
        ends = [round(0.1 * blocks[0])] + [0] * (len(ranks) - 1)
        ends[-1] += round(head_flops(m) + prediction_flops(m, sequence))
        given = _balanced(before, ends)
        if ranks[0] == ranks[-1] != ranks[len(ranks) // 2]:  # a V, where a rank turns to its other stage instead of waiting for another rank
            given = _evened(before, ends, ranks, given)
    starts = [0, *accumulate(given)]
    return [range(a, b) for a, b in zip(starts, starts[1:])]


def _evened(before: list[int], ends: list[int], ranks: Sequence[int], counts: list[int]) -> list[int]:
    """Single blocks move from stage to stage while that makes the costs of ranks, or else those of stages, more alike."""

    def cost(counts: list[int]) -> tuple:
        starts = [0, *accumulate(counts)]
        stages = [before[b] - before[a] + end for a, b, end in zip(starts, starts[1:], ends)]
        sums = dict.fromkeys(ranks, 0)
        for rank, stage in zip(ranks, stages):
            sums[rank] += stage
        return *((max(costs), sum(c * c for c in costs)) for costs in (sums.values(), stages)), counts

    while True:
        moves = ((a, b) for a, b in permutations(range(len(counts)), 2) if counts[a])
        best = min(([n - (i == a) + (i == b) for i, n in enumerate(counts)] for a, b in moves), key=cost)
        if cost(best) >= cost(counts):
            return counts
        counts = best


def _balanced(before: list[int], ends: list[int]) -> list[int]:
    """Blocks of each stage such that the dearest is as cheap as possible, and among those splits the sum of squared costs least.

    `before`: the cost of all blocks before each; `ends`: what a stage costs beside its blocks. From the last stage to the first, for each number of
    blocks that are left: the best split of those."""
    best = [(0 if start == len(before) - 1 else float("inf"), 0, ()) for start in range(len(before))]
    for end in reversed(ends):
        best = [_first_stage(before, start, end, best) for start in range(len(before))]
    return list(best[0][2])


Split = tuple[float, int, tuple[int, ...]]  # cost of the dearest stage, sum of squared costs, blocks of each stage


def _first_stage(before: list[int], start: int, end: int, rest: list[Split]) -> Split:
    """The best split of the blocks from `start` on, where `rest` has those of the stages behind this one."""
    found = (float("inf"), 0, ())
    for stop in range(start, len(before)):
        cost = before[stop] - before[start] + end
        if cost > found[0]:
            break
        dearest, squares, counts = rest[stop]
        found = min(found, (max(cost, dearest), squares + cost**2, (stop - start, *counts)), key=lambda split: split[:2])
    return found
