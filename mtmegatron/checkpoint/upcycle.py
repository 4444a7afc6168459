"""Upcycling: the checkpoint of a dense model becomes that of a model with experts, whose output is the same (2212.05055).

Notable:
- Every expert is a copy of the feed-forward layer, so a token's output is that layer's, whatever the router chooses, as long as its weights add up
  to 1. A router whose weights add up to `scale` gets down-projections divided by it. Shared experts begin with a down-projection of zero.
- The router and what else is new has the first value that training would give it, from (seed, name).
- One process, one expert of one matrix in memory at a time; the result is a checkpoint of step 0 without optimizer state, for any layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.rectangle import Rectangle, dtype_name
from mtmegatron.checkpoint.store import Item, Store, write_manifest, write_shard
from mtmegatron.config.load import validate
from mtmegatron.config.model import MoEConfig
from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError
from mtmegatron.placement import Placement, initial_value

# what may differ between the two models: experts, and what concerns first values and training alone
FREE = {"moe", "max_positions", "init_std", "init_scaled", "dropout_embedding", "dropout_attention", "dropout_residual"}
EXPERTS, SHARED_DOWN = ".mlp.experts.", ".mlp.shared.down.weight"


def upcycle(dense: Store, config: Config, parameters: dict[str, Placement], folder: Folder) -> Path:
    """Writes step 0 of a run of `config` (resolved) from a dense checkpoint; `parameters`: those of the model with experts, by name.

    Raises UserError where the output would be another."""
    faults = list(_faults(dense, config))
    if folder.steps():
        faults.append(f"{folder.root} holds checkpoints already: choose another train.folder")
    if faults:
        raise UserError(f"{dense.folder} cannot become this model with experts\n" + "\n".join(f"  {fault}" for fault in faults))
    kept = {key: dense.extra.get(key) for key in ("tokenizer", "tokenizer_hash")}
    facts = {"config": config.model_dump(mode="json"), "loss_scale": None, "layout": "serial", "step": 0, "updates": 0}
    target = folder.begin(0)
    part = write_shard(target, 0, _Source(dense, config, parameters).items())
    write_manifest(target, [part], kept | facts)
    return folder.publish(0)


def _faults(dense: Store, config: Config) -> Iterator[str]:
    """Why the two models cannot have the same output, each with its repair."""
    moe = config.model.moe
    if moe is None:
        yield "`model.moe` is not given: describe the experts"
        return
    if "config" not in dense.extra:
        yield "the checkpoint does not say which model it holds: use one of `mtm train`"
        return
    saved = validate(dense.extra["config"], f"{dense.folder}").model
    if saved.moe is not None:
        yield "the checkpoint has experts already: use that of a dense model"
    for name in sorted(type(saved).model_fields.keys() - FREE):
        there, here = getattr(saved, name), getattr(config.model, name)
        if there != here:
            yield f"`model.{name}: {here}` is {there} in the checkpoint: make it equal"
    if (moe.ffn or config.model.ffn) != saved.ffn:
        yield f"`model.moe.ffn: {moe.ffn}` is another width than the feed-forward layer's {saved.ffn}: leave it out"
    if not _sum_is_fixed(moe):
        yield "the weights of a token's experts do not add up to a fixed number: set model.moe.renormalise: true"
    if moe.capacity is not None and moe.capacity * moe.top_k < moe.experts:
        yield f"`model.moe.capacity: {moe.capacity}` drops tokens: leave it out, or use at least {moe.experts / moe.top_k:g}"


def _sum_is_fixed(moe: MoEConfig) -> bool:
    """Whether a token's weights add up to `scale` for any logits."""
    return moe.renormalise or (moe.score_after and moe.score == "softmax")


@dataclass
class _Source:
    """The dense checkpoint, seen as one of the model with experts."""

    dense: Store
    config: Config
    parameters: dict[str, Placement]

    def items(self) -> Iterator[Item]:
        """Rectangles of all weights, whole but for experts, which come one by one."""
        for name, placement in self.parameters.items():
            if EXPERTS in name:
                yield from self._experts(name, placement)
            else:
                value = self._value(name, placement)
                yield Rectangle.whole(f"weight/{name}", value), value

    def _experts(self, name: str, placement: Placement) -> Iterator[Item]:
        one = self.dense.read(f"weight/{name.replace(EXPERTS, '.mlp.')}.weight")[None]
        if name.endswith(".down"):
            one = one / self.config.model.moe.scale
        for e in range(placement.shape[0]):
            yield Rectangle(f"weight/{name}", placement.shape, dtype_name(one.dtype), (e, 0, 0), tuple(one.shape)), one

    def _value(self, name: str, placement: Placement) -> torch.Tensor:
        stored = f"weight/{name}"
        if stored in self.dense.names:
            return self.dense.read(stored, (0,) * len(placement.shape), placement.shape)
        dtype = self.dense.dtype(self.dense.names[0])
        if name.endswith(SHARED_DOWN):
            return torch.zeros(placement.shape, dtype=dtype)
        return initial_value(name, placement, self.config.train.seed).to(dtype)
