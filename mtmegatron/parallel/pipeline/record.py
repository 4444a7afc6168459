"""Times the actions of one real execution, in the same form as a simulation, so that both can be drawn and compared.

Notable:
- All ranks start their clocks behind one collective, so their times can stand in one picture; what is left of skew is
  the time of that collective.
- Waiting for a message is not part of an action: the executor waits first, then the clock of the action starts. On a
  device with streams the compute stream is drained before and after each computation. Not the whole device: that would
  wait for messages that are still on their way and turn every receive into a stop.
- Collectives inside a computation (tensor parallel, the reduction of gradients) count as part of it.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

import torch

from mtmegatron.device import Device
from mtmegatron.mesh import Mesh
from mtmegatron.parallel.pipeline.schedule import Action, Plan
from mtmegatron.parallel.pipeline.simulate import Span, Timeline, simulate

NS_PER_MS = 1e6


class Recorder:
    """Begin and end of each action of one execution on this rank, in nanoseconds since the common start."""

    def __init__(self, mesh: Mesh, device: Device) -> None:
        self.mesh, self.device = mesh, device
        self.plan: Plan | None = None
        self.times: list[tuple[int, int]] = []
        self.origin = 0

    def start(self, plan: Plan) -> None:
        """Waits for all ranks and starts the clock. All ranks call it."""
        self.plan, self.times = plan, []
        self.mesh.world.all_reduce(torch.zeros(1, device=self.mesh.device)).item()
        self.origin = time.perf_counter_ns()

    def time(self, perform: Callable[[Action], None], action: Action) -> None:
        """Performs an action and keeps when it began and ended."""
        begin = self._now(action)
        perform(action)
        self.times.append((begin, self._now(action)))

    def _now(self, action: Action) -> int:
        stream = self.device.current_stream()
        if stream is not None and action.peer is None:
            stream.synchronize()
        return time.perf_counter_ns() - self.origin

    def gather(self) -> list[Timeline]:
        """The measured timelines of all pipelines, in milliseconds, in the order of their first ranks. All ranks call it.

        A pipeline is the ranks that differ in their stage alone: rank r of the first stage begins pipeline r.
        """
        assert self.plan is not None, "nothing was recorded"
        most = max(len(actions) for actions in self.plan.actions)
        own = torch.zeros(1, most, 2, dtype=torch.int64)
        own[0, : len(self.times)] = torch.tensor(self.times, dtype=torch.int64)
        times = self.mesh.world.all_gather(own.to(self.mesh.device)).tolist()
        layout = self.mesh.layout
        pipelines = [layout.group(first, "pipeline") for first in range(layout.stage)]
        return [measured(self.plan, [times[rank] for rank in ranks]) for ranks in pipelines]


def measured(plan: Plan, times: list[list[list[int]]]) -> Timeline:
    """A timeline in milliseconds from [stage][action] -> (begin, end) in nanoseconds; entries past the plan's are padding."""
    spans = [
        Span(rank, action, begin / NS_PER_MS, end / NS_PER_MS)
        for rank, actions in enumerate(plan.actions)
        for action, (begin, end) in zip(actions, times[rank])
    ]
    return Timeline(plan, tuple(spans))


def mean_costs(timeline: Timeline) -> dict[str, float]:
    """Mean time of the computations of each kind, one chunk each, over all ranks."""
    lengths = defaultdict(list)
    for span in timeline.spans:
        if span.compute:
            lengths[span.action.kind].append(span.end - span.start)
    return {kind: fmean(values) for kind, values in lengths.items()}


def ideal(timeline: Timeline) -> Timeline:
    """The simulation of a measured plan in which every computation of a kind takes the mean of its kind and messages no time.

    Where the plan has split backwards, a whole one takes the sum of its two halves.
    """
    mean, plan = mean_costs(timeline), timeline.plan
    costs = mean["F"], mean.get("I", mean.get("B", 0.0)), mean.get("W", 0.0)
    return simulate(plan, per_stage=[costs] * len(plan.place))
