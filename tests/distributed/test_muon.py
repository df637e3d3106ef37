"""Muon at every stage: torch's numbers, equal on all worlds, with states divided like those of any optimizer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit.compare import assert_same, assert_same_on_ranks
from tests.toolkit.configs import at
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raised, raises, snapshot
from tests.toolkit.transports import late, transport
from zerolite.comm.recorder import record

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")

MUON = ("Muon", {"lr": 0.02, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.01})
STAGES = (0, 1, 2, "3 moving", "3 one unit")
SHAPES = {
    "wide": (5, 19),
    "tall": (31, 3),
    "embedding": (6, 4),  # a matrix of AdamW's, by its name
    "square": (7, 7),
    "again": (7, 7),
    "third": (7, 7),
    "vector": (9,),
    "row": (1, 11),
    "seldom": (4, 5),
}


class Given(nn.Module):
    """A model whose gradients are given. They are small integers, so their sums over ranks are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("turned", nn.Parameter(torch.randn(6, 5).t()))  # columns behind one another
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(
        self, step: int, micro: int = 0, rank: int = 0, world: int = 1, without: tuple[str, ...] = ()
    ) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + micro)
        loss = torch.zeros(())
        for name, parameter in self.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            gradient = torch.randint(-8, 9, shape, generator=generator).float()
            if name in without or not parameter.requires_grad:
                continue
            own = 2 * rank + 1 - world  # zero on average
            loss = loss + (parameter * (gradient + own)).float().sum()
        return loss


def model(init: dict[str, Any] | None = None) -> Given:
    torch.manual_seed(5)
    with contextlib.nullcontext() if init is None else zerolite.zero.Init(config_dict_or_path=init):
        return Given()


def plain(steps: int, accumulation: int = 1, **more: Any) -> dict[str, Tensor]:
    """The weights that torch's own optimizers give."""
    made = model()
    hidden = [p for name, p in made.named_parameters() if p.dim() == 2 and name != "embedding"]
    rest = [made.embedding, made.vector]
    muon = torch.optim.Muon(hidden, lr=0.02, momentum=0.9, weight_decay=0.01)
    adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.01)
    for step in range(steps):
        for micro in range(accumulation):
            (made(step, micro, without=unused(step)) / accumulation).backward()
        if "clip" in more:
            nn.utils.clip_grad_norm_(made.parameters(), more["clip"])
        muon.step(), adamw.step()
        made.zero_grad()
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


def unused(step: int) -> tuple[str, ...]:
    """Names of the parameters without a gradient on all ranks."""
    return ("seldom", "third") if step == 1 else ()


