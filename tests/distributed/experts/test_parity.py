"""Training with experts spread over ranks is training on the joint batch in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.toolkit import experts
from tests.toolkit.ranks import on_ranks
from tests.toolkit.sequences import needs_transformers

EXACT, ROUNDED = 1e-12, 1e-6


def assert_like_one_process(name: str, size: int, stage: str, tolerance: float, **how: Any) -> None:
    engine, norms, windows = experts.train(name, size, stage, **{k: v for k, v in how.items() if k != "factor"})
    clip, double = how.get("clip", 0.0), how.get("double", False)
    options = {k: v for k, v in how.items() if k not in ("clip", "double", "accumulation", "steps", "config")}
    wanted, wanted_norms = experts.in_one_process(name, windows, double, clip, **options)
    torch.testing.assert_close(experts.parameters_of(engine), experts.own_part(engine, wanted), rtol=0, atol=tolerance)
    assert norms == pytest.approx(wanted_norms, rel=tolerance)


@pytest.mark.fast("3 moving-4")
@on_ranks(2, 4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving", "3 tight", "3 defaults"])
def test_stages_match_one_process(stage: str) -> None:
    """In fp64, on different numbers of tokens, with accumulation and clipping; ep x dp is 2 x 1 and 2 x 2."""
    assert_like_one_process("Mixture", 2, stage, EXACT, double=True, accumulation=2, clip=0.3)


@pytest.mark.slow
@on_ranks(4, timeout=120)
@pytest.mark.parametrize("stage", ["0", "1", "2", "3 moving"])
def test_experts_over_all_ranks_match_one_process(stage: str) -> None:
    assert_like_one_process("Mixture", 4, stage, EXACT, double=True, accumulation=2, clip=0.3)


@pytest.mark.slow
@on_ranks(4, 8, timeout=240)
@pytest.mark.parametrize(
    "stage", ["0 in sets", "1 in sets", "2 in sets", "3 moving in sets", "3 tight in sets", "3 moving hierarchical"]
)
def test_replicas_match_one_process(stage: str) -> None:
    """Two sets of ranks have all experts each. In sets of four, two ranks have the same ones."""
    config = {"consistency_check_interval": 1}
    assert_like_one_process("Mixture", 2, stage, EXACT, double=True, accumulation=2, clip=0.3, config=config)


@needs_transformers
@pytest.mark.fast("mixtral-2")
@on_ranks(2, 4, timeout=120)
@pytest.mark.parametrize("name", list(experts.FAMILIES))
def test_families_of_hugging_face_match_one_process(name: str) -> None:
    """On four ranks ep x dp is 2 x 2 and 4 x 1."""
    for size in {2, dist.get_world_size()}:
        for stage in ("2", "3 moving"):
            assert_like_one_process(name, size, stage, ROUNDED)
