"""The protocol finds the faults that users of other frameworks suffered from, planted here one by one."""

import pytest
import torch

from mtmegatron.layers.norm import Norm
from mtmegatron.parallel import data
from mtmegatron.train.engine import Engine
from mtmegatron.verify import protocol
from mtmegatron.verify.pool import RankFailed
from mtmegatron.verify.protocol import (
    FACTOR,
    Reference,
    Trace,
    checks_of,
    compare,
    serial_reference,
)
from tests.tiny import tiny


@pytest.fixture(scope="module")
def reference():
    return serial_reference(tiny(model={"tied": True}), ("fp32",))


def no_reduction(rank, world, config, layout, precision, path):
    """Gradients of norm weights are not summed over the tensor axis."""
    original = data.Bucket.start_reduction
    data.Bucket.start_reduction = lambda self, dtype: original(self, dtype) if "tensor" not in self.axis.name else None
    try:
        return protocol._rank(rank, world, config, layout, precision, path)
    finally:
        data.Bucket.start_reduction = original


def twice_counted(rank, world, config, layout, precision, path):
    """Every rank counts its copies in the norm."""
    original = data.Buckets.squared_norm
    data.Buckets.squared_norm = lambda self: torch.stack([b.gradients.square().sum() for b in self.buckets]).sum()
    try:
        return protocol._rank(rank, world, config, layout, precision, path)
    finally:
        data.Buckets.squared_norm = original


def small_drift(rank, world, config, layout, precision, path):
    """One rank's norm weights are off by one part in a million."""
    original = Norm.forward
    Norm.forward = lambda self, x: original(self, x) * (1 + 1e-6 * (rank == 1))
    try:
        return protocol._rank(rank, world, config, layout, precision, path)
    finally:
        Norm.forward = original


def late_drift(rank, world, config, layout, precision, path):
    """One rank's gradient of one weight is off by one part in a million, in the last step alone."""
    original = Engine.update

    def update(self, result, step):
        if step == protocol.STEPS - 2:
            self.model.layers["1"].attention_norm.weight.register_hook(lambda g: g * (1 + 1e-6 * (rank == 1)))
        return original(self, result, step)

    Engine.update = update
    try:
        return protocol._rank(rank, world, config, layout, precision, path)
    finally:
        Engine.update = original


def no_gather(rank, world, config, layout, precision, path):
    """Updated shards are not gathered."""
    original = data.Buckets.publish
    data.Buckets.publish = lambda self: None
    try:
        return protocol._rank(rank, world, config, layout, precision, path)
    finally:
        data.Buckets.publish = original


FAULTS = [
    (no_reduction, {"tensor": 2}, "gradient"), (twice_counted, {"data": 2, "zero": 1}, "gradient norm"),
    (twice_counted, {"tensor": 2, "sequence": False}, "gradient norm"), (small_drift, {"tensor": 2}, "loss"),
    (late_drift, {"tensor": 2}, "gradient of step 2"), (no_gather, {"data": 2, "zero": 1}, "weight"),
]  # fmt: skip


@pytest.mark.parametrize("fault, layout, what", FAULTS, ids=lambda v: getattr(v, "__name__", None))
def test_a_planted_fault_is_found(fault, layout, what, reference, pool, monkeypatch):
    monkeypatch.setattr(protocol, "_rank", fault)
    checks = compare(tiny(model={"tied": True}), layout, "fp64", reference, pool)
    assert any(c.what.startswith(what) and not c.passed for c in checks), checks


def test_serial_is_its_own_reference(reference, pool):
    assert all(c.error == 0 for c in compare(tiny(model={"tied": True}), {}, "fp64", reference, pool))


def test_the_norm_may_be_off_by_what_its_gradients_are():
    """As measured: Adam makes the rounding of the third gradient 15 times that of the first, and by luck serial runs have hardly any of it in the norm.
    Another projection of as large an error is no fault, a norm beyond it is."""
    kinds = [f"gradient of step {step}" for step in range(protocol.STEPS)]
    tensors = {kind: {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)} for kind in kinds}
    rounding = {(kind, "w"): size for kind, size in zip(kinds, (2e-7, 1e-6, 3e-6))}
    reference = Reference(Trace([1.0] * 3, [5.0] * 3), tensors | {"weight": {}}, {"fp32": rounding}, {"fp32": 1e-7})
    off = 5e-6 * 2.0**-29  # of the gradient of the last step, which is within its own bound

    def norm_of(beyond: float) -> protocol.Check:
        errors = {(kind, "w", ()): off**2 * (kind == kinds[-1]) for kind in kinds}
        trace = Trace([1.0] * 3, [5.0, 5.0, 5.0 + off + beyond], 0, errors)
        return next(c for c in checks_of("any", "fp64", [trace], reference) if c.what == "gradient norm")

    unit = torch.finfo(torch.float64).eps * 5
    assert norm_of(0.0).passed and not norm_of(2 * FACTOR * unit).passed
    assert norm_of(0.0).bound == pytest.approx(off + FACTOR * unit)


def test_a_failing_rank_is_named(pool):
    with pytest.raises(RankFailed, match="rank 1 of 2:(.|\n)*this one"):
        pool.run(fails_on_one, 2)
    assert pool.run(adds, 2) == [2.0, 2.0]  # and the pool goes on


def fails_on_one(rank, world):
    if rank == 1:
        raise ValueError("this one")
    torch.distributed.barrier()


def adds(rank, world):
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    return float(x)
