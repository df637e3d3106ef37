"""Checkpoints and whole models of every grid of pipeline stages, data-parallel and tensor-parallel ranks, in every
other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.cases.export import read_model
from tests.checkpoint.cases.grids import GRIDS
from tests.toolkit.grids import Grid
from tests.toolkit.pool import Pools
from zerolite.checkpoint import inspect
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.export import export_checkpoint
from zerolite.checkpoint.manifest import SavedGrid, read_manifest

CASES = "tests.checkpoint.cases.grids"


def stages_of(grid: Grid) -> list[int]:
    return [0, 1] if grid[0] > 1 else [0, 1, 2, 3]


GRIDS_AT_STAGES = [(world, grid) for world, grids in GRIDS.items() for grid in grids]
PLACES = [
    (world, grid, stages_of(grid)[number % len(stages_of(grid))])
    for number, (world, grid) in enumerate(GRIDS_AT_STAGES)
]


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The snapshots of all ranks as one: what several say must be the same."""
    whole: dict[str, Any] = {"states": {}, "notes": {}}
    for snapshot in ranks:
        for kind in ("states", "notes"):
            for name, value in snapshot[kind].items():
                known = whole[kind].setdefault(name, value)
                assert known.shape == value.shape and torch.equal(known, value) if kind == "states" else known == value
        for state in (snapshot["values"], snapshot["fp32"]):
            state.pop("blocks.0.seen"), state.pop("blocks.1.seen")
        for kind in ("values", "fp32", "groups", "steps"):
            assert_same(whole.setdefault(kind, snapshot[kind]), snapshot[kind])
    return whole


def assert_same(found: Any, wanted: Any, where: str = "", rtol: float = 0.0) -> None:
    if isinstance(wanted, dict):
        assert sorted(found) == sorted(wanted), where
        for name, value in wanted.items():
            assert_same(found[name], value, f"{where} {name}", rtol)
    elif isinstance(wanted, torch.Tensor):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype, where
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol, msg=lambda text: f"{where}: {text}")
    else:
        assert found == wanted, where


def saved(pools: Pools, world: int, grid: Grid, stage: int, directory: Path, **more: Any) -> list[list[dict[str, Any]]]:
    """Both snapshots, of each rank."""
    kwargs = {"grid": grid, "stage": stage, "directory": str(directory), **more}
    ranks = pools(world).run(f"{CASES}:save", kwargs, timeout=120)
    return [[rank[moment] for rank in ranks] for moment in (0, 1)]


def loaded(
    pools: Pools, world: int, places: list[tuple[Grid, int]], directory: Path, **more: Any
) -> list[list[list[dict[str, Any]]]]:
    """The same for each place."""
    ranks = pools(world).run(f"{CASES}:load", {"grids": places, "directory": str(directory), **more}, timeout=240)
    return [[[rank[number][moment] for rank in ranks] for moment in (0, 1)] for number in range(len(places))]


def check(
    pools: Pools, world: int, grid: Grid, stage: int, directory: Path, into: dict[int, list[Any]], **more: Any
) -> None:
    moments = saved(pools, world, grid, stage, directory, **more)
    before, after = map(joined, moments)
    for other, places in into.items():
        for (there, _), (first, second) in zip(places, loaded(pools, other, places, directory, **more), strict=True):
            for rank, snapshot in enumerate(second):
                assert snapshot["client"] == {"saved at": list(grid)}
                data = rank // there[2] % there[1]
                for block in (0, 1):  # buffers that differ between ranks
                    seen = [float(block), 100.0 + (data if there == grid else 0)]
                    assert snapshot["values"][f"blocks.{block}.seen"].tolist() == seen
                if data < grid[1]:
                    source = rank if there == grid else data * grid[2]
                    assert torch.equal(snapshot["numbers"], moments[1][source]["numbers"])
            assert_same(joined(first), before, f"{grid} -> {there}")
            assert_same(joined(second), after, f"{grid} -> {there}, two steps later", rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "grid", "stage"), PLACES)
