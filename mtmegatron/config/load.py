"""From a YAML file and dotted overrides to a `Config`, with the origin of each value, all faults at once.

Notable: a fault of type or spelling is told in the words of the file (`parallel.tensr: unknown key; did you mean tensor?`), not in pydantic's.
"""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from mtmegatron.config.schema import Config
from mtmegatron.errors import UserError


@dataclass
class Loaded:
    """A configuration and, for each dotted key, where its value came from: `file`, `override`, `default`."""

    config: Config
    origins: dict[str, str] = field(default_factory=dict)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Loaded:
    """Reads `path`, applies `section.key=value` overrides and validates.

    Raises UserError with one line per fault."""
    tree = read_yaml(Path(path))
    origins = {key: f"file {path}" for key in _flatten(tree)}
    for text in overrides:
        key, value = _parse_override(text)
        _set(tree, key, value, text)
        origins = {k: v for k, v in origins.items() if k != key and not k.startswith(key + ".")}
        origins |= {k: "override" for k in (_flatten({key: value}) if isinstance(value, dict) else [key])}
    return Loaded(validate(tree, str(path)), origins)


def validate(tree: dict[str, Any], source: str) -> Config:
    """A tree of values as a Config; UserError lists every fault with its repair."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_fault(e) for e in error.errors() if not _of_another_form(e)]
        raise UserError(f"{source}: {len(lines)} fault{'s' * (len(lines) > 1)}\n" + "\n".join(f"  {x}" for x in lines)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Once)
    except FileNotFoundError:
        raise UserError(f"no configuration file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no sections; write at least `model:` with layers, width and heads")
    return tree


class _Once(yaml.SafeLoader):
    """YAML in which a key may stand once in a section; the library takes the last one and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, key in enumerate(keys):
            if key.value in {other.value for other in keys[:i]}:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice: keep one", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def values(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Every value of a configuration by its dotted key."""
    found: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        found |= values(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name: value}
    return found


def _parse_override(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UserError(f"override {text!r} is not of the form section.key=value")
    try:
        return key.strip(), _number(yaml.safe_load(value))
    except yaml.YAMLError:
        return key.strip(), value


def _number(value: Any) -> Any:
    """YAML 1.1 reads `3e-4` as text; people mean a number."""
    if isinstance(value, str) and value[:1].isdigit():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _set(tree: dict[str, Any], key: str, value: Any, text: str) -> None:
    *parents, leaf = key.split(".")
    for name in parents:
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise UserError(f"override {text!r}: {name} is a value, not a section")
    tree[leaf] = value


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for name, value in tree.items():
        keys += _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return keys


def _is_form(part: Any) -> bool:
    """Whether a part of a location is no key but one of the forms that a value may have."""
    return part == "str" or str(part).startswith("list[")


def _of_another_form(error: Any) -> bool:
    """A value that may be text or a list is judged as a list if it is one, else as text."""
    return _is_form(error["loc"][-1]) and isinstance(error["input"], list) == (error["type"] == "string_type")


def _fault(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"] if not _is_form(part))
    if error["type"] == "extra_forbidden":
        known = _known(error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        return f"{where}: unknown key; " + (f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}")
    if error["type"] == "missing":
        return f"{where}: must be given"
    return f"{where}: {error['input']!r} is refused: {error['msg'][0].lower()}{error['msg'][1:]}"


def _known(location: tuple[Any, ...]) -> list[str]:
    """The field names of the section at a location of the schema."""
    section: Any = Config
    for part in location:
        annotation = section.model_fields[part].annotation if isinstance(part, str) and part in section.model_fields else None
        for candidate in (annotation, *get_args(annotation), *(b for a in get_args(annotation) for b in get_args(a))):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                section = candidate
    return list(section.model_fields)
