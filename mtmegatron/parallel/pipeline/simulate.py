"""Run a pipeline plan on paper: who computes when, how long each rank idles, what it holds, and if it can run at all.

Notable:
- It reads the same action lists that the engine executes, transfers included; nothing about a kind of schedule is
  known here.
- Costs may be any numbers, also `fractions.Fraction`: then the closed forms of the papers come out exactly.
- Two kinds of transfer. Eager: sends and receives cost their rank no time, a message arrives `transfer` after its
  send. Rendezvous: both ends stop until the other has come, the strictest that a backend may do; a plan that passes
  so cannot deadlock on any backend.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mtmegatron.parallel.pipeline.schedule import LIVE, TICKS, Action, Plan, needs_of, result_of, stages_of


class Deadlock(Exception):
    """No rank can go on; the text names each waiting rank and its action."""


@dataclass(frozen=True)
class Span:
    """One action of one rank in time."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def compute(self) -> bool:
        return self.action.peer is None


@dataclass(frozen=True)
class Timeline:
    """What a simulated plan did. Times are in the unit of the costs that were given."""

    plan: Plan
    spans: tuple[Span, ...]  # rank after rank, each in execution order

    @cached_property
    def makespan(self) -> float:
        return max(span.end for span in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Compute time of each rank."""
        times = [0] * self.plan.stages
        for span in filter(lambda span: span.compute, self.spans):
            times[span.rank] += span.end - span.start
        return tuple(times)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time of each rank in which it does not compute, from the common start to the common end."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Share of all rank time that is idle: 1 - busy / (p * makespan)."""
        return 1 - sum(self.busy) / (self.plan.stages * self.makespan)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """Most activations that each rank holds at once, in micro-batches of a full stage: a chunk counts 1/v.

        F allocates; B, or W where the backward is split, releases. An evaluation releases at once: one chunk.
        """
        return tuple(_most_live(self.plan, rank) / self.plan.chunks for rank in range(self.plan.stages))


def _most_live(plan: Plan, rank: int) -> int:
    compute = [action.kind for action in plan.actions[rank] if action.peer is None]
    if set(compute) == {"F"}:
        return 1
    live = most = 0
    for kind in compute:
        live += LIVE[kind]
        most = max(most, live)
    return most


def simulate(
    plan: Plan,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    transfer: float = 0.0,
    per_stage: Sequence[tuple[float, float, float]] | None = None,
    rendezvous: bool = False,
) -> Timeline:
    """Times of all actions of a plan; a whole backward costs input_grad + weight_grad.

    forward, input_grad, weight_grad: costs of a full stage; a chunk takes 1/v of them. per_stage: in their place, the
    three costs of each global stage as it is. transfer: time of one message. rendezvous: see the module.

    Raises Deadlock when the plan cannot come to its end.
    """
    uniform = tuple(cost / plan.chunks for cost in (forward, input_grad, weight_grad))
    costs = list(per_stage) if per_stage is not None else [uniform] * len(plan.place)
    assert len(costs) == len(plan.place), f"per_stage has {len(costs)} entries for {len(plan.place)} global stages"
    run = _Run(plan, costs, transfer, rendezvous)
    while any([run.advance(rank) for rank in range(plan.stages)]):
        pass
    if waiting := [rank for rank in range(plan.stages) if run.head(rank)]:
        raise Deadlock("; ".join(f"rank {rank} waits at {run.head(rank)}" for rank in waiting))
    return Timeline(plan, tuple(span for spans in run.spans for span in spans))


class _Run:
    """A simulation under way: how far each rank is in its list and when each result is there."""

    def __init__(self, plan: Plan, costs: list, transfer: float, rendezvous: bool) -> None:
        self.plan, self.costs, self.transfer, self.rendezvous = plan, costs, transfer, rendezvous
        self.stage = stages_of(plan.place)
        self.clock: list[float] = [0] * plan.stages
        self.spans: list[list[Span]] = [[] for _ in range(plan.stages)]
        self.there: list[dict] = [{} for _ in range(plan.stages)]  # [rank] result -> time from which it is there
        self.posted: list[set] = [set() for _ in range(plan.stages)]  # [rank] results it has an eager receive for

    def head(self, rank: int) -> Action | None:
        """The action that a rank is at, None when it is through."""
        actions, position = self.plan.actions[rank], len(self.spans[rank])
        return actions[position] if position < len(actions) else None

    def advance(self, rank: int) -> bool:
        """Let a rank go as far as it can; whether it moved."""
        before = len(self.spans[rank])
        while (action := self.head(rank)) and self._step(rank, action):
            pass
        return len(self.spans[rank]) > before

    def _step(self, rank: int, action: Action) -> bool:
        if action.peer is None:
            return self._compute(rank, action)
        return self._meet(rank, action) if self.rendezvous else self._post(rank, action)

    def _take(self, rank: int, action: Action, start: float, cost: float) -> None:
        self.clock[rank] = start + cost
        self.spans[rank].append(Span(rank, action, start, start + cost))

    def _compute(self, rank: int, action: Action) -> bool:
        stage = self.stage[rank, action.chunk]
        needs = needs_of(action, stage, len(self.plan.place))
        if not all(self._usable(rank, need) for need in needs):
            return False
        forward, input_grad, weight_grad = self.costs[stage]
        cost = {"F": forward, "B": input_grad + weight_grad, "I": input_grad, "W": weight_grad}[action.kind]
        self._take(rank, action, max([self.clock[rank], *(self.there[rank][need] for need in needs)]), cost)
        self.there[rank][result_of(action, stage)] = self.clock[rank]
        return True

    def _usable(self, rank: int, need: tuple) -> bool:
        """Made on this rank, or sent to it and received."""
        return need in self.there[rank] and (self.plan.place[need[2]][0] == rank or need in self.posted[rank])

    def _post(self, rank: int, action: Action) -> bool:
        """Eager: a send waits for its result, a receive for nothing."""
        result = self.message(rank, action)
        if action.kind.startswith("RECV"):
            self.posted[rank].add(result)
        elif result not in self.there[rank]:
            return False
        else:
            self.there[action.peer][result] = self.clock[rank] + self.transfer
        self._take(rank, action, self.clock[rank], 0)
        return True

    def _meet(self, rank: int, action: Action) -> bool:
        """Rendezvous: pass only together with the other end, which must be at the other half of the same message."""
        peer, other = action.peer, self.head(action.peer)
        result = self.message(rank, action)
        if other is None or other.peer != rank or self.message(peer, other) != result:
            return False
        sender, receiver = (rank, peer) if action.kind.startswith("SEND") else (peer, rank)
        if result not in self.there[sender]:
            return False
        start = max(self.clock[rank], self.clock[peer])
        self._take(rank, action, start, self.transfer)
        self._take(peer, other, start, self.transfer)
        self.there[receiver][result] = self.clock[receiver]
        self.posted[receiver].add(result)
        return True

    def message(self, rank: int, action: Action) -> tuple[str, int, int]:
        """The result that a send or receive carries, named by the global stage that made it."""
        return message_of(action, self.stage[rank, action.chunk])


def message_of(action: Action, global_stage: int) -> tuple[str, int, int]:
    """The result, as in `result_of`, that a send or receive of this global stage carries."""
    way, letter = action.kind.split("_")
    made_at = global_stage if way == "SEND" else global_stage + (-1 if letter == "F" else 1)
    return "F" if letter == "F" else "G", action.micro_batch, made_at


def check(plan: Plan) -> None:
    """Prove a plan: every micro-batch passes every global stage once (F, and B or I and W), each need is met in time,
    for each directed pair of ranks sends and receives stand in the same order, and no rendezvous deadlocks.

    Raises AssertionError, or Deadlock.
    """
    _check_complete(plan)
    _check_pairs(plan)
    simulate(plan, rendezvous=True)


def _check_complete(plan: Plan) -> None:
    stage = stages_of(plan.place)
    everywhere = [(rank, chunk) for rank in range(plan.stages) for chunk in range(plan.chunks)]
    assert sorted(stage) == everywhere, "placement is not one to one"
    counts = Counter(
        (action.kind, action.micro_batch, stage[rank, action.chunk])
        for rank, actions in enumerate(plan.actions)
        for action in actions
        if action.kind in TICKS
    )
    backward = plan.kind != "forward_only"
    for i in range(plan.micro_batches):
        for g in range(len(plan.place)):
            F, B, I, W = (counts.pop((kind, i, g), 0) for kind in "FBIW")
            once = F == 1 and I == W and B + I == backward
            assert once, f"micro-batch {i}, global stage {g}: F {F}, B {B}, I {I}, W {W}"
    assert not counts, f"actions that belong to nothing: {list(counts)}"


def _check_pairs(plan: Plan) -> None:
    stage = stages_of(plan.place)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(plan.actions):
        for action in actions:
            if action.kind.startswith("SEND"):
                sent[rank, action.peer].append(message_of(action, stage[rank, action.chunk]))
            elif action.kind.startswith("RECV"):
                received[action.peer, rank].append(message_of(action, stage[rank, action.chunk]))
    assert sent == received, "sends and receives of a pair of ranks stand in different orders"
