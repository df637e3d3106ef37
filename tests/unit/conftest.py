"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zerolite.planning.fake_backend import DryPlatform
from zerolite.utils.accelerator import use_platform


@pytest.fixture
def without_ranks() -> Iterator[None]:
    with use_platform(DryPlatform()):
        yield
