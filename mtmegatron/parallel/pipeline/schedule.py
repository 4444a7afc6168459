"""Pipeline schedules as data: for each rank the list of what it computes, sends and receives.

Notable:
- The model is a chain of global stages. `place[global stage] = (rank, chunk)` lays it on the ranks: round by round
  (interleaved) or as a V, where the chain goes down the ranks and comes back up, so that embedding and loss lie on
  one rank.
- A kind of schedule is a generator of compute orders, nothing else. `with_transfers` puts the sends and receives in,
  the same way for all.
- Transfers need no tags and cannot deadlock, even when a send blocks until its receive is reached: all transfers
  stand in one total order (that of a unit-time run) and each rank's list is a subsequence of it.
- Work of one micro-batch never waits for another micro-batch. So leaving micro-batches out of a valid schedule gives
  a valid one: that is how kinds that come in groups of micro-batches take any number of them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from mtmegatron.errors import UserError

Place = tuple[tuple[int, int], ...]
TICKS = {"F": 1, "B": 2, "I": 1, "W": 1}  # the unit-time run that orders transfers: B is I and W together
LIVE = {"F": 1, "B": -1, "I": 0, "W": -1}  # what an action adds to the activations that its rank holds


@dataclass(frozen=True)
class Action:
    """One step of one rank.

    kind: F forward; B whole backward; I input gradient; W weight gradient; SEND_F, RECV_F an activation to or from
    the next or previous global stage; SEND_B, RECV_B a gradient the other way. chunk is this rank's chunk: the one
    that computes, whose output (SEND_F) or input gradient (SEND_B) leaves, or whose input (RECV_F) or output gradient
    (RECV_B) arrives. peer is the other rank of a transfer.
    """

    kind: str
    micro_batch: int
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" peer {self.peer}"
        return f"{self.kind} micro-batch {self.micro_batch} chunk {self.chunk}{peer}"


Orders = list[list[Action]]


@dataclass(frozen=True)
class Plan:
    """A schedule: `actions[rank]` in execution order, and where each global stage lies."""

    kind: str
    stages: int  # ranks of the pipeline, p
    chunks: int  # global stages on each rank, v
    micro_batches: int  # m
    place: Place  # [global stage] -> (rank, chunk)
    actions: tuple[tuple[Action, ...], ...]  # [rank]

    def global_stage(self, rank: int, chunk: int) -> int:
        """Position in the model of a rank's chunk, 0 .. stages * chunks - 1."""
        return self.place.index((rank, chunk))

    def forward_only(self, micro_batches: int) -> "Plan":
        """The evaluation of a model that is laid out as in this plan: only forwards, the deepest chunk first."""
        orders = _deepest_first(self.place, micro_batches)
        actions = with_transfers(orders, self.place)
        return Plan("forward_only", self.stages, self.chunks, micro_batches, self.place, actions)


