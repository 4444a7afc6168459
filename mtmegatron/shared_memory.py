"""Collectives through shared memory, for ranks of one host on a CPU.

Notable:
- Each rank maps one arena per peer: a nameless file in memory (memfd), opened through /proc/<pid>/fd. It needs no /dev/shm, has no size limit
  of a container's mount, and leaves nothing behind however the processes end.
- A group's collectives are one stream of numbered pieces. A rank writes its piece into a slot of its own arena, then raises one counter
  (`POSTED`); peers read the slot by themselves, then raise theirs (`TAKEN`); a slot is free once all peers took it. No locks, no threads.
- To begin a collective posts as much as there is room for; to wait posts the rest and completes all that was begun before, in order. So ranks
  that begin and wait for a group's collectives in the same order cannot stop each other, however little memory there is.
- Sums are in rank order, in fp32 for 16-bit types, rounded once: the bits of the sums in `mesh.py`.
- Only where stores become visible in order (x86): the data is written before the counter.
- A rank that waits polls, then yields its core, then sleeps; a peer that is gone is noticed through its pidfd.
"""

import mmap
import os
import secrets
import select
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

LINE = 64  # bytes: a cache line; what one rank writes and another polls has one of its own
SLOT = 256 * 1024  # bytes: what fits the caches of a core beside its source
SLOTS = 128  # at most, per rank and group: 32 MiB
FIRST_SLOTS = 2  # that exist from the start: enough to make progress
AHEAD = 15  # pieces that are posted beyond the one that is waited for: 4 MiB, which the last cache holds
POSTED, TAKEN, CLOSED, TABLE = 0, LINE // 8, 2 * LINE // 8, 3 * LINE // 8  # 8-byte words of a section's header
HEADER = 4096  # bytes; the table has two words per piece: its slot, and what it is
SECTION = HEADER + SLOTS * SLOT
TOKEN = 16  # bytes: proves that an opened file is the peer's arena
SPINS, YIELDS, NAP, CHECK = 200, 400, 1e-4, 0.1  # polls, yields, seconds of a sleep, seconds between looks for dead peers
FOLDS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Arena:
    """A rank's memory: one section for each of its groups. Sections are sparse: `grow` is what makes memory exist."""

    def __init__(self, fd: int, sections: int):
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self.memory = mmap.mmap(fd, mmap.PAGESIZE + sections * SECTION)
        self.words = memoryview(self.memory).cast("q")
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    @classmethod
    def create(cls, sections: int) -> "Arena":
        """Raises OSError where the system cannot do it."""
        fd = os.memfd_create("mtmegatron")
        os.ftruncate(fd, mmap.PAGESIZE + sections * SECTION)
        arena = cls(fd, sections)
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        arena.memory[:TOKEN] = secrets.token_bytes(TOKEN)
        for section in range(sections):
            os.posix_fallocate(fd, _start(section), HEADER + FIRST_SLOTS * SLOT)
        return arena

    @classmethod
    def open(cls, pid: int, fd: int, token: bytes, sections: int) -> "Arena":
        """The arena of another process of this host. Raises OSError or ValueError where that is not possible."""
        arena = cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), sections)
        if arena.memory[:TOKEN] != token:
            raise OSError(f"descriptor {fd} of process {pid} is another file")
        return arena

    def grow(self, section: int, slot: int) -> bool:
        """Makes a slot exist; whether there was memory for it."""
        try:
            os.posix_fallocate(self.fd, _start(section) + HEADER + slot * SLOT, SLOT)
        except OSError:
            return False
        return True


def _start(section: int) -> int:
    return mmap.PAGESIZE + section * SECTION


