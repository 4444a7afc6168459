"""The state of a run from any layout to any layout, by every rank reading little.

Bits within one layout, rounding between two: the runs, and the bound for fp64, are those of tests/field/test_resume.py,
which has the layouts of ZeRO 0 and 1. Here are the others, each with each.
"""

from pathlib import Path

import pytest

from mtmegatron.checkpoint.folder import Folder
from mtmegatron.checkpoint.state import load, save
from mtmegatron.checkpoint.store import Store
from mtmegatron.verify.protocol import batches
from tests.field.test_resume import MOVED, RUN, whole_and_cut
from tests.field.training import contents, engine_of, lines_of, name, same_bits, spread, state_of
from tests.tiny import tiny

LAYOUTS = [
    {},
    {"data": 2, "zero": 3},
    {"pipeline": 2, "schedule": "zb-v", "zero": 2},
    {"tensor": 2, "context": 2},
    {"tensor": 4},
    {"data": 4, "zero": 1, "shard": 2},
    {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
]
RESUMED = [
    ({"data": 2, "zero": 2}, "fp32"),
    ({"data": 2, "zero": 3}, "fp32"),
    ({"data": 2, "zero": 3}, "bf16"),
    ({"data": 4, "zero": 3, "shard": 2}, "fp32"),
    ({"pipeline": 2, "schedule": "zb-v", "zero": 2}, "fp32"),
    ({"pipeline": 2, "schedule": "zb-v", "zero": 2}, "bf16"),
    ({"context": 2}, "fp32"),
    ({"context": 2, "zero": 3}, "bf16"),
]


# ---- the same layout: the same bits ----


@pytest.mark.parametrize("layout, precision", RESUMED, ids=name)
def test_a_resumed_run_is_the_uninterrupted_one(layout, precision, pool, tmp_path):
    """Saves here are plain ones; those in the background have the same bytes (test_background.py)."""
    whole, cut = whole_and_cut(pool, tmp_path, tiny(RUN), layout, layout, precision)
    assert same_bits(state_of(cut, 6), state_of(whole, 6))
    assert lines_of(cut) == lines_of(whole)


# ---- each layout to each ----


def first_rank(rank, world, config, layout, folder):
    """Three steps, a checkpoint, two more steps and another one; returns losses and norms of those two."""
    engine = engine_of(config, layout, rank, world)
    for step in range(3):
        engine.step(batches(engine, step), step)
    save(Folder(folder), 3, engine.optimizer, engine.mesh, {})
    return two_steps(engine, folder)


def other_rank(rank, world, config, layout, sources, root):
    """The same two steps from the checkpoint of each other layout; what was loaded is saved again untouched."""
    engine, numbers = engine_of(config, layout, rank, world), {}
    for first, (source, _) in sources.items():
        load(Folder(source).open(3), engine.optimizer, engine.mesh)
        engine.optimizer.publish()
        save(Folder(root / first), 3, engine.optimizer, engine.mesh, {})
        numbers[first] = two_steps(engine, root / first)
    return numbers


def two_steps(engine, folder) -> list[tuple[float, float]]:
    results = [engine.step(batches(engine, step), step) for step in (3, 4)]
    save(Folder(folder), 5, engine.optimizer, engine.mesh, {})
    return [(result.loss, result.grad_norm) for result in results]


@pytest.fixture(scope="module")
def sources(pool, tmp_path_factory) -> dict[str, tuple[Path, list]]:
    """Each layout's folder with checkpoints of 3 and 5, and its numbers of the two steps between."""
    made = {}
    for layout in LAYOUTS:
        folder = tmp_path_factory.mktemp("source")
        made[name(layout)] = folder, spread(pool, first_rank, layout, tiny(RUN), layout, folder)[0]
    return made


@pytest.mark.parametrize("then", LAYOUTS, ids=name)
def test_c07_a_layout_loads_every_other_and_goes_on_to_rounding(then, sources, pool, tmp_path):
    ranks = spread(pool, other_rank, then, tiny(RUN), then, sources, tmp_path)
    assert all(numbers == ranks[0] for numbers in ranks)
    for first, (folder, right) in sources.items():
        loaded, saved, a, b = (contents(Folder(f).open(step)) for step in (3, 5) for f in (tmp_path / first, folder))
        assert same_bits(loaded, saved), "as loaded, so saved"
        if first == name(then):
            assert ranks[0][first] == right and same_bits(a, b)
        for mine, other in zip(ranks[0][first], right, strict=True):
            assert mine == pytest.approx(other, rel=MOVED), first
        assert a.keys() == b.keys()
        for key in b:
            assert (a[key] - b[key]).abs().max() <= MOVED * max(1.0, float(b[key].abs().max())), (first, key)


# ---- frugal ----

LARGE = tiny(
    model={"layers": 2, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 1536, "vocab": 8192, "tied": True},
    train={"global_batch": 4, "micro_batch": 1},
    parallel={"bucket_mb": 4.0},
)  # 126 MiB of masters and moments


def save_rank(rank, world, layout, folder):
    engine = engine_of(LARGE, layout, rank, world, "fp32")
    save(Folder(folder), 1, engine.optimizer, engine.mesh, {})


def memory(what: str) -> int:
    """Bytes: VmRSS now, VmHWM at its highest since `clear_refs`. Mapped files count: both are above private memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def load_rank(rank, world, layout, folder):
    """(growth of the peak while loading, own share of the state, files that were read) of one rank, in bytes."""
    engine, files = engine_of(LARGE, layout, rank, world, "fp32"), set()
    store = Store(Folder(folder).path(1), on_read=lambda file, key: files.add(file))
    share = sum(t.numel() * t.element_size() for state in engine.optimizer.states for t in state.tensors.values())
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    load(store, engine.optimizer, engine.mesh)
    return memory("VmHWM") - before, share, files


@pytest.fixture(scope="module")
def large(pool, tmp_path_factory):
    """A checkpoint of four equal shards; its folder and the size of one."""
    folder, layout = tmp_path_factory.mktemp("large"), {"data": 4, "zero": 1}
    spread(pool, save_rank, layout, layout, folder)
    sizes = [path.stat().st_size for path in Folder(folder).path(1).glob("rank-*")]
    assert len(sizes) == 4 and max(sizes) < 1.01 * min(sizes) and min(sizes) > 30 << 20
    return folder, max(sizes)


@pytest.mark.parametrize("layout", [{"data": 4, "zero": 1}, {"data": 4, "zero": 3}, {"tensor": 4}, {}], ids=name)
def test_r04_loading_needs_the_own_share_and_one_shard(layout, large, pool):
    folder, shard = large
    for rank, (grown, share, files) in enumerate(spread(pool, load_rank, layout, layout, folder)):
        assert grown <= 1.2 * (share + shard), f"{grown >> 20} MiB for {share >> 20} and a shard of {shard >> 20}"
        if layout == {"data": 4, "zero": 1}:
            assert files == {f"rank-{rank:05d}.safetensors"}, "where the layout is the same, no file but the own"
