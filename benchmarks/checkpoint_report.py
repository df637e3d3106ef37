"""From turns of saving and loading to tables. Ratios are medians over rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.report import Columns, Row, median, ratio

Turns = Sequence[Mapping[str, Any]]

TABLES: dict[str, Columns] = {
    "save": (
        ("competitor", "name", "{}"),
        ("MB", "file_bytes", "{:.0f}"),
        ("returns s", "save_s", "{:.2f}"),
        ("on disk s", "durable_s", "{:.2f}"),
        ("min", "min_s", "{:.2f}"),
        ("max", "max_s", "{:.2f}"),
        ("GB/s", "gb_s", "{:.2f}"),
        ("of dd", "of_zeros", "{:.2f}"),
        ("of random", "of_random", "{:.2f}"),
        ("of direct", "of_direct", "{:.2f}"),
        ("x first", "durable_to_first", "{:.2f}"),
    ),
    "load": (
        ("competitor", "name", "{}"),
        ("cold s", "cold_s", "{:.2f}"),
        ("GB/s", "cold_gb_s", "{:.2f}"),
        ("of dd", "cold_of_disk", "{:.2f}"),
        ("x first", "cold_to_first", "{:.2f}"),
        ("warm s", "warm_s", "{:.2f}"),
        ("GB/s", "warm_gb_s", "{:.2f}"),
        ("of dd", "warm_of_disk", "{:.2f}"),
        ("x first", "warm_to_first", "{:.2f}"),
    ),
    "asynchronous save": (
        ("competitor", "name", "{}"),
        ("copy ms", "copy_ms", "{:.0f}"),
        ("first stall ms", "first_stall_ms", "{:.0f}"),
        ("copies", "first_copies", "{:.2f}"),
        ("stall ms", "stall_ms", "{:.0f}"),
        ("copies", "copies", "{:.2f}"),
        ("step ms", "train_ms", "{:.0f}"),
        ("adds ms", "added_ms", "{:.0f}"),
    ),
}
COLUMNS: Columns = [column for columns in TABLES.values() for column in columns]
# Times whose ratio, within a turn, is a figure of its own.
WITHIN = {
    "of_zeros": ("zeros_s", "durable_s"),
    "of_random": ("random_s", "durable_s"),
    "of_direct": ("direct_s", "durable_s"),
    "warm_of_disk": ("read_warm_s", "warm_s"),
    "cold_of_disk": ("read_cold_s", "cold_s"),
    "first_copies": ("first_stall_s", "copy_s"),
    "copies": ("stall_s", "copy_s"),
}
# What the disk and the memory did by themselves.
MACHINE = {
    "dd writes": "zeros_s",
    "random bytes are written": "random_s",
    "dd writes past the page cache": "direct_s",
    "dd reads cold": "read_cold_s",
    "warm": "read_warm_s",
    "a copy": "copy_s",
    "into new memory": "new_copy_s",
}


def _times(turns: Turns, name: str) -> list[float | None]:
    return [turn.get(name) for turn in turns]


def _speed(turns: Turns, name: str) -> float | None:
    """GB/s of the competitor's files."""
    return median(turn["file_bytes"] / 1e9 / turn[name] for turn in turns if turn.get(name))


def _ms(seconds: Iterable[float | None]) -> float | None:
    found = median(seconds)
    return None if found is None else 1e3 * found


def figures(turns: Turns, first: Turns, steps: int) -> Row:
    """Return the figures of one competitor. "of": share of the disk's own speed; "to_first": time over that of the
    first competitor. steps: of training, in each of the parts that are timed."""
    durable = [turn["durable_s"] for turn in turns]
    row: Row = {name: median(_times(turns, name)) for name in ("save_s", "durable_s", "warm_s", "cold_s")}
    row |= {"file_bytes": turns[0]["file_bytes"], "min_s": min(durable), "max_s": max(durable)}
    row |= {name: ratio(_times(turns, above), _times(turns, below)) for name, (above, below) in WITHIN.items()}
    for what in ("durable", "warm", "cold"):
        row[f"{what}_to_first"] = ratio(_times(turns, f"{what}_s"), _times(first, f"{what}_s"))
    row |= {"gb_s": _speed(turns, "durable_s"), "warm_gb_s": _speed(turns, "warm_s")}
    row["cold_gb_s"] = _speed(turns, "cold_s")
    for what in ("copy", "first_stall", "stall"):
        row[f"{what}_ms"] = _ms(_times(turns, f"{what}_s"))
    row["train_ms"] = _ms(turn["train_s"] / steps for turn in turns)
    row["added_ms"] = _ms(turn["total_s"] - turn["plain_s"] for turn in turns if "total_s" in turn)
    return row


def machine(turns: Turns) -> str:
    """Describe what the disk and the memory did by themselves, over all turns."""
    speeds = {what: _speed(turns, name) for what, name in MACHINE.items()}
    return "GB/s of all ranks together: " + ", ".join(
        f"{what} {'-' if speed is None else format(speed, '.2f')}" for what, speed in speeds.items()
    )
