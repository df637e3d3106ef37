"""Stage 3 with the parameters' shards on the host or on disk: the bits and the collectives are those of the device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import ADAMW, PARTITIONED, config
from tests.distributed.test_parity import assert_same_bits
from tests.pool import Pools
from zerolite.zero.layout import part_numel

CASES = "tests.distributed.cases.offload_param"
PREFETCH = "stage3_prefetch_bucket_size"
ELEMENTS = 1024  # of a layer of the chain
LAYERS = 6


def tiers(
    path: Path, setting: str, zero: dict[str, Any] | None = None, disk: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A config for each tier. zero: further keys of its section; disk: of offload_param for the disk."""
    blocks: dict[str, dict[str, Any]] = {
        "device": {"device": "none"},
        "host": {"device": "cpu"},
        "disk": {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0, **(disk or {})},
    }
    sections = {name: {**PARTITIONED[setting], **(zero or {}), "offload_param": blocks[name]} for name in blocks}
    return {name: config(3, clip=0.5, optimizer=ADAMW, zero=section, **more) for name, section in sections.items()}


def run(pools: Pools, world: int, calls: dict[str, tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return pools(world).run(f"{CASES}:all_of_it", {"calls": calls}, timeout=240)


EVERY = ("device", "host", "disk", "host apart", "disk apart")


def compared(
    path: Path, model: str, setting: str, names: tuple[str, ...] = EVERY, **more: Any
) -> tuple[str, dict[str, Any]]:
    """For :func:`run`. names: of tiers, "apart" where device and host do not share their memory."""
    of_tier = tiers(path, setting, **more)
    configs = {name: of_tier[name.split()[0]] for name in names}
    return "compare", {"model": model, "configs": configs, "apart": tuple(name for name in names if "apart" in name)}


def gathers_as_one(calls: list[tuple[str, str, int]]) -> tuple[list[tuple[str, str, int]], int]:
    """All calls but the gathers of parameters, in order; and the elements that these have gathered."""
    gathers = [numel for op, _, numel in calls if op == "all_gather"]
    return [call for call in calls if call[0] != "all_gather"], sum(gathers)


def assert_alike(ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        for what, runs in results.items():
            expected = runs["device"]
            assert expected["places"] == ["device"]
            for name, found in runs.items():
                where = f"rank {rank}, {what}, {name}"
                assert_same_bits(expected["parameters"], found["parameters"], where)
                for key in ("losses", "norms", "evaluated", "followed"):
                    assert found[key] == expected[key], f"{where}: {key}"
                calls = gathers_as_one if "disk" in name else list  # these may begin later, and in smaller groups
                assert calls(found["calls"]) == calls(expected["calls"]), where
                assert name == "device" or "device" not in found["places"], where


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_every_tier_gives_the_bits_and_collectives_of_the_device(pools: Pools, world: int, tmp_path: Path) -> None:
    some, others = ("device", "host apart", "disk"), ("device", "host", "disk apart")
    calls = {
        "tied, frozen, empty": compared(tmp_path, "OddModel", "moving", some),
        "bf16, accumulated": compared(tmp_path, "OddModel", "tight", others, precision="bf16", accumulation=2),
    }
    assert_alike(run(pools, world, calls))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("setting", list(PARTITIONED))
def test_every_kind_of_model_is_the_same_at_every_tier(pools: Pools, world: int, setting: str, tmp_path: Path) -> None:
    models = ("OddModel", "Frozen", "External", "SharedCheckpointed", "PrimeMlp")
    calls = {
        model: compared(tmp_path, model, setting, disk={"buffer_size": 300, "buffer_count": 1}) for model in models
    }
    for model in ("Frozen", "OddModel"):
        calls[f"{model}, bf16"] = compared(tmp_path, model, setting, precision="bf16", accumulation=2)
    assert_alike(run(pools, world, calls))


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_shards_rest_at_their_tier_and_nothing_is_whole_between_uses(pools: Pools, world: int, tmp_path: Path) -> None:
    configs = tiers(tmp_path, "moving", {PREFETCH: 1})
    part = 4 * part_numel(ELEMENTS, world)  # bytes of a layer, frozen or trained
    ranks = run(pools, world, {name: ("memory", {"config": settings}) for name, settings in configs.items()})
    for results in ranks:
        for name, found in results.items():
            assert found["rests"] == {f"compute_parameters on {name}": LAYERS * part}, name
        whole = 2 * world * part
        for name in ("host", "disk"):
            assert 0 < results[name]["whole"] <= whole
        assert results["host"]["staged"] == 0
        assert 0 < results["disk"]["staged"]


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_what_stays_in_the_hosts_memory_with_a_disk(pools: Pools, world: int, tmp_path: Path) -> None:
    """Trained parameters fill max_in_cpu before frozen ones, and of each kind those that a forward uses first; whole
    parameters are on the device anyway."""
    rows = {"max_in_cpu": 4 * math.ceil(ELEMENTS / world)}
    calls = {
        "some": ("memory", {"config": tiers(tmp_path, "moving", disk=rows)["disk"]}),
        "whole": ("memory", {"config": tiers(tmp_path, "defaults")["disk"]}),
    }
    for results in run(pools, world, calls):
        assert results["some"]["on host"] == [0, 3, 4, 5]
        assert results["whole"]["on host"] == [*range(LAYERS)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_on_disk_is_read_ahead_of_its_gather_within_the_limit(pools: Pools, world: int, tmp_path: Path) -> None:
    rows = 4
    buffers = {"buffer_size": ELEMENTS // world, "buffer_count": rows}
    calls = {
        prefetch: ("reads", {"config": tiers(tmp_path, "moving", {PREFETCH: prefetch}, buffers)["disk"]})
        for prefetch in (0, 10**6)
    }
    order = [*range(LAYERS), *reversed(range(LAYERS))]
    for results in run(pools, world, calls):
        for first, *_, last in results.values():
            assert _of(first, "read", "gather") == [
                (kind, (index,)) for index in order for kind in ("read", "gather")
            ], "on demand, without a plan"
            assert [index for _, indices in _of(last, "gather") for index in indices] == order
            assert [index for _, indices in _of(last, "read") for index in indices] == order
            assert min(_leads(last, rows)[1:]) > 0, last


def _of(events: list[tuple[str, tuple[int, ...]]], *kinds: str) -> list[tuple[str, tuple[int, ...]]]:
    return [event for event in events if event[0] in kinds]


def _leads(events: list[tuple[str, tuple[int, ...]]], limit: int) -> list[int]:
    """For each gather, how many uses began since the read for it. Never more than ``limit`` are in hand."""
    pending: list[tuple[int, int]] = []  # parameter, place in the events
    leads = []
    in_hand = 0
    for place, (kind, indices) in enumerate(events):
        if kind == "read":
            pending += [(index, place) for index in indices]
            in_hand += len(indices)
            assert in_hand <= limit
        elif kind == "end":
            in_hand -= len(indices)
        elif kind == "gather":
            for index in indices:
                expected, begun = pending.pop(0)
                assert index == expected
                leads.append(sum(kind == "use" for kind, _ in events[begun:place]))
    return leads


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_built_partitioned_rests_at_its_tier_from_the_start(pools: Pools, world: int, tmp_path: Path) -> None:
    configs = tiers(tmp_path, "moving")
    for results in run(pools, world, {"": ("built_partitioned", {"configs": configs})}):
        expected = results[""]["device"]
        for name, found in results[""].items():
            assert found["places"] == [name]
            for key in ("values", "copied", "parameters 0", "parameters 1"):
                assert_same_bits(expected["values" if key == "copied" else key], found[key], f"{name}: {key}")
            for turn in range(2):
                assert found[f"losses {turn}"] == expected[f"losses {turn}"]


@pytest.mark.slow
def test_remote_device_overrides_the_config(pools: Pools, tmp_path: Path) -> None:
    configs = {"host": tiers(tmp_path, "moving")["disk"]}
    for results in run(pools, 2, {"": ("built_partitioned", {"configs": configs, "remote_device": "cpu"})}):
        assert results[""]["host"]["places"] == ["host"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_cannot_be_read_is_an_error_after_which_training_goes_on(
    pools: Pools, world: int, tmp_path: Path
) -> None:
    disk = tiers(tmp_path, "moving", disk={"buffer_size": ELEMENTS, "buffer_count": 4})["disk"]
    for results in run(pools, world, {"": ("failing_disk", {"config": disk})}):
        assert len(results[""]["caught"]) == 2 and all("17 bytes" in text for text in results[""]["caught"])
        assert results[""]["losses"] == results[""]["expected"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["config", "group"])
def test_parameters_that_are_trained_later_move_on_at_their_tier(
    pools: Pools, world: int, how: str, tmp_path: Path
) -> None:
    found = {
        name: pools(world).run("tests.distributed.cases.growth:train", {"config": settings, "how": how, "steps": 7})
        for name, settings in tiers(tmp_path, "tight", precision="bf16").items()
    }
    for name in ("host", "disk"):
        for expected, ours in zip(found["device"], found[name], strict=True):
            assert_same_bits(expected["parameters"], ours["parameters"], name)
            assert ours["losses"] == expected["losses"]
