"""Windows continued in another precision, with ranks that have summed nothing; a save whose engine has gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import Pools

CASES = "tests.checkpoint.cases.windows"
PRECISIONS = [("fp16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "fp16")]


@pytest.mark.parametrize("stages", [(1, 1), pytest.param((3, 0), marks=pytest.mark.slow), (0, 3)], ids=str)
@pytest.mark.parametrize("pair", PRECISIONS, ids="-".join)
def test_in_another_precision(pools: Pools, tmp_path: Path, pair: tuple[str, str], stages: tuple[int, int]) -> None:
    case = {"directory": str(tmp_path), "saved": pair[0], "loaded": pair[1], "stages": stages}
    assert max(pools(2).run(f"{CASES}:in_another_precision", case)) < 0.02  # of 16 bits, where the scale is 2^16


@pytest.mark.parametrize("void", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stages", [(1, 1), (0, 0), (1, 3), pytest.param((2, 0), marks=pytest.mark.slow)], ids=str)
def test_of_a_rank_without_gradients(pools: Pools, tmp_path: Path, stages: tuple[int, int], void: int) -> None:
    pools(2).run(f"{CASES}:of_a_rank_without_gradients", {"directory": str(tmp_path), "stages": stages, "void": void})


def test_the_engine_is_gone_before_its_checkpoint_is_complete(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(f"{CASES}:engine_that_is_gone", {"directory": str(tmp_path)})
