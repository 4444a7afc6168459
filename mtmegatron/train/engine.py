"""One optimizer step on this rank: a list of micro-batches in, updated weights and a few numbers out.

Notable, in the order in which it happens: the valid tokens of the global batch are counted before the first forward, so each micro-batch's loss is
divided by the right number at once; the schedule's actions run; gradients are reduced while the last backward runs; one sum over all ranks
carries loss and squared norm; the clip factor and the update follow. A step whose loss or norm is not finite changes nothing, and is run once
more with eyes open to tell where the first such number appears.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from mtmegatron.batch import IGNORE, Batch
from mtmegatron.config.derived import high_precision
from mtmegatron.config.schema import Config
from mtmegatron.device import Device
from mtmegatron.layers.build import Build
from mtmegatron.layers.fp8 import use_fp8
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.stages import build_chunks, parameters_of
from mtmegatron.optim.groups import setting_of
from mtmegatron.optim.optimizer import Optimizer
from mtmegatron.optim.schedule import learning_rate, weight_decay
from mtmegatron.parallel.canonical.exact import LOSS, Exact, sum_of_squares
from mtmegatron.parallel.data import Buckets
from mtmegatron.parallel.offload import Offload
from mtmegatron.parallel.pipeline.record import Recorder
from mtmegatron.parallel.pipeline.run import Run
from mtmegatron.parallel.pipeline.schedule import Action, Plan, schedule
from mtmegatron.placement import initialise
from mtmegatron.precision.amax import Histories
from mtmegatron.precision.fp8 import Fp8
from mtmegatron.precision.gemm import Gemm
from mtmegatron.precision.recipes import recipe_of
from mtmegatron.precision.scaling import LossScale
from mtmegatron.precision.types import Types, types_of
from mtmegatron.train.experts import ExpertLayers, Loads


@dataclass
class StepResult:
    """What a step tells: token-mean loss of the global batch (z term apart), gradient norm before clipping, learning rate, valid tokens.

    `ahead`: the loss of each depth of multi-token prediction, the mean over its own valid labels. `experts`: loads of
    the layers with experts, None without any or where the step changed nothing. `fault`: empty, or why the step changed nothing; `overflow`: it was the
    loss scale alone."""

    loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    fault: str = ""
    ahead: tuple[float, ...] = ()
    experts: Loads | None = None
    overflow: bool = False


@dataclass
class Engine:
    """The model part, buckets and optimizer of one rank.

    `read`: numbers of the device on the host, where a step waits for the device; a rank that is only described has none.
    `device`: whose streams carry what is offloaded; a CPU's has none, and copies then are done at once. `types`: those of the precision by default;
    others let a proof separate how a recipe quantises from how a layout rounds."""

    config: Config
    mesh: Mesh
    native_bf16: bool = True
    read: Callable[[Tensor], list] = Tensor.tolist
    device: Device = Device("cpu")
    types: Types | None = None

    def __post_init__(self) -> None:
        config, mesh, p = self.config, self.mesh, self.config.parallel
        canonical = config.train.numerics == "canonical"
        self.types = self.types or types_of(config.train.precision, canonical)
        self.loss_scale = LossScale.of(config.train.loss_scale) if config.train.precision == "fp16" else None
        self.exact = Exact(config.train.blocks, config.data.sequence // (2 * config.train.blocks)) if canonical else None
        again = frozenset(config.recompute.parts if config.recompute.mode == "selective" else ())
        self.offload = Offload(self.device) if config.recompute.offload else None
        self.build = Build(
            mesh, self.types.compute, Gemm(self._native, self.device.mixed_products), context_kind=p.context_kind, recompute=again,
            offload=self.offload, exact=self.exact, loss_scale=self.loss_scale,
        )  # fmt: skip
        self.chunks = build_chunks(config, self.build)
        self.fp8 = self._use_fp8()
        self.names = {param: name for chunk in self.chunks for name, param in chunk.named_parameters()}
        initialise(self.names, mesh.layout, mesh.rank, config.train.seed)
        units = {unit: modules for chunk in self.chunks for unit, modules in chunk.units().items()}
        self.buckets = Buckets(
            units, self.names, mesh, self.types, zero=p.zero, bucket_bytes=p.bucket_mb * 2**20, overlap=p.overlap,
            reduce_dtype=torch.bfloat16 if p.reduce == "bf16" else None,
            buffers={name: buffer for chunk in self.chunks for name, buffer in chunk.named_buffers()},
        )  # fmt: skip
        if self.offload is not None:
            self.offload.leave(self.names)
        self.optimizer = Optimizer(config.optimizer, self.buckets, self.types, partial(parameters_of, config), config.train.seed)
        for param, name in self.names.items():
            param.requires_grad_(setting_of(name, param.placement, config.optimizer).kind != "frozen")
        self.experts = ExpertLayers(config, self.chunks, mesh) if config.model.moe else None
        for chunk in self.chunks:
            chunk.hooks = self.buckets

    @property
    def _native(self) -> bool:
        """Whether the device multiplies the compute type itself."""
        return self.device.type != "cpu" if self.types.compute == torch.float16 else self.native_bf16

    def _use_fp8(self) -> Fp8 | None:
        """What the layers in fp8 have in common, once these layers have been told; None in another precision."""
        train, mesh = self.config.train, self.mesh
        recipe = recipe_of(train.precision)
        if recipe is None:
            return None
        axes, settings = (mesh["tensor"], mesh["data", "context"]), train.fp8
        histories = Histories(axes, settings.history, settings.margin, settings.interval) if recipe.delayed else None
        fp8 = Fp8(recipe, settings.format, mesh.layout, mesh.rank, self.device.native_fp8, self.config.parallel.zero < 3, histories)
        for chunk in self.chunks:
            use_fp8(chunk.named_modules(), fp8, high_precision(self.config))
        return fp8

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
        return self.update(self.backward(batches, step, recorder), step)

    def backward(self, batches: list[Batch], step: int, recorder: Recorder | None = None) -> StepResult:
        """A step as far as its reduced gradients, which are in the buckets."""
        tokens = self.count_tokens(batches)
        loss, z_loss, norm, ahead = self._gradients(batches, tokens, step, recorder)
        return StepResult(loss, z_loss, norm, learning_rate(self.config, step), tokens, self._fault(loss, norm, tokens), ahead)

    def update(self, result: StepResult, step: int) -> StepResult:
        """The rest of the step that `backward` began."""
        if not result.fault:
            clip, norm = self.config.optimizer.clip, result.grad_norm
            self.optimizer.step(result.lr, clip / norm if clip and norm > clip else 1.0, weight_decay(self.config, step))
            result.experts = self.experts.finish() if self.experts else None
            if self.fp8 and self.fp8.histories:
                self.fp8.histories.finish()
        if self.loss_scale:
            self._rescale(result)
        return result

    def _rescale(self, result: StepResult) -> None:
        """Lets the loss scale know how the step went; a step that it alone was the reason to skip says so."""
        if not result.fault:
            self.loss_scale.succeeded()
        elif result.tokens and math.isfinite(result.loss) and not math.isfinite(result.grad_norm):
            before = self.loss_scale.scale
            self.loss_scale.overflowed()
            result.overflow = True
            result.fault = f"the gradient overflowed at a loss scale of {before:g}, the next is {self.loss_scale.scale:g}"

    def gradients(self, batches: list[Batch], tokens: int, step: int = 0, recorder: Recorder | None = None) -> tuple[float, float, float]:
        """Reduced gradients of one global batch in the buckets; returns (loss, z term, gradient norm)."""
        return self._gradients(batches, tokens, step, recorder)[:3]

    def _gradients(self, batches: list[Batch], tokens: int, step: int, recorder: Recorder | None) -> tuple[float, float, float, tuple[float, ...]]:
        """`gradients`, and the loss of each depth of multi-token prediction."""
        self.buckets.start(self.optimizer.reduces)
        self._start_fp8()
        if self.experts:
            self.experts.start()
        if self.exact:
            self.exact.spoiled = False
        counts = self._count_ahead(batches)
        stages = _Training(self, batches, self._scale / max(tokens, 1), step, self._factors(counts))
        self._run(stages, training=True, recorder=recorder)
        self.buckets.finish()
        if self.loss_scale:
            self.buckets.scale_gradients(1.0 / self._scale)
        self.optimizer.prepare_gradients()
        loss, z_loss, *ahead, squared = self._exact_totals(stages) if self.exact else self._totals(stages)
        norm = math.sqrt(squared) if squared >= 0 else math.nan
        return loss / max(tokens, 1), z_loss / max(tokens, 1), norm, tuple(total / max(n, 1) for total, n in zip(ahead, counts))

    def _totals(self, stages: "_Training") -> list[float]:
        """Sums over all ranks: loss, z term, loss of each depth of multi-token prediction, squared gradient norm."""
        wide = torch.promote_types(self.types.gradient, torch.float32)
        numbers = torch.stack([*(x.to(wide) for x in stages.sums()), self.buckets.squared_norm().to(wide)])
        return self.read(self.mesh.world.all_reduce(numbers))

    def _exact_totals(self, stages: "_Training") -> list[float]:
        """The same with canonical numerics; a step with a number that did not fit on the grid has a norm of NaN."""
        spoiled = torch.tensor(int(self.exact.spoiled), device=self.mesh.device)
        *sums, spoiled = self.read(self.mesh.world.all_reduce(torch.stack([*stages.sums(), spoiled])))
        squared = sum_of_squares(self.buckets.counted_gradients(), self.mesh.world)
        return [*(total * 2.0**-LOSS for total in sums), math.nan if spoiled else self.read(squared)]

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> tuple[float, int]:
        """(summed cross entropy, valid tokens) of one global batch; nothing of the training state changes."""
        tokens = self.count_tokens(batches)
        self._start_fp8()
        stages = _Training(self, batches, 1.0, None)
        self._run(stages, training=False)
        loss, _ = self.read(self.mesh.world.all_reduce(torch.stack(stages.sums())))
        return loss * 2.0**-LOSS if self.exact else loss, tokens

    def count_tokens(self, batches: list[Batch]) -> int:
        """Valid labels of the global batch."""
        own = torch.stack([(batch.labels != IGNORE).sum() for batch in batches]).sum().reshape(1)
        return self.read(self.mesh["data", "context"].all_reduce(own))[0]

    def _count_ahead(self, batches: list[Batch]) -> list[int]:
        """Valid labels of the global batch for each depth of multi-token prediction."""
        if self.config.model.prediction is None:
            return []
        own = torch.stack([(batch.ahead_labels != IGNORE).sum(1) for batch in batches]).sum(0)
        return self.read(self.mesh["data", "context"].all_reduce(own))

    def _factors(self, counts: list[int]) -> tuple[float, ...]:
        """On the summed loss of each depth: coefficient / depths / valid labels, times the loss scale."""
        prediction = self.config.model.prediction
        return tuple(self._scale * prediction.coefficient / prediction.depth / max(n, 1) for n in counts)

    @property
    def _scale(self) -> float:
        """The factor with which gradients are made."""
        return self.loss_scale.scale if self.loss_scale else 1.0

    def _start_fp8(self) -> None:
        """Weights may have changed: they are quantised anew."""
        if self.fp8:
            self.fp8.start(self.optimizer.updates)

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
        if not math.isfinite(norm):
            return "the gradient is not finite"
        limit = self.config.optimizer.skip_norm
        return f"the gradient norm {norm:.4g} is above `optimizer.skip_norm: {limit:g}`" if limit and norm > limit else ""

    def find_fault(self, batches: list[Batch], tokens: int, step: int) -> str:
        """Runs a step again and tells the first value that is not finite: its stage, micro-batch, direction. Weights stay as they are."""
        self.buckets.start()
        stages = _Training(self, batches, self._scale / max(tokens, 1), step, self._factors(self._count_ahead(batches)), watch=True)
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
    """The chunks of this rank for the pipeline executor, in one step.

    `scale`: the factor on the loss; `ahead`: those on the losses of multi-token prediction, which without them does not run."""

    def __init__(
        self, engine: Engine, batches: list[Batch], scale: float, step: int | None, ahead: tuple[float, ...] = (), watch: bool = False
    ):  # fmt: skip
        self.engine, self.batches, self.scale, self.step, self.ahead, self.watch = engine, batches, scale, step, ahead, watch
        self.parts: list[list[Tensor]] = []
        self.backwards = [0] * len(engine.chunks)
        self.put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.faults: list[tuple[int, int]] = []

    def forward(self, chunk: int, x: Tensor | None, micro_batch: int) -> Tensor:
        model, batch = self.engine.chunks[chunk], self.batches[micro_batch]
        hidden = model(x, batch, step=self.step)
        if not model.last:
            return hidden
        loss, *sums = model.loss(hidden, batch, self.scale, self.ahead, self.step)
        self.parts.append(sums)
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
        return torch.empty(tokens, engine.config.model.width, dtype=engine.model.stream, device=engine.mesh.device)

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
        """Summed loss, z term and losses of multi-token prediction of this rank's micro-batches; zeros on ranks that do not count them."""
        engine = self.engine
        if not engine.last or engine.mesh.coordinate("tensor") or not self.parts:
            wide = torch.int64 if engine.exact else torch.promote_types(engine.types.compute, torch.float32)
            return [torch.zeros((), dtype=wide, device=engine.mesh.device)] * (2 + len(self.ahead))
        return [torch.stack(column).sum() for column in zip(*self.parts)]
