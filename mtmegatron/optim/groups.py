"""Which optimizer, learning rate and decay each parameter gets: from its placement, and from the groups of the configuration.

Notable: a parameter is known by its name alone, so groups are the same in every layout and after a resume.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mtmegatron.config.schema import GroupConfig, OptimizerConfig
from mtmegatron.errors import UserError
from mtmegatron.placement import Placement

OUTER = ("embedding", "positions", "head")  # tables at the two ends of a model: no hidden matrices


@dataclass(frozen=True)
class Setting:
    """How a parameter is updated. `lr`, `decay`: factors on those of the update; kind `frozen`: it is not."""

    kind: str
    lr: float
    decay: float


def setting_of(name: str, placement: Placement, o: OptimizerConfig) -> Setting:
    """The setting of a parameter."""
    group = group_of(name, o.groups)
    if group is not None and group.frozen:
        return Setting("frozen", 0.0, 0.0)
    kind = group.kind if group and group.kind else o.kind
    if kind == "muon" and not is_hidden_matrix(name, placement):
        kind = "adamw"
    decay = float(placement.decay) if group is None or group.decay is None else group.decay
    return Setting(kind, group.lr if group else 1.0, decay)


def group_of(name: str, groups: list[GroupConfig]) -> GroupConfig | None:
    """The first group whose pattern fits."""
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def is_hidden_matrix(name: str, placement: Placement) -> bool:
    """Whether a parameter is a matrix, or one for each expert, between embedding and head."""
    return len(placement.shape) >= 2 and name.split(".")[0] not in OUTER


def check_groups(groups: list[GroupConfig], known: Mapping[str, Placement]) -> None:
    """UserError for groups that fit no parameter of the model (`known`), or one that their optimizer cannot update."""
    taken = {name: group_of(name, groups) for name in known}
    faults = [line for i, group in enumerate(groups) for line in _faults(i, group, known, taken)]
    if all(group is not None and group.frozen for group in taken.values()):
        faults.append("`optimizer.groups` freeze every parameter, there is nothing to train: leave some out")
    if faults:
        raise UserError("\n".join(faults))


def _faults(number: int, group: GroupConfig, known: Mapping[str, Placement], taken: Mapping[str, GroupConfig | None]) -> list[str]:
    here = f"`optimizer.groups.{number}.match: {group.match}`"
    fits = [name for name in known if fnmatchcase(name, group.match)]
    mine = [name for name in fits if taken[name] is group]
    if not fits:
        return [f"{here} fits no parameter: use a pattern of these names: {_short(list(known))}"]
    if not mine:
        return [f"{here} fits only parameters that earlier groups take ({_short(fits)}): remove it, or put it before them"]
    others = [name for name in mine if not is_hidden_matrix(name, known[name])]
    if group.kind == "muon" and others:
        return [f"{here} with `kind: muon` fits what is no matrix between embedding and head ({_short(others)}): use a narrower pattern"]
    return []


def _short(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
