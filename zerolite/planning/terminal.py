"""Tables, bars and charts of characters for a terminal."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from zerolite.planning.palette import LOOKS

_NARROWEST, _WIDEST, _UNKNOWN = 40, 120, 100
_STEPS = (0, 95, 135, 175, 215, 255)  # of each primary colour, in a terminal's 256
_PARTS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Screen:
    """What the output can show. width: columns, 40 to 120. blocks: whether it has Unicode's block elements, which plain
    ASCII stands for otherwise. colour: whether it understands ANSI colours."""

    width: int = _UNKNOWN
    blocks: bool = True
    colour: bool = False

    @staticmethod
    def of(stream: TextIO, environ: Mapping[str, str] = os.environ) -> Screen:
        """That of ``stream``; COLUMNS and NO_COLOR (https://no-color.org) are heeded."""
        terminal = stream.isatty()
        columns = environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) > 0 else _columns(stream) if terminal else _UNKNOWN
        colour = terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        return Screen(max(_NARROWEST, min(_WIDEST, width)), _can_encode(stream, _PARTS + "▒"), colour)

    def paragraph(self, text: str, indent: str = "", first: str | None = None) -> list[str]:
        """``text`` in lines; ``first`` begins the first one instead of ``indent``."""
        return textwrap.wrap(
            text, self.width, initial_indent=indent if first is None else first, subsequent_indent=indent
        )

    def bar(self, item: str, share: float, width: int) -> str:
        """``share`` (0 to 1) of ``width`` columns, in the colour of ``item``."""
        eighths = round(min(max(share, 0.0), 1.0) * width * 8)
        if not self.blocks:
            return "#" * round(eighths / 8)
        bar = (_PARTS[8] * (eighths // 8) + _PARTS[eighths % 8]).rstrip()
        return f"\033[38;5;{_colour(item)}m{bar}\033[0m" if self.colour and bar else bar

    def stacked(self, items: Mapping[str, int], scale: int, width: int) -> str:
        """A bar of the letters of ``items``, in which ``scale`` bytes are ``width`` columns."""
        cells = shares(list(items.values()), round(width * sum(items.values()) / scale) if scale else 0)
        bar = ""
        for item, count in zip(items, cells, strict=True):
            bar += self._painted(item, LOOKS[item].letter * count)
        return bar

    def _painted(self, item: str, text: str) -> str:
        if not self.colour or not text:
            return text
        front = 97 if LOOKS[item].is_dark else 30
        return f"\033[{front};48;5;{_colour(item)}m{text}\033[0m"

    def chart(self, columns: Sequence[tuple[int, int]], highest: int, height: int) -> list[str]:
        """Rows, the top one first, of columns (lower part, whole), in which ``highest`` is ``height`` rows. The part
        above the lower one is shaded."""
        full, shade = ("█", "▒") if self.blocks else ("#", ":")
        rows = []
        for row in reversed(range(height)):
            middle = (row + 0.5) / height * highest
            line = "".join(full if lower >= middle else shade if whole >= middle else " " for lower, whole in columns)
            rows.append(line.rstrip())
        return rows


def _colour(item: str) -> int:
    """The nearest of a terminal's 256 colours."""
    red, green, blue = (_nearest_step(value) for value in LOOKS[item].rgb)
    return 16 + 36 * red + 6 * green + blue


def _nearest_step(value: int) -> int:
    return min(range(len(_STEPS)), key=lambda step: abs(_STEPS[step] - value))


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _UNKNOWN
    except OSError:
        return _UNKNOWN


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def shares(amounts: Sequence[int], cells: int) -> list[int]:
    """``cells`` shared out in proportion to ``amounts``: whole numbers that sum to it."""
    whole = sum(amounts)
    if whole == 0:
        return [0] * len(amounts)
    exact = [amount * cells / whole for amount in amounts]
    counts = [int(value) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_rest[: cells - sum(counts)]:
        counts[index] += 1
    return counts


def table(
    rows: Sequence[Sequence[str]], width: int, left: Sequence[int] = (0,), optional: Sequence[int] = ()
) -> list[str]:
    """Aligned lines of at most ``width`` columns; the first row is the head. left: columns aligned to the left.
    optional: columns that are left out, in this order, while the lines are too long; then the first is cut."""
    shown = list(range(len(rows[0])))
    leave_out = list(optional)
    while True:
        widths = {column: max(len(row[column]) for row in rows) for column in shown}
        excess = sum(widths.values()) + 2 * (len(shown) - 1) - width
        if excess <= 0 or not leave_out:
            break
        shown.remove(leave_out.pop(0))
    if excess > 0:
        widths[0] = max(widths[0] - excess, 4)
    lines = []
    for row in rows:
        cells = [
            f"{cut(row[column], widths[column]):{'<' if column in left else '>'}{widths[column]}}" for column in shown
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def cut(text: str, width: int) -> str:
    """At most ``width`` columns of ``text``, which end in ".." if there was more."""
    return text if len(text) <= width else text[: width - 2] + ".."
