"""Activation offload: the same bits, little left on the device, copies waited for, refused on a CPU."""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mtmegatron import device
from mtmegatron.config import check
from mtmegatron.config.constraints import faults
from mtmegatron.device import Device
from mtmegatron.errors import UserError
from mtmegatron.parallel.offload import LEAST, Lane, Offload
from mtmegatron.plan.account import account
from mtmegatron.train.loop import prepare
from mtmegatron.verify.protocol import batches
from tests.field.training import engine_of, name, spread
from tests.tiny import tiny

ON = {"offload": True}
PARTS = ["attention", "norm", "activation", "up"]
MODES = [
    {}, {"recompute": "full"}, {"recompute": "full", "every": 2}, {"recompute": "selective", "parts": PARTS},
    {"recompute": "selective", "parts": ["norm", "activation"]},
]  # fmt: skip
LAYOUTS = [{}, {"tensor": 2}, {"context": 2, "context_kind": "ring"}, {"data": 2, "zero": 3}, {"pipeline": 2, "schedule": "zb-v"}]


def large(**sections: dict):
    """Blocks keep storages of 128 KiB in fp32; on two tensor or context ranks of 64 KiB, the least that travels."""
    return tiny(sections, data={"sequence": 128}, train={"micro_batch": 4, "global_batch": 16})


class Accelerator(Device):
    """A CPU under another name: host memory begins as NaN."""

    def host_buffer(self, nbytes: int) -> Tensor:
        return super().host_buffer(nbytes).fill_(0xFF)


@dataclass
class Slow(Lane):
    """Copies that nobody waits for are never done, nor those whose source is gone by then: what was to be read of them stays NaN."""

    device: Device
    copies: list[tuple[weakref.ref, Tensor] | None] = field(default_factory=list)
    sources: list[tuple[StorageWeakRef, int]] = field(default_factory=list)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies.append((weakref.ref(source), target))
        self.sources.append((StorageWeakRef(source.untyped_storage()), source.nbytes))

    def mark(self) -> int:
        return len(self.copies)

    def wait(self, mark: int) -> None:
        for i, copy in enumerate(self.copies[:mark]):
            if copy is not None and (source := copy[0]()) is not None:
                copy[1].copy_(source)
            self.copies[i] = None

    @property
    def alive(self) -> int:
        """Bytes of what was copied from here and is still here."""
        return sum(nbytes for storage, nbytes in self.sources if not storage.expired())


def slow_offload(least: int = LEAST) -> Offload:
    return Offload(Accelerator("cpu"), least, Slow)


def gradients(config, layout: dict, rank: int = 0, world: int = 1, offload: Offload | None = None) -> tuple:
    """(loss, z term, norm) and this rank's gradients of a global batch."""
    engine = engine_of(config, layout, rank, world, "fp32")
    if offload is not None:
        engine.build.offload = offload
        offload.leave(engine.names)
    mine = batches(engine, 0)
    numbers = engine.gradients(mine, engine.count_tokens(mine))
    return numbers, [bucket.own_gradients.clone() for bucket in engine.buckets.buckets]


def same(a: tuple, b: tuple) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


# ---- the same bits


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_gradients_have_the_same_bits_though_copies_are_slow(mode):
    offload = slow_offload()
    assert same(gradients(large(), mode), gradients(large(), mode, offload=offload))
    assert offload.out.sources and offload.back.sources


