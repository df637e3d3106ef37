"""docs/drop-in.md has a test for every row; those of the rows are in test_drop_in_*.py."""

from __future__ import annotations

import importlib

import pytest

from tests.toolkit.drop_in import CASES, ROWS, assert_row_is_true
from tests.toolkit.pool import Pools

THEMES = ("loops", "gradients", "hooks", "optimizers", "schedules", "weights", "modules", "graphs")
MODULES = {theme: f"tests.distributed.test_drop_in_{theme}" for theme in THEMES}


def test_every_row_has_a_case_and_every_refusal_words_and_an_alternative() -> None:
    for module in MODULES.values():
        importlib.import_module(module)
    assert CASES.keys() == ROWS.keys()
    assert len(ROWS) > 90
    for row, (*cells, instead) in ROWS.items():
        assert set(cells) <= {"works", "raises"}, row
        assert "raises" not in cells or (instead and CASES[row].words), row


OTHER_WORLDS = [
    *(("loops", name) for name in ("the_engines_loop", "accumulated", "weighted", "joined")),
    *(("gradients", name) for name in ("grad_read", "grad_changed", "clipped_by_torch")),
    ("hooks", "accumulate_hook_in_a_window"),
    ("optimizers", "elementwise"),
    ("schedules", "states_read"),
    ("weights", "written_gathered"),
    ("graphs", "unused_modules_in_a_leaf"),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("theme", "name"), OTHER_WORLDS)
def test_rows_are_true_at_other_world_sizes(pools: Pools, theme: str, name: str, world: int) -> None:
    importlib.import_module(MODULES[theme])
    if world > 1 or name != "joined":  # which is about ranks that differ
        assert_row_is_true(pools, MODULES[theme], name, True, world)
