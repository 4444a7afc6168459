"""Round trips of rectangles, and damage of every kind: nothing damaged may load, and the message names the file."""

import random
import resource
import shutil
import subprocess
import sys
import tempfile
import weakref
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mtmegatron.checkpoint.rectangle import Box, Rectangle, dtype_name, flat_rectangles
from mtmegatron.checkpoint.store import (
    HEADER,
    CheckpointError,
    Store,
    _signed,
    write_manifest,
    write_shard,
)
from mtmegatron.errors import UserError
from tests.checkpoint import small

DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small.write(tmp_path, seed=3, run="alpha")
    return tmp_path


# ---- round trip ----


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern (NaNs too); for bool 0 and 1."""
    draw = torch.Generator().manual_seed(seed)
    width = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (prod(shape) * width,), generator=draw, dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


@st.composite
def boxes_of(draw, shape: tuple[int, ...]) -> Box:
    low_high = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in low_high), tuple(high - low for low, high in low_high))


@st.composite
def tilings(draw, shape: tuple[int, ...]) -> list[Box]:
    """A grid of blocks (tensor parallel), each then cut at flat positions (ZeRO), in random order."""
    if prod(shape) == 0:
        return [Box((0,) * len(shape), shape)]
    blocks = [Box((), ())]
    for n in shape:
        bounds = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))})
        blocks = [Box((*b.offset, low), (*b.size, high - low)) for b in blocks for low, high in zip(bounds, bounds[1:])]
    pieces = []
    for block in blocks:
        bounds = sorted({0, prod(block.size), *draw(st.lists(st.integers(0, prod(block.size)), max_size=2))})
        for start, stop in zip(bounds, bounds[1:]):
            for box in flat_rectangles(block.size, start, stop):
                pieces.append(Box(tuple(a + o for a, o in zip(block.offset, box.offset)), box.size))
    return draw(st.permutations(pieces))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_what_was_written_in_one_cut_is_read_in_any_other(data):
    whole, shards = {}, ([], [], [])
    for i in range(data.draw(st.integers(1, 3))):
        name, shape = f"layer.{i}.wéight", data.draw(st.lists(st.integers(0, 6), max_size=4).map(tuple))
        whole[name] = random_bytes(shape, data.draw(st.sampled_from(DTYPES)), seed=i)
        for box in data.draw(tilings(shape)):
            rectangle = Rectangle(name, shape, dtype_name(whole[name].dtype), *box)
            piece = whole[name][box.slices((0,) * len(shape))]
            shards[data.draw(st.integers(0, 2))].append((rectangle, piece))
    with tempfile.TemporaryDirectory() as folder:
        limit = data.draw(st.sampled_from((HEADER + 20, 1 << 30)))
        parts = [write_shard(Path(folder), rank, iter(items), limit) for rank, items in enumerate(shards)]
        write_manifest(Path(folder), parts, {})
        store = Store(folder)
        assert store.names == sorted(whole)
        for name, tensor in whole.items():
            assert store.shape(name) == tensor.shape and store.dtype(name) == tensor.dtype
            assert same_bits(store.read(name), tensor)
            box = data.draw(boxes_of(tuple(tensor.shape)))
            assert same_bits(store.read(name, *box), tensor[box.slices((0,) * tensor.dim())])
        store.verify()


def test_tensors_that_are_not_contiguous_or_require_gradients(tmp_path):
    transposed = torch.arange(12.0).reshape(3, 4).t()
    trained = torch.nn.Parameter(torch.arange(3.0))
    items = [(Rectangle.whole("t", transposed), transposed), (Rectangle.whole("p", trained), trained)]
    write_manifest(tmp_path, [write_shard(tmp_path, 0, items)], {})
    store = Store(tmp_path)
    assert torch.equal(store.read("t"), transposed)
    assert torch.equal(store.read("p"), trained.detach())


def test_extra_comes_back(folder):
    assert Store(folder).extra == {"step": 3, "run": "alpha"}


def test_files_are_plain_safetensors(folder):
    upper = load_file(folder / "rank-00000.safetensors")
    expected = small.tensors(3)
    assert sorted(upper) == ["head.weight@0,0", "norm.weight", "random_state", "step"]
    assert torch.equal(upper["head.weight@0,0"], expected["head.weight"][:4])
    assert torch.equal(upper["step"], expected["step"])


def test_a_read_is_fresh_memory(folder):
    """DeepSpeed#8385: master weights and a moment bound to the same memory after load."""
    store = Store(folder)
    store.read("head.weight").zero_()
    store.read("random_state").zero_()
    assert small.holds(store, 3)


# ---- what a write holds, what a read touches ----