class Section:
    """The part of an arena that belongs to one group."""

    def __init__(self, arena: Arena, index: int):
        self.arena, self.index, self.slots = arena, index, FIRST_SLOTS
        start = _start(index)
        self.words = arena.words[start // 8 : (start + HEADER) // 8]
        self.bytes = arena.bytes[start + HEADER : start + SECTION]

    def slot(self, number: int) -> Tensor:
        return self.bytes.narrow(0, number * SLOT, SLOT)

    def grow(self) -> bool:
        """Adds a slot; whether there is one more now."""
        if self.slots == SLOTS or not self.arena.grow(self.index, self.slots):
            return False
        self.slots += 1
        return True


class Exchange:
    """One collective of one rank, cut into pieces that fit a slot.

    `x`: one row that all peers read, or a row for each of them. `out`: without `fold`, a row from each rank; with it, the fold of what all
    ranks hold for this one, in rank order. `sources`: the places whose rows are wanted, by default all.

    Shapes: x [1 or ranks, M]; out [ranks, M], or [M] with fold."""

    def __init__(
        self, what: str, place: int, size: int, x: Tensor, out: Tensor, fold: str | None = None, sources: Iterable[int] | None = None
    ):  # fmt: skip
        self.what, self.place, self.x, self.out, self.fold = what, place, x, out, fold
        self.sources = tuple(range(size) if sources is None else sources)
        self.rows = [0] if len(x) == 1 else [row for row in range(size) if row != place]
        self.width = SLOT // len(self.rows) // x.element_size() // LINE * LINE
        self.pieces = -(-x.shape[1] // self.width)
        self.mark = zlib.crc32(repr((what, tuple(x.shape), x.dtype, fold)).encode())  # differs where ranks disagree about what they do
        self.taken = 0

    def _columns(self, piece: int) -> slice:
        return slice(piece * self.width, min((piece + 1) * self.width, self.x.shape[1]))

    def put(self, piece: int, slot: Tensor) -> None:
        """Writes what peers read of a piece, row after row."""
        columns, lanes = self._columns(piece), slot.view(self.x.dtype)
        count = columns.stop - columns.start
        for lane, row in enumerate(self.rows):
            lanes[lane * self.width : lane * self.width + count].copy_(self.x[row, columns])

    def take(self, piece: int, slots: dict[int, Tensor]) -> None:
        """Reads a piece of the sources: `slots`, and the own one from x."""
        columns = self._columns(piece)
        parts = [self._part(source, columns, slots) for source in self.sources]
        if self.fold is not None:
            _fold(parts, self.fold, self.out[columns])
            return
        for row, part in zip(self.out, parts):
            target = row[columns]
            if target.data_ptr() != part.data_ptr():
                target.copy_(part)

    def _part(self, source: int, columns: slice, slots: dict[int, Tensor]) -> Tensor:
        if source == self.place:
            return self.x[self.place if len(self.x) > 1 else 0, columns]
        lane = 0 if len(self.rows) == 1 else self.place - (self.place > source)
        return slots[source].view(self.x.dtype)[lane * self.width :][: columns.stop - columns.start]


def _fold(parts: list[Tensor], fold: str, out: Tensor) -> None:
    """out = ((p0 + p1) + p2) + ...; 16-bit sums in fp32, rounded once. `out` may be one of the parts: it is written last."""
    operation, dtype = FOLDS[fold], parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if fold == "sum" and dtype.is_floating_point else dtype
    total, *rest = parts
    total = total.to(wide)
    for part in rest[:-1]:
        total = operation(total, part)
    operation(total, rest[-1], out=out)


@dataclass(frozen=True)
class Peers:
    """The processes of the other ranks, to see whether they still run."""

    pids: dict[int, int]  # by rank
    descriptors: dict[int, int]  # pidfds by rank
    patient: bool  # more ranks than cores: whoever waits gives its core away at once

    def ended(self) -> set[int]:
        poll = select.poll()
        for fd in self.descriptors.values():
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        return {rank for rank, fd in self.descriptors.items() if fd in ended}

    def check(self, what: str, ended: set[int], late: list[int], waited: float, timeout: float) -> None:
        """Raises RuntimeError when a rank that is waited for is gone, or does not come in time."""
        if lost := sorted(ended.intersection(late)):
            gone = f"rank {lost[0]} (process {self.pids[lost[0]]}) is gone"
            raise RuntimeError(f"shared memory: {what}: connection closed by peer: {gone}")
        if waited > timeout:
            raise RuntimeError(f"shared memory: {what}: ranks {', '.join(map(str, late))} did not come within {timeout:.0f} s")


def wait_until(ready: Callable[[], bool], check: Callable[[float], None], patient: bool) -> None:
    """Polls, yields, then sleeps until it is ready; while it sleeps it calls `check(seconds waited)` now and then."""
    spins = 1 if patient else SPINS
    for attempt in range(spins + YIELDS):
        if ready():
            return
        if attempt >= spins:
            os.sched_yield()
    begin = checked = time.monotonic()
    while not ready():
        time.sleep(NAP)
        now = time.monotonic()
        if now > checked + CHECK:
            check(now - begin)
            checked = now


class Channel:
    """The collectives of one group. All its ranks begin the same ones in the same order, and wait for them in the same order."""

    def __init__(self, ranks: tuple[int, ...], rank: int, sections: dict[int, Section], peers: Peers, timeout: float):
        self.ranks, self.place, self.size = ranks, ranks.index(rank), len(ranks)
        self.timeout, self._peers = timeout, peers
        self._own = sections[rank]
        self._others = {place: sections[r] for place, r in enumerate(ranks) if r != rank}
        self._free = deque(range(FIRST_SLOTS))
        self._held: deque[int] = deque()  # slots of the pieces that some peer has yet to take, oldest first
        self._begun: deque[Exchange] = deque()  # not complete, oldest first
        self._unposted: deque[tuple[Exchange, int]] = deque()  # with the number of the first piece that is left
        self._posted = self._taken = self._promised = 0  # pieces
        weakref.finalize(self, close, self._own.words, os.getpid())

    def start(self, exchange: Exchange) -> "Ongoing":
        """Begins. Until it is waited for, its tensors may not be used for anything else."""
        ongoing = self._begin(exchange)
        self._post(self._promised)
        return ongoing

    def run(self, exchange: Exchange) -> "Ongoing":
        """Begins and completes: pieces are written as they are read, so that the caches hold them."""
        ongoing = self._begin(exchange)
        ongoing.wait()
        return ongoing

    def _begin(self, exchange: Exchange) -> "Ongoing":
        self._begun.append(exchange)
        self._promised += exchange.pieces
        if exchange.pieces:
            self._unposted.append((exchange, 0))
        return Ongoing(self, exchange)

    def complete(self, exchange: Exchange) -> None:
        """Completes all that was begun, up to this one."""
        while exchange.taken < exchange.pieces:
            head = self._begun[0]
            if head.taken == head.pieces:
                self._begun.popleft()
                continue
            self._wait(head)
            self._take(head)
        while self._begun and self._begun[0].taken == self._begun[0].pieces:
            self._begun.popleft()

    def _take(self, exchange: Exchange) -> None:
        """Reads the next piece, which all have posted."""
        at = TABLE + self._taken % SLOTS * 2
        slots = {}
        for place, section in self._others.items():
            assert section.words[at + 1] == exchange.mark, f"ranks {self.ranks} disagree about {exchange.what}"
            if place in exchange.sources:
                slots[place] = section.slot(section.words[at])
        exchange.take(exchange.taken, slots)
        exchange.taken += 1
        self._taken += 1
        self._own.words[TAKEN] = self._taken

    def _post(self, until: int) -> None:
        """Writes pieces below number `until`, as long as there is room."""
        while self._posted < until and (slot := self._room()) is not None:
            exchange, piece = self._unposted.popleft()
            exchange.put(piece, self._own.slot(slot))
            if piece + 1 < exchange.pieces:
                self._unposted.appendleft((exchange, piece + 1))
            at = TABLE + self._posted % SLOTS * 2
            self._own.words[at], self._own.words[at + 1] = slot, exchange.mark
            self._held.append(slot)
            self._posted += 1
            self._own.words[POSTED] = self._posted  # last: whoever sees it sees all of the above

    def _room(self) -> int | None:
        """A free slot, the one used longest ago: what a peer has just read lies in its cache, and writing there costs more than twice the time."""
        if self._held:
            unread = self._posted - min(section.words[TAKEN] for section in self._others.values())
            while len(self._held) > unread:
                self._free.append(self._held.popleft())
        if not self._free and self._own.grow():
            self._free.append(self._own.slots - 1)
        return self._free.popleft() if self._free else None

    def _missing(self) -> list[int]:
        """The ranks that have not posted the next piece; else those that keep this rank from posting it."""
        words = {self.ranks[place]: section.words for place, section in self._others.items()}
        late = [rank for rank, word in words.items() if word[POSTED] <= self._taken]
        return late or [rank for rank, word in words.items() if word[TAKEN] < self._taken]

    def _ready(self) -> bool:
        if self._posted <= self._taken + AHEAD:
            self._post(min(self._taken + AHEAD + 1, self._promised))
        for section in self._others.values():
            if section.words[POSTED] <= self._taken:
                return False
        return self._posted > self._taken

    def _wait(self, exchange: Exchange) -> None:
        """Until all ranks have posted the next piece. Raises RuntimeError when a peer is gone, or does not come in time."""
        wait_until(self._ready, lambda waited: self._check(exchange, waited), self._peers.patient)

    def _check(self, exchange: Exchange, waited: float) -> None:
        ended = self._peers.ended() | {self.ranks[p] for p, section in self._others.items() if section.words[CLOSED]}
        late = self._missing()  # after the look at who ended: what they posted before is seen
        self._peers.check(f"{exchange.what} of ranks {list(self.ranks)}", ended, late, waited, self.timeout)


@dataclass(frozen=True)
class Ongoing:
    """A collective that has begun."""

    channel: Channel
    exchange: Exchange

    def wait(self) -> None:
        self.channel.complete(self.exchange)


def close(words: memoryview, pid: int) -> None:
    """Tells peers that nothing more comes; not in a fork of the rank."""
    if os.getpid() == pid:
        words[CLOSED] = 1
