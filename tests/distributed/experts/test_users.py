"""Users freeze experts of several ranks, generate with them and register them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerolite
from tests.toolkit import experts
from tests.toolkit.configs import at
from tests.toolkit.monitoring import Lines
from tests.toolkit.ranks import on_ranks
from zerolite.engine.step_observers import ExpertLoads
from zerolite.moe import ExpertParallel


@on_ranks(2, timeout=60)
def test_generation_and_external_parameters_are_refused() -> None:
    engine = experts.make("Mixture", 2, "3 moving")
    message = r"expected all experts on every rank, got expert_parallel.size 2"
    with pytest.raises(RuntimeError, match=message), zerolite.gathered_for_generation(engine):
        pass
    first, second = engine.module.blocks
    with pytest.raises(ValueError, match=r"got 'blocks.1.experts.up_weight' of experts"):
        zerolite.zero.register_external_parameter(first, second.experts.up_weight)


@on_ranks(2, timeout=60)
def test_a_monitor_has_the_load_of_each_expert(tmp_path: Path) -> None:
    """Loads are relative to the mean of a layer, over both ranks and both micro-batches, and a clipped step has one."""
    how: dict[str, Any] = {"accumulation": 2, "clip": 0.1, "expert_parallel": {"size": 2, "log_load": True}}
    how["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path)}
    config = at("2", optimizer=("SGD", {"lr": 0.1}), **how)
    engine = zerolite.initialize(experts.build("Mixture", False, favourite=3), config)
    kept = Lines()
    if engine.monitor.enabled:
        engine.monitor._writers.append(kept)
    for step in range(4):
        engine.backward(engine(**experts.batch_of(step, 4)))
        engine.step()
    with torch.no_grad():
        engine.eval()(**experts.batch_of(9, 4))
    engine.monitor.close()
    if engine.data_parallel_rank == 0:
        loads = [{name: v for name, v in line.items() if name.startswith("Train/Experts/")} for line in kept.lines]
        wanted = {
            f"Train/Experts/blocks.{block}.experts/{expert}": experts.EXPERTS * float(expert == 3)
            for block in range(2)
            for expert in range(experts.EXPERTS)
        }
        assert [load for load in loads if load] == [wanted, wanted]


def test_a_step_has_the_loads_of_all_its_statistics() -> None:
    """A save within an accumulation and a clip collect statistics too."""
    written: list[dict[str, float]] = []
    log: Any = SimpleNamespace(write=lambda step, values, group: written.append(values))
    call: Any = SimpleNamespace(experts=2, load=None)
    loads = ExpertLoads({"layer": call}, torch.device("cpu"), log)
    for step, collected in enumerate(([[1, 3], [5, 3]], [[2, 0]])):
        for chosen in collected:
            call.load += torch.tensor(chosen)
            numbers = torch.zeros(2, dtype=torch.float64)
            loads.write_slice(numbers)
            loads.read_slice(True, numbers)
        loads.on_settled(step, 0.0)
    assert written == [{"layer/0": 1.0, "layer/1": 1.0}, {"layer/0": 2.0, "layer/1": 0.0}]


def test_frozen_members_stay_frozen() -> None:
    members = [experts.Expert().requires_grad_(False) for _ in range(2)]
    assert not any(parameter.requires_grad for parameter in ExpertParallel(members).parameters())
    with pytest.raises(ValueError, match="frozen in all of them or in none"):
        ExpertParallel([*members, experts.Expert()])
