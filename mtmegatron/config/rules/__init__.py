"""Rules of what does not fit together, by subject: each yields lines `fact: reason: repair`. `config/constraints.py` runs them all.

Notable: a rule is given the configuration, the same resolved, and the number of processes.
"""

from collections.abc import Iterator


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def one_of(values: list[int]) -> str:
    head = [str(v) for v in values]
    if len(head) > 8:
        head = head[:7] + ["..", head[-1]]
        return ", ".join(head)
    return head[0] if len(head) == 1 else f"{', '.join(head[:-1])} or {head[-1]}"


def idle(section: str, given: object, active: dict[str, tuple[object, str]]) -> Iterator[str]:
    """A line for each value that was changed and takes no part; `active`: for each name whether it does, and with what it would."""
    for name, (used, other) in active.items():
        if not used and getattr(given, name) != type(given).model_fields[name].default:
            yield f"`{section}.{name}: {str(getattr(given, name)).lower()}` has no effect without {other}: remove it, or set that"