def rounds(stages: int, chunks: int) -> Place:
    """Interleaved placement: global stage g lies on rank g mod p as chunk g // p."""
    return tuple((g % stages, g // stages) for g in range(stages * chunks))


def vee(stages: int, chunks: int = 2) -> Place:
    """V placement: chunk 0 of ranks 0 .. p-1, then chunk 1 of ranks p-1 .. 0 (2405.15362, section 3)."""
    assert chunks == 2
    return tuple((g, 0) for g in range(stages)) + tuple((g, 1) for g in reversed(range(stages)))


# ---- compute orders, one generator per kind: (stages, chunks, micro-batches) -> for each rank its F, B, I, W


def gpipe(stages: int, chunks: int, micro_batches: int) -> Orders:
    """All forwards, then all backwards (1811.06965). Idle (p-1)(F+B), peak m."""
    return [_phases([(micro_batches, "F0"), (micro_batches, "B0")], micro_batches) for _ in range(stages)]


def one_f_one_b(stages: int, chunks: int, micro_batches: int) -> Orders:
    """min(p-r-1, m) forwards, then one forward and one backward in turn, then the backwards that are left (2104.04473).

    Idle (p-1)(F+B), peak p-r.
    """
    return [_phases([(stages - rank - 1, "F0"), (micro_batches, "F0 B0")], micro_batches) for rank in range(stages)]


def zb_h1(stages: int, chunks: int, micro_batches: int) -> Orders:
    """1F1B with the weight gradients in what were the bubbles (ZB-H1 of 2401.10241).

    For m >= p and W not longer than F and I: idle (p-1)(F+I-W), peak p on each rank.
    """
    orders = [_phases([(stages - rank - 1, "F0"), (micro_batches, "F0 I0")], micro_batches) for rank in range(stages)]
    return _fill_with_weight_grads(orders, rounds(stages, 1), most_live=stages)


def interleaved(stages: int, chunks: int, micro_batches: int) -> Orders:
    """1F1B on v chunks per rank, micro-batches in groups of p (2104.04473, section 2.2).

    Idle (p-1)(F+B)/v, peak p + (p-1)/v. When p does not divide m the last group is smaller, and idle time
    grows by at most F+B for each micro-batch that it lacks.
    """

    def in_groups(kind: str, chunk_order: range) -> list[Action]:
        starts = range(0, micro_batches, stages)
        groups = [range(start, start + stages) for start in starts]
        return [Action(kind, i, chunk) for group in groups for chunk in chunk_order for i in group]

    forwards, backwards = in_groups("F", range(chunks)), in_groups("B", range(chunks)[::-1])
    orders = []
    for rank in range(stages):
        warm_up = (stages - rank - 1) * (1 if chunks == 1 else 2) + (chunks - 1) * stages
        pairs = zip_longest(forwards[warm_up:], backwards)
        order = forwards[:warm_up] + [action for pair in pairs for action in pair if action]
        orders.append([action for action in order if action.micro_batch < micro_batches])
    return orders


def zb_v(stages: int, chunks: int, micro_batches: int) -> Orders:
    """Two chunks per rank in a V, backwards split (ZB-V of 2401.10241, V-ZB of 2405.15362).

    For m >= p and F = I = W: idle (p-1)/2, the skew of the start and nothing else; peak p on each rank.
    """

    def order(rank: int) -> list[Action]:
        below = stages - rank - 1
        warm_up = [(2 * below + 1, "F0"), (rank, "F1 F0"), (below + 1, "F1 I1")]
        return _phases([*warm_up, (micro_batches, "F0 I0 F1 I1")], micro_batches)

    return _fill_with_weight_grads([order(rank) for rank in range(stages)], vee(stages), most_live=2 * stages)


def dualpipe_v(stages: int, chunks: int, micro_batches: int) -> Orders:
    """DualPipe (2412.19437, section 3.2.1) folded to a V: its two directions are the two legs of the V.

    In the middle a forward of one chunk stands next to a whole backward of the other: an engine may overlap the
    communication of one with the computation of the other. For m >= p and F = I = W: idle (p-1)/2, peak p + 1/2.
    """

    def order(rank: int) -> list[Action]:
        below = stages - rank - 1
        warm_up = [(2 * below, "F0"), (rank + 1, "F0 F1"), (below, "I1 F1")]
        middle = (max(micro_batches - stages, 0), "F0 B1 F1 B0")
        return _phases([*warm_up, middle, (stages, "I1 I0")], micro_batches)

    return _fill_with_weight_grads([order(rank) for rank in range(stages)], vee(stages), most_live=2 * stages + 1)


def forward_only(stages: int, chunks: int, micro_batches: int) -> Orders:
    """Evaluation of a model that lies in rounds; for another placement see `Plan.forward_only`. Idle (p-1)F/v."""
    return _deepest_first(rounds(stages, chunks), micro_batches)


def _phases(table: list[tuple[int, str]], micro_batches: int) -> list[Action]:
    """An order from (repetitions, "F0 I1"): kinds and chunks. A chunk takes micro-batches 0, 1, 2, ... each way.

    Micro-batches that are not there are left out: so "F0 B0" becomes "B0" by itself when the forwards have run out.
    """
    following: Counter = Counter()
    order = []
    for repetitions, pattern in table:
        for kind, chunk in pattern.split() * repetitions:
            order.append(Action(kind, following[kind == "F", chunk], int(chunk)))
            following[kind == "F", chunk] += 1
    return [action for action in order if action.micro_batch < micro_batches]


def _fill_with_weight_grads(orders: Orders, place: Place, most_live: int) -> Orders:
    """Put the W of each I where, in unit time, its rank would wait, or would go forward holding `most_live` chunks."""
    stage = stages_of(place)
    heads = [deque(order) for order in orders]
    deferred: list[deque[Action]] = [deque() for _ in orders]
    live = [0] * len(orders)
    filled: Orders = [[] for _ in orders]

    def choose(rank: int, finished: set) -> Action | None:
        action = heads[rank][0] if heads[rank] else None
        if action and ready(action, stage[rank, action.chunk], finished, len(place)):
            if action.kind != "F" or live[rank] < most_live:
                return heads[rank].popleft()
        return deferred[rank].popleft() if deferred[rank] else None

    def pick(rank: int, finished: set) -> Action | None:
        if action := choose(rank, finished):
            live[rank] += LIVE[action.kind]
            filled[rank].append(action)
            if action.kind == "I":
                deferred[rank].append(Action("W", action.micro_batch, action.chunk))
        return action

    deque(_unit_time(place, pick), maxlen=0)
    return filled


def _deepest_first(place: Place, micro_batches: int) -> Orders:
    """Only forwards; of several a rank takes the one nearest to the model's end, so that few are on their way."""
    stage = stages_of(place)
    ranks, chunks = _size(place)
    orders: Orders = [[] for _ in range(ranks)]
    following = {where: 0 for where in place}

    def pick(rank: int, finished: set) -> Action | None:
        for chunk in reversed(range(chunks)):
            action = Action("F", following[rank, chunk], chunk)
            if action.micro_batch < micro_batches and ready(action, stage[rank, chunk], finished, len(place)):
                following[rank, chunk] += 1
                orders[rank].append(action)
                return action
        return None

    deque(_unit_time(place, pick), maxlen=0)
    return orders


# ---- what every kind shares


def stages_of(place: Place) -> dict[tuple[int, int], int]:
    """(rank, chunk) -> global stage."""
    return {where: g for g, where in enumerate(place)}


def _size(place: Place) -> tuple[int, int]:
    return max(rank for rank, _ in place) + 1, max(chunk for _, chunk in place) + 1


def result_of(action: Action, global_stage: int) -> tuple[str, int, int]:
    """What a compute action makes: the activation F, the gradient G of its input (by B or I), the weight gradient W."""
    return {"F": "F", "B": "G", "I": "G", "W": "W"}[action.kind], action.micro_batch, global_stage


def needs_of(action: Action, global_stage: int, global_stages: int) -> list[tuple[str, int, int]]:
    """The results that a compute action waits for, see `result_of`."""
    i, g = action.micro_batch, global_stage
    if action.kind == "F":
        return [("F", i, g - 1)] if g > 0 else []
    if action.kind == "W":
        return [("G", i, g)]
    return [("F", i, g)] + ([("G", i, g + 1)] if g + 1 < global_stages else [])


def ready(action: Action, global_stage: int, finished: set, global_stages: int) -> bool:
    """Whether all that a compute action needs is in `finished`."""
    return all(need in finished for need in needs_of(action, global_stage, global_stages))


def _unit_time(place: Place, pick: Callable[[int, set], Action | None]) -> Iterator[tuple[int, Action, bool]]:
    """Run all ranks side by side in unit time: `pick(rank, finished)` names what an idle rank starts, None to wait.

    Yields (rank, action, ended) for every start and every end, in one total order, until nothing runs or is picked.
    """
    stage, ranks = stages_of(place), _size(place)[0]
    finished: set = set()
    running: dict[int, tuple[Action, int]] = {}
    tick = 0
    while True:
        for rank in range(ranks):
            if rank not in running and (action := pick(rank, finished)):
                running[rank] = action, tick + TICKS[action.kind]
                yield rank, action, False
        if not running:
            return
        tick += 1
        for rank, (action, end) in sorted(running.items()):
            if end == tick:
                del running[rank]
                finished.add(result_of(action, stage[rank, action.chunk]))
                yield rank, action, True


def with_transfers(orders: Orders, place: Place) -> tuple[tuple[Action, ...], ...]:
    """Insert sends and receives into compute orders.

    In a unit-time run, when an action ends whose result another rank needs, the send is put on its rank's list and
    the receive on the other's at that same moment, behind what each has started by then. So a receive stands before
    the action that needs it, and for each pair of ranks sends and receives stand in the same order.
    """
    stage = stages_of(place)
    lists: Orders = [[] for _ in orders]
    waiting = [iter(order) for order in orders]
    heads = [next(order, None) for order in waiting]

    def pick(rank: int, finished: set) -> Action | None:
        action = heads[rank]
        if action is None or not ready(action, stage[rank, action.chunk], finished, len(place)):
            return None
        heads[rank] = next(waiting[rank], None)
        return action

    for rank, action, ended in _unit_time(place, pick):
        if not ended:
            lists[rank].append(action)
        elif transfer := _transfer(rank, action, place, stage):
            (receiver, receive), send = transfer
            lists[rank].append(send)
            lists[receiver].append(receive)
    assert not any(heads), f"the compute orders wait for each other: {[str(a) for a in heads if a]}"
    return tuple(map(tuple, lists))


def _transfer(rank: int, action: Action, place: Place, stage: dict) -> tuple[tuple[int, Action], Action] | None:
    """((receiving rank, its RECV), the SEND) for the result of a compute action, None when it stays on the rank."""
    step, letter = {"F": (1, "F"), "B": (-1, "B"), "I": (-1, "B"), "W": (None, "")}[action.kind]
    if step is None or not 0 <= (target := stage[rank, action.chunk] + step) < len(place) or place[target][0] == rank:
        return None
    receiver, chunk = place[target]
    send = Action(f"SEND_{letter}", action.micro_batch, action.chunk, receiver)
    return (receiver, Action(f"RECV_{letter}", action.micro_batch, chunk, rank)), send


@dataclass(frozen=True)
class _Kind:
    orders: Callable[[int, int, int], Orders]
    place: Callable[[int, int], Place] = rounds
    chunks: int | None = 1  # the only number of chunks that it takes; None: any


KINDS = {
    "gpipe": _Kind(gpipe),
    "1f1b": _Kind(one_f_one_b),
    "interleaved": _Kind(interleaved, chunks=None),
    "zb-h1": _Kind(zb_h1),
    "zb-v": _Kind(zb_v, vee, chunks=2),
    "dualpipe-v": _Kind(dualpipe_v, vee, chunks=2),
    "forward_only": _Kind(forward_only, chunks=None),
}


def placement_of(kind: str, stages: int, chunks: int) -> Place:
    """Where each global stage lies under a kind of schedule: (rank, chunk) of each."""
    return KINDS[kind].place(stages, chunks)


def schedule(kind: str, stages: int, chunks: int, micro_batches: int) -> Plan:
    """The plan of a kind (a key of KINDS) for p = `stages` ranks, v = `chunks` on each and m = `micro_batches`.

    Raises UserError for an unknown kind, a size below one, or a number of chunks that the kind does not take.
    """
    if kind not in KINDS:
        raise UserError(f"pipeline schedule {kind!r} is unknown: use one of {', '.join(KINDS)}")
    for name, size in (("stages", stages), ("chunks", chunks), ("micro_batches", micro_batches)):
        if size < 1:
            raise UserError(f"pipeline schedule {kind}: {name} is {size}: use at least 1")
    rule = KINDS[kind]
    if rule.chunks not in (None, chunks):
        raise UserError(f"pipeline schedule {kind}: chunks is {chunks}: use {rule.chunks}, or the kind 'interleaved'")
    place = rule.place(stages, chunks)
    orders = rule.orders(stages, chunks, micro_batches)
    return Plan(kind, stages, chunks, micro_batches, place, with_transfers(orders, place))
