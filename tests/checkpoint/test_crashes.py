"""Killed at any point, or with a disk that fails at any point: the checkpoint before, or the new one, is there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.cases import crashes
from tests.toolkit.pool import Pool, Pools, WorkerDied

CASES = "tests.checkpoint.cases.crashes"


@pytest.mark.fast("first-within")
@pytest.mark.parametrize("how", ["before", "within"])
@pytest.mark.parametrize("scenario", crashes.SCENARIOS)
def test_ends_at_every_point(ram: Path, scenario: str, how: str) -> None:
    check_kills(scenario, crashes.kills(scenario, ram, how, "pretended"))


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.slow) for how in ("before", "within")])
@pytest.mark.parametrize("scenario", crashes.SCENARIOS)
def test_killed_at_every_point(alone: Pool, ram: Path, scenario: str, how: str) -> None:
    arguments = {"scenario": scenario, "directory": ram, "how": how, "death": "killed"}
    check_kills(scenario, alone.run(f"{CASES}:kills", arguments)[0])


def check_kills(scenario: str, result: dict[str, Any]) -> None:
    assert len(result["loaded"]) == result["points"] >= 18
    assert set(result["loaded"]) == crashes.SCENARIOS[scenario][2]
    assert sorted(result["loaded"]) == result["loaded"]  # once the new one is there, it stays
    assert result["left"] == []


@pytest.mark.fast("first-from there on")
@pytest.mark.parametrize("always", [False, True], ids=["once", "from there on"])
@pytest.mark.parametrize("scenario", crashes.SCENARIOS)
def test_disk_fails_at_every_point(ram: Path, scenario: str, always: bool) -> None:
    results = crashes.failures(scenario, ram, always)
    assert len(results) >= 18
    created = False
    for result in results:
        created |= result["operation"][0] == "create"
        assert result["loaded"] in crashes.SCENARIOS[scenario][2], result
        assert result["left afterwards"] == [], result
        if result["said"] is None:  # the checkpoint is complete, and what is not needed any more stays for a while
            assert result["loaded"] == 3 and result["operation"][0] in ("remove", "rename", "fsync"), result
            continue
        assert any(reason in result["said"] for reason in result["reasons"]), result
        assert result["operation"][1] in result["said"] or "'latest'" in result["said"], result
        if created and not always:  # the one that is replaced stays until the other is safe
            allowed = {".latest.new", *([".replaced-best"] if result["loaded"] == 3 else [])}
            assert set(result["left"]) <= allowed, result


# -------------------------------------------------------------------- engines on two ranks

STAGE = 3


@pytest.fixture(scope="module")
def run(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A run that nothing has happened to, by rank."""
    directory = tmp_path_factory.mktemp("reference") / "checkpoints"
    return pools(2).run(f"{CASES}:reference", {"directory": directory, "stage": STAGE})


def check_killed(
    pools: Pools, run: list[dict[str, Any]], ram: Path, points: dict[int, int], background: bool, first: bool
) -> None:
    arguments = {"directory": ram / "saved", "stage": STAGE}
    with Pool(2) as pool, pytest.raises(WorkerDied) as died:
        pool.run(f"{CASES}:save_and_die", {**arguments, "points": points, "background": background, "first": first})
    for rank in range(2):
        if rank in points:
            assert f"rank {rank} died: killed by SIGKILL" in str(died.value) or len(points) == 2
        else:  # at once
            assert f"rank {rank} raised" in str(died.value) and "CheckpointError: " in str(died.value), str(died.value)
    resumed = pools(2).run(f"{CASES}:resume", arguments)
    steps = {result["held"] and result["held"]["global_steps"] for result in resumed}
    assert len(steps) == 1
    for result, wanted in zip(resumed, run, strict=True):
        assert result["again"] and result["left"] == []
        if result["held"] is None:
            assert first
        else:
            step = result["held"]["global_steps"]
            assert step in ((1,) if first else (1, 2))
            assert crashes._equal(result["held"], wanted["held"][step - 1])


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed(pools: Pools, run: list[dict[str, Any]], ram: Path, rank: int, background: bool) -> None:
    operations = run[rank]["operations"][1]
    operation = "rename" if rank == 0 else "fsync"
    at = next(place for place, (what, _) in enumerate(operations) if what == operation)
    check_killed(pools, run, ram, {rank: at}, background, first=False)


