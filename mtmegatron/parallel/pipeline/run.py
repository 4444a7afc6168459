"""Executes a plan: the actions of this rank, one after the other.

Notable: the executor knows no schedule. Receives are posted when their action comes up and waited for before the computation that needs them;
sends go out at once and are waited for at the end. Shapes come from the micro-batch itself, so they may differ between micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mtmegatron.mesh import Axis, Pending
from mtmegatron.parallel.pipeline.record import Recorder
from mtmegatron.parallel.pipeline.schedule import Action, Plan


class Stages(Protocol):
    """What the executor runs: the chunks of this rank."""

    def forward(self, chunk: int, x: Tensor | None, micro_batch: int) -> Tensor:
        """Hidden states, or the scaled loss on the last stage."""

    def backward_begins(self, action: Action) -> None:
        """Before the backward of a micro-batch; "I" puts its weight gradients off."""

    def backward_ends(self, action: Action) -> None: ...

    def weight_gradients(self, action: Action) -> None:
        """The weight gradients that were put off."""

    def empty(self, micro_batch: int) -> Tensor:
        """A buffer for the hidden states of a micro-batch."""

    def observe(self, action: Action, value: Tensor | None) -> None:
        """Sees the result of each computation."""


@dataclass
class Run:
    """State of one execution: what has arrived, what waits to be used or sent."""

    plan: Plan
    stages: Stages
    axis: Axis
    training: bool = True
    recorder: Recorder | None = None  # where the times of the actions go
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    arriving: dict[tuple[str, int, int], Pending] = field(default_factory=dict)
    leaving: list[Pending] = field(default_factory=list)

    def execute(self) -> None:
        """Runs all actions of this rank."""
        rank = self.axis.rank
        handlers: dict[str, Callable[[Action], None]] = {
            "F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights,
            "SEND_F": self._send, "SEND_B": self._send, "RECV_F": self._receive, "RECV_B": self._receive,
        }  # fmt: skip
        if self.recorder is not None:
            self.recorder.start(self.plan)
        for action in self.plan.actions[rank]:
            self._wait_for_message(action)
            if self.recorder is None:
                handlers[action.kind](action)
            else:
                self.recorder.time(handlers[action.kind], action)
        for message in self.leaving:
            message.wait()

    def _forward(self, action: Action) -> None:
        key = (action.micro_batch, action.chunk)
        x = self.inputs.get(key) if self.training else self.inputs.pop(key, None)
        if x is not None and self.training:
            x.requires_grad_()
        out = self.stages.forward(action.chunk, x, action.micro_batch)
        self.stages.observe(action, out)
        self.outputs[key] = out
        self._hand_over(action, +1, out)

    def _backward(self, action: Action) -> None:
        key = (action.micro_batch, action.chunk)
        gradient, out, x = self.gradients.pop(key, None), self.outputs.pop(key), self.inputs.pop(key, None)
        self.stages.backward_begins(action)
        torch.autograd.backward(out, gradient)
        self.stages.backward_ends(action)
        self.stages.observe(action, None if x is None else x.grad)
        if x is not None and not self._hand_over(action, -1, x.grad):
            self.outputs[key] = x.grad  # what SEND_B takes

    def _weights(self, action: Action) -> None:
        self.stages.weight_gradients(action)

    def _hand_over(self, action: Action, direction: int, value: Tensor) -> bool:
        """Passes a result to the neighbouring global stage when it lies on this rank; whether it does."""
        rank = self.axis.rank
        to = self.plan.global_stage(rank, action.chunk) + direction
        if not (0 <= to < len(self.plan.place) and self.plan.place[to][0] == rank):
            return False
        target = self.inputs if direction > 0 else self.gradients
        target[action.micro_batch, self.plan.place[to][1]] = value.detach()
        return True

    def _send(self, action: Action) -> None:
        key = (action.micro_batch, action.chunk)
        backward = action.kind == "SEND_B"
        value = (self.outputs.pop(key) if backward or not self.training else self.outputs[key]).detach().contiguous()
        self.leaving.append(self.axis.send(value, action.peer))

    def _receive(self, action: Action) -> None:
        target = self.inputs if action.kind == "RECV_F" else self.gradients
        buffer = self.stages.empty(action.micro_batch)
        target[action.micro_batch, action.chunk] = buffer
        self.arriving[action.kind[-1], action.micro_batch, action.chunk] = self.axis.receive(buffer, action.peer)

    def _wait_for_message(self, action: Action) -> None:
        """Waits until what a computation takes from another rank is in its buffer."""
        letter = {"F": "F", "B": "B", "I": "B"}.get(action.kind)
        message = self.arriving.pop((letter, action.micro_batch, action.chunk), None)
        if message is not None:
            message.wait()
