"""From samples to the micro-batches of one rank. No state: the samples of step s are numbers s x global batch and on, whatever the layout.

Notable: micro-batch i of data rank d takes `micro_batch` samples from i x data x micro_batch + d x micro_batch on, so one global order is dealt
out and another number of data ranks deals the same cards. Which rank holds a sample never changes the loss, which is a sum over tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from mtmegatron.batch import IGNORE, Batch, Bounds
from mtmegatron.config.ramp import batch_size, samples_before
from mtmegatron.config.schema import Config
from mtmegatron.data.gpt import Sample
from mtmegatron.mesh import Mesh
from mtmegatron.parallel.context import ContextSplit


class Samples(Protocol):
    """Samples by their global number."""

    def __getitem__(self, i: int) -> Sample: ...


def sample_numbers(config: Config, data_rank: int, step: int) -> list[list[int]]:
    """Global sample numbers of each micro-batch of a data rank in a step."""
    train, ranks = config.train, config.parallel.data
    first, size = samples_before(train, step), train.micro_batch
    count = batch_size(train, step) // (size * ranks)
    starts = [first + (i * ranks + data_rank) * size for i in range(count)]
    return [list(range(start, start + size)) for start in starts]


def micro_batches(config: Config, samples: Samples, mesh: Mesh, step: int) -> list[Batch]:
    """The micro-batches of this rank in a step: those of its data rank, of which it holds its context rank's tokens."""
    made, split = [], ContextSplit(mesh.layout.context, mesh.coordinate("context"))
    data_rank, device = mesh.coordinate("data"), mesh.device
    for numbers in sample_numbers(config, data_rank, step):
        batch = assemble(config, [samples[i] for i in numbers], device)
        first = (numbers[0] - samples_before(config.train, step)) * config.data.sequence
        batch.numbers = torch.arange(first, first + batch.tokens.shape[0], device=device)
        made.append(split.select(batch, len(numbers)))
    return made


def assemble(config: Config, samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """Samples of S + 1 tokens or more, end to end, as inputs and labels. Shapes: B samples -> T = B x S."""
    length, data, prediction = config.data.sequence, config.data, config.model.prediction
    depth = prediction.depth if prediction else 0
    mask_ahead = data.mask_boundary_loss or data.mask_documents

    def shifted(k: int, mask: bool) -> np.ndarray:
        return np.concatenate([_shifted(sample, length, k, mask) for sample in samples])

    tokens = np.stack([sample.tokens[:length] for sample in samples]).reshape(-1)
    bounds = _document_bounds(samples, length) if data.mask_documents else Bounds.equal(len(samples), length)
    positions = np.concatenate([np.arange(n) for n in bounds.lengths])
    batch = Batch(*(torch.from_numpy(a).to(device) for a in (tokens, shifted(0, data.mask_boundary_loss), positions)), bounds)
    if depth:
        ahead_tokens = torch.from_numpy(np.stack([shifted(k, False) for k in range(depth)]))
        ahead_labels = torch.from_numpy(np.stack([shifted(k + 1, mask_ahead) for k in range(depth)]))
        batch.ahead_tokens = ahead_tokens.clamp_(min=0).to(device)  # who has no label may see any token
        batch.ahead_labels = ahead_labels.to(device)
    return batch


def _shifted(sample: Sample, length: int, depth: int, mask: bool) -> np.ndarray:
    """t_{i+depth+1} for each place i of a sequence; IGNORE where the sample has no such token, and with `mask` where it is of another document.

    Shapes: S."""
    labels = np.full(length, IGNORE, np.int64)
    known = sample.tokens[depth + 1 : depth + 1 + length]
    labels[: len(known)] = known
    if mask:
        document = np.searchsorted(sample.starts, np.arange(length + depth + 1), side="right")
        labels[document[:length] != document[depth + 1 :]] = IGNORE
    return labels


def _document_bounds(samples: Sequence[Sample], length: int) -> Bounds:
    """Bounds at each document and each sample."""
    starts = [row * length + int(s) for row, sample in enumerate(samples) for s in sample.starts if s < length]
    return Bounds((*starts, len(samples) * length))
