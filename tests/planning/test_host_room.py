"""Whether what is kept off the device fits into a host's memory and onto its disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pool import Pools
from tests.unit.plan_examples import GB, make_items, make_plan
from zerolite.comm import create_communicator
from zerolite.config import ZeroliteConfig, load_config
from zerolite.planning import host_room
from zerolite.planning.host_room import OPTIMIZER, PARAMETERS, Room, find_room, find_shortage, is_ample, offloads
from zerolite.zero import Init


def config(path: Path | None = None, **more: Any) -> ZeroliteConfig:
    """Stage 3 with its optimizer states on a disk, or on the host."""
    block = {"device": "cpu"} if path is None else {"device": "nvme", "nvme_path": path}
    return load_config({"zero_optimization": {"stage": 3, "offload_optimizer": block, **more}})


def room(config: ZeroliteConfig, model: nn.Module | None = None) -> Room:
    return find_room(model or nn.Linear(1, 1), config, create_communicator(torch.device("cpu")))


def test_nothing_is_asked_without_offload() -> None:
    assert not offloads(load_config({"zero_optimization": {"stage": 3}}))
    assert offloads(config())
    assert offloads(load_config({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))


def test_ranks_share_what_a_host_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_room, "share_of_host", lambda ranks: 1000 // ranks)
    monkeypatch.setattr(host_room, "_free", lambda path: 600 if str(path) == str(tmp_path) else None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert room(config()) == Room(4, 250 + 8, {})
    assert room(config(tmp_path)) == Room(4, 250 + 8, {OPTIMIZER: 150})
    both = config(tmp_path, offload_param={"device": "nvme", "nvme_path": str(tmp_path)})
    assert room(both).disks == {OPTIMIZER: 75, PARAMETERS: 75}
    missing = config(tmp_path, offload_param={"device": "nvme", "nvme_path": str(tmp_path / "none")})
    assert room(missing).disks == {OPTIMIZER: 150, PARAMETERS: None}
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert room(config()).ranks == 1


def test_what_the_model_has_by_now_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_room, "share_of_host", lambda ranks: 1000)
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    assert room(config(), model).memory == 1800
    model[1].weight = model[0].weight
    assert room(config(), model).memory == 1400
    with Init():
        model = nn.Linear(10, 10, bias=False)
    assert room(config(), model).memory == 1400
    assert room(config(), nn.Linear(10, 10, device="meta")).memory == 1000


def test_disks_are_those_at_the_paths(tmp_path: Path) -> None:
    free = room(config(tmp_path)).disks[OPTIMIZER]
    assert free is not None and 0 < free < 2**60
    assert room(config(tmp_path / "missing")).disks == {OPTIMIZER: None}


def test_large_hosts_need_no_plan(tmp_path: Path) -> None:
    numel = 10**6
    for setting in (config(), config(tmp_path)):
        assert is_ample(Room(1, 10**12, {OPTIMIZER: 10**12}), setting, numel)
        assert is_ample(Room(1, 10**12, {OPTIMIZER: None}), setting, numel)
        assert not is_ample(Room(1, 20 * numel, {OPTIMIZER: 10**12}), setting, numel)
        assert not is_ample(Room(1, 10**12, {OPTIMIZER: 20 * numel}), setting, numel)


def test_what_is_short_is_told() -> None:
    host, disk = make_items(master_weights=2 * GB, offload_buffers=GB), make_items(optimizer_states=7 * GB)
    plan = make_plan(host=host, disk=disk | {"compute_parameters": GB}, host_peak=4 * GB)
    assert find_shortage(plan, Room(8, 4 * GB, {OPTIMIZER: 7 * GB, PARAMETERS: GB})) is None
    assert find_shortage(plan, Room(8, 4 * GB, {OPTIMIZER: None, PARAMETERS: None})) is None
    memory = find_shortage(plan, Room(8, 3 * GB, {}))
    assert memory is not None
    assert "(7,500,000,000 parameters) at ZeRO stage 2 on 64 ranks needs 4.00 GB of host memory" in memory.reason
    assert "each of 8 ranks of a host, and 3.00 GB are left for each there: master weights 2.00 GB" in memory.reason
    assert "offload buffers 1.00 GB" in memory.reason and "before the engine has it 1.00 GB" in memory.reason
    assert '"nvme"' in memory.remedy and "fewer ranks on a host" in memory.remedy
    for name, needed in ((OPTIMIZER, 7 * GB), (PARAMETERS, GB)):
        disks: dict[str, int | None] = {OPTIMIZER: 7 * GB, PARAMETERS: GB}
        short = find_shortage(plan, Room(1, 4 * GB, disks | {name: needed - 1}))
        assert short is not None
        assert f"GB at zero_optimization.{name}.nvme_path for each of 1 rank of a host" in short.reason
        assert f"as zero_optimization.{name}.nvme_path" in short.remedy


def test_ranks_count_themselves_where_no_launcher_tells(pools: Pools) -> None:
    assert pools(2).run("tests.planning.fits_cases:ranks_here", {}) == [2, 2]
