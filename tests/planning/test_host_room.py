"""Room on a host and its disks for states that are kept off the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.planning.fits_cases import NUMEL, PLENTY, START, stack, start
from tests.toolkit.pool import Pools
from tests.toolkit.ranks import on_ranks
from tests.unit.plan_examples import GB, make_items, make_plan
from zerolite import planning
from zerolite.comm import create_communicator, dry_communicator
from zerolite.config import ZeroliteConfig, load_config
from zerolite.planning import command, host_room
from zerolite.planning.host_room import OPTIMIZER, PARAMETERS, Room, find_room, find_shortage, is_ample
from zerolite.planning.make import plan
from zerolite.planning.settings import compare
from zerolite.zero import Init


def config(path: Path | None = None, **more: Any) -> ZeroliteConfig:
    """Stage 3 with its optimizer states on a disk, or on the host."""
    block = {"device": "cpu"} if path is None else {"device": "nvme", "nvme_path": path}
    return load_config({"zero_optimization": {"stage": 3, "offload_optimizer": block, **more}})


def room(config: ZeroliteConfig, model: nn.Module | None = None) -> Room:
    return find_room(model or nn.Linear(1, 1), config, dry_communicator("gloo", 0, 1))


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
    monkeypatch.undo()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert room(config()).ranks == 1
    free = room(config(tmp_path)).disks[OPTIMIZER]
    assert free is not None and 0 < free < 2**60
    assert room(config(tmp_path / "missing")).disks == {OPTIMIZER: None}


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


@on_ranks(2)
def test_ranks_count_themselves_where_no_launcher_tells() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
            patch.delenv(name, raising=False)
        assert find_room(nn.Linear(1, 1), load_config({}), create_communicator(torch.device("cpu"))).ranks == 2


def job(path: Path | None = None, stage: int | str = 2) -> dict[str, Any]:
    block = {"device": "cpu"} if path is None else {"device": "nvme", "nvme_path": str(path)}
    zero = {"stage": stage, "reduce_bucket_size": 4200, "offload_optimizer": block}
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    bf16 = {"enabled": True}
    return {"train_micro_batch_size_per_gpu": 2, "bf16": bf16, "optimizer": optimizer, "zero_optimization": zero}


def test_a_host_or_disk_that_is_too_small_stops_all_ranks(pools: Pools, tmp_path: Path) -> None:
    """2 ranks: 12 bytes a parameter for each two of them are on the host or on disk."""
    plenty = [PLENTY, PLENTY]
    cases = {
        "host memory on each of 2 ranks": (job(), {"host": [PLENTY, NUMEL]}),
        "at zero_optimization.offload_optimizer.nvme_path": (job(tmp_path), {"host": plenty, "disk": [PLENTY, NUMEL]}),
    }
    for words, (config, short) in cases.items():
        (error,) = {result["error"] for result in pools(2).run(START, {"config": config, "free": plenty, **short})}
        assert words in error and "on rank 1 of 2" in error and "zerolite plan" in error
    enough = {"host": [15 * NUMEL] * 2, "disk": [40 * NUMEL] * 2}  # a plan is made, and it fits
    results = pools(2).run(START, {"config": job(tmp_path), "free": plenty, **enough})
    assert [result.get("steps") for result in results] == [1, 1]


def test_an_automatic_stage_is_one_that_has_what_is_to_be_offloaded() -> None:
    config = job(stage="auto")
    assert start(config, [PLENTY], host=[PLENTY])["stage"] == 1
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    assert start(config, [PLENTY], host=[PLENTY])["stage"] == 3


@pytest.mark.slow
def test_a_comparison_plans_what_is_offloaded_and_what_is_not() -> None:
    config = job(stage=3)
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    compared = compare(lambda: nn.Linear(64, 64), config, 2, device_memory=10**9, offload_host_memory=10**9, nodes=1)
    rows = dict(compared.rows)
    assert compared.left_out == [] and compared.rows[compared.chosen or 0][0] == "stage 0"
    assert [name for name, made in rows.items() if made.host is None] == [f"stage {stage}" for stage in range(4)]
    assert rows["stage 3"].host_spare is None and rows["stage 3"].offloaded == 0
    some, all_of_it = rows["stage 3, optimizer on the host"], rows["stage 3, optimizer and parameters on the host"]
    assert 0 < some.offloaded < all_of_it.offloaded and some.sent == all_of_it.sent == rows["stage 3"].sent
    assert some.host_spare is not None and some.host_spare > 0


@pytest.mark.slow
def test_what_rests_elsewhere_leaves_nothing_on_the_device() -> None:
    """A plan for CUDA, where what comes from the host is a copy: none of it stays between two steps."""
    moving = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 0}
    config = job() | {"zero_optimization": {**moving, "offload_param": {"device": "cpu"}}}
    made = plan(stack, config, 2)
    assert made.host is not None and made.host["compute_parameters"] >= NUMEL  # 2 bytes, a half
    assert (made.at_rest["compute_parameters"], made.at_rest["offload_buffers"]) == (0, 0)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    made = plan(stack, config, 2)
    assert {item for item, nbytes in made.at_rest.items() if nbytes} <= {"activations", "other"}
    assert made.host is not None and made.host["optimizer_states"] >= 4 * NUMEL


CPU = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
MACHINE = command.find_memory("cpu")


@pytest.mark.parametrize(
    ("given", "config", "meant"),
    [
        (["--host-memory", "3GB"], {}, {"host_memory": 3 * GB}),
        (["--host-memory", "3GB"], CPU, {"host_memory": 3 * GB}),
        ([], CPU, {"host_memory": MACHINE}),
        ([], {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, {"host_memory": MACHINE}),
        (["--host-memory", "auto"], {}, {"host_memory": MACHINE}),
        ([], {}, {}),
        # Memory that only some of the settings take is this machine's where it is not given; memory that all take, too.
        (["--compare"], {}, {"offload_host_memory": MACHINE}),
        (["--compare", "--host-memory", "3GB"], {}, {"host_memory": 3 * GB}),
        (["--compare"], {"activation_checkpointing": {"cpu_checkpointing": True}}, {"host_memory": MACHINE}),
    ],
)
def test_the_memory_of_the_host_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, given: list[str], config: dict[str, Any], meant: dict[str, int]
) -> None:
    told: list[Any] = []
    for name in ("plan", "compare"):
        monkeypatch.setattr(planning, name, lambda *args, **options: told.append(options))
    monkeypatch.setattr(planning, "load_model_fn", lambda name: None)
    job = ["--model", "m:f", "--config", "c.json", "--world-size", "2", *given]
    command.make(command.parse_command_line(job), load_config(config))
    memory = {name: value for name, value in told[0].items() if "memory" in name and value is not None}
    assert memory == meant
