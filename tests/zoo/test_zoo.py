"""Architectures of transformers and torchvision, tiny: every stage, precision and way of construction against plain
PyTorch."""

from __future__ import annotations

import importlib.util

import pytest

from tests.toolkit.pool import Pools
from tests.zoo.architectures import ARCHITECTURES, Architecture
from tests.zoo.torchvision_models import MODELS


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MODELS], ids=lambda architecture: architecture.model)
def test_every_stage_gives_what_plain_pytorch_gives(pools: Pools, architecture: Architecture) -> None:
    package = "transformers" if architecture.make is None else "torchvision"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for rank, problems in enumerate(
        pools(2).run("tests.zoo.cases:compare", {"architecture": architecture}, timeout=600)
    ):
        assert not problems, f"rank {rank}: " + "; ".join(problems)
