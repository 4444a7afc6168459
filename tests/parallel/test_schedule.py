"""Pipeline schedules: the papers' figures come out exactly; every kind and size is proved free of deadlock."""

from collections import deque
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.errors import UserError
from mtmegatron.parallel.pipeline.draw import draw
from mtmegatron.parallel.pipeline.schedule import KINDS, Action, Plan, rounds, schedule, vee
from mtmegatron.parallel.pipeline.simulate import Deadlock, Timeline, check, simulate

ONE = Fraction(1)
CHUNKS = {"gpipe": (1,), "1f1b": (1,), "zb-h1": (1,), "zb-v": (2,), "dualpipe-v": (2,)}  # absent: any number
FORMS = [(kind, chunks) for kind in KINDS for chunks in CHUNKS.get(kind, (1, 2, 3, 4))]


def unit(plan: Plan) -> Timeline:
    """Exact times for F = I = W = 1."""
    return simulate(plan, ONE, ONE, ONE, Fraction(0))


def published_peak(kind: str, p: int, v: int, m: int) -> Fraction:
    split = Fraction(p) + Fraction(p - 1, v)
    peaks = {"gpipe": m, "1f1b": p, "interleaved": split, "zb-h1": p, "zb-v": p, "dualpipe-v": p + Fraction(1, 2)}
    return min(Fraction(m), peaks[kind]) if kind in peaks else Fraction(1, v)


def verify(kind: str, p: int, v: int, m: int) -> None:
    plan = schedule(kind, p, v, m)
    check(plan)
    execute(plan)
    assert max(unit(plan).peak) <= float(published_peak(kind, p, v, m))


def execute(plan: Plan) -> None:
    """Run a plan the dumbest way: a value per message, one untagged queue per directed pair, sends that never block."""
    queues: dict[tuple[int, int], deque] = {}
    values: list[dict] = [{} for _ in range(plan.stages)]
    lists = [deque(actions) for actions in plan.actions]
    last, moved = len(plan.place) - 1, True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while actions and _execute_one(plan, rank, actions[0], values[rank], queues, last):
                actions.popleft()
                moved = True
    assert not any(lists)


def _execute_one(plan: Plan, rank: int, action: Action, values: dict, queues: dict, last: int) -> bool:
    """Values are named by (letter, micro-batch, boundary between global stages); False to wait for a message."""
    kind, i, g = action.kind, action.micro_batch, plan.global_stage(rank, action.chunk)
    into, out = ("x", i, g), ("x", i, g + 1)
    grad_into, grad_out = ("g", i, g), ("g", i, g + 1)
    if kind.startswith("SEND"):
        queues.setdefault((rank, action.peer), deque()).append(values[out if kind == "SEND_F" else grad_into])
    elif kind.startswith("RECV"):
        queue = queues.get((action.peer, rank))
        if not queue:
            return False
        name = into if kind == "RECV_F" else grad_out
        values[name] = queue.popleft()
        assert values[name] == name, f"rank {rank} got {values[name]} where it wanted {name}"
    elif kind == "F":
        assert g == 0 or values[into] == into
        values[out] = out
    elif kind in "BI":
        assert out in values and (g == last or values[grad_out] == grad_out)
        values[grad_into] = grad_into
    else:
        assert kind == "W" and grad_into in values
    return True


# ---- published figures

GOLDEN = {  # kind, chunks -> for 4 and for 8 ranks: idle time, peak
    ("1f1b", 1): ((9, 4), (21, 8)),
    ("interleaved", 2): ((4.5, 5.5), (10.5, 11.5)),
    ("zb-v", 2): ((1.5, 4), (3.5, 8)),
    ("dualpipe-v", 2): ((1.5, 4.5), (3.5, 8.5)),
    ("zb-h1", 1): ((3, 4), (7, 8)),
}