def test_every_grid_loads_every_other(pools: Pools, tmp_path: Path, world: int, grid: Grid, stage: int) -> None:
    into = {
        other: [(there, n) for there in grids for n in stages_of(there) if (n + stage) % 2]
        for other, grids in GRIDS.items()
    }
    check(pools, world, grid, stage, tmp_path, into)


@pytest.mark.slow
def test_an_optimizer_without_a_kernel(pools: Pools, tmp_path: Path) -> None:
    into = {2: [((1, 1, 2), 0), ((1, 1, 2), 2), ((2, 1, 1), 1)], 4: [((2, 1, 2), 1), ((1, 2, 2), 3)]}
    check(pools, 4, (1, 1, 4), 1, tmp_path, into, optimizer="RAdam")


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, grid, stage, precision",
    [
        (2, (1, 1, 2), 3, "fp16"),
        (4, (1, 2, 2), 2, "bf16"),
        (4, (2, 1, 2), 0, None),
    ],
)
def test_training_goes_on_at_every_other_grid(
    pools: Pools, tmp_path: Path, world: int, grid: Grid, stage: int, precision: str | None
) -> None:
    kwargs = {"grid": grid, "stage": stage, "directory": str(tmp_path), "precision": precision}
    wanted = pools(world).run(f"{CASES}:save_gpt", kwargs, timeout=240)[0]
    rtol = 2e-5 if precision is None else 2e-2
    for other, grids in GRIDS.items():
        places = [
            (there, min(stage, 1) if there[0] > 1 else (stage + number) % 4) for number, there in enumerate(grids)
        ]
        kwargs = {"grids": places, "directory": str(tmp_path), "precision": precision}
        for rank in pools(other).run(f"{CASES}:load_gpt", kwargs, timeout=240):
            for place, found in zip(places, rank, strict=True):
                assert_same(found["saved"], wanted["saved"], f"{grid} -> {place}")
                assert found["losses"] == pytest.approx(wanted["losses"], rel=rtol), f"{grid} -> {place}"
                assert_same(found["values"], wanted["values"], f"{grid} -> {place}", rtol=10 * rtol)


# -------------------------------------------------------------------- refusals


def test_what_only_the_whole_can_do(pools: Pools, tmp_path: Path) -> None:
    for said in pools(2).run(f"{CASES}:refusals_within", {"directory": str(tmp_path)}):
        assert said["save, pipeline"] == said["save, sequence"] == "nothing was raised"
        for name, why in (("pipeline", "of 2 of the model only. Call"), ("sequence", "cut by tensor parallelism")):
            own, other = said[f"state dict, {name}"], said[f"load state dict, {name}"]
            assert own.startswith("RuntimeError: state_dict: this rank has ") and why in own
            assert other.startswith("RuntimeError: load_state_dict: this rank has ") and why in other
            assert "engine.full_state_dict()" in own and "engine.load_full_state_dict(state)" in other


# -------------------------------------------------------------------- whole models


def check_whole(pools: Pools, tmp_path: Path, worlds: list[int]) -> None:
    state = pools(1).run(f"{CASES}:save", {"grid": (1, 1, 1), "stage": 0, "directory": str(tmp_path / "a")})[0][1]
    values = state["fp32"]
    sets: dict[str, list[torch.Tensor]] = {}
    for world in worlds:
        places = [(there, n) for there in GRIDS[world] for n in stages_of(there)]
        directory = tmp_path / str(world)
        kwargs = {"grids": places, "state": values, "directory": str(directory)}
        ranks = pools(world).run(f"{CASES}:whole", kwargs, timeout=240)
        for number, (there, n) in enumerate(places):
            for rank, found in enumerate(ranks):
                assert_same(found[number]["back"], values, f"{there} at stage {n}")
                assert found[number]["on rank 0"] == (sorted(values) if rank == 0 else [])
                for name, tensors in found[number]["set"].items():
                    for one, other in zip(tensors, sets.setdefault(name, tensors), strict=False):
                        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
            assert_same_files(directory / str(number), directory / f"{number} trained", values)
    assert {name: value[1].shape for name, value in sets.items()} == {
        name: values[name].shape for name in sets if name in values
    }


