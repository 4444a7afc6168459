"""From samples to the micro-batches of one rank. No state: the samples of step s are numbers s x global batch and on, whatever the layout.

Notable: micro-batch i of data rank d takes `micro_batch` samples from i x data x micro_batch + d x micro_batch on, so one global order is dealt
out and another number of data ranks deals the same cards. Which rank holds a sample never changes the loss, which is a sum over tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from mtmegatron.batch import IGNORE, Batch, Bounds
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
    first, size = step * train.global_batch, train.micro_batch
    count = train.global_batch // (size * ranks)
    starts = [first + (i * ranks + data_rank) * size for i in range(count)]
    return [list(range(start, start + size)) for start in starts]


def micro_batches(config: Config, samples: Samples, mesh: Mesh, step: int) -> list[Batch]:
    """The micro-batches of this rank in a step: those of its data rank, of which it holds its context rank's tokens."""
    made, split = [], ContextSplit(mesh.layout.context, mesh.coordinate("context"))
    data_rank, device = mesh.coordinate("data"), mesh.device
    for numbers in sample_numbers(config, data_rank, step):
        batch = assemble(config, [samples[i] for i in numbers], device)
        first = (numbers[0] - step * config.train.global_batch) * config.data.sequence
        batch.numbers = torch.arange(first, first + batch.tokens.shape[0], device=device)
        made.append(split.select(batch, len(numbers)))
    return made


def assemble(config: Config, samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """Samples of S + 1 tokens, end to end, as inputs and labels. Shapes: B samples -> T = B x S."""
    length, masked = config.data.sequence, config.data.mask_documents
    tokens = np.stack([sample.tokens for sample in samples])
    labels = tokens[:, 1:].copy()
    if config.data.mask_boundary_loss:
        for row, sample in zip(labels, samples):
            row[sample.starts[sample.starts > 0] - 1] = IGNORE
    bounds = _document_bounds(samples, length) if masked else Bounds.equal(len(samples), length)
    positions = np.concatenate([np.arange(n) for n in bounds.lengths])
    arrays = (np.ascontiguousarray(tokens[:, :-1]).reshape(-1), labels.reshape(-1), positions)
    return Batch(*(torch.from_numpy(a).to(device) for a in arrays), bounds)


def _document_bounds(samples: Sequence[Sample], length: int) -> Bounds:
    """Bounds at each document and each sample."""
    starts = [row * length + int(s) for row, sample in enumerate(samples) for s in sample.starts if s < length]
    return Bounds((*starts, len(samples) * length))
