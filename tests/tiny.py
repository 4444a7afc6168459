"""The small model of most tests, and ways to vary it."""

import copy

from mtmegatron.config.load import validate
from mtmegatron.config.schema import Config

# 4 layers, grouped-query attention, a vocabulary that no usual degree divides, buckets so small that there are several
TINY = {
    "model": {"layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 176, "vocab": 259},
    "data": {"sequence": 32, "mask_boundary_loss": True},
    "train": {"global_batch": 8, "micro_batch": 2, "steps": 20},
    "optimizer": {"lr": 1e-2},
    "parallel": {"bucket_mb": 0.1},
}
GPT2 = {
    "model": {
        "norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "max_positions": 40, "bias_qkv": True,
        "bias_attention_out": True, "bias_mlp": True, "tied": True,
    }
}  # fmt: skip


def tiny(*changes: dict, **sections: dict) -> Config:
    """TINY with changes: dictionaries of sections, later ones win."""
    tree = copy.deepcopy(TINY)
    for change in (*changes, sections):
        for section, values in change.items():
            tree[section] = tree.get(section, {}) | values if isinstance(values, dict) else values
    return validate(tree, "tiny")
