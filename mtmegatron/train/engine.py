"""One optimizer step on this rank: a list of micro-batches in, updated weights and a few numbers out.

Notable, in the order in which it happens: the valid tokens of the global batch are counted before the first forward, so each micro-batch's loss is
divided by the right number at once; the schedule's actions run; gradients are reduced while the last backward runs; one sum over all ranks
carries loss and squared norm; the clip factor and the update follow. A step whose loss or norm is not finite changes nothing, and is run once
more with eyes open to tell where the first such number appears.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mtmegatron.batch import IGNORE, Batch
from mtmegatron.config.schema import Config
from mtmegatron.layers.build import Build
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.stages import build_chunks
from mtmegatron.optim.adamw import AdamW
from mtmegatron.optim.schedule import learning_rate
from mtmegatron.parallel.data import Buckets
from mtmegatron.parallel.pipeline.record import Recorder
from mtmegatron.parallel.pipeline.run import Run
from mtmegatron.parallel.pipeline.schedule import Action, Plan, schedule
from mtmegatron.placement import initialise
from mtmegatron.precision.gemm import Gemm
from mtmegatron.precision.types import TYPES


@dataclass
class StepResult:
    """What a step tells: token-mean loss of the global batch (z term apart), gradient norm before clipping, learning rate, valid tokens.

    `fault`: empty, or why the step changed nothing."""

    loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    fault: str = ""


@dataclass
class Engine:
    """The model part, buckets and optimizer of one rank.

    `read`: numbers of the device on the host, where a step waits for the device; a rank that is only described has none."""

    config: Config
    mesh: Mesh
    native_bf16: bool = True
    read: Callable[[Tensor], list] = Tensor.tolist

    def __post_init__(self) -> None:
        config, mesh, p = self.config, self.mesh, self.config.parallel
        self.types = TYPES[config.train.precision]
        again = frozenset(config.recompute.parts if config.recompute.mode == "selective" else ())
        self.build = Build(mesh, self.types.compute, Gemm(self.native_bf16), context_kind=p.context_kind, recompute=again)
        self.chunks = build_chunks(config, self.build)
        self.names = {param: name for chunk in self.chunks for name, param in chunk.named_parameters()}
        initialise(self.names, mesh.layout, mesh.rank, config.train.seed)
        units = {unit: modules for chunk in self.chunks for unit, modules in chunk.units().items()}
        self.buckets = Buckets(
            units, self.names, mesh, self.types, zero=p.zero, bucket_bytes=p.bucket_mb * 2**20, overlap=p.overlap,
            reduce_dtype=torch.bfloat16 if p.reduce == "bf16" else None,
        )  # fmt: skip
        self.optimizer = AdamW(config.optimizer, self.buckets, self.types)
        for chunk in self.chunks:
            chunk.hooks = self.buckets

    @property
    def model(self) -> Decoder:
        """The first chunk of this rank; all of its part where there is one chunk on a rank."""
        return self.chunks[0]

    @property
    def last(self) -> bool:
        """Whether the loss is computed on this rank."""
        return any(chunk.last for chunk in self.chunks)

    def step(self, batches: list[Batch], step: int, recorder: Recorder | None = None) -> StepResult:
        """Forward, backward and update with the micro-batches of this data rank; `recorder` gets the times of the pipeline's actions."""
        lr = learning_rate(self.config.optimizer, self.config.train, step)
        tokens = self.count_tokens(batches)
        loss, z_loss, norm = self.gradients(batches, tokens, step, recorder)
        result = StepResult(loss, z_loss, norm, lr, tokens, self._fault(loss, norm, tokens))
        if not result.fault:
            clip = self.config.optimizer.clip
            self.optimizer.step(lr, clip / norm if clip and norm > clip else 1.0)
        return result

    def gradients(self, batches: list[Batch], tokens: int, step: int = 0, recorder: Recorder | None = None) -> tuple[float, float, float]:
        """Reduced gradients of one global batch in the buckets; returns (loss, z term, gradient norm)."""
        self.buckets.start()
        stages = _Training(self, batches, 1.0 / max(tokens, 1), step)
        self._run(stages, training=True, recorder=recorder)
        self.buckets.finish()
        wide = torch.promote_types(self.types.gradient, torch.float32)
        numbers = torch.stack([*(x.to(wide) for x in stages.sums()), self.buckets.squared_norm().to(wide)])
        loss, z_loss, squared = self.read(self.mesh.world.all_reduce(numbers))
        return loss / max(tokens, 1), z_loss / max(tokens, 1), math.sqrt(squared) if squared >= 0 else math.nan

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> tuple[float, int]:
        """(summed cross entropy, valid tokens) of one global batch; nothing of the training state changes."""
        tokens = self.count_tokens(batches)
        stages = _Training(self, batches, 1.0, None)
        self._run(stages, training=False)
        loss, _ = self.read(self.mesh.world.all_reduce(torch.stack(stages.sums())))
        return loss, tokens

    def count_tokens(self, batches: list[Batch]) -> int:
        """Valid labels of the global batch."""
        own = torch.stack([(batch.labels != IGNORE).sum() for batch in batches]).sum().reshape(1)
        return self.read(self.mesh["data", "context"].all_reduce(own))[0]

    def _run(self, stages: "_Training", training: bool, recorder: Recorder | None = None) -> None:
        p = self.config.parallel
        plan = _plan(p.schedule, p.pipeline, p.chunks, len(stages.batches))
        if not training:
            plan = plan.forward_only(len(stages.batches))
        Run(plan, stages, self.mesh["pipeline"], training, recorder).execute()

    def _fault(self, loss: float, norm: float, tokens: int) -> str:
        if not tokens:
            return "no token of the global batch has a label"
        if not math.isfinite(loss):
            return "the loss is not finite"
        return "" if math.isfinite(norm) else "the gradient is not finite"

    def find_fault(self, batches: list[Batch], tokens: int, step: int) -> str:
        """Runs a step again and tells the first value that is not finite: its stage, micro-batch, direction. Weights stay as they are."""
        self.buckets.start()
        stages = _Training(self, batches, 1.0 / max(tokens, 1), step, watch=True)
        self._run(stages, training=True)
        self.buckets.finish()
        seen = stages.first_fault()
        reports = self.mesh.world.all_gather(torch.tensor([seen], dtype=torch.int64, device=self.mesh.device)).tolist()
        stage = self.mesh.layout.axes["pipeline"]
        found = [(kind, stage.coordinate(r) * (1 if kind == 0 else -1), m, r) for r, (kind, m) in enumerate(reports) if kind < 2]
        if not found:
            return "it did not occur again when the step was repeated: look at the hardware"
        kind, _, micro_batch, rank = min(found)
        return f"it first appears in the {('forward', 'backward')[kind]} pass of micro-batch {micro_batch}, pipeline stage {stage.coordinate(rank)}, rank {rank}"


