"""Activation offload: what backward needs of a block waits in host memory.

Notable:
- Copies run beside the device's work, in a stream for each direction. What a block kept leaves while the next block computes; in backward it comes
  back while the block after it computes. So the device holds that of two blocks at a time, whatever the number of blocks and micro-batches.
- The unit that travels is a storage, whole: tensors that share memory travel once and have their old strides when they are back, so backward runs the
  same operations on the same bits. What two neighbouring blocks keep, as rotary tables, is one copy for both.
- Parameters, gradient sums and small tensors stay. Under recomputation a block keeps its inputs alone, and only these travel.
- What the last block kept is still on the device when its backward follows at once, and is used there.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mtmegatron.device import Device

LEAST = 1 << 16  # bytes: for less, starting the copies costs more than the memory is worth


class Lane:
    """Copies in one direction, in the order they are asked for, beside the work of a device; on a device without streams they are done at once."""

    def __init__(self, device: Device):
        self.device, self.stream = device, device.stream()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begins when the work that the device was given so far is done."""
        if self.stream is not None:
            self.stream.wait_stream(self.device.current_stream())
        with self.device.stream_context(self.stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        """The copies so far, for `wait`."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, mark: Any) -> None:
        """Further work of the device begins after the copies up to a mark. The host does not wait."""
        if mark is not None:
            self.device.current_stream().wait_event(mark)


class _Memory:
    """One storage that travels. `bytes`: all of it on the device, None while it is in host memory alone; `seen`, `version`: to notice a write."""

    def __init__(self, x: Tensor, group: "_Group"):
        self.group, self.seen, self.version = group, x.detach(), x._version
        self.bytes: Tensor | None = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        self.device, self.host = x.device, None

    def leave(self) -> None:
        assert self.seen._version == self.version, "an activation was written to after backward was promised it"
        self.bytes = self.seen = None


class _Group:
    """What one block kept. `before`: that of the block before it in the same forward; `left`, `arrived`: marks of its copies."""

    def __init__(self, before: "_Group | None"):
        self.before, self.left, self.arrived = before, None, None
        self.memories: dict[int, _Memory] = {}  # by address of the storage, which it keeps while it is held; empty once backward has it all

    @property
    def nbytes(self) -> int:
        return sum(memory.host.nbytes for memory in self.memories.values())


class Offload:
    """Runs blocks so that what their backward needs waits in host memory.

    `least`: bytes of the smallest storage that travels; `lane` makes what copies; `transit`: the most bytes of what travels that forward had on the
    device at one time."""

    def __init__(self, device: Device, least: int = LEAST, lane: Callable[[Device], Lane] = Lane):
        self.device, self.least, self.transit = device, least, 0
        self.out, self.back = lane(device), lane(device)
        self._stays: set[int] = set()
        self._last: _Group | None = None

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """Parameters, and what they are views of, never travel."""
        for p in parameters:
            self._stays |= {t.untyped_storage()._cdata for t in (p, getattr(p, "grad_sum", None)) if t is not None}

    def call(self, block: Callable[..., Tensor], first: bool, *inputs: Any) -> Tensor:
        """block(*inputs), whose backward finds what it needs in host memory; `first`: of this forward's blocks."""
        if not torch.is_grad_enabled():
            return block(*inputs)
        last, group = self._last, _Group(None if first else self._last)
        with saved_tensors_hooks(partial(self._pack, group), self._unpack):
            result = block(*inputs)
        group.left, self._last = self.out.mark(), group
        self.transit = max(self.transit, group.nbytes + (last.nbytes if last else 0))
        if last is not None and last.memories:
            self.out.wait(last.left)  # its memory is given to others, who must not write before it is copied
            for memory in last.memories.values():
                memory.leave()
        return result

    def _pack(self, group: _Group, x: Tensor) -> Any:
        storage = x.untyped_storage()
        key = storage._cdata
        if storage.nbytes() < self.least or key in self._stays:
            return x
        memory = group.memories.get(key) or group.before and group.before.memories.pop(key, None) or self._send(x, group)
        memory.group, group.memories[key] = group, memory
        return memory, x.dtype, x.shape, x.stride(), x.storage_offset()

    def _send(self, x: Tensor, group: _Group) -> _Memory:
        memory = _Memory(x, group)
        n = memory.bytes.numel()
        memory.host = memory.bytes.new_empty(n) if x.is_meta else self.device.host_buffer(n)
        self.out.copy(memory.host, memory.bytes)
        return memory

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        memory, dtype, shape, stride, offset = kept
        self._ready(memory.group)
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.bytes.untyped_storage(), offset, shape, stride)

    def _ready(self, group: _Group) -> None:
        """Backward of a block begins: what it kept has to be there, and that of the block before is sent for."""
        if not group.memories:
            return
        self._fetch(group)
        self.back.wait(group.arrived)
        group.memories = {}  # from here on, memory lives as long as autograd holds it
        before, group.before = group.before, None
        if before is not None:
            self._fetch(before)

    def _fetch(self, group: _Group) -> None:
        for memory in group.memories.values():
            if memory.bytes is None:
                memory.bytes = torch.empty_like(memory.host, device=memory.device)
                self.back.copy(memory.bytes, memory.host)
        group.arrived = self.back.mark()
