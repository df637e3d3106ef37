"""Pools of the tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.toolkit.pool import Pool


@pytest.fixture(scope="module")
def lone() -> Iterator[Pool]:
    """One rank."""
    with Pool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two ranks that share the device. NCCL refuses that, so their group is gloo's."""
    with Pool(2) as pool:
        yield pool