def train(engine: Any, steps: int = 3, first: int = 0, alone: tuple[str, ...] = ()) -> None:
    """``alone``: these get a gradient on the last rank alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps):
            without = unused(step) if rank == world - 1 else (*unused(step), *alone)
            engine.backward(engine(step, micro, rank, world, without))
            engine.step()


def engine_at(stage: int | str, *arguments: Any, init: bool = False, optimizer: Any = MUON, **more: Any) -> Any:
    made = at(stage, *arguments, optimizer=optimizer, **more)
    return zerolite.initialize(model(made if init else None), made)


def full(engine: Any) -> dict[str, Any]:
    """The weights, and a state of each parameter: Muon's or AdamW's."""
    states = {}
    for name, parameter in engine.module.named_parameters():
        matrix = parameter.dim() == 2 and name != "embedding"
        if parameter.requires_grad:
            state = "momentum_buffer" if matrix else "exp_avg"
            states[name] = zerolite.get_full_optimizer_state(parameter, state)
    return {"weights": engine.full_state_dict(dtype=torch.float32), "states": states}


@pytest.mark.fast("3")
@on_ranks(1, 2, 3, 4)
def test_all_stages_and_worlds_have_the_numbers_of_torch() -> None:
    wanted = plain(3)
    for stage in STAGES:
        engine = engine_at(stage)
        train(engine)
        found = snapshot(engine)
        torch.testing.assert_close(
            found, wanted, rtol=1e-6, atol=1e-6, msg=lambda text, stage=stage: f"{stage}: {text}"
        )


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 2},
    "clip": {"clip": 16.0},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "bf16 masters": {"precision": "bf16", "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "sets": {"zero": {"zero_hpz_partition_size": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2, 3)
def test_settings_have_the_bits_of_stage_0(name: str) -> None:
    more = SETTINGS[name]
    alike = {key: value for key, value in more.items() if key != "zero"}
    # A third of a sum rounds, and stage 2 divides the sum of each micro-batch.
    alone = () if name == "accumulation" else ("tall",)
    reference = engine_at(0, **alike)
    train(reference, alone=alone)
    wanted = full(reference)
    for stage in (3,) if name == "sets" else STAGES[1:]:
        if name == "sets" and dist.get_world_size() % 2:
            continue
        engine = engine_at(stage, **more)
        train(engine, alone=alone)
        assert_same(full(engine), wanted, f"stage {stage}")
        assert_same_on_ranks(snapshot(engine))


@pytest.mark.parametrize("stage", [2, "3 moving"])
@on_ranks(2)
def test_collectives_that_deliver_late(stage: int | str) -> None:
    """The exchanges go as they do on NCCL, and nothing reads their results before it has waited."""
    found = []
    for how in (transport("native"), late()):
        with how:
            engine = engine_at(stage)
            train(engine)
            found.append(snapshot(engine))
    assert_same(*found)


@pytest.mark.fast("2-2", "2-3 moving")
@pytest.mark.parametrize("stage", [0, 2, "3 moving"])
@on_ranks(2)
def test_a_class_of_torch_gets_matrices(stage: int | str) -> None:
    settings = at(stage)
    del settings["optimizer"]
    found = []
    for optimizer in (torch.optim.Muon, lambda parameters: torch.optim.Muon(parameters)):
        torch.manual_seed(5)
        matrices = nn.Sequential(nn.Linear(7, 13, bias=False), nn.Tanh(), nn.Linear(13, 3, bias=False))
        engine = zerolite.initialize(matrices, settings, optimizer=optimizer)
        for step in range(3):
            engine.backward(engine(torch.full((2, 7), 0.5 * step)).sum())
            engine.step()
        found.append(full(engine))
    assert_same(found[0], found[1])
    with raises(ValueError, "(3,)"):
        zerolite.initialize(nn.Linear(4, 3), settings, optimizer=torch.optim.Muon)


@pytest.mark.slow
@on_ranks(2)
def test_ranks_with_other_numbers_are_told_before_the_step() -> None:
    """Momentum and learning rate are compared, and a number that one rank lacks stops all."""
    engine = engine_at("3 moving", consistency_check_interval=1)
    odd = dist.get_rank()
    train(engine, 1)
    muon, adamw = sorted(engine.optimizer.param_groups, key=lambda group: not group["use_muon"])
    for group, key, value in ((muon, "momentum", 0.9), (muon, "lr", 0.02), (adamw, "eps", 1e-8), (muon, "ns_steps", 5)):
        assert group[key] == value
        group[key] = value / 2 if odd else value
        assert f" has {key} {value} on rank 0, but " in raised(train, engine, 1, 1)
        group[key] = value
    if odd:
        del muon["momentum"]
    assert "'momentum' as a value like" in raised(train, engine, 1, 1)


def save(stage: int | str, directory: str) -> dict[str, Any]:
    engine = engine_at(stage)
    train(engine, 2)
    engine.save_checkpoint(directory, tag="two")
    train(engine, 1, 2)
    return full(engine)


def load(stage: int | str, directory: str) -> dict[str, Any]:
    engine = engine_at(stage)
    engine.load_checkpoint(directory, tag="two")
    train(engine, 1, 2)
    return full(engine)


@pytest.mark.fast("saved1-loaded1")
@pytest.mark.parametrize(
    ("saved", "loaded"), [((1, 0), (3, 3)), ((2, 3), (3, 2)), ((3, 2), (2, 3)), ((2, 3), (1, 0)), ((4, 1), (2, 3))]
)
def test_checkpoints_load_at_other_worlds_and_stages(
    pools: Pools, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    """(world, stage) of the run that saves and of the one that loads. Both go on to the same third step."""
    (wanted, *_) = pools(saved[0]).run(save, {"stage": saved[1], "directory": str(tmp_path)})
    for found in pools(loaded[0]).run(load, {"stage": loaded[1], "directory": str(tmp_path)}):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@on_ranks(2)
def test_two_bytes_an_element_travel_there_and_back() -> None:
    """Each rank sends its part of each matrix to the matrix's owner, and each owner sends the parts of the ranks."""
    matrices = sum(p.numel() for name, p in model().named_parameters() if p.dim() == 2 and name != "embedding")
    for stage in (2, "3 moving"):
        engine = engine_at(stage)
        train(engine, 1)
        with record() as recorder:
            train(engine, 1, 2)
        there, back = recorder.select(tag="owners")
        assert there.op == back.op == "all_to_all" and there.dtype == back.dtype == torch.bfloat16
        sent = torch.tensor([there.numel, back.numel])
        dist.all_reduce(sent)
        assert sent.tolist() == [matrices, matrices]
