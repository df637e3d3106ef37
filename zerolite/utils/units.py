"""Numbers with units, for people."""

from __future__ import annotations

from collections.abc import Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def with_unit(value: float, unit: str) -> str:
    """Return ``value`` with a decimal prefix: 25_200_000 and "FLOP" give "25.2 MFLOP"; three digits are kept."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000.0, power + 1
    text = f"{value:.3g}" if power or value != int(value) else str(int(value))
    return f"{text} {_PREFIXES[power]}{unit}".rstrip()


def table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table with columns two spaces apart. The first of ``rows`` is the heading.

    The first ``left`` columns are left-aligned, the others right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
