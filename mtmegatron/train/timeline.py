"""The pipeline of one recorded step, on disk: `timeline.json` with every action, `timeline.png` with the run beside its ideal.

Notable: the picture shows the pipeline of rank 0, the file all of them. Both parts of the picture have one time scale: what
the measured part has more is imbalance between stages, messages, and the reduction of gradients.
"""

import json
from pathlib import Path

from mtmegatron.checkpoint.store import writes_to
from mtmegatron.parallel.pipeline.draw import draw_together
from mtmegatron.parallel.pipeline.record import ideal, mean_costs
from mtmegatron.parallel.pipeline.simulate import Timeline


def write_timeline(folder: Path, step: int, pipelines: list[Timeline]) -> None:
    """Writes both files of the measured timelines (milliseconds) of a step. Raises UserError where they cannot be written."""
    first = pipelines[0]
    simulated = ideal(first)
    with writes_to(folder / "timeline.json"):
        (folder / "timeline.json").write_text(json.dumps(facts(step, pipelines, simulated)), encoding="utf-8")
    pictures = [(f"step {step} as measured", first), ("simulated with the mean cost of each kind", simulated)]
    draw_together(pictures, folder / "timeline.png", unit="ms")


def facts(step: int, pipelines: list[Timeline], simulated: Timeline) -> dict:
    """What the file says; all times in milliseconds from the common start."""
    plan = simulated.plan
    return {
        "step": step,
        "unit": "ms",
        "plan": {"kind": plan.kind, "stages": plan.stages, "chunks": plan.chunks, "micro_batches": plan.micro_batches},
        "mean_cost": mean_costs(pipelines[0]),
        "simulated": {"makespan": simulated.makespan, "bubble": simulated.bubble},
        "pipelines": [_pipeline(timeline) for timeline in pipelines],
    }


def _pipeline(timeline: Timeline) -> dict:
    actions = [
        {"stage": span.rank, **vars(span.action), "begin": span.start, "end": span.end} for span in timeline.spans
    ]
    return {"makespan": timeline.makespan, "bubble": timeline.bubble, "idle": timeline.idle, "actions": actions}
