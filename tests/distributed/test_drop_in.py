"""docs/drop-in.md is true, row by row. What a loop does for each row is in the modules of tests/distributed/drop_in."""

from __future__ import annotations

import importlib

import pytest

from tests.toolkit.drop_in import CASES, ROWS, outcomes
from tests.toolkit.pool import Pools

for theme in ("loops", "gradients", "hooks", "optimizers", "schedules", "weights", "modules", "graphs"):
    importlib.import_module(f"tests.distributed.drop_in.{theme}")
NAMES = {case.name: row for row, case in CASES.items()}


def test_every_row_has_a_case_and_every_refusal_words_and_an_alternative() -> None:
    assert CASES.keys() == ROWS.keys() and len(NAMES) == len(ROWS) > 90
    for row, (*cells, instead) in ROWS.items():
        assert set(cells) <= {"works", "raises"}, row
        assert "raises" not in cells or (instead and CASES[row].words), row


def assert_row_is_true(pools: Pools, name: str, everything: bool, world: int = 2) -> None:
    row = NAMES[name]
    kwargs = {"module": CASES[row].function.__module__, "row": row, "everything": everything}
    for rank in pools(world).run(outcomes, kwargs, timeout=300.0):
        for stage, found in rank.items():
            said = ROWS[row][stage]
            assert set(found) == {said}, f"stage {stage}: {sorted(set(found))}, the table says {said}"


FAST = ("torchs_loop", "closure", "clipped_by_torch", "grad_read", "grad_assigned", "own_updates", "module_hooks")


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_true(pools: Pools, request: pytest.FixtureRequest, name: str) -> None:
    assert_row_is_true(pools, name, everything=request.node.get_closest_marker("slow") is not None)


OTHER_WORLDS = ("the_engines_loop", "accumulated", "weighted", "joined", "grad_read", "grad_changed")
OTHER_WORLDS += ("clipped_by_torch", "accumulate_hook", "elementwise", "states_read", "written_gathered")
OTHER_WORLDS += ("unused_modules_in_a_leaf", "unfreezing", "group_added")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", OTHER_WORLDS)
def test_rows_are_true_at_other_world_sizes(pools: Pools, name: str, world: int) -> None:
    if world > 1 or name != "joined":  # which is about ranks that differ
        assert_row_is_true(pools, name, False, world)
