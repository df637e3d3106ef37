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
