"""Fixtures of the unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from zerolite.planning.fake_backend import DryPlatform
from zerolite.utils.accelerator import use_platform
from zerolite.zero import param_gatherer


@pytest.fixture
def without_ranks() -> Iterator[None]:
    with use_platform(DryPlatform()):
        yield


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what earlier tests of this process have compiled and captured: gathers would end with the step."""
    monkeypatch.setattr(param_gatherer, "_is_read_unseen", False)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