@cache
def _plan(kind: str, stages: int, chunks: int, micro_batches: int) -> Plan:
    return schedule(kind, stages, chunks, micro_batches)


class _Training:
    """The chunks of this rank for the pipeline executor, in one step."""

    def __init__(self, engine: Engine, batches: list[Batch], scale: float, step: int | None, watch: bool = False):
        self.engine, self.batches, self.scale, self.step, self.watch = engine, batches, scale, step, watch
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.backwards = [0] * len(engine.chunks)
        self.put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.faults: list[tuple[int, int]] = []

    def forward(self, chunk: int, x: Tensor | None, micro_batch: int) -> Tensor:
        model, batch = self.engine.chunks[chunk], self.batches[micro_batch]
        hidden = model(x, batch, step=self.step)
        if not model.last:
            return hidden
        loss, ce_sum, z_sum = model.loss(hidden, batch, self.scale)
        self.parts.append((ce_sum, z_sum))
        return loss

    def backward_begins(self, action: Action) -> None:
        split = action.kind == "I"
        self.engine.build.queue.defer = split
        self.engine.buckets.complete = not split and self._completes(action.chunk)

    def backward_ends(self, action: Action) -> None:
        queue = self.engine.build.queue
        if action.kind == "I":
            self.put_off[action.chunk, action.micro_batch], queue.defer = queue.take(), False
        if self.engine.chunks[action.chunk].first:
            self.engine.buckets.after_backward("embedding")

    @torch.no_grad()
    def weight_gradients(self, action: Action) -> None:
        buckets, units = self.engine.buckets, list(self.engine.chunks[action.chunk].units())
        for unit in units:
            buckets.expect(unit)
        for work in self.put_off.pop((action.chunk, action.micro_batch)):
            work()
        if self._completes(action.chunk):
            for unit in reversed(units):
                buckets.unit_done(unit)

    def _completes(self, chunk: int) -> bool:
        """Whether the gradients of this backward may be reduced: always with ZeRO 2 and 3, else after the last of the step."""
        self.backwards[chunk] += 1
        return self.engine.buckets.zero >= 2 or self.backwards[chunk] == len(self.batches)

    def empty(self, micro_batch: int) -> Tensor:
        engine, batch = self.engine, self.batches[micro_batch]
        tokens = batch.tokens.shape[0] // (engine.build.tensor.size if engine.mesh.layout.sequence else 1)
        return torch.empty(tokens, engine.config.model.width, dtype=engine.types.compute, device=engine.mesh.device)

    def observe(self, action: Action, value: Tensor | None) -> None:
        if not self.watch:
            return
        bad = value is not None and not bool(torch.isfinite(value).all())
        if action.kind != "F":  # a forward would be blamed for the gradients of an earlier backward
            bad = bad or self.engine.buckets.not_finite()
        if bad:
            self.faults.append((0 if action.kind == "F" else 1, action.micro_batch))

    def first_fault(self) -> tuple[int, int]:
        """(0 forward, 1 backward, 2 none; micro-batch)."""
        return min(self.faults, default=(2, 0))

    def sums(self) -> list[Tensor]:
        """Summed loss and z term of this rank's micro-batches; zeros on ranks that do not count them."""
        engine = self.engine
        if not engine.last or engine.mesh.coordinate("tensor") or not self.parts:
            wide = torch.promote_types(engine.types.compute, torch.float32)
            return [torch.zeros((), dtype=wide, device=engine.mesh.device)] * 2
        return [torch.stack(column).sum() for column in zip(*self.parts)]
