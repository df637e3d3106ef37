"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools(world_size).run("module:function", kwargs)``: persistent distributed workers, killed at the end of the
    session."""
    pools = Pools()
    try:
        yield pools
    finally:
        pools.close()