@pytest.mark.parametrize("kind, chunks", GOLDEN)
@pytest.mark.parametrize("p, m", [(4, 8), (4, 16), (8, 16), (8, 32)])
def test_golden_table(kind, chunks, p, m):
    idle, peak = GOLDEN[kind, chunks][p // 8]
    timeline = unit(schedule(kind, p, chunks, m))
    assert set(timeline.idle) == {idle}
    assert max(timeline.peak) == peak
    assert timeline.makespan == 3 * m + idle
    assert timeline.bubble == Fraction(idle) / (3 * m + Fraction(idle))


cost = st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=4)


@given(p=st.integers(1, 9), m=st.integers(1, 20), f=cost, i=cost, w=cost)
@settings(max_examples=40, deadline=None)
def test_gpipe_and_1f1b_idle_for_any_costs(p, m, f, i, w):
    for kind in ("gpipe", "1f1b"):
        assert set(simulate(schedule(kind, p, 1, m), f, i, w, Fraction(0)).idle) == {(p - 1) * (f + i + w)}


@given(p=st.integers(1, 7), v=st.integers(1, 4), groups=st.integers(1, 4), f=cost, b=cost)
@settings(max_examples=40, deadline=None)
def test_interleaving_divides_the_bubble_by_v(p, v, groups, f, b):
    timeline = simulate(schedule("interleaved", p, v, groups * p), f, b, Fraction(0), Fraction(0))
    assert set(timeline.idle) == {(p - 1) * (f + b) / v}


@given(p=st.integers(1, 7), v=st.integers(1, 4), m=st.integers(1, 24))
@settings(max_examples=40, deadline=None)
def test_a_smaller_last_group_costs_no_more_than_its_missing_micro_batches(p, v, m):
    idle = max(unit(schedule("interleaved", p, v, m)).idle)
    assert idle <= Fraction(3 * (p - 1), v) + 3 * (-m % p)


@given(p=st.integers(2, 9), extra=st.integers(0, 12), f=cost, w=cost)
@settings(max_examples=40, deadline=None)
def test_zb_h1_idle(p, extra, f, w):
    """(p-1)(F+I-W), where weight gradients are not longer than what they fill: W <= F = I."""
    f = max(f, w)
    assert set(simulate(schedule("zb-h1", p, 1, p + extra), f, f, w, Fraction(0)).idle) == {(p - 1) * (2 * f - w)}


@pytest.mark.parametrize("p", [1, 2, 3, 5, 6, 11])
@pytest.mark.parametrize("kind", ["zb-v", "dualpipe-v"])
def test_v_schedules_idle_only_while_they_start(kind, p):
    for m in (p, p + 1, 3 * p + 2):
        assert set(unit(schedule(kind, p, 2, m)).idle) == {Fraction(p - 1, 2)}


def test_1f1b_holds_p_minus_r_and_gpipe_all():
    assert unit(schedule("1f1b", 5, 1, 12)).peak == (5, 4, 3, 2, 1)
    assert unit(schedule("gpipe", 3, 1, 7)).peak == (7, 7, 7)


@pytest.mark.parametrize("p, m", [(4, 6), (4, 2), (1, 3), (3, 1)])
def test_1f1b_order(p, m):
    """Warm-up of min(p-r-1, m), then one forward and one backward, then the rest."""
    plan = schedule("1f1b", p, 1, m)
    for rank, actions in enumerate(plan.actions):
        warm_up = min(p - rank - 1, m)
        expected = "F" * warm_up + "FB" * (m - warm_up) + "B" * warm_up
        assert "".join(action.kind for action in actions if action.peer is None) == expected