def assert_same_files(directory: Path, trained: Path, values: dict[str, Any]) -> None:
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    del tensors["head.weight"]
    found, _ = read_model(directory)
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    assert_same(found, {name: value.bfloat16() for name, value in tensors.items()})
    found, _ = read_model(trained)
    frozen = [name for name in tensors if name.endswith(("table", "bounds"))]
    assert sorted(found) == sorted(set(tensors) - set(frozen))


@pytest.mark.slow
def test_whole_models_of_every_grid(pools: Pools, tmp_path: Path) -> None:
    check_whole(pools, tmp_path, [1, 2, 4])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "grid"), [(4, (2, 1, 2))])
def test_what_does_not_fit(pools: Pools, tmp_path: Path, world: int, grid: Grid) -> None:
    kwargs: dict[str, Any] = {"grid": (1, 1, 1), "directory": str(tmp_path)}
    values = pools(1).run(f"{CASES}:save", {**kwargs, "stage": 0})[0][0]["fp32"]
    for said in pools(world).run(f"{CASES}:misfits", {**kwargs, "grid": grid, "state": values}):
        assert "missing norm.bias" in said["short"] and "Nothing was loaded" in said["short"]
        assert "unexpected" in said["long"]
        assert "shapes differ for blocks.1.qkv.weight (expected (24, 6))" in said["wrong"], said["wrong"]
        assert "it has no parameter more." in said["missing"], said["missing"]
        assert "the model has no parameter blocks.0.bounds, blocks.1.bounds." in said["unexpected"], said["unexpected"]


def test_states_that_mean_nothing_for_a_part(pools: Pools, tmp_path: Path) -> None:
    for saving, loading in pools(2).run(f"{CASES}:states_of_rows", {"directory": str(tmp_path)}):
        assert "optimizer state 'rows' of parameter '" in saving
        assert saving.endswith("with tensor_parallel.size = 1 it can be saved")
        assert loading.endswith("such states can be loaded with tensor_parallel.size = 1 only")


# -------------------------------------------------------------------- people


def test_the_command_line_knows_the_grid(pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kwargs = {"grid": (2, 1, 1), "stage": 1, "directory": str(tmp_path / "saved")}
    values = pools(2).run(f"{CASES}:save", kwargs)[0][0]["fp32"]
    assert inspect.main([str(tmp_path / "saved"), "--verify"]) == 0
    assert "ranks        2 (pipe=2, data=1, tensor=1), stage 1" in capsys.readouterr().out
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    found, aliases = read_model(tmp_path / "out")
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    assert_same({**found, "head.weight": found["embed.weight"]}, tensors)
    assert aliases == {"head.weight": "embed.weight"}


def test_checkpoints_from_before_there_were_grids(pools: Pools, tmp_path: Path) -> None:
    saved(pools, 2, (1, 2, 1), 1, tmp_path)
    manifest = read_manifest(tmp_path / "global_step2")
    assert manifest.about.grid == SavedGrid(1, 2, 1)
    del manifest.about.layout["grid"]
    assert manifest.about.grid == SavedGrid(1, 2, 1)
    (tmp_path / "global_step2" / "manifest.json").write_bytes(manifest.to_json())
    assert read_manifest(tmp_path / "global_step2") == manifest
    for grid in ({"pipe": 1, "data": 3, "tensor": 1}, {"pipe": -1, "data": -2, "tensor": 1}, {"pipe": 2}):
        manifest.about.layout["grid"] = grid
        (tmp_path / "global_step2" / "manifest.json").write_bytes(manifest.to_json())
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(tmp_path / "global_step2")
