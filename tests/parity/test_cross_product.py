"""The cross product equals one process: every pair of values and over 60 triples (mtmegatron/verify/generate.py).

A case that fails is run again by what its test prints: `mtm verify ...`."""

import pytest

from mtmegatron.verify.generate import Space
from mtmegatron.verify.report import Trials

SPACE = Space()
CASES = SPACE.cover()


@pytest.fixture(scope="module")
def trials(pool):
    return Trials(SPACE, pool)


def name(case) -> str:
    return ", ".join(f"{d} {v}" for d, v in case.choice.items() if v != SPACE.plain[d])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_case_equals_serial(case, trials):
    print("mtm verify", case.words)  # pytest shows it when this fails, or a rank does
    failed = [check for check in trials.run(case) if not check.passed]
    assert not failed, failed