def different(rank: int, world: int, layout: dict) -> list[dict]:
    right = gradients(large(), layout, rank, world)
    return [mode for mode in MODES if not same(right, gradients(large(), layout | mode | ON, rank, world))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_gradients_have_the_same_bits_in_layouts(layout, pool):
    assert not any(spread(pool, different, layout, layout))


# ---- what is left on the device


def left_by_a_forward(layers: int, mode: dict) -> tuple[int, int]:
    """(bytes sent to the host, bytes of them still on the device)."""
    offload = slow_offload()
    engine = engine_of(large(model={"layers": layers}), mode, precision="fp32")
    engine.build.offload = offload
    offload.leave(engine.names)
    hidden = engine.model(None, batches(engine, 0)[0], step=0)
    assert hidden.requires_grad
    return sum(nbytes for _, nbytes in offload.out.sources), offload.out.alive


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_the_device_keeps_one_block_of_any_number(mode):
    two, four = left_by_a_forward(2, mode), left_by_a_forward(4, mode)
    assert four[0] > 1.5 * two[0]
    assert 0 < four[1] == two[1] < two[0]


def test_under_full_recomputation_only_the_inputs_of_blocks_travel():
    sent, _ = left_by_a_forward(4, {"recompute": "full"})
    assert sent == 4 * (4 * 128) * 64 * 4  # layers x tokens x width x bytes


def test_backward_leaves_nothing_on_the_device():
    offload = slow_offload()
    gradients(large(), {}, offload=offload)
    assert offload.out.alive == 0 and not any(offload.back.copies)


def test_parameters_stay_and_so_does_what_is_small():
    offload = slow_offload(least=1)
    engine = engine_of(large(), {}, precision="fp32")
    engine.build.offload = offload
    offload.leave(engine.names)
    engine.model(None, batches(engine, 0)[0], step=0)
    sizes = {nbytes for _, nbytes in offload.out.sources}
    assert min(sizes) < LEAST and not sizes & {b.values.untyped_storage().nbytes() for b in engine.buckets.buckets}
    offload = slow_offload()
    gradients(large(), {}, offload=offload)
    assert min(nbytes for _, nbytes in offload.out.sources) >= LEAST


def test_the_planner_counts_what_is_left():
    kept = {on: account(check(large(recompute={"offload": on}), 1), 0) for on in (False, True)}
    assert kept[True].activations < kept[False].activations
    assert kept[True].state == kept[False].state


# ---- streams


def test_copies_run_in_a_stream_of_their_own_and_are_ordered_by_events():
    """Against the interface that torch's streams have; on an accelerator it is theirs."""
    host = create_autospec(Device, instance=True)
    side, work = (create_autospec(torch.cuda.Stream, instance=True) for _ in range(2))
    host.stream.return_value, host.current_stream.return_value, host.stream_context.return_value = side, work, nullcontext()
    lane, target = Lane(host), torch.zeros(3)
    lane.copy(target, torch.ones(3))
    side.wait_stream.assert_called_once_with(work)
    host.stream_context.assert_called_once_with(side)
    assert target.sum() == 3
    mark = lane.mark()
    assert mark is side.record_event.return_value
    work.wait_event.assert_not_called()
    lane.wait(mark)
    work.wait_event.assert_called_once_with(mark)


# ---- storages, not tensors


class Keep(torch.autograd.Function):
    """Keeps tensors and notes what backward gets of them."""

    @staticmethod
    def forward(ctx, x, tensors, got):
        ctx.save_for_backward(*tensors)
        ctx.got = got
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.got += ctx.saved_tensors
        return dy, None, None


def test_views_travel_as_one_and_come_back_with_their_strides():
    offload, got = slow_offload(least=1), []
    whole = torch.randn(6, 8, dtype=torch.float64)
    views = [whole, whole.t(), whole[1:3, 2:5], whole.view(-1).split(24)[1]]
    right = [(v.clone(), v.stride(), v.storage_offset()) for v in views]
    y = offload.call(lambda x, views=views: Keep.apply(x, views, got), True, torch.zeros(3, requires_grad=True))
    y = offload.call(lambda x: Keep.apply(x, [], []), False, y)
    del views, whole
    assert len(offload.out.sources) == 1 and offload.out.alive == 0
    y.sum().backward()
    for mine, (value, stride, offset) in zip(got, right, strict=True):
        assert torch.equal(mine, value) and (mine.stride(), mine.storage_offset()) == (stride, offset)
    assert len({v.untyped_storage().data_ptr() for v in got}) == 1


def test_what_neighbours_share_travels_once():
    offload, got, table = slow_offload(least=1), [], torch.randn(5)
    y = torch.zeros(3, requires_grad=True)
    for number in range(4):
        y = offload.call(lambda x: Keep.apply(x, [table], got), number == 0, y)
    assert len(offload.out.sources) == 1
    y.sum().backward()
    assert len(got) == 4 and all(torch.equal(t, table) for t in got)


def test_a_write_to_what_was_kept_is_noticed():
    offload, table = slow_offload(least=1), torch.randn(5)
    y = offload.call(lambda x: Keep.apply(x, [table], []), True, torch.zeros(3, requires_grad=True))
    table.add_(1)
    with pytest.raises(AssertionError, match="written to"):
        offload.call(lambda x: Keep.apply(x, [], []), False, y)


def test_memory_is_sent_for_while_the_block_after_it_runs():
    offload, issued = slow_offload(least=1), []

    class Look(list):
        def __iadd__(self, got):
            issued.append(len(offload.back.copies))
            return self

    y = torch.zeros(3, requires_grad=True)
    for number in range(4):
        y = offload.call(lambda x: Keep.apply(x, [torch.randn(5)], Look()), number == 0, y)
    y.sum().backward()
    assert issued == [1, 2, 3, 3]  # the last is still there, and each sends for one


def test_without_gradients_nothing_is_kept():
    offload = slow_offload(least=1)
    with torch.no_grad():
        offload.call(lambda x: x.sin(), True, torch.zeros(3, requires_grad=True))
    assert not offload.out.sources


# ---- refused where there is nothing to gain


@pytest.mark.parametrize("named", ["auto", "cpu"])
def test_a_cpu_is_refused_before_any_process_group(named, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "_device_count", lambda kind: 0)
    config = tiny(device=named, recompute=ON, train={"folder": str(tmp_path)})
    with pytest.raises(UserError, match="`recompute.offload` has no effect.*: remove it"):
        prepare(config, 1)


def test_an_accelerator_is_not():
    assert not list(faults(tiny(device="musa", recompute=ON), 1))
