"""Which chunks of a model a rank builds, from the configuration and its place in the pipeline."""

import torch

from mtmegatron.config.schema import Config
from mtmegatron.layers.build import Build
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.size import split_layers
from mtmegatron.parallel.pipeline.schedule import placement_of


def build_chunks(config: Config, build: Build) -> list[Decoder]:
    """This rank's chunks, in the order of their local number, on the mesh's device.

    A tied table that the first and the last chunk of the model use is one module where both lie on this rank."""
    p, rank = config.parallel, build.mesh.coordinate("pipeline")
    place = placement_of(p.schedule, p.pipeline, p.chunks)
    split = split_layers(config.model, len(place), config.data.sequence, p.pipeline_layers)
    two_stages = config.model.tied and place[0][0] != place[-1][0]
    chunks: list[Decoder] = []
    with torch.device(build.mesh.device):
        for chunk in range(p.chunks):
            stage = place.index((rank, chunk))
            first, last = stage == 0, stage == len(place) - 1
            shared = chunks[0].embedding if last and config.model.tied and chunks and chunks[0].first else None
            chunks.append(Decoder(config, build, split[stage], first, last, embedding=shared, two_stages=two_stages))
    return chunks
