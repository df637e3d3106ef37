"""Numbers with units, for people."""

from __future__ import annotations

from collections.abc import Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def with_unit(value: float, unit: str) -> str:
    """``value`` with a decimal prefix: 25_200_000 and "FLOP" give "25.2 MFLOP"; three digits are kept."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000.0, power + 1
    text = f"{value:.3g}" if power or value != int(value) else str(int(value))
    return f"{text} {_PREFIXES[power]}{unit}".rstrip()


def table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of ``rows``, the first of them a heading, in columns two spaces apart; the first ``left`` columns begin at
    the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