@given(p=st.integers(1, 7), v=st.integers(1, 4), groups=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_evaluation_idles_for_one_chunk_per_rank(p, v, groups):
    assert set(unit(schedule("forward_only", p, v, groups * p)).idle) == {Fraction(p - 1, v)}


def test_evaluation_takes_the_deepest_chunk_first():
    actions = schedule("forward_only", 2, 2, 4).actions[0]
    assert "".join(str(action.chunk) for action in actions if action.kind == "F") == "00110011"


def test_interleaved_with_one_chunk_is_1f1b():
    for p, m in ((1, 2), (4, 8), (4, 6), (5, 3)):
        assert schedule("interleaved", p, 1, m).actions == schedule("1f1b", p, 1, m).actions


# ---- every kind and size


@pytest.mark.parametrize("kind, chunks", FORMS)
def test_every_small_size_is_proved(kind, chunks):
    for p in range(1, 7):
        for m in range(1, 15):
            verify(kind, p, chunks, m)


@given(form=st.sampled_from(FORMS), p=st.integers(1, 32), m=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_large_sizes_are_proved(form, p, m):
    verify(form[0], p, form[1], m)


@pytest.mark.parametrize("kind, chunks", FORMS)
def test_largest_size_is_proved(kind, chunks):
    verify(kind, 32, chunks, 40)


@pytest.mark.parametrize("kind, chunks", FORMS)
def test_one_rank_has_no_transfers_and_no_bubble(kind, chunks):
    plan = schedule(kind, 1, chunks, 5)
    assert all(action.peer is None for action in plan.actions[0])
    assert unit(plan).idle == (0,)


def test_neighbours_on_one_rank_hand_over_without_a_transfer():
    plan = schedule("zb-v", 3, 2, 4)
    assert all(action.peer in (None, 1) for action in plan.actions[2])  # the turn 2 -> 3 is inside rank 2
    assert sum(action.kind == "SEND_F" for actions in plan.actions for action in actions) == 4 * (6 - 1 - 1)


def test_placements():
    assert rounds(3, 2) == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1))
    assert vee(3) == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
    plan = schedule("dualpipe-v", 3, 2, 2)
    assert [plan.global_stage(rank, 1) for rank in range(3)] == [5, 4, 3]


@pytest.mark.parametrize("kind, chunks", FORMS)
def test_evaluation_keeps_the_placement(kind, chunks):
    plan = schedule(kind, 4, chunks, 6)
    for m in (1, 3, 7):
        evaluation = plan.forward_only(m)
        check(evaluation)
        execute(evaluation)
        assert evaluation.place == plan.place
        assert set(evaluation.actions[0]) >= {Action("F", i, c) for i in range(m) for c in range(chunks)}


# ---- simulator


def test_forward_only_is_a_flow_shop():
    """m equal jobs through p machines: sum of the stages, and the slowest once more for each further micro-batch."""
    costs = [Fraction(n) for n in (2, 5, 1, 3)]
    plan = schedule("forward_only", 4, 1, 6)
    assert simulate(plan, per_stage=[(c, 0, 0) for c in costs]).makespan == sum(costs) + 5 * max(costs)


def test_one_micro_batch_pays_each_transfer():
    for rendezvous in (False, True):
        timeline = simulate(schedule("1f1b", 4, 1, 1), ONE, ONE, ONE, Fraction(1, 8), rendezvous=rendezvous)
        assert timeline.makespan == 4 * 3 + 2 * 3 * Fraction(1, 8)


def test_rendezvous_stops_the_sender_and_eager_does_not():
    plan = schedule("forward_only", 2, 1, 3)
    costs = [(ONE, 0, 0), (4 * ONE, 0, 0)]
    ends = {}
    for rendezvous in (False, True):
        spans = simulate(plan, per_stage=costs, rendezvous=rendezvous).spans
        ends[rendezvous] = max(span.end for span in spans if span.rank == 0)
    assert ends == {False: 3, True: 9}  # rank 1 comes to its last receive after two forwards, 1 .. 9


def test_spans_of_a_rank_do_not_overlap():
    timeline = simulate(schedule("dualpipe-v", 4, 2, 9), 1.0, 1.5, 0.5, 0.25, rendezvous=True)
    for one, two in zip(timeline.spans, timeline.spans[1:]):
        assert one.rank < two.rank or one.end <= two.start


# ---- broken plans are found


def changed(plan: Plan, rank: int, actions: list[Action]) -> Plan:
    return replace(plan, actions=plan.actions[:rank] + (tuple(actions),) + plan.actions[rank + 1 :])


