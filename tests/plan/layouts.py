"""Random configurations of a small model in layouts of every kind, from a seed."""

import random

from mtmegatron.config import Config, check
from mtmegatron.config.constraints import faults
from mtmegatron.plan.collectives import with_micro_batches
from mtmegatron.verify.protocol import world_of
from tests.tiny import GPT2, tiny

SIZES = {"width": 8, "head_size": 2, "ffn": 19, "vocab": 37}
DEGREES = (1, 1, 2, 2, 3, 4, 8)


def _layout(draw: random.Random) -> dict:
    layout = {axis: draw.choice(DEGREES) for axis in ("tensor", "context", "data", "pipeline")}
    layout |= {"zero": draw.randrange(4), "sequence": layout["tensor"] > 1 and draw.random() < 0.7}
    if layout["context"] > 1:
        layout["context_kind"] = draw.choice(["allgather", "ring", "ulysses", "ring-ulysses"])
        layout |= {"ulysses": 2} if layout["context_kind"] == "ring-ulysses" else {}
    if layout["zero"] and draw.random() < 0.3:
        layout["shard"] = draw.choice([1, 2, 4])
    layout["schedule"] = draw.choice(["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
    return layout


def _config(draw: random.Random) -> tuple[Config, int]:
    layout, heads = _layout(draw), draw.choice([8, 24])
    model = draw.choice([{}, GPT2["model"], {"bias_qkv": True}])
    model = model | SIZES | {
        "layers": draw.randint(1, 6), "heads": heads, "kv_heads": draw.choice([1, 2, 4, 8]), "tied": draw.random() < 0.5,
        "max_positions": 48,
    }  # fmt: skip
    train = {"global_batch": layout["data"], "micro_batch": 1}
    recompute = {"mode": draw.choice(["none", "none", "full", "selective"])}
    return tiny(model=model, parallel=layout, train=train, recompute=recompute, data={"sequence": 48}), world_of(layout)


def random_configs(count: int, seed: int, largest: int) -> list[Config]:
    """So many resolved configurations of at most `largest` ranks, of 2 micro-batches each, that no rule refuses."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        config, world = _config(draw)
        if 1 < world <= largest and next(faults(config, world), None) is None:
            found.append(with_micro_batches(check(config, world), 2))
    return found
