"""The update that torch.compile makes: the same numbers as the operations it is made of."""

import shutil

import pytest
import torch

from mtmegatron.errors import UserError
from mtmegatron.verify.protocol import compare, serial_reference
from tests.field.training import engine_of, joined, parts_of
from tests.optim.test_optim import gradient
from tests.tiny import tiny

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


def trained(optimizer: dict, precision: str, compiled: bool, layout: dict) -> list[dict[str, torch.Tensor]]:
    """Weights, masters, moments and averages of a first rank after three updates, one of them without clipping."""
    engine = engine_of(tiny(optimizer={**optimizer, "compiled": compiled}), layout, precision=precision)
    engine.optimizer.publish = engine.buckets.publish = lambda: None  # there are no other ranks
    for step, clip in enumerate((0.5, 1.0, 0.25)):
        for state in engine.optimizer.states:
            state.gradients.copy_(gradient("all", tuple(state.gradients.shape), step))
        engine.optimizer.step(1e-2, clip)
    return [dict(state.tensors, values=state.values) for state in engine.optimizer.states]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("optimizer", [
    {"kind": "adamw", "ema": 0.9}, {"kind": "adam"}, {"kind": "sgd", "nesterov": True}, {"kind": "lion"},
    {"kind": "adamw", "groups": [{"match": "*norm*", "kind": "sgd"}, {"match": "head*", "frozen": True}]},
])  # fmt: skip
def test_one_pass_gives_the_numbers_of_single_operations(optimizer, precision, zero):
    """Adam by torch's fused kernel orders its operations in another way: a few units in the last place for each update."""
    layout = {"data": 2, "zero": zero} if zero else {}
    mine, plain = (trained(optimizer, precision, compiled, layout) for compiled in (True, False))
    for ours, theirs in zip(mine, plain, strict=True):
        for name, value in theirs.items():
            eps = torch.finfo(value.dtype).eps
            close = 16 * eps * value.abs().clamp(min=1e-2)
            assert (ours[name] - value).abs().le(close).all(), name


def test_a_run_learns_the_same():
    runs = []
    for compiled in (True, False):
        engine = engine_of(tiny(optimizer={"compiled": compiled, "kind": "lion"}), {})
        for step in range(2):
            for name, param in engine.model.named_parameters():
                param.grad_sum.copy_(gradient(name, param.placement.shape, step))
            engine.optimizer.step(1e-2, 1.0)
        runs.append(joined([parts_of(engine)]))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[1])


@pytest.mark.parametrize("layout", [{"tensor": 2, "data": 2, "zero": 2}, {"pipeline": 2, "context": 2, "schedule": "zb-h1", "recompute": "full"}], ids=str)
def test_layouts_keep_parity(layout, pool):
    config = tiny(optimizer={"compiled": True, "ema": 0.9})
    reference = serial_reference(config, ("fp32", "bf16"))
    failed = [c for precision in ("fp64", "bf16") for c in compare(config, layout, precision, reference, pool, timeout=240.0) if not c.passed]
    assert not failed, failed


def test_without_a_compiler_the_run_does_not_begin(monkeypatch):
    def compiles(function, **_):
        def broken(*arguments):
            raise RuntimeError("no compiler")

        return broken

    monkeypatch.setattr(torch, "compile", compiles)
    with pytest.raises(UserError, match="no compiler.*install a C"):
        engine_of(tiny(optimizer={"compiled": True}), {})