def test_items_are_taken_one_at_a_time(tmp_path):
    made, most_alive = [], 0

    def items():
        nonlocal most_alive
        for i in range(5):
            tensor = torch.full((4,), float(i))
            made.append(weakref.ref(tensor))
            most_alive = max(most_alive, sum(ref() is not None for ref in made))
            yield Rectangle.whole(str(i), tensor), tensor
            del tensor

    write_shard(tmp_path, 0, items())
    assert len(made) == 5
    assert most_alive == 2  # the one that was just written and the one that comes next


def test_files_split_before_the_limit_and_when_the_header_is_full(tmp_path):
    kilobyte = torch.zeros(256)
    by_bytes = write_shard(
        tmp_path, 0, ((Rectangle.whole(f"t{i}", kilobyte), kilobyte) for i in range(7)), limit=HEADER + 3 * 1024
    )
    names = ("rank-00000.safetensors", "rank-00000-00001.safetensors", "rank-00000-00002.safetensors")
    assert {name: entry["bytes"] - HEADER for name, entry in by_bytes["files"].items()} == dict(
        zip(names, (3072, 3072, 1024))
    )
    long_names = [f"{i}".rjust(1000, "x") for i in range(100)]  # 100 kB of names in headers of 64 kB
    by_header = write_shard(tmp_path, 1, ((Rectangle.whole(name, kilobyte), kilobyte) for name in long_names))
    assert len(by_header["files"]) == 2
    write_manifest(tmp_path, [by_bytes, by_header], {})
    store = Store(tmp_path)
    store.verify()
    counts = [len(load_file(tmp_path / name)) for name in ("rank-00001.safetensors", "rank-00001-00001.safetensors")]
    assert sum(counts) == 100
    assert len(store.names) == 107


def test_only_intersecting_rectangles_are_read(tmp_path):
    """DeepSpeed#1111: every rank read everything at resume."""
    whole = torch.arange(64.0).reshape(8, 8)
    rows = [(Rectangle("w", (8, 8), "float32", (row, 0), (2, 8)), whole[row : row + 2]) for row in range(0, 8, 2)]
    parts = [write_shard(tmp_path, rank, [item]) for rank, item in enumerate(rows)]
    write_manifest(tmp_path, parts, {})
    touched = []
    store = Store(tmp_path, on_read=lambda file, key: touched.append((file, key)))
    for missing in ("rank-00000.safetensors", "rank-00003.safetensors"):
        (tmp_path / missing).unlink()
    assert torch.equal(store.read("w", (3, 2), (2, 5)), whole[3:5, 2:7])
    assert touched == [("rank-00001.safetensors", "w@2,0"), ("rank-00002.safetensors", "w@4,0")]
    touched.clear()
    assert store.read("w", (4, 0), (0, 8)).shape == (0, 8)
    assert touched == []


def test_reading_a_slice_does_not_allocate_the_whole(tmp_path):
    whole = torch.zeros(16 << 20, dtype=torch.uint8)
    write_manifest(tmp_path, [write_shard(tmp_path, 0, [(Rectangle.whole("w", whole), whole)])], {})

    code = (
        "import resource, sys; from pathlib import Path; from mtmegatron.checkpoint.store import Store\n"
        "data_now = int(Path('/proc/self/statm').read_text().split()[5]) * resource.getpagesize()\n"
        "room = data_now + (16 << 20) + (8 << 20)  # the mapped file, and half of another copy\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (room, resource.RLIM_INFINITY))\n"
        "assert Store(Path(sys.argv[1])).read('w', (1000,), (int(sys.argv[2]),)).numel() == int(sys.argv[2])"
    )

    def read(size: int) -> int:
        """In a new process: one that has worked may have room in what it freed."""
        return subprocess.run([sys.executable, "-c", code, str(tmp_path), str(size)], stderr=subprocess.DEVNULL).returncode

    assert read(1000) == 0
    assert read(15 << 20) == 1  # the limit does bite


# ---- our own faults ----


def test_holes_overlaps_and_contradictions_are_assertions(tmp_path):
    whole = torch.zeros(4, 4)
    top = (Rectangle("w", (4, 4), "float32", (0, 0), (2, 4)), whole[:2])
    bottom = (Rectangle("w", (4, 4), "float32", (2, 0), (2, 4)), whole[2:])
    other_shape = (Rectangle("w", (6, 4), "float32", (2, 0), (2, 4)), whole[2:])
    one, two, again, other = (
        write_shard(tmp_path, rank, [item]) for rank, item in enumerate((top, bottom, top, other_shape))
    )
    for parts, words in (
        ([one], "hole at"),
        ([one, two, again], "overlap at"),
        ([one, other], "against"),
        ([one, one], "two parts"),
    ):
        with pytest.raises(AssertionError, match=words):
            write_manifest(tmp_path, parts, {})
    assert not (tmp_path / "manifest.json").exists()
    write_manifest(tmp_path, [one, two], {})


