"""Ranks are killed at every point of a save, or their disks fail: the checkpoint before, or the new one, is there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.cases import crashes
from tests.toolkit.pool import Pool, Pools, WorkerDied

CASES = "tests.checkpoint.cases.crashes"


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
@pytest.mark.parametrize(
    ("who", "first", "background"),
    [("0", False, False), ("1", False, True), ("1", True, False), ("all", False, True), ("0", True, True)],
)
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
