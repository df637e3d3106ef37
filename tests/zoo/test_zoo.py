"""Architectures of transformers, tiny: every stage, precision and way of construction against plain PyTorch."""

from __future__ import annotations

import pytest

from tests.pool import Pools
from tests.zoo.architectures import ARCHITECTURES, Architecture

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[transformers]'")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.model)
def test_every_stage_gives_what_plain_pytorch_gives(pools: Pools, architecture: Architecture) -> None:
    for rank, problems in enumerate(
        pools(2).run("tests.zoo.cases:compare", {"architecture": architecture}, timeout=600)
    ):
        assert not problems, f"rank {rank}: " + "; ".join(problems)
