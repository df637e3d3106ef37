"""Checkpoints, full states and export of experts that ranks spread have the whole model's names and values."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerolite
from tests.checkpoint.exported import read_model
from tests.toolkit import experts
from tests.toolkit.compare import from_all_ranks
from tests.toolkit.ranks import on_ranks

STEPS = 2


def step(engine: Any, first: int) -> None:
    rank, ranks = engine.data_parallel_rank, engine.data_parallel_world_size
    engine.backward(experts.loss_of(engine(**experts.batch_of(first * ranks + rank, 3 + 4 * rank))))
    engine.step()


def trained(size: int, stage: str) -> Any:
    engine = experts.make("Mixture", size, stage, double=True)
    for place in range(STEPS):
        step(engine, place)
    return engine


def wanted_after(ranks: int) -> dict[str, torch.Tensor]:
    windows = [[experts.batch_of(s * ranks + r, 3 + 4 * r) for r in range(ranks)] for s in range(STEPS + 1)]
    return experts.in_one_process("Mixture", windows, True, 0.0)[0]


SETTINGS = [(1, "2"), (2, "0"), (4, "1"), (2, "2"), (2, "3 moving"), (4, "3 moving"), (1, "3 moving")]
SETTINGS += [(2, "1 in sets"), (2, "3 moving hierarchical")]
SAVED = [(2, "0"), (2, "2"), (4, "1"), (2, "3 moving"), (4, "3 moving"), (1, "2")]
IN_SETS = [(2, "2 in sets"), (2, "3 moving in sets"), (2, "3 moving hierarchical")]


@pytest.mark.fast("2-0-4")
@on_ranks(4, timeout=120)
@pytest.mark.parametrize(
    "size, stage", [(2, "0"), (2, "2"), (4, "1"), (2, "3 moving"), (4, "3 moving"), (1, "2"), *IN_SETS]
)
def test_a_checkpoint_goes_on_in_any_other_size(size: int, stage: str) -> None:
    path = Path(from_all_ranks(_directory())[0])
    trained(size, stage).save_checkpoint(path)
    wanted = wanted_after(4)
    for other, other_stage in SETTINGS:
        engine = experts.make("Mixture", other, other_stage, double=True)
        engine.load_checkpoint(path)
        step(engine, STEPS)
        found, expected = experts.parameters_of(engine), experts.own_part(engine, wanted)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def _directory() -> str:
    return tempfile.mkdtemp() if dist.get_rank() == 0 else ""


@pytest.mark.slow
@on_ranks(4, timeout=120)
@pytest.mark.parametrize("size, stage", [(2, "0"), (2, "2"), (4, "3 moving"), (2, "3 moving"), *IN_SETS])
def test_full_values_are_those_of_the_whole_model(size: int, stage: str) -> None:
    engine, plain = trained(size, stage), trained(1, "0")
    wanted, found = plain.full_state_dict(), engine.full_state_dict()
    assert list(found) == list(wanted)
    streamed = {name: tensor.clone() for bucket in zerolite.stream_full_weights(engine) for name, tensor in bucket}
    torch.testing.assert_close(streamed, found, rtol=0, atol=0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        ours, others = (zerolite.get_full_optimizer_state(one.module.parameters(), name) for one in (engine, plain))
        torch.testing.assert_close(ours, others, rtol=0, atol=1e-12)
    for one in (engine, plain):
        rank = one.data_parallel_rank
        one.backward(experts.loss_of(one(**experts.batch_of(100 + rank, 5))))
    mine, others = (dict(one.module.named_parameters()) for one in (engine, plain))
    for name in ("blocks.0.experts.up_weight", "blocks.1.experts.down_weight", "head.weight"):
        for get in (zerolite.get_full_grad, zerolite.get_full_master):
            torch.testing.assert_close(get(mine[name]), get(others[name]), rtol=0, atol=1e-12)
    name = "blocks.0.experts.up_bias"
    value = torch.randn(wanted[name].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for put, get in (
        (zerolite.set_full_grad, zerolite.get_full_grad),
        (zerolite.set_full_master, zerolite.get_full_master),
    ):
        put(mine[name], value)
        torch.testing.assert_close(get(mine[name]).double(), value, rtol=0, atol=1e-6)  # gradients come in fp32
    zerolite.set_full_grad(others[name], value)
    zerolite.set_full_master(others[name], value)
    engine.step()
    plain.step()
    assert engine.get_global_grad_norm() == pytest.approx(plain.get_global_grad_norm(), rel=1e-12)
    torch.testing.assert_close(engine.full_state_dict(), plain.full_state_dict(), rtol=0, atol=1e-12)


@pytest.mark.fast("3 moving-2")
@on_ranks(2, timeout=120)
@pytest.mark.parametrize("stage", ["0", "2", "3 moving"])
def test_full_states_are_loaded(stage: str) -> None:
    plain, engine = trained(1, "0"), experts.make("Mixture", 2, stage, double=True)
    state = plain.full_state_dict()
    engine.load_full_state_dict(state if dist.get_rank() == 0 else None)
    torch.testing.assert_close(engine.full_state_dict(), state, rtol=0, atol=0)
    for one in (engine, plain):
        one.eval()
        with torch.no_grad():
            one.loss = one(**experts.batch_of(7, 9))
    torch.testing.assert_close(engine.loss, plain.loss, rtol=0, atol=1e-12)


@on_ranks(2, timeout=60)
def test_a_part_is_not_taken_for_the_model() -> None:
    engine = experts.make("Mixture", 2, "2")
    with pytest.raises(RuntimeError, match=r"parts of parameters .*up_weight.*full_state_dict"):
        engine.module.state_dict()
    with pytest.raises(RuntimeError, match="load_full_state_dict"):
        engine.module.load_state_dict(engine.full_state_dict())


@on_ranks(2, timeout=60)
def test_export_has_all_experts() -> None:
    engine = experts.make("Mixture", 2, "3 moving", bf16={"enabled": True})
    path = Path(from_all_ranks(_directory())[0])
    state = engine.full_state_dict()
    engine.save_16bit_model(path)
    if dist.get_rank() == 0:
        exported, _ = read_model(path)
        torch.testing.assert_close(exported, {name: value.bfloat16() for name, value in state.items()})
