"""From figures to tables: ratios within rounds, agreement of losses, text and Markdown. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# The line of one competitor: figures by key, and None where there is none. All have "name" and "absent", the reason
# why there are no figures.
Row = dict[str, Any]
# Title, key of the row, format. Keys that end in _bytes are shown in MB.
Columns = Sequence[tuple[str, str, str]]


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are there, None if there are none."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def ratio(ours: Iterable[float | None], theirs: Iterable[float | None]) -> float | None:
    """Return the median over rounds of the ratio within a round."""
    return median(a / b for a, b in zip(ours, theirs, strict=False) if a is not None and b)


def disagreement(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> str | None:
    """Say where the losses first leave the reference's by more than `tolerance`; one that is no number does."""
    for step, (ours, theirs) in enumerate(zip(losses, reference, strict=True), 1):
        gap = abs(ours - theirs)
        if not gap <= tolerance:  # also true for NaN
            return f"the loss of step {step} is {gap:.2e} from the reference's, allowed is {tolerance:.0e}"
    return None


def make_rows(
    names: Iterable[str], absent: Mapping[str, str], columns: Columns, figures: Callable[[str], Row]
) -> list[Row]:
    """Return a row for each name; competitors in `absent` get the reason in the place of figures."""
    blank = dict.fromkeys([key for _, key, _ in columns])
    return [
        {**blank, "name": name, "absent": absent.get(name), **({} if name in absent else figures(name))}
        for name in names
    ]


def columns_in_use(rows: Sequence[Row], columns: Columns) -> Columns:
    """Leave out ratios ("to_") over a competitor that did not take part, and times of the host where there are none."""
    return [c for c in columns if not c[1].startswith(("to_", "host_")) or any(row[c[1]] is not None for row in rows)]


def render_table(rows: Sequence[Row], markdown: bool, columns: Columns) -> str:
    """Return the table as aligned text or Markdown; an absent row keeps its line, with the reason. MB are 10^6
    bytes."""
    header = [title for title, _, _ in columns]
    lines = [header, *(_cells(row, columns) for row in rows)]
    if markdown:
        lines.insert(1, ["---"] + ["---:"] * (len(header) - 1))
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    reasons = [None, *(row["absent"] for row in rows)]
    full = [line for line, reason in zip(lines, reasons, strict=True) if reason is None]
    widths = [max(map(len, cells)) for cells in zip(*full, strict=True)]
    widths[0] = max(len(line[0]) for line in lines)
    return "\n".join(
        f"{line[0]:<{widths[0]}}  {reason}"
        if reason is not None
        else "  ".join([f"{line[0]:<{widths[0]}}", *map(str.rjust, line[1:], widths[1:])])
        for line, reason in zip(lines, reasons, strict=True)
    )


def _cells(row: Row, columns: Columns) -> list[str]:
    if row["absent"] is not None:
        return [row["name"], f"absent ({row['absent']})"] + [""] * (len(columns) - 2)
    return [_cell(row[key], key, form) for _, key, form in columns]


def _cell(value: Any, key: str, form: str) -> str:
    if value is None:
        return "-"
    return form.format(value / 1e6 if key.endswith("_bytes") else value)
