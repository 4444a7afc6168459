"""Laws of the whole package: who may name hardware, import whom, read the environment, make a parameter."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mtmegatron
from mtmegatron.config.constraints import check, faults
from mtmegatron.config.derived import layout_of
from mtmegatron.layers.build import Build
from mtmegatron.mesh import GROUPS, Mesh
from mtmegatron.models.decoder import Decoder
from mtmegatron.models.stages import build_chunks
from tests.tiny import GPT2, tiny

ROOT = Path(mtmegatron.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
HARDWARE = re.compile(r"\b(cuda|musa|nccl|mccl)\b", re.IGNORECASE)
# ground floor first: a room imports from its own floor and those below
FLOORS = [
    {"errors", "device", "layout", "config", "batch", "process", "shared_memory", "shared_messages", "shared_connect"},
    {"mesh", "placement", "launch"},
    {"parallel", "precision", "ops"},
    {"layers"},
    {"models", "data", "checkpoint", "optim"},
    {"train", "plan", "verify"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings(module: ast.Module) -> set[int]:
    """Ids of the constants that are strings standing alone: docstrings, also of fields."""
    return {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def names_of_devices(module: ast.Module) -> set[int]:
    """Ids of the constants in `device: Literal[...]`: the words by which a user chooses."""
    fields = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "device"
    ]
    return {
        id(constant)
        for field in fields
        for constant in ast.walk(field.annotation)
        if isinstance(constant, ast.Constant)
    }


def hardware_in_code(module: ast.Module) -> list[int]:
    """Lines whose code, not its comments or docstrings, names a device type or its library."""
    allowed, lines = docstrings(module) | names_of_devices(module), []
    for node in ast.walk(module):
        words = [
            value
            for field in ("id", "attr", "name", "arg", "module")
            if isinstance(value := getattr(node, field, None), str)
        ]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in allowed:
            words.append(node.value)
        if any(HARDWARE.search(word) for word in words):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", [f for f in FILES if place(f) != "device.py"], ids=place)
def test_only_device_py_names_hardware_in_code(path):
    assert hardware_in_code(tree(path)) == []


def test_the_rule_above_sees_what_it_should():
    code = 'x.cuda()\nfrom torch.cuda import c\ny = "nccl:0"\ndef f(musa=1): ...\n'
    code += '"""cuda"""\n# cuda\ndevice: Literal["cuda"]\nother: Literal["cuda"]\n'
    assert sorted(set(hardware_in_code(ast.parse(code)))) == [1, 2, 3, 4, 8]


def imports(module: ast.Module) -> list[tuple[int, str]]:
    """(line, room) of each import of this package, wherever it stands."""
    found = []
    for node in ast.walk(module):
        names = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        assert not (isinstance(node, ast.ImportFrom) and node.level), "relative imports hide where a name comes from"
        found += [(node.lineno, name.split(".")[1]) for name in names if name.startswith("mtmegatron.")]
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [f for f in FILES if f != ROOT / "__init__.py"], ids=place)
def test_imports_go_down_the_house(path):
    assert room(path) in FLOOR, "a new room needs a floor"
    upward = [(line, other) for line, other in imports(tree(path)) if FLOOR[other] > FLOOR[room(path)]]
    assert upward == []


def test_no_two_rooms_need_each_other():
    needs = {
        name: {other for path in FILES if room(path) == name for _, other in imports(tree(path))} - {name}
        for name in FLOOR
    }
    while needs:
        free = [name for name, others in needs.items() if not others & needs.keys()]
        assert free, f"a circle of imports among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


@pytest.mark.parametrize("path", FILES, ids=place)
def test_there_is_no_global_state(path):
    assert not [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]


def environment_reads(module: ast.Module) -> list[int]:
    """Lines that touch the environment, except those that hand it to `find_process` at the start of a command."""
    calls = [
        n
        for n in ast.walk(module)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "find_process" and not n.keywords
    ]
    handed = {id(argument) for call in calls for argument in call.args}
    names = ("environ", "environb", "getenv", "putenv")
    uses = [
        n.lineno for n in ast.walk(module) if isinstance(n, ast.Attribute) and n.attr in names and id(n) not in handed
    ]
    froms = [n for n in ast.walk(module) if isinstance(n, ast.ImportFrom) and n.module == "os"]
    return uses + [n.lineno for n in froms if any(a.name in names for a in n.names)]


@pytest.mark.parametrize("path", FILES, ids=place)
def test_only_the_start_reads_the_environment(path):
    assert environment_reads(tree(path)) == [] or place(path) == "launch.py"  # which sets that of its children


@pytest.mark.parametrize("path", FILES, ids=place)
def test_parameters_are_made_in_one_place(path):
    made = [
        n.lineno
        for n in ast.walk(tree(path))
        if isinstance(n, ast.Call) and ast.unparse(n.func) in ("nn.Parameter", "torch.nn.Parameter", "Parameter")
    ]
    assert not made or place(path) == "placement.py", made


@pytest.mark.parametrize("path", FILES, ids=place)
def test_every_file_says_what_it_is(path):
    if place(path) != "cli/__init__.py" or path.read_text():
        assert ast.get_docstring(tree(path)), "a file begins with its subject"


# ---- every parameter has its description ----

MODELS = [{}, GPT2["model"], {"tied": True, "bias_qkv": True, "kv_heads": 1}, {"bias_mlp": True, "activation": "geglu"}]


def models(config, world: int) -> list[tuple[Decoder, Mesh]]:
    """The part of the model on every rank, without memory."""
    own, made = check(config, world), []
    for rank in range(world):
        mesh = Mesh(layout_of(own), rank, "meta")
        made += [(chunk, mesh) for chunk in build_chunks(own, Build(mesh))]
    return made


@given(
    model=st.sampled_from(MODELS),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 4),
    data=st.integers(1, 2),
    sequence=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_every_parameter_is_described_and_its_parts_tile_it_once_per_copy(model, tensor, pipeline, data, sequence):
    parallel = {"tensor": tensor, "pipeline": pipeline, "data": data, "sequence": sequence and tensor > 1}
    config, world = tiny(model=model, parallel=parallel), tensor * pipeline * data
    assert not list(faults(config, world))
    held: dict[str, torch.Tensor] = {}
    described = {}
    for part, mesh in models(config, world):
        for key, param in part.named_parameters():
            placement = param.placement
            offset, size = placement.offset_and_size(mesh.layout, mesh.rank)
            assert tuple(param.shape) == size and described.setdefault(key, placement) == placement
            assert {"data", "context"} <= set(placement.summed)
            assert tuple("data_shards" if axis == "data" else axis for axis in placement.summed) in GROUPS
            count = held.setdefault(key, torch.zeros(placement.shape, dtype=torch.int32))
            count[tuple(slice(o, o + n) for o, n in zip(offset, size))] += 1
    layout = layout_of(check(config, world))
    for key, placement in described.items():
        # an element is held by the ranks over which its gradient is summed, times the copies that have the sum already
        assert held[key].unique().tolist() == [layout.size(placement.summed) * layout.size(placement.copies)], key
