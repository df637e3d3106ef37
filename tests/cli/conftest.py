"""Fixtures of the tests of the command."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.sites import MakeSite, build_site


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[MakeSite]:
    """``make_site(2, 1)`` makes hosts with so many slots each, which go at the end of the test."""
    with ExitStack() as stack:
        yield functools.partial(build_site, stack, tmp_path)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus that is easy to learn: forty files, some of which the example's split takes for validation."""
    directory = tmp_path_factory.mktemp("text")
    for i in range(40):
        (directory / f"part{i}.txt").write_text(f"Chapter {i}: the cat sat on the mat, and the rat ran.\n" * 20)
    return directory
