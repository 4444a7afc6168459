"""The training loop: from a configuration and this process's place to a trained, saved model.

Notable, in order: everything the user can have said wrong is checked before the process group exists; then the mesh, the model, the newest
checkpoint; then steps. The loop holds no state of its own but the step number, so resuming is starting at another number.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mtmegatron.checkpoint.background import Background
from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import save, together
from mtmegatron.config.constraints import check
from mtmegatron.config.derived import layout_of
from mtmegatron.config.ramp import batch_size, samples_before, without_ramp
from mtmegatron.config.schema import Config
from mtmegatron.data.loader import micro_batches
from mtmegatron.device import Device, choose_device
from mtmegatron.errors import UserError
from mtmegatron.launch import report, start_group
from mtmegatron.mesh import Mesh
from mtmegatron.models.size import training_flops
from mtmegatron.models.stages import parameters_of
from mtmegatron.optim.groups import check_groups
from mtmegatron.parallel.pipeline.record import Recorder
from mtmegatron.process import Process
from mtmegatron.train.corpus import Corpus, open_corpus, with_vocabulary
from mtmegatron.train.engine import Engine, StepResult
from mtmegatron.train.experts import numbers_of
from mtmegatron.train.loads import LoadHistory
from mtmegatron.train.metrics import Metrics, require_wandb, throughput
from mtmegatron.train.picture import loss_picture
from mtmegatron.train.progress import Progress
from mtmegatron.train.resume import resume
from mtmegatron.train.timeline import write_timeline


def prepare(config: Config, world: int) -> tuple[Config, Corpus]:
    """The configuration as the run uses it, and its data. Raises UserError for all that can be known without processes."""
    device = choose_device(config.device).type  # what `auto` is on this machine
    resolved = check(with_vocabulary(config.model_copy(update={"device": device})), world)
    if resolved.optimizer.groups:
        check_groups(resolved.optimizer.groups, parameters_of(resolved))
    _check_folder(Path(resolved.train.folder))
    require_wandb(resolved.log)
    return resolved, open_corpus(resolved)


def train(config: Config, process: Process) -> int:
    """Trains in this process, one of `process.world`; says what went wrong and returns the exit code. `launch.leave` comes next."""
    store = None
    try:
        config, corpus = prepare(config, process.world)
        _check_fresh(config, process)
        device = choose_device(config.device, process.local_rank)
        if config.train.numerics == "canonical":
            device.take_one_thread()
        store = start_group(process, device, config.train.timeout)
        mesh = Mesh(
            layout_of(config), process.rank, device.torch_device, ordered_sum=device.ordered_sum, connect=process.world > 1,
            shared=config.parallel.shared_memory, narrow_sum=device.narrow_sum,
        )  # fmt: skip
        Loop(config, corpus, device, mesh, Engine(config, mesh, device.native_bf16_matmul, device=device)).run()
        return 0
    except BaseException as error:
        return report(process, error, store)


@dataclass
class Loop:
    """The steps of a run on one rank."""

    config: Config
    corpus: Corpus
    device: Device
    mesh: Mesh
    engine: Engine
    after_step: Callable[[int, StepResult], None] = lambda step, result: None
    skipped: int = field(default=0, init=False)

    def run(self) -> None:
        """Resumes if there is something to resume, trains to the last step, evaluates, saves, draws."""
        config, rank = self.config, self.mesh.rank
        self.folder = Folder(Path(config.train.folder) / "checkpoints")
        found, notes = None, []
        if config.train.resume != "never":
            found = resume(self.engine, self.folder, self._extra(), notes.append)
        if config.train.resume == "must" and found is None:
            raise UserError(f"`train.resume: must`, but {self.folder.root} holds no good checkpoint: give the folder of the run to go on with")
        first = found or 0
        self.progress = Progress(config.train.steps, first, rank=rank)
        self.metrics = Metrics(Path(config.train.folder), config.log, first_step=first, rank=rank)
        self.loads = LoadHistory(Path(config.train.folder), first) if config.model.moe and rank == 0 else None
        self.background = Background(self.folder, self.engine.optimizer, self.mesh, self.progress.say, self._saved)
        try:
            self._announce([] if found is None else notes + self._missed(first))
            for step in range(first, config.train.steps):
                self._one_step(step)
            self._finish(first)
        finally:
            self.background.close()
            self.metrics.close()
            self.progress.close()

    def _one_step(self, step: int) -> None:
        begin = time.perf_counter()
        batches = micro_batches(self.config, self.corpus.train, self.mesh, step)
        recorder = Recorder(self.mesh, self.device) if step + 1 == self.config.train.timeline else None
        result = self.engine.step(batches, step, recorder)
        if result.fault:
            self._on_fault(step, result, batches)
        else:
            self.skipped = 0
        self.after_step(step, result)
        done = step + 1
        if done % self.config.log.every == 0 or result.fault or done == self.config.train.steps:
            self._log(done, result, time.perf_counter() - begin)
        if recorder is not None:
            self._timeline(done, recorder)
        every = self.config.train.eval_every
        if every and done % every == 0 and done != self.config.train.steps:
            self._evaluate(done)
        self.background.poll()
        every = self.config.checkpoint.every
        if every and done % every == 0 and done != self.config.train.steps:
            self._save(done)

    def _finish(self, first: int) -> None:
        steps = self.config.train.steps
        if first >= steps:
            self.progress.say(f"nothing to do: the run already has {first} of {steps} steps")
            return
        self._evaluate(steps)
        if self.config.checkpoint.at_end:
            self._save(steps)
        else:
            self._draw_loads(steps)
        self.background.finish()
        if self.mesh.rank == 0:
            self.metrics.close()
            folder = Path(self.config.train.folder)
            loss_picture(folder / "metrics.jsonl", folder / "loss.png")

    def _log(self, step: int, result: StepResult, seconds: float) -> None:
        train, sequence = self.config.train, self.config.data.sequence
        peak = torch.tensor([float(self.device.memory_peak())], device=self.mesh.device)
        speed = throughput(
            batch_size(train, step - 1) * sequence, seconds, flops_per_token=training_flops(self.config.model, sequence),
            peak_per_rank=self.device.peak_flops(self.engine.types.compute), world=self.mesh.layout.world,
        )  # fmt: skip
        values: dict[str, Any] = {
            "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr, **speed,
            "memory_bytes": int(self.mesh.world.all_reduce(peak, "max").item()), "samples": samples_before(train, step), "tokens": result.tokens,
        }  # fmt: skip
        if train.z_loss:
            values["z_loss"] = result.z_loss
        values |= {f"prediction_{k}_loss": loss for k, loss in enumerate(result.ahead, 1)}
        if self.loads and result.experts:
            loads = result.experts.read()
            self.loads.add(step, loads)
            values |= numbers_of(loads)
        if result.fault:
            values["skipped"] = result.fault
        self.metrics.write(step, values)
        self.progress.update(step, values)

    def _timeline(self, step: int, recorder: Recorder) -> None:
        pipelines = recorder.gather()
        if self.mesh.rank == 0:
            folder = Path(self.config.train.folder)
            write_timeline(folder, step, pipelines)
            self.progress.say(f"step {step}: the pipeline's actions are in {folder / 'timeline.json'} and timeline.png")

    def _evaluate(self, step: int) -> None:
        if self.corpus.valid is None:
            return
        total, tokens = 0.0, 0
        for index in range(self.config.train.eval_batches):
            batches = micro_batches(without_ramp(self.config), self.corpus.valid, self.mesh, index)
            loss, count = self.engine.evaluate(batches)
            total, tokens = total + loss, tokens + count
        loss = total / max(tokens, 1)
        self.metrics.write(step, {"valid_loss": loss})
        self.progress.say(f"step {step}: validation loss {loss:.4f} over {tokens:,} tokens")

    def _draw_loads(self, step: int) -> None:
        """The loads of experts so far, before the checkpoint that a resumed run goes on from."""
        pixels = self.loads.write() if self.loads else None
        if pixels is not None:
            self.metrics.image(step, "experts/load", pixels)

    def _save(self, step: int) -> None:
        self._draw_loads(step)
        if self.config.checkpoint.asynchronous:
            self.background.start(step, self._extra())
            return
        begin = time.perf_counter()
        save(self.folder, step, self.engine.optimizer, self.mesh, self._extra())
        self._saved(step, time.perf_counter() - begin)

    def _saved(self, step: int, seconds: float) -> None:
        """A checkpoint exists; `seconds` after it was requested."""
        self.progress.say(f"step {step}: checkpoint complete in {self.folder.path(step)} ({seconds:.1f} s)")
        together(self.mesh, lambda: self.folder.prune(self.config.checkpoint.keep) if self.mesh.rank == 0 else None)

    def _extra(self) -> dict[str, Any]:
        """What the manifest tells beside the tensors."""
        tokenizer = self.corpus.tokenizer
        scale = self.engine.loss_scale
        return {
            "config": self.config.model_dump(mode="json"), "loss_scale": scale.state if scale else None, "layout": self.mesh.layout.describe(),
            "tokenizer": None if tokenizer is None else str(tokenizer.spec), "tokenizer_hash": None if tokenizer is None else tokenizer.hash,
        }  # fmt: skip

    def _on_fault(self, step: int, result: StepResult, batches: list) -> None:
        if result.overflow:
            return self.progress.say(f"step {step + 1} skipped: {result.fault}")
        self.skipped += 1
        broken = not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
        where = self.engine.find_fault(batches, result.tokens, step) if broken else ""
        text = f"step {step + 1} skipped: {result.fault}" + (f"; {where}" if where else "")
        self.progress.say(text)
        if self.skipped > self.config.train.max_skipped:
            self.background.wait()  # the way back may need it
            raise UserError(
                f"{text}\n{self.skipped} steps in a row were skipped (`train.max_skipped: {self.config.train.max_skipped}`): "
                "lower the learning rate, look at the data of these steps, or go on from an earlier checkpoint"
            )

    def _missed(self, first: int) -> list[str]:
        """What was asked for at a step that lies before this start, and is not there."""
        timeline = self.config.train.timeline
        if not timeline or timeline > first or (Path(self.config.train.folder) / "timeline.json").exists():
            return []
        return [f"no timeline is recorded: `train.timeline: {timeline}` is before step {first + 1}, where this run goes on"]

    def _announce(self, notes: list[str]) -> None:
        config, layout = self.config, self.mesh.layout
        for note in notes:
            self.progress.say(note)
        if self.mesh.not_shared:
            self.progress.say(f"`parallel.shared_memory`: some ranks exchange over the network instead, which is slower: {self.mesh.not_shared}")
        if self.corpus.epochs > 1:
            self.progress.say(f"the corpus is shorter than the run: it is read {self.corpus.epochs} times, each time in another order")
        self.progress.say(
            f"{layout.world} process{'es' * (layout.world > 1)} ({layout.describe()}) on {self.device.name}, {config.train.precision}, "
            f"{config.train.global_batch * config.data.sequence:,} tokens per step"
        )


def _check_folder(folder: Path) -> None:
    """The run's folder can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"`train.folder: {folder}` cannot be written: {error.strerror}: choose another folder or repair its permissions") from None


def _check_fresh(config: Config, process: Process) -> None:
    """A run that must not resume does not mix with an earlier one."""
    root = Path(config.train.folder) / "checkpoints"
    if config.train.resume == "never" and process.attempt == 0 and Folder(root).steps():
        raise UserError(f"`train.resume: never`, but {root} holds checkpoints of an earlier run: choose another train.folder, or resume: auto")