def test_a_tensor_that_is_not_its_rectangle_is_an_assertion(tmp_path):
    rectangle = Rectangle("w", (4,), "float32", (0,), (4,))
    for rank, tensor in enumerate((torch.zeros(3), torch.zeros(4, dtype=torch.float64))):
        with pytest.raises(AssertionError):
            write_shard(tmp_path, rank, [(rectangle, tensor)])


# ---- damage ----


def read_all(folder: Path) -> None:
    store = Store(folder)
    for name in store.names:
        store.read(name)


def test_a_flipped_bit_anywhere_is_an_error_that_names_the_file(folder):
    draw = random.Random(0)
    for path in sorted(folder.iterdir()):
        intact = path.read_bytes()
        data = range(HEADER, len(intact))[:40]
        for position in (0, 7, 8, *data, len(intact) - 1, *draw.sample(range(len(intact)), 150)):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                read_all(folder)
            with pytest.raises(CheckpointError, match=path.name):
                Store(folder).verify()
        path.write_bytes(intact)
    assert small.holds(Store(folder), 3)


def test_the_message_for_a_flipped_byte_names_the_tensor(folder):
    path = folder / "rank-00001.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    store = Store(folder)
    assert torch.equal(store.read("step"), torch.tensor(3)), "the tensors in other files still read"
    for _ in range(2):  # a failed check is not remembered as a passed one
        with pytest.raises(
            UserError, match=r"rank-00001.safetensors is damaged: tensor head.weight at offset \[4, 0\] does not match"
        ):
            store.read("head.weight")
    assert torch.equal(store.read("head.weight", (0, 0), (4, 6)), small.tensors(3)["head.weight"][:4])


@pytest.mark.parametrize("length", (0, 1, 8, 500, -1, "longer"))
def test_a_file_of_another_length_is_an_error_that_names_it(folder, length):
    for path in sorted(folder.iterdir()):
        intact = path.read_bytes()
        path.write_bytes(intact + b"\n" if length == "longer" else intact[:length])
        for check in (read_all, lambda f: Store(f).check_sizes()):
            with pytest.raises(CheckpointError, match=path.name):
                check(folder)
        path.write_bytes(intact)


def test_a_file_that_is_missing_is_an_error_that_names_it(folder, tmp_path_factory):
    for path in sorted(folder.iterdir()):
        aside = tmp_path_factory.mktemp("aside") / path.name
        shutil.move(path, aside)
        for check in (read_all, lambda f: Store(f).check_sizes(), lambda f: Store(f).verify()):
            with pytest.raises(CheckpointError, match=f"{path.name}.*No such file"):
                check(folder)
        shutil.move(aside, path)


def test_a_file_of_another_checkpoint_is_noticed(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    small.write(other, seed=4)
    shutil.copy(other / "rank-00001.safetensors", folder)
    Store(folder).check_sizes()
    with pytest.raises(CheckpointError, match="rank-00001"):
        read_all(folder)


def test_a_tensor_that_is_missing_is_named_with_its_neighbours(folder):
    with pytest.raises(CheckpointError, match="no tensor head.weights; it has head.weight"):
        Store(folder).read("head.weights")


def test_an_edited_manifest_and_another_format_are_refused(folder):
    path = folder / "manifest.json"
    text = path.read_text()
    assert '"step":3' in text
    path.write_text(text.replace('"step":3', '"step":4'))
    with pytest.raises(CheckpointError, match="manifest.json does not match its own checksum"):
        Store(folder)
    path.write_bytes(_signed(b'{"format":2}'))
    with pytest.raises(CheckpointError, match="format 2; this version reads format 1"):
        Store(folder)


def test_verify_reads_again_what_was_read_before(folder):
    store = Store(folder)
    assert small.holds(store, 3)
    path = folder / "rank-00000.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(CheckpointError, match="rank-00000"):
        store.verify()


def test_a_refusal_of_the_system_names_the_path(tmp_path):
    """A file-size limit stands for the full disk: it binds root as well."""

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER + 1000, resource.RLIM_INFINITY))
        big = torch.zeros(10_000)
        with pytest.raises(UserError, match="cannot write .*rank-00000.safetensors: File too large"):
            write_shard(tmp_path, 0, [(Rectangle.whole("w", big), big)])
        with pytest.raises(UserError, match="cannot write .*manifest.json: File too large"):
            write_manifest(tmp_path, [], {"long": "x" * 100_000})
        with pytest.raises(UserError, match="cannot write .*rank-00001.safetensors: No such file"):
            write_shard(tmp_path / "absent", 1, [(Rectangle.whole("w", big), big)])

    assert small.in_child(write) == 0
    assert not (tmp_path / "manifest.json").exists()
