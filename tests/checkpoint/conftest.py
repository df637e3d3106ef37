"""Fixtures for the tests of crashes and of damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint import faults
from tests.toolkit.pool import Pool


@pytest.fixture(scope="module")
def alone() -> Iterator[Pool]:
    """One process without a process group, whose threads a fork would not have."""
    with Pool(1, init_group=False) as pool:
        yield pool


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    with faults.memory(tmp_path) as directory:
        yield directory


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A directory for checkpoints, which is not there yet."""
    return str(tmp_path / "checkpoints")
