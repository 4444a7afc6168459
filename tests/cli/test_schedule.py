"""`mtm schedule` tells published figures, its documentation agrees with it, and a real run is recorded as it was planned."""

import json
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmegatron.cli.schedule import comparison_row, exact, facts, timeline_of
from mtmegatron.device import Device
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.parallel.pipeline.closed_form import FORMS, Sizes, idle_time
from mtmegatron.parallel.pipeline.record import Recorder, ideal, mean_costs, measured
from mtmegatron.parallel.pipeline.schedule import KINDS, schedule
from mtmegatron.parallel.pipeline.simulate import Timeline, simulate
from mtmegatron.verify.protocol import batches
from tests.cli.mtm import mtm
from tests.field.training import engine_of, lines_of, run, spread
from tests.tiny import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"


def told(*words: object) -> dict | list:
    result = mtm("schedule", *words, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


# ---- the command ----

GOLDEN = {  # 4 ranks, 8 micro-batches, F = I = W = 1: chunks, makespan, idle, peak of each rank, messages
    "gpipe": (1, 33, 9, [8, 8, 8, 8], 48),
    "1f1b": (1, 33, 9, [4, 3, 2, 1], 48),
    "interleaved": (2, 28.5, 4.5, [5.5, 4.5, 3.5, 2.5], 112),
    "zb-h1": (1, 27, 3, [4, 4, 4, 4], 48),
    "zb-v": (2, 25.5, 1.5, [4, 4, 4, 4], 96),
    "dualpipe-v": (2, 25.5, 1.5, [4.5, 4.5, 4.5, 4.5], 96),
    "forward_only": (1, 11, 3, [1, 1, 1, 1], 24),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_a_kind(kind):
    chunks, makespan, idle, peak, messages = GOLDEN[kind]
    numbers = told(kind, "--stages", 4, "--micro-batches", 8)
    assert numbers["chunks"] == chunks and numbers["makespan"] == makespan
    assert numbers["idle"] == [idle] * 4 and numbers["closed_form"]["value"] == idle
    assert numbers["bubble"] == idle / makespan
    assert numbers["peak"] == peak
    # both ways between neighbours of the chain of global stages; the turn of a V lies inside a rank
    assert numbers["transfers"] == messages == sum(numbers["sent"])


def test_costs_and_chunks_are_taken():
    numbers = told("interleaved", "--chunks", 4, "--forward", 0.1, "--input-grad", 0.2, "--weight-grad", 0.3)
    assert numbers["idle"] == [float(Fraction(3 * 6, 4 * 10))] * 4  # (p-1)(F+I+W)/v, exact although 0.1 is no binary fraction
    assert numbers["makespan"] == float(8 * Fraction(6, 10) + Fraction(18, 40))
    slow = told("1f1b", "--micro-batches", 1, "--transfer", 0.5)
    assert slow["makespan"] == 4 * 3 + 2 * 3 * 0.5 and slow["closed_form"] is None


def test_all_is_one_table_of_every_kind():
    numbers = told("all", "--stages", 4, "--micro-batches", 8)
    assert [row["kind"] for row in numbers] == list(KINDS)
    assert {row["kind"]: row["makespan"] for row in numbers} == {kind: golden[1] for kind, golden in GOLDEN.items()}
    table = mtm("schedule", "all", "--stages", 4, "--micro-batches", 8).out
    for row in numbers:
        assert re.search(r"\s+".join(map(re.escape, comparison_row(row))), table), row["kind"]
    assert [row["chunks"] for row in told("all", "--chunks", 3)] == [1, 1, 3, 1, 2, 2, 3]  # where a kind takes any number


def test_one_kind_is_told_in_words():
    out = mtm("schedule", "1f1b", "--stages", 4, "--micro-batches", 8).out
    assert "makespan 33, bubble 27.3%; each rank idles (p-1)(F+I+W) = 9" in out
    assert [line.split() for line in out.splitlines() if re.match(r" +\d", line)] == [
        ["0", "9", "4", "8"], ["1", "9", "3", "16"], ["2", "9", "2", "16"], ["3", "9", "1", "8"]
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["zb-v", "all"])
def test_the_picture_has_every_rank_of_every_kind(kind, tmp_path):
    file = tmp_path / "plan.svg"
    assert mtm("schedule", kind, "--stages", 3, "--micro-batches", 4, "--draw", file).code == 0
    pictures = len(KINDS) if kind == "all" else 1
    text = file.read_text()
    for rank in range(3):
        assert text.count(f"<!-- rank {rank} -->") == pictures
    assert text.count("<!-- forward -->") == pictures


@pytest.mark.parametrize(
    "words, message",
    [
        (("2f2b",), "'2f2b' is unknown: use one of gpipe"),
        (("1f1b", "--chunks", 2), "chunks is 2: use 1"),
        (("1f1b", "--stages", 0), "stages is 0: use at least 1"),
        (("all", "--micro-batches", 0), "micro_batches is 0: use at least 1"),
        (("1f1b", "--forward", 0), "--forward is 0: give a time above 0"),
        (("1f1b", "--transfer=-1"), "--transfer is -1: give a time of 0 or more"),
        (("1f1b", "--input-grad", "nan"), "--input-grad is nan"),
        (("1f1b", "--draw", "plan.doc"), "must end in one of .svg, .png, .pdf"),
        (("1f1b", "--draw", "absent/plan.svg"), "cannot draw to absent/plan.svg"),
    ],
)
def test_faults_are_one_message(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = mtm("schedule", *words)
    assert result.code == 2
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and message in result.err


def test_help_shows_an_example():
    assert "Example: mtm schedule" in " ".join(mtm("schedule", "--help").out.split())


def test_a_picture_that_cannot_be_is_refused_before_anything_is_printed():
    assert mtm("schedule", "1f1b", "--draw", "plan.doc").out == ""


# ---- closed forms ----

cost = st.fractions(min_value=Fraction(1, 4), max_value=4, max_denominator=4)


@given(kind=st.sampled_from(list(KINDS)), p=st.integers(1, 6), v=st.integers(1, 3), m=st.integers(1, 14), costs=st.data())
@settings(max_examples=80, deadline=None)
def test_where_a_closed_form_is_told_the_simulation_agrees(kind, p, v, m, costs):
    v = KINDS[kind].chunks or v
    equal = costs.draw(st.booleans())
    F, I, W = (costs.draw(cost),) * 3 if equal else (costs.draw(cost) for _ in range(3))  # noqa: E741
    form = idle_time(kind, Sizes(p, v, m, F, I, W))
    if form is not None:
        assert set(simulate(schedule(kind, p, v, m), F, I, W, Fraction(0)).idle) == {form[1]}
    assert form or kind not in ("gpipe", "1f1b") and (not equal or m < p or m % p)


def test_every_kind_has_a_closed_form():
    assert FORMS.keys() == KINDS.keys()


# ---- the page ----


def rows_of_the_page() -> list[list[str]]:
    """The cells of the table of kinds and their figures."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| kind | chunks | makespan"))
    rows = []
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_the_page_is_what_the_command_tells():
    costs = exact(1, 1, 1, 0)
    numbers = [facts(timeline_of(kind, 4, 8, None, costs), costs) for kind in KINDS]
    assert rows_of_the_page() == [[*comparison_row(row), row["closed_form"]["idle"]] for row in numbers]


# ---- recording: one process ----


class Streamed(SimpleNamespace):
    """A device with a stream, that counts how often it is waited for."""

    def current_stream(self) -> "Streamed":
        return self

    def synchronize(self) -> None:
        self.waits += 1


def test_only_computations_wait_for_the_stream():
    plan, device = schedule("1f1b", 2, 1, 3), Streamed(waits=0)
    recorder = Recorder(Mesh(Layout()), device)
    recorder.start(plan)
    performed = []
    for action in plan.actions[0]:
        recorder.time(performed.append, action)
    assert performed == list(plan.actions[0])
    assert len(recorder.times) == len(plan.actions[0])
    assert device.waits == 2 * 6  # around 3 forwards and 3 backwards, not around the 6 messages


def test_measured_times_become_a_timeline_and_its_ideal():
    plan = schedule("zb-h1", 2, 1, 2)
    length = {"F": 2_000_000, "I": 3_000_000, "W": 1_000_000}
    times, padding = [], [[0, 0]] * 3
    for actions in plan.actions:
        clock, row = 500_000, []
        for action in actions:
            row.append([clock, clock + length.get(action.kind, 0)])
            clock = row[-1][1]
        times.append(row + padding)
    timeline = measured(plan, times)
    assert mean_costs(timeline) == {"F": 2.0, "I": 3.0, "W": 1.0}
    assert timeline.makespan == 0.5 + 2 * (2 + 3 + 1) and timeline.idle == (0.5, 0.5)
    assert ideal(timeline).spans == simulate(plan, 2.0, 3.0, 1.0).spans


def test_whole_backwards_keep_their_mean():
    plan = schedule("1f1b", 2, 1, 2)
    timeline = simulate(plan, 1.0, 2.0, 3.0)
    assert ideal(timeline).spans == timeline.spans


# ---- recording: real runs ----

LAYOUTS = [
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "zb-v", "data": 2, "zero": 2},
    {"pipeline": 2, "schedule": "interleaved", "tensor": 2},
]


def record(rank: int, world: int, layout: dict) -> tuple[list[Timeline], int, bool]:
    """The timelines of one step, when this rank's clock began, and whether recording changed no number."""
    engine, plain = (engine_of(tiny(), layout, rank, world) for _ in range(2))
    recorder = Recorder(engine.mesh, Device("cpu"))
    mine = batches(engine, 0)
    same = engine.step(mine, 0, recorder) == plain.step(mine, 0)
    return recorder.gather(), recorder.origin, same


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.get("schedule", "1f1b"))
def test_a_run_is_recorded_as_it_was_planned(layout, pool):
    results = spread(pool, record, layout, layout)
    pipelines, origins = results[0][0], [origin for _, origin, _ in results]
    assert all(same for *_, same in results)
    assert all(timelines == pipelines for timelines, *_ in results)
    width = layout.get("tensor", 1) * layout.get("data", 1)
    assert len(pipelines) == width
    for first, timeline in enumerate(pipelines):
        check_recorded(timeline, [origins[first + stage * width] / 1e6 for stage in range(2)])


def check_recorded(timeline: Timeline, origins: list[float]) -> None:
    """Every action once, in order, none inside another, and no computation before what it needs exists on the other rank."""
    plan = timeline.plan
    assert sum(map(len, plan.actions)) == len(timeline.spans) and plan.micro_batches > 1
    ends: dict[tuple[str, int, int], float] = {}
    for rank, actions in enumerate(plan.actions):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert [span.action for span in spans] == list(actions)
        assert all(span.end > span.start for span in spans if span.compute) and spans[0].start >= 0
        assert all(one.end <= two.start for one, two in pairwise(spans))
        for span in filter(lambda span: span.compute, spans):
            kind = "B" if span.action.kind == "I" else span.action.kind
            ends[kind, span.action.micro_batch, plan.global_stage(rank, span.action.chunk)] = span.end + origins[rank]
    for span in filter(lambda span: span.compute, timeline.spans):
        stage, i = plan.global_stage(span.rank, span.action.chunk), span.action.micro_batch
        kind, start = span.action.kind, span.start + origins[span.rank]
        needs = {"F": [("F", i, stage - 1)], "W": [("B", i, stage)]}.get(kind, [("F", i, stage), ("B", i, stage + 1)])
        # the processes share one clock, of which a nanosecond is about 1e-6 ms: the quotients round by far less
        assert all(ends.get(need, 0.0) <= start + 1e-6 for need in needs), span


def test_a_run_writes_its_timeline_once(pool, tmp_path):
    config = tiny(train={"steps": 3, "timeline": 2}, log={"tensorboard": False})
    run(pool, config, {"pipeline": 2}, tmp_path)
    written = json.loads((tmp_path / "timeline.json").read_text())
    plan = schedule("1f1b", 2, 1, 4)
    assert written["step"] == 2
    assert written["plan"] == {"kind": "1f1b", "stages": 2, "chunks": 1, "micro_batches": 4}
    (pipeline,) = written["pipelines"]
    for stage, actions in enumerate(plan.actions):
        assert [a["kind"] for a in pipeline["actions"] if a["stage"] == stage] == [a.kind for a in actions]
    simulated = simulate(plan, written["mean_cost"]["F"], written["mean_cost"]["B"], 0.0)
    assert written["simulated"] == {"makespan": simulated.makespan, "bubble": simulated.bubble}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len(lines_of(tmp_path)) >= 3


def test_a_run_without_it_writes_none_and_a_missed_step_is_told(tmp_path, capfd):
    short = tiny(train={"steps": 2}, log={"tensorboard": False}, optimizer={"decay_length": 4})
    run(None, short, {}, tmp_path)
    assert not (tmp_path / "timeline.json").exists()
    longer = {"steps": 3, "timeline": 1, "accept_changes": ["train.steps"]}
    run(None, tiny(short.model_dump(exclude_unset=True), train=longer), {}, tmp_path)
    assert "no timeline is recorded: `train.timeline: 1` is before step 3" in capfd.readouterr().out
    assert not (tmp_path / "timeline.json").exists()
