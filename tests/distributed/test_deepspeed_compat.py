"""`zerolite.compat.deepspeed`: loops written for DeepSpeed give plain PyTorch's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zerolite.compat.deepspeed as deepspeed
from tests.toolkit.pool import Pools

CASES = "tests.distributed.cases.deepspeed_compat"
PARTS = "tests.distributed.cases.deepspeed_parts"
_FAST = {(1, "engine"), (2, "plain"), (3, "by hand")}


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        pytest.param(stage, kind, marks=() if (stage, kind) in _FAST else pytest.mark.slow)
        for stage in range(4)
        for kind in ("engine", "plain", "by hand")
    ],
)
def test_a_loop_trains_as_plain_pytorch(pools: Pools, stage: int, kind: str) -> None:
    for rank in pools(2).run(f"{CASES}:parity", {"stage": stage, "kind": kind}):
        assert rank["worst"] < 2e-6
        assert rank["norms"][0] == pytest.approx(rank["norms"][1], rel=1e-5)
        assert (rank["steps"], rank["batch"], rank["config"]) == (3, (16, 4, 2), stage)
        assert rank["prefixed"] and rank["applied"] and rank["lr"] and rank["note"] == "of the module"


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        pytest.param(1, {"offload_optimizer": CPU}, marks=pytest.mark.slow),
        pytest.param(2, {"cpu_offload": True}, marks=pytest.mark.slow),
        pytest.param(3, {"offload_optimizer": {**CPU, "pin_memory": True}}, marks=pytest.mark.slow),
        (3, {"offload_optimizer": CPU, "offload_param": CPU}),
    ],
)
def test_offload_trains_as_plain_pytorch(pools: Pools, stage: int, zero: dict[str, Any]) -> None:
    for rank in pools(2).run(f"{CASES}:parity", {"stage": stage, "kind": "engine", "zero": zero}):
        assert rank["worst"] < 2e-6 and rank["applied"] and rank["steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_a_compiled_module_trains_as_plain_pytorch(pools: Pools, stage: int) -> None:
    for rank in pools(2).run(f"{CASES}:parity", {"stage": stage, "kind": "compiled"}):
        assert rank["worst"] < 2e-6 and rank["applied"]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pipeline_trains_as_its_layers_in_one_process(pools: Pools, stage: int) -> None:
    for rank in pools(2).run(f"{PARTS}:pipeline", {"stage": stage}):
        assert rank["found"] == pytest.approx(rank["expected"], rel=1e-5)


def test_marked_modules_are_gathered_where_ranks_use_different_parts(pools: Pools) -> None:
    for worst in pools(2).run(f"{PARTS}:leaf_modules"):
        assert worst < 1e-6


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_continues_and_is_exported(pools: Pools, tmp_path: Path, stage: int) -> None:
    for rank in pools(2).run(f"{CASES}:resume", {"stage": stage, "folder": str(tmp_path)}):
        assert rank["path"] and rank["same"] and rank["exported"] and rank["overwrites"]
        assert rank["client_state"] == {"epoch": 4} and rank["missing"] == (None, {})
    assert (tmp_path / "latest").read_text().strip() == "global_step2"
    assert (tmp_path / "zero_to_fp32.py").stat().st_mode & 0o111


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_without_an_optimizer_and_a_second_engine(pools: Pools, stage: int) -> None:
    for rank in pools(2).run(f"{CASES}:reference_model", {"stage": stage}):
        assert rank == {"none": True, "same": True, "again": 1}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_of_deepspeed_is_loaded(pools: Pools, tmp_path: Path, stage: int) -> None:
    for rank in pools(2).run(f"{CASES}:load_deepspeeds", {"stage": stage, "folder": str(tmp_path)}):
        assert rank["same"] and rank["exported"] and rank["tied"]
        assert rank["state"] == ("global_step6", {"epoch": 3}, [0.5], 6)
        assert rank["left"] == []


def test_parts_of_parameters_are_read_and_set_by_rank(pools: Pools) -> None:
    for rank in pools(2).run(f"{CASES}:local_values"):
        assert all(rank.values()), rank
        assert len(rank) == 2 + 3 * 6


def test_parts_are_refused_where_parameters_are_whole() -> None:
    with pytest.raises(ValueError, match="that stage 3 has partitioned, got one of shape .* that is whole"):
        deepspeed.utils.safe_get_local_fp32_param(torch.nn.Parameter(torch.ones(2), requires_grad=False))
