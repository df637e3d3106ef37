"""Directories of checkpoints."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint import exported


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is one: thousands of fsyncs."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as directory:
        yield Path(directory)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A directory for checkpoints, which is not there yet."""
    return str(tmp_path / "checkpoints")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "global_step12"
    exported.make_checkpoint(path, exported.contents(), exported.PARAMETERS, exported.BUFFERS)
    return path
