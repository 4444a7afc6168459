"""Which chunks of a model a rank builds, from the configuration and its place in the pipeline."""

import torch

from mtmegatron.config.constraints import resolve
from mtmegatron.config.schema import Config, ParallelConfig
from mtmegatron.layers.build import Build
from mtmegatron.layout import Layout
from mtmegatron.mesh import Mesh
from mtmegatron.models.decoder import Decoder, table_at_both_ends
from mtmegatron.models.size import split_layers
from mtmegatron.parallel.pipeline.schedule import placement_of
from mtmegatron.placement import Placement


def build_chunks(config: Config, build: Build) -> list[Decoder]:
    """This rank's chunks, in the order of their local number, on the mesh's device.

    A table that the first and the last chunk of the model use is one module where both lie on this rank."""
    p, rank = config.parallel, build.mesh.coordinate("pipeline")
    place = placement_of(p.schedule, p.pipeline, p.chunks)
    split = split_layers(config.model, [holder for holder, _ in place], config.data.sequence, p.pipeline_layers)
    both_ends = table_at_both_ends(config.model)
    two_stages = both_ends and place[0][0] != place[-1][0]
    chunks: list[Decoder] = []
    with torch.device(build.mesh.device):
        for chunk in range(p.chunks):
            stage = place.index((rank, chunk))
            first, last = stage == 0, stage == len(place) - 1
            shared = chunks[0].embedding if last and both_ends and chunks and chunks[0].first else None
            chunks.append(Decoder(config, build, split[stage], first, last, embedding=shared, two_stages=two_stages))
    return chunks


def parameters_of(config: Config) -> dict[str, Placement]:
    """Names and descriptions of all parameters of a model, whatever the layout of the run; nothing is allocated."""
    single = resolve(config.model_copy(update={"parallel": ParallelConfig()}), 1)
    (model,) = build_chunks(single, Build(Mesh(Layout(), 0, "meta")))
    return {name: param.placement for name, param in model.named_parameters()}
