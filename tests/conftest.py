"""Fixtures of the whole suite: one thread per process, and one pool of Gloo processes for all tests that need ranks."""

import pytest
import torch

from mtmegatron.verify.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool():
    """Eight processes that stay for the whole session: starting them is what costs."""
    with Pool(8) as made:
        yield made