def test_what_ranks_write(run: list[dict[str, Any]]) -> None:
    """The first one makes the directory, and completes the checkpoint when all have written."""
    for step in range(2):
        assert [what for what, _ in run[1]["operations"][step]] == ["create", "write", "fsync"]
    done = run[0]["operations"][1]
    names = ["rank_00000.safetensors", "tensors.json", "state.json", "manifest.json"]
    assert [name for what, name in done if what == "fsync" and name in names] == names
    of_directory = next(i for i, (what, name) in enumerate(done) if what == "fsync" and ".incomplete" in name)
    renamed = done.index(("rename", "global_step2"))
    assert done.index(("fsync", "manifest.json")) < of_directory < renamed
    assert done[renamed + 1][0] == "fsync" and done[renamed + 2] == ("create", ".latest.new")
    assert done[-2:] == [("rename", "latest"), ("fsync", done[renamed + 1][1])]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("first", [False, True], ids=["second", "first"])
@pytest.mark.parametrize("who", ["0", "1", "all"])
def test_ranks_are_killed_at_every_point(
    pools: Pools, run: list[dict[str, Any]], ram: Path, who: str, first: bool, background: bool
) -> None:
    operations = [run[rank]["operations"][0 if first else 1] for rank in range(2)]
    for at in range(len(operations[1 if who == "1" else 0])):
        points = {int(who): at} if who != "all" else {rank: min(at, len(operations[rank]) - 1) for rank in range(2)}
        check_killed(pools, run, ram / str(at), points, background, first)


def test_disk_of_one_rank_fails_at_every_point(pools: Pools, ram: Path) -> None:
    ranks = pools(2).run(f"{CASES}:failing_ranks", {"directory": ram / "saved", "stage": STAGE})
    assert {result["rank"] for result in ranks[0]} == {0, 1}
    for of_ranks in zip(*ranks, strict=True):
        assert of_ranks[0]["said"] == of_ranks[1]["said"], of_ranks
        result = of_ranks[0]
        assert result["reason"] in result["said"] and f"rank {result['rank']}" in result["said"], result
        assert result["operation"][1] in result["said"] or "'latest'" in result["said"], result
        committed = "is complete" in result["said"] or result["operation"] == ("fsync", "saved")
        assert committed or all(one["before"] for one in of_ranks), result


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"mounting a small disk is not allowed here: {mount.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.fast("sync")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_full_disk(pools: Pools, small_disk: Path, background: bool) -> None:
    arguments = {"directory": small_disk / "saved", "stage": 2, "background": background}
    ranks = pools(2).run(f"{CASES}:full_disk", arguments)
    assert ranks[0]["said"] == ranks[1]["said"]
    for result in ranks:
        assert result["good"] >= 2
        assert "No space left on device" in result["said"] and ".safetensors" in result["said"]
        assert f"The newest complete checkpoint there is 'global_step{result['good']}'" in result["said"]
        assert result["left"] == [] and result["intact"] and result["again"]


# -------------------------------------------------------------------- all ranks at once, at random times


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "seed"), [(2, 0), (3, 1)])
def test_all_ranks_are_killed_at_random_times(alone: Pool, ram: Path, world_size: int, seed: int) -> None:
    """A hundred times; each time a new job goes on from what was saved."""
    trials = 100 if world_size == 2 else 30
    arguments = {"directory": ram / "saved", "world_size": world_size, "trials": trials, "seed": seed}
    seen = alone.run("tests.checkpoint.cases.kills:random_kills", arguments, timeout=3000)[0]
    print(seen)
    assert seen["new"] and seen["before"] and seen["steps"] > trials
