"""Messages between two ranks of one host through shared memory.

Notable:
- The two directions of a line are streams of their own, each with its numbered pieces in the sender's section of `shared_memory.py`.
- A message that finds no room goes over the network, and an entry in its place says so. So to send waits for the receiver only when more than a
  hundred messages are unread. No schedule posts that many receives ahead of their use: whoever is that far behind is not waiting for this rank.
- What has been written is out of the sender's hands: its tensor may change at once.
"""

import os
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mtmegatron.shared_memory import (
    CLOSED,
    FIRST_SLOTS,
    POSTED,
    SLOT,
    TABLE,
    TAKEN,
    Peers,
    Section,
    close,
    wait_until,
)

ENTRIES = 240  # of the table; at most SLOTS of them are in memory, so the sender stops only when the receiver is many messages behind
NETWORK = -1  # in place of a slot: the message comes the other way


class Line:
    """Messages to and from one other rank, each way in the order in which they are sent."""

    def __init__(self, rank: int, other: int, sections: dict[int, Section], peers: Peers, timeout: float):
        self.rank, self.other, self.timeout, self._peers = rank, other, timeout, peers
        self._own, self._others = sections[rank], sections[other]
        self._free = deque(range(FIRST_SLOTS))
        self._held: deque[int] = deque()  # slots, or NETWORK, of what is yet to be taken, oldest first
        self._expected: deque[Arrival] = deque()
        self._posted = self._taken = 0  # pieces
        weakref.finalize(self, close, self._own.words, os.getpid())

    def send(self, x: Tensor) -> bool:
        """Writes a message; False when there was no room, and the peer has been told to get it over the network. Shapes: x flat."""
        wait_until(lambda: self._unread() < ENTRIES, lambda waited: self._check("send to", waited), self._peers.patient)
        mark, parts = _mark(x), x.split(SLOT // x.element_size())
        room = self._room(len(parts))
        if not room:
            self._post(NETWORK, mark)
            return False
        for part in parts:
            slot = self._free.popleft()  # the one used longest ago, see `shared_memory.py`
            self._own.slot(slot).view(x.dtype)[: len(part)].copy_(part)
            self._post(slot, mark)
        return True

    def receive(self, x: Tensor, network: Callable[[], object]) -> "Arrival":
        """Begins to fill x; `network()` does so where the message comes that way. Shapes: x flat."""
        arrival = Arrival(self, x, network)
        self._expected.append(arrival)
        return arrival

    def complete(self, arrival: "Arrival") -> None:
        """Completes all receives up to this one."""
        while arrival in self._expected:
            self._take(self._expected.popleft())

    def _unread(self) -> int:
        while len(self._held) > self._posted - self._others.words[TAKEN]:
            slot = self._held.popleft()
            if slot != NETWORK:
                self._free.append(slot)
        return len(self._held)

    def _room(self, pieces: int) -> bool:
        while len(self._free) < pieces and self._own.grow():
            self._free.append(self._own.slots - 1)
        return len(self._free) >= pieces and self._unread() + pieces <= ENTRIES

    def _post(self, slot: int, mark: int) -> None:
        at = TABLE + self._posted % ENTRIES * 2
        self._own.words[at], self._own.words[at + 1] = slot, mark
        self._held.append(slot)
        self._posted += 1
        self._own.words[POSTED] = self._posted  # last: whoever sees it sees all of the above

    def _take(self, arrival: "Arrival") -> None:
        for part in arrival.x.split(SLOT // arrival.x.element_size()):
            wait_until(lambda: self._others.words[POSTED] > self._taken, lambda waited: self._check("receive from", waited), self._peers.patient)
            at = TABLE + self._taken % ENTRIES * 2
            slot = self._others.words[at]
            assert self._others.words[at + 1] == _mark(arrival.x), f"ranks {self.rank} and {self.other} disagree about a message"
            if slot != NETWORK:
                part.copy_(self._others.slot(slot).view(part.dtype)[: len(part)])
            self._taken += 1
            self._own.words[TAKEN] = self._taken
            if slot == NETWORK:
                arrival.network()
                return

    def _check(self, what: str, waited: float) -> None:
        ended = self._peers.ended() | ({self.other} if self._others.words[CLOSED] else set())
        late = [self.other] if what == "send to" or self._others.words[POSTED] <= self._taken else []
        self._peers.check(f"{what} rank {self.other}", ended, late, waited, self.timeout)


@dataclass(frozen=True, eq=False)
class Arrival:
    """A receive that has begun."""

    line: Line
    x: Tensor
    network: Callable[[], object]

    def wait(self) -> None:
        self.line.complete(self)


def _mark(x: Tensor) -> int:
    return zlib.crc32(repr((x.numel(), x.dtype)).encode())
