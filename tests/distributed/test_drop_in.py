"""docs/drop-in.md is true: every row runs at every stage, and its cells say what comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases.drop_in import STAGES, all_cases
from tests.toolkit.models import ROOT
from tests.toolkit.pool import Pools

HEADER = ["what a loop does", "0", "1", "2", "3", "instead"]


def table(text: str) -> dict[str, list[str]]:
    """The cells for stages 0 to 3 by row, of all tables of ``text``."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith("|") or set(line) <= set("|- "):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == len(HEADER), line
        if cells == HEADER:
            continue
        assert cells[0] not in rows, f"two rows {cells[0]!r}"
        rows[cells[0]] = cells[1:5]
    return rows


ROWS = table((ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8"))
CASES = all_cases()
NAMES = {row: CASES[row].name if row in CASES else row for row in ROWS}
OVER_ROWS = pytest.mark.parametrize("row", [pytest.param(row, id=NAMES[row]) for row in ROWS])


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert ROWS.keys() - CASES.keys() == set()
    assert CASES.keys() - ROWS.keys() == set()


def test_cells_say_works_or_raises() -> None:
    assert len(ROWS) > 90
    for row, cells in ROWS.items():
        assert set(cells) <= {"works", "raises"}, row


def test_what_raises_somewhere_has_words_and_an_alternative() -> None:
    for line in (ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8").splitlines():
        if "| raises |" in line:
            *_, instead = line.strip("|").split("|")
            assert instead.strip(), line
            assert CASES[line.strip("|").split("|")[0].strip()].words, line


@pytest.mark.fast(
    "2-the_engines_loop",
    "2-torchs_loop",
    "2-accumulated",
    "2-joined",
    "2-closure",
    "2-autocast",
    "2-clipped_by_torch",
    "2-grad_read",
    "2-own_updates",
    "2-module_hooks",
    "2-muon_by_name",
)
@OVER_ROWS
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_row_is_true(pools: Pools, world: int, row: str) -> None:
    if world == 1 and CASES[row].several:
        pytest.skip("about ranks that differ")
    kwargs: dict[str, Any] = {"row": row, "everything": world != 2}
    wanted = dict(zip(STAGES, ROWS[row], strict=True))
    for rank in pools(world).run("tests.distributed.cases.drop_in:outcomes", kwargs, timeout=300.0):
        for stage, found in rank.items():
            assert set(found) == {wanted[stage]}, f"stage {stage}: {sorted(set(found))}, the table says {wanted[stage]}"
