"""Offload of the optimizer: the numbers, the traffic and the memory, against the same run without it; bits are equal.

A CPU has one memory where a GPU's host has two. Variants with ``apart`` pretend that there are two: then everything
passes through the buffers through which it passes on a GPU, only that no copy runs beside the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases.offload import LOOPS, RUNS
from tests.toolkit.pool import Pools

CASES = "tests.distributed.cases.offload"


def offload(device: str, directory: Path, **more: Any) -> dict[str, Any]:
    path = {"nvme_path": str(directory)} if device == "nvme" else {}
    return {"offload_optimizer": {"device": device, **path, **more}}


def variants(directory: Path) -> dict[str, dict[str, Any]]:
    """Return variants of zero_optimization. Sub-groups of one element, of odd lengths, and larger than everything."""
    return {
        "nothing": {},
        "cpu": offload("cpu", directory),
        "cpu, apart": {**offload("cpu", directory), "apart": True},
        "cpu, small": {**offload("cpu", directory, buffer_count=1), "sub_group_size": 1, "apart": True},
        "cpu, odd": {**offload("cpu", directory, buffer_count=2), "sub_group_size": 5003, "apart": True},
        "cpu, a third": {**offload("cpu", directory, ratio=0.3), "sub_group_size": 4097, "apart": True},
        "cpu, a third, together": offload("cpu", directory, ratio=0.3),
        "cpu, nothing": {**offload("cpu", directory, ratio=0.0), "apart": True},
        "nvme": offload("nvme", directory),
        "nvme, small": {**offload("nvme", directory, buffer_count=1), "sub_group_size": 1},
        "nvme, odd": {**offload("nvme", directory, buffer_count=2), "sub_group_size": 5003},
        "nvme, apart": {**offload("nvme", directory, buffer_count=3), "sub_group_size": 9001, "apart": True},
    }


def check(pools: Pools, world: int, runs: list[dict[str, Any]], environment: dict[str, str] | None = None) -> None:
    kwargs = {"runs": runs, "environment": environment}
    for rank, found in enumerate(pools(world).run(f"{CASES}:several", kwargs, timeout=600.0)):
        assert found == [], f"rank {rank}: {len(found)} differences, the first: {found[0]:.600}"


def of(name: str, stage: int, directory: Path, *chosen: str, **more: Any) -> dict[str, Any]:
    every = variants(directory)
    return {"name": name, "stage": stage, "variants": [every[one] for one in chosen or every], **more}


def test_numbers_do_not_depend_on_the_tier(pools: Pools, tmp_path: Path) -> None:
    runs = [
        of("wide in bf16", 1, tmp_path, "nvme, odd", "cpu, a third"),
        of("wide in bf16", 3, tmp_path, "nvme, odd", "cpu"),
        of("mixture in fp16", 2, tmp_path, "nvme, apart"),
        of("not a number", 3, tmp_path, "nvme"),
        of("clamped, NAdam in bf16", 2, tmp_path, "nvme, odd", "cpu, apart"),
        of("sums in bf16", 2, tmp_path, "nvme", loop="phases"),
        of("wide in bf16", 2, tmp_path, "nvme", "cpu, apart", loop="p.grad"),
    ]
    check(pools, 2, runs)


@pytest.mark.slow
def test_numbers_of_one_process_do_not_depend_on_the_tier(pools: Pools, tmp_path: Path) -> None:
    runs = [
        of("wide, SGD", 1, tmp_path, "nvme, odd", "cpu, small"),
        of("set whole in bf16", 2, tmp_path, "nvme, apart", config={"aio": {"checksums": True}}),
        of("replacing in bf16", 3, tmp_path, "nvme"),
    ]
    check(pools, 1, runs)


STAGES = (1, 2, 3)


def everything() -> Iterator[Any]:
    for name, stage in itertools.product(RUNS, STAGES):
        if stage in RUNS[name].stages:
            yield pytest.param(name, stage, id=f"{name}-{stage}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), list(everything()))
def test_every_run_at_every_tier(pools: Pools, tmp_path: Path, name: str, stage: int) -> None:
    check(pools, 2, [of(name, stage, tmp_path)])


SOME = (
    "mixture in bf16",
    "mixture in fp16",
    "sums in bf16",
    "wide in bf16",
    "not a number",
    "woken",
    "added group",
)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "engine"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_loop(pools: Pools, tmp_path: Path, stage: int, loop: str) -> None:
    chosen = ("nothing", "cpu", "cpu, a third", "nvme, odd", "nvme, apart")
    more = ("NAdam", "accumulation with weights", "clamped in bf16", "reloaded in bf16", "replacing in bf16")
    check(pools, 2, [of(name, stage, tmp_path, *chosen, loop=loop) for name in (*SOME, *more)])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_every_world_size(pools: Pools, tmp_path: Path, stage: int, world: int) -> None:
    more = ("wide, NAdam", "clamped in bf16", "set whole, NAdam in bf16", "round trip in bf16", "replacing in bf16")
    chosen = ("cpu, a third", "nvme, odd", "nvme, apart")
    check(pools, world, [of(name, stage, tmp_path, *chosen) for name in (*SOME, *more)])


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_without_kernels(pools: Pools, tmp_path: Path, stage: int) -> None:
    chosen = ("cpu", "cpu, a third", "nvme, odd", "nvme, apart")
    more = ("wide, SGD", "wide, Lion", "wide, Adagrad", "clamped in bf16", "set whole in bf16", "round trip in bf16")
    runs = [of(name, stage, tmp_path, *chosen) for name in (*SOME, *more)]
    check(pools, 2, runs, {"ZEROLITE_KERNELS": "0"})


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "overlap": ({"overlap_comm": True}, {}, STAGES),
    "no overlap": ({"overlap_comm": False}, {}, STAGES),
    "all-reduce": ({"reduce_scatter": False, "overlap_comm": True}, {}, (1, 2)),
    "sent in fp32": ({}, {"communication_data_type": "fp32"}, (1, 2)),
    "divided before": ({}, {"prescale_gradients": True}, (1, 2)),
    "always gathered": ({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 100}, {}, (3,)),
    "checksums": ({}, {"aio": {"checksums": True, "thread_count": 2, "block_size": 4096}}, STAGES),
    "one request": ({}, {"aio": {"queue_depth": 1, "single_submit": True, "overlap_events": False}}, STAGES),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(pools: Pools, tmp_path: Path, option: str) -> None:
    zero, config, stages = OPTIONS[option]
    names = (
        "mixture in bf16",
        "accumulation",
        "wide in bf16",
        "wide, NAdam",
        "set whole in bf16",
        "round trip in bf16",
    )
    chosen = ("cpu, odd", "nvme, odd", "nvme, apart")
    runs = [of(name, stage, tmp_path, *chosen, zero=zero, config=config) for name in names for stage in stages]
    check(pools, 2, runs)


# -------------------------------------------------------------------- traffic and memory


@pytest.mark.slow
def test_nothing_else_is_sent(pools: Pools, tmp_path: Path) -> None:
    every = variants(tmp_path)
    for stage in (2, 3):
        for name in ("cpu, odd", "nvme, odd"):
            zero = dict(every[name])
            apart = zero.pop("apart", False)
            plain = pools(2).run(f"{CASES}:traffic", {"stage": stage, "zero": {}, "apart": False})
            moved = pools(2).run(f"{CASES}:traffic", {"stage": stage, "zero": zero, "apart": apart})
            assert len(plain[0]) > 10
            assert moved == plain


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_where_the_bytes_are(pools: Pools, tmp_path: Path, device: str, stage: int) -> None:
    """16-bit training has 12 bytes an element off the device, and its gradient while it waits."""
    world, place = 2, {"cpu": "host", "nvme": "disk"}[device]
    zero = {**offload(device, tmp_path), "sub_group_size": 5000, "stage3_param_persistence_threshold": 0}
    kwargs = {"stage": stage, "precision": "bf16", "zero": zero, "apart": True}
    for rank in pools(world).run(f"{CASES}:residence", kwargs):
        part = rank["numel"] // world
        whole = part if stage == 3 else rank["numel"]
        after, pending = rank["after"][1], rank["pending"][1]
        assert after["items"]["compute_parameters"] == 2 * whole
        for item, nbytes in (("master_weights", 4 * part), ("optimizer_states", 8 * part)):
            assert after[place][item] == nbytes
            assert {after[other][item] for other in ("items", "host", "disk") if other != place} == {0}
        assert pending[place]["gradients"] == 2 * part
        assert pending["items"]["gradients"] == 0
        # Four sub-groups of 2 (gradient) + 4 + 8 + 2 (rounded) bytes an element, in whole blocks.
        assert 0 < after["host"]["offload_buffers"] <= 4 * (16 * 5000 + 5 * 4096)
        assert rank["after"][0] == after


# -------------------------------------------------------------------- disks that fail

FAILURES = "tests.distributed.cases.offload_failures"


def check_refusals(result: dict[str, Any], directory: Path) -> None:
    """After an error nothing goes on as if there had been none, but from the checkpoint on everything does."""
    assert result["raised"].startswith(("OSError", "UnexpectedEnd"))
    assert "bytes at byte" in result["raised"] and str(directory) in result["raised"]
    assert all("the swap file of rank 0" in text for text in (result["step"], result["loop"]) if text)
    assert result["loop"], "a step was done with what the disk has lost"
    if result["save"]:
        assert "the swap file of rank 0" in result["save"]
    else:
        assert result["saved"] == [], "what the disk has lost was saved"
    if "failed in its middle" in result["save"]:
        assert "last checkpoint" in result["save"] and "failed in its middle" in result["export"]
    assert result["differences"] == []


def failures(pools: Pools, directory: Path, name: str, stage: int, points: list[int]) -> list[dict[str, Any]]:
    (directory / "disk").mkdir()
    zero = {**offload("nvme", directory / "disk"), "sub_group_size": 5000}
    kwargs = {"directory": str(directory / "saved"), "name": name, "stage": stage, "zero": zero, "points": points}
    results: list[dict[str, Any]] = pools(1).run(f"{FAILURES}:breaks", kwargs, timeout=600.0)[0]
    return results


@pytest.mark.slow
def test_an_error_of_the_disk_is_not_forgotten(pools: Pools, tmp_path: Path) -> None:
    """A gradient on its way there, something on its way to the update, and its result on the way back."""
    for result in failures(pools, tmp_path, "sums in bf16", 2, [0, 7, 40, 80]):
        check_refusals(result, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("mixture in bf16", 2), ("sums in bf16", 2), ("NAdam", 3), ("wide", 1)])
def test_an_error_of_any_request_is_not_forgotten(pools: Pools, tmp_path: Path, name: str, stage: int) -> None:
    results = failures(pools, tmp_path, name, stage, list(range(150)))
    broken = [result for result in results if result["raised"]]
    assert len(broken) > 20
    for result in broken:
        check_refusals(result, tmp_path)
    for result in results[len(broken) :]:
        assert result["requests"] <= len(broken), "one that failed was not noticed"
        assert result["differences"] == []


@pytest.mark.parametrize("what", ["missing", pytest.param("a file", marks=pytest.mark.slow)])
def test_a_path_that_is_not_there_on_one_rank_is_said_on_all(pools: Pools, tmp_path: Path, what: str) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    (tmp_path / "0" / "swap").mkdir()
    if what == "a file":
        (tmp_path / "1" / "swap").touch()
    kwargs = {"directory": str(tmp_path), "name": "mixture", "stage": 2, "zero": offload("nvme", Path("swap"))}
    for rank, result in enumerate(pools(2).run(f"{FAILURES}:begin", {**kwargs, "steps": 1})):
        assert result["phase"] == "initialize"
        assert "zero_optimization.offload_optimizer.nvme_path" in result["error"]
        assert {"missing": "swap does not exist", "a file": "swap is not a directory"}[what] in result["error"]
        assert rank or "rank 1:" in result["error"]


@contextlib.contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    """A file system of its own. Skips where none can be mounted."""
    directory.mkdir(exist_ok=True)
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], capture_output=True, text=True
    )
    if not mounted or mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr if mounted else 'there is no mount'}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full_on_one_rank_is_said_on_all(pools: Pools, tmp_path: Path) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank / "swap").mkdir(parents=True)
    kwargs = {"directory": str(tmp_path), "name": "wide", "stage": 2, "zero": offload("nvme", Path("swap"))}
    with small_disk(tmp_path / "1" / "swap", "300k"):
        for result in pools(2).run(f"{FAILURES}:begin", {**kwargs, "steps": 1}):
            assert result["phase"] == "initialize"
            for word in ("zero_optimization.offload_optimizer.nvme_path", "KB are free", "rank 1"):
                assert word in result["error"]


@pytest.mark.slow
def test_a_full_disk_shows_at_the_start(pools: Pools, tmp_path: Path) -> None:
    """However little there is; it was not checked before."""
    zero, config = offload("nvme", Path("swap")), {"memory_check": "off"}
    kwargs = {"directory": str(tmp_path), "name": "wide in bf16", "stage": 2, "zero": zero, "config": config}
    (tmp_path / "0").mkdir()
    phases = set()
    for size in ("8k", "200k", "300k", "500k", "600k", "2m"):
        with small_disk(tmp_path / "0" / "swap", size):
            result = pools(1).run(f"{FAILURES}:begin", {**kwargs, "steps": 2})[0]
        phases.add(result["phase"])
        if result["error"]:
            assert "expected room for" in result["error"] and "the swap file of rank 0 in swap" in result["error"]
    assert phases == {"initialize", "none"}
