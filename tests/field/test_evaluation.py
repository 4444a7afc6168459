"""Cases of evaluation after a resume (G06, G08) and of the memory of the loss (R03), from ../shared/reference/field_bugs.md.

An evaluation always begins at the first sample of the validation set, so it has no position to save.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtmegatron.ops.cross_entropy import linear_cross_entropy
from tests.field.training import lines_of, run
from tests.tiny import tiny

RUN = {"train": {"steps": 4, "eval_every": 1, "eval_batches": 2}, "checkpoint": {"every": 1}, "log": {"tensorboard": False}}


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "data": 2, "zero": 1}], ids=str)
def test_g06_g08_evaluation_goes_on_after_a_resume(layout, pool, tmp_path):
    """The run is cut off in update 3, before its evaluation: the resumed one evaluates at its first step, overlap on, and sees the same set."""
    config = tiny(RUN)
    run(pool, config, layout, tmp_path / "whole")
    run(pool, config, layout, tmp_path / "cut", stop=2)
    run(pool, config, layout, tmp_path / "cut")
    whole, resumed = lines_of(tmp_path / "whole"), lines_of(tmp_path / "cut")
    assert [line["valid_loss"] for line in whole] == [line["valid_loss"] for line in resumed] and len(whole) == 4
    assert whole == resumed


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.most = max(self.most, *(t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor)), 0)
        return made


def test_r03_the_loss_never_holds_all_logits():
    """S x V logits are 51 million numbers; the loss makes none larger than the table itself, whose gradient it has to give."""
    vocab, sequence, width = 100_008, 512, 8
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(sequence, width, generator=draw).requires_grad_()
    table = torch.randn(vocab, width, generator=draw)
    labels = torch.randint(vocab, (sequence,), generator=draw)
    with Largest() as seen:
        loss, _, _ = linear_cross_entropy(hidden, table, labels, 1.0 / sequence)
        loss.backward()
    assert seen.most <= max(2**20 + vocab, table.numel()) < sequence * vocab / 8
    logits = hidden.detach().requires_grad_() @ table.t()
    whole = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.allclose(loss, whole, rtol=64 * torch.finfo(torch.float32).eps)
