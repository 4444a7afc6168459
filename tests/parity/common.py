"""What the tests of this folder have in common: names of cases, and the verdict of the protocol on a layout."""

from mtmegatron.config.schema import Config
from mtmegatron.verify.pool import Pool
from mtmegatron.verify.protocol import Reference, compare, describe


def name(value: object) -> str:
    return value if isinstance(value, str) else describe(value)


def equals_serial(config: Config, layout: dict, precision: str, reference: Reference, pool: Pool) -> None:
    failed = [c for c in compare(config, layout, precision, reference, pool) if not c.passed]
    assert not failed, failed