def swapped(plan: Plan, rank: int, first: str, second: str) -> Plan:
    """The plan with two actions, given by their text, exchanged."""
    actions = list(plan.actions[rank])
    a, b = ([str(action) for action in actions].index(text) for text in (first, second))
    actions[a], actions[b] = actions[b], actions[a]
    return changed(plan, rank, actions)


def test_deadlock_names_the_waiting_ranks():
    plan = schedule("1f1b", 2, 1, 2)
    actions = sorted(plan.actions[0], key=lambda action: action.kind != "RECV_B")
    broken = changed(plan, 0, actions)
    with pytest.raises(Deadlock) as error:
        simulate(broken, rendezvous=True)
    assert str(error.value) == (
        "rank 0 waits at RECV_B micro-batch 0 chunk 0 peer 1; rank 1 waits at RECV_F micro-batch 0 chunk 0 peer 0"
    )
    assert simulate(broken).makespan == simulate(plan).makespan  # eager receives do not block


@pytest.mark.parametrize("rendezvous", [False, True])
def test_receive_behind_its_use_is_a_deadlock(rendezvous):
    plan = schedule("1f1b", 2, 1, 2)
    broken = swapped(plan, 1, "F micro-batch 0 chunk 0", "RECV_F micro-batch 0 chunk 0 peer 0")
    with pytest.raises(Deadlock, match="rank 1 waits at F micro-batch 0"):
        simulate(broken, rendezvous=rendezvous)


def test_weight_gradient_before_input_gradient_is_found():
    plan = schedule("zb-h1", 2, 1, 2)
    with pytest.raises(Deadlock, match="rank 1 waits at W micro-batch 0"):
        check(swapped(plan, 1, "I micro-batch 0 chunk 0", "W micro-batch 0 chunk 0"))


def test_sends_out_of_order_are_found():
    plan = schedule("gpipe", 2, 1, 2)
    first, sent_first, second, sent_second, *rest = plan.actions[0]
    broken = changed(plan, 0, [first, second, sent_second, sent_first, *rest])
    with pytest.raises(AssertionError, match="different orders"):
        check(broken)
    with pytest.raises(Deadlock, match="rank 0 waits at SEND_F micro-batch 1.*rank 1 waits at RECV_F micro-batch 0"):
        simulate(broken, rendezvous=True)


@pytest.mark.parametrize("schedule_kind, kind", [("1f1b", "B"), ("zb-h1", "F"), ("zb-h1", "I"), ("zb-h1", "W")])
def test_missing_and_doubled_actions_are_found(schedule_kind, kind):
    plan = schedule(schedule_kind, 2, 1, 3)
    action = Action(kind, 1)
    for actions in ([a for a in plan.actions[1] if a != action], [*plan.actions[1], action]):
        with pytest.raises(AssertionError, match="micro-batch 1, global stage 1"):
            check(changed(plan, 1, actions))


# ---- the user's faults, and the picture


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("2f2b", 2, 1, 4), ["'2f2b'", "gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v"]),
        (("1f1b", 2, 2, 4), ["chunks is 2", "use 1", "interleaved"]),
        (("zb-v", 2, 1, 4), ["chunks is 1", "use 2"]),
        (("1f1b", 0, 1, 4), ["stages is 0", "at least 1"]),
        (("interleaved", 2, 0, 4), ["chunks is 0", "at least 1"]),
        (("gpipe", 2, 1, 0), ["micro_batches is 0", "at least 1"]),
    ],
)
def test_user_faults(arguments, words):
    with pytest.raises(UserError) as error:
        schedule(*arguments)
    assert all(word in str(error.value) for word in words)


def test_draw(tmp_path):
    timeline = simulate(schedule("dualpipe-v", 2, 2, 4), transfer=0.25, rendezvous=True)
    assert draw(timeline, tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    picture = draw(timeline, tmp_path / "plan.svg").read_text()
    assert all(f"<!-- {word} -->" in picture for word in ("rank 0", "rank 1", "input gradient", "backward"))
    with pytest.raises(UserError, match=".svg, .png, .pdf"):
        draw(timeline, tmp_path / "plan.doc")
