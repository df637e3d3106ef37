"""Saving and loading as calls: arguments, tags, client state, who must call and when, and who writes what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toolkit.pool import Pools

CASES = "tests.checkpoint.cases"


def case(pools: Pools, name: str, directory: Path, world: int = 2, **kwargs: Any) -> list[Any]:
    """name: "module:function"."""
    return pools(world).run(f"{CASES}.{name}", {"directory": str(directory / "checkpoints"), **kwargs})


def stages(*fast: int) -> Any:
    return pytest.mark.parametrize(
        "stage", [pytest.param(stage, marks=() if stage in fast else pytest.mark.slow) for stage in (0, 1, 2, 3)]
    )


@pytest.mark.fast("client_state-2")
@stages(2)
@pytest.mark.parametrize(
    "name", ["tags", "nothing_there", "client_state", "client_state_refused", "plateau", "different_arguments"]
)
def test_arguments(pools: Pools, tmp_path: Path, stage: int, name: str) -> None:
    case(pools, f"calls:{name}", tmp_path, stage=stage)


@pytest.mark.fast("odd_things-3")
@stages(3)
@pytest.mark.parametrize(
    "name",
    [
        "the_same_tag",
        "between_update_and_publish",
        "between_backward_and_step",
        "older_and_twice",
        "in_the_middle_of_an_accumulation",
        "odd_things",
        "written_before",
    ],
)
def test_at_which_time(pools: Pools, tmp_path: Path, stage: int, name: str) -> None:
    case(pools, f"times:{name}", tmp_path, stage=stage)


@pytest.mark.slow
@stages(1)
def test_loading_in_inference_mode(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "times:in_inference_mode", tmp_path, stage=stage)


@stages(1)
def test_another_default_device(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "times:another_default_device", tmp_path, stage=stage)


@stages(1)
def test_a_buffer_whose_elements_share_memory(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "times:expanded_buffer", tmp_path, stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["in_gathered_parameters", pytest.param("persistent_and_frozen", marks=pytest.mark.slow)]
)
def test_frozen_parameters_of_stage_3(pools: Pools, tmp_path: Path, name: str) -> None:
    case(pools, f"times:{name}", tmp_path, stage=3)


@pytest.mark.slow
@stages(1)
def test_models_that_were_initialised_in_parts(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "times:initialised_in_parts", tmp_path, stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "how"),
    [(0, "save"), (1, "load"), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((1, "save"), (0, "load")))],
)
def test_a_rank_that_does_not_take_part_is_named(pools: Pools, tmp_path: Path, missing: int, how: str) -> None:
    case(pools, "calls:absent", tmp_path, stage=1, missing=missing, how=how)


@pytest.mark.parametrize("missing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_call_that_a_rank_has_left_out(pools: Pools, tmp_path: Path, missing: int) -> None:
    case(pools, "calls:left_out", tmp_path, stage=1, missing=missing)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_comes_too_late(pools: Pools, tmp_path: Path, missing: int) -> None:
    case(pools, "calls:late", tmp_path, stage=1, missing=missing)


def test_one_process_of_several_needs_no_other(pools: Pools, tmp_path: Path) -> None:
    case(pools, "calls:one_process_of_several", tmp_path)


@pytest.mark.slow
@stages(3)
@pytest.mark.parametrize("finished", [0, 1])
def test_a_rank_that_has_finished_follows(pools: Pools, tmp_path: Path, stage: int, finished: int) -> None:
    case(pools, "calls:joined", tmp_path, stage=stage, finished=finished)


@stages(3)
def test_loading_where_a_rank_has_finished(pools: Pools, tmp_path: Path, stage: int) -> None:
    case(pools, "calls:joined_load", tmp_path, stage=stage)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "name",
    [
        "calls:tags",
        "calls:client_state",
        "times:the_same_tag",
        "times:between_update_and_publish",
        "times:older_and_twice",
    ],
)
def test_on_other_numbers_of_ranks(pools: Pools, tmp_path: Path, world: int, stage: int, name: str) -> None:
    case(pools, name, tmp_path, world, stage=stage)


# -------------------------------------------------------------------- who writes and reads what

OTHERS = [((2, 0), (1, 0)), ((3, 1), (2, 3)), ((1, 0), (3, 3)), ((3, 3), (2, 0)), ((2, 2), (4, 2))]  # ranks and stage


@stages(0, 3)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_rank_writes_and_reads_its_share(pools: Pools, tmp_path: Path, stage: int, world: int) -> None:
    width, depth = 331, 4
    ranks = case(pools, "calls:written_bytes", tmp_path, world, stage=stage, sizes={"width": width, "depth": depth})
    written, total = ranks[0]["written"], ranks[0]["total"]
    assert len(written) == world and sum(written.values()) == total
    assert all(rank["empty"] == [] for rank in ranks)
    # The random state of each rank is about 10 KB; a bucket is padded to a multiple of 64 elements for each rank.
    slack = 20_000 + 3 * depth * 64 * 4 * world
    for count in written.values():
        assert abs(count - total / world) <= slack, written
    block = 1 << 20
    for number, rank in enumerate(ranks):
        seen = [entry for entry in rank["read"] if entry[0].startswith("rank_")]
        assert len(seen) <= len(set(seen)) + 1, "a block was read twice, and not for the random state"
        if stage == 0:  # every rank needs everything
            assert {name for name, _ in seen} == set(written)
        else:
            assert {name for name, _ in seen} == {f"rank_{number:05d}.safetensors"}
            assert len(seen) <= -(-(written[f"rank_{number:05d}.safetensors"] + 20_000) // block) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 3), (3, 1)), *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_weights_of_several_blocks(
    pools: Pools, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    before = case(pools, "calls:large", tmp_path, saved[0], stage=saved[1], part="save")
    after = case(pools, "calls:large", tmp_path, loaded[0], stage=loaded[1], part="load")
    assert len(before[0]) == 4
    assert all(rank == before[0] for rank in (*before, *after))


@stages(0, 3)
def test_no_tensor_without_elements_is_in_a_file(pools: Pools, tmp_path: Path, stage: int) -> None:
    for rank in case(pools, "calls:nothing_empty", tmp_path, stage=stage):
        shapes = {f"{file} {name}": shape for file, names in rank.items() for name, shape in names.items()}
        assert shapes and not [name for name, shape in shapes.items() if 0 in shape]
        keys = [name.split()[1].split("@")[0] for name in shapes]
        assert "parameters/mix.weight" in keys and "parameters/again.weight" not in keys


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(2, 3), *(pytest.param(*worlds, marks=pytest.mark.slow) for worlds in ((2, 2), (3, 2), (2, 4)))],
)
def test_a_pass_over_the_data_goes_on_in_its_middle(pools: Pools, tmp_path: Path, saved: int, loaded: int) -> None:
    before = case(pools, "calls:data_position", tmp_path, saved, stage=1, part="save")
    after = case(pools, "calls:data_position", tmp_path, loaded, stage=3, part="load")
    samples = torch.tensor([*sum(before, []), *sum(after, [])])
    assert samples.sort().values.tolist() == list(range(48))
