"""Who can share memory with whom: each rank makes an arena, the ranks of its host open it, and all learn who could.

Notable: what a peer needs to open an arena goes round once, through the default process group. Ranks of another host, another boot or another space
of process numbers are no neighbours; a neighbour whose memory cannot be opened is a fault that is told.
"""

import os
import platform
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from mtmegatron.shared_memory import TOKEN, Arena, Peers, Section

Sections = dict[tuple[int, ...], dict[int, Section]]


@dataclass(frozen=True)
class Card:
    """What peers need to know of a rank to open its arena. `why`: what kept it from having one."""

    host: tuple[str, int]
    pid: int
    fd: int
    token: bytes
    sections: tuple[tuple[int, ...], ...]
    why: str = ""


def connect(groups: list[tuple[int, ...]], rank: int) -> tuple[Sections, Peers, str]:
    """The sections of those of this rank's groups whose members all share memory, by member, and why ranks of one host could not ("" if they can).

    All ranks of the default process group call it. Groups that span hosts have no sections: that is no fault. The order of a group's ranks is part
    of its name."""
    own, card = _create(groups)
    cards: list[Card] = _from_all(card)
    opened, peers, why = _open(cards, rank, own)
    answers: list[tuple[set[int], str]] = _from_all((set(opened), why))
    sharing = [group for group in groups if all(answers[member][0].issuperset(group) for member in group)]
    sections = {group: {member: Section(opened[member], cards[member].sections.index(group)) for member in group} for group in sharing}
    return sections, peers, next((text for _, text in answers if text), "")


def _from_all(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _create(groups: list[tuple[int, ...]]) -> tuple[Arena | None, Card]:
    try:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise OSError(f"a processor of type {platform.machine()} does not store in order")
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            raise OSError("this system has no memfd or no pidfd")
        own = Arena.create(len(groups))
        return own, Card(_host(), os.getpid(), own.fd, own.memory[:TOKEN], tuple(groups))
    except (OSError, ValueError) as error:
        return None, Card(("", 0), 0, 0, b"", (), str(error))


def _host() -> tuple[str, int]:
    """Equal for processes that see each other's numbers: one boot of one machine, one space of process numbers."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.stat("/proc/self/ns/pid").st_ino


def _open(cards: list[Card], rank: int, own: Arena | None) -> tuple[dict[int, Arena], Peers, str]:
    """The arenas of the ranks of this host that can be opened."""
    if own is None:
        return {}, Peers({}, {}, True), cards[rank].why
    opened, pids, descriptors, why = {rank: own}, {}, {}, ""
    neighbours = {r: card for r, card in enumerate(cards) if card.host == cards[rank].host and r != rank}
    for other, card in neighbours.items():
        try:
            descriptors[other], pids[other] = os.pidfd_open(card.pid), card.pid
            opened[other] = Arena.open(card.pid, card.fd, card.token, len(card.sections))
        except (OSError, ValueError) as error:
            why = f"rank {rank} cannot open the memory of rank {other}: {error}"
    peers = Peers(pids, descriptors, len(neighbours) + 1 > len(os.sched_getaffinity(0)))
    weakref.finalize(peers, _close_all, list(descriptors.values()))
    return opened, peers, why


def _close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
