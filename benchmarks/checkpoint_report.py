"""From turns of saving and loading to tables and goals. Ratios are medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.checkpoint_turn import Background, Turn
from benchmarks.report import Columns

Rounds = Mapping[str, Sequence[Turn]]

LEAST_OF_DISK = 0.8
MOST_COPIES = 1.2


@dataclass(frozen=True)
class Row:
    """One competitor. ``of_``: share of the disk's own speed. ``to_first``: time over the first competitor's."""

    name: str
    absent: str | None = None
    file_bytes: int | None = None
    save_s: float | None = None
    durable_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    gb_s: float | None = None
    of_zeros: float | None = None
    of_random: float | None = None
    of_direct: float | None = None
    save_to_first: float | None = None
    warm_s: float | None = None
    warm_gb_s: float | None = None
    warm_of_disk: float | None = None
    warm_to_first: float | None = None
    cold_s: float | None = None
    cold_gb_s: float | None = None
    cold_of_disk: float | None = None
    cold_to_first: float | None = None
    copy_ms: float | None = None
    first_stall_ms: float | None = None
    first_copies: float | None = None
    stall_ms: float | None = None
    copies: float | None = None
    train_ms: float | None = None
    added_ms: float | None = None


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
        ("x first", "save_to_first", "{:.2f}"),
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


def summarise(rounds: Rounds, absent: Mapping[str, str], steps: int) -> list[Row]:
    """One row for each key of ``rounds``; competitors in ``absent`` get the reason instead of figures."""
    first = next((turns for name, turns in rounds.items() if name not in absent), ())
    return [
        Row(name, absent=absent[name]) if name in absent else _row(name, turns, first, steps)
        for name, turns in rounds.items()
    ]


def _row(name: str, turns: Sequence[Turn], first: Sequence[Turn], steps: int) -> Row:
    def gb_s(seconds: Callable[[Turn], float | None]) -> float | None:
        return _median(turn.file_bytes / 1e9 / value for turn in turns if (value := seconds(turn)))

    backgrounds = _backgrounds(turns)
    return Row(
        name,
        file_bytes=turns[0].file_bytes,
        save_s=_median(turn.save_s for turn in turns),
        durable_s=_median(turn.durable_s for turn in turns),
        min_s=min(turn.durable_s for turn in turns),
        max_s=max(turn.durable_s for turn in turns),
        gb_s=gb_s(durable),
        of_zeros=_ratio(turns, lambda turn: turn.zeros_s, turns, durable),
        of_random=_ratio(turns, lambda turn: turn.random_s, turns, durable),
        of_direct=_ratio(turns, lambda turn: turn.direct_s, turns, durable),
        save_to_first=_ratio(turns, durable, first, durable),
        warm_s=_median(turn.warm_s for turn in turns),
        warm_gb_s=gb_s(warm),
        warm_of_disk=_ratio(turns, lambda turn: turn.read_warm_s, turns, warm),
        warm_to_first=_ratio(turns, warm, first, warm),
        cold_s=_median(turn.cold_s for turn in turns),
        cold_gb_s=gb_s(cold),
        cold_of_disk=_cold_of_disk(turns),
        cold_to_first=_ratio(turns, cold, first, cold),
        copy_ms=_ms(copy(turn) for turn in turns),
        first_stall_ms=_ms(background.first_stall_s for background in backgrounds),
        first_copies=_median(background.first_stall_s / background.copy_s for background in backgrounds),
        stall_ms=_ms(background.stall_s for background in backgrounds),
        copies=_copies(turns),
        train_ms=_ms(turn.train_s / steps for turn in turns),
        added_ms=_ms(background.total_s - background.plain_s for background in backgrounds),
    )


def machine(rounds: Rounds) -> str:
    """What the disk and the memory did by themselves, over all turns."""
    turns = [turn for of_competitor in rounds.values() for turn in of_competitor]

    def gb_s(what: str, seconds: Callable[[Turn], float | None]) -> str:
        median = _median(turn.file_bytes / 1e9 / value for turn in turns if (value := seconds(turn)))
        return f"{what} {'-' if median is None else format(median, '.2f')}"

    return "GB/s of all ranks together: " + ", ".join(
        (
            gb_s("dd writes", lambda turn: turn.zeros_s),
            gb_s("random bytes are written", lambda turn: turn.random_s),
            gb_s("dd writes past the page cache", lambda turn: turn.direct_s),
            gb_s("dd reads cold", lambda turn: turn.read_cold_s),
            gb_s("warm", lambda turn: turn.read_warm_s),
            gb_s("a copy", copy),
            gb_s("into new memory", lambda turn: turn.background.new_copy_s if turn.background else None),
        )
    )


def goals(rounds: Rounds, absent: Mapping[str, str]) -> list[str]:
    """A sentence for each goal of each stage of zerolite: met, missed, or not measured."""
    sentences = []
    for name in [name for name in rounds if name.startswith("zerolite")]:
        if name in absent:
            sentences.append(f"{name}: {absent[name]}")
            continue
        turns = rounds[name]
        own = _ratio(turns, lambda turn: turn.zeros_s, turns, durable)
        sentences.append(_goal(f"{name} saves at {LEAST_OF_DISK} of the disk's speed", own, LEAST_OF_DISK, "{:.2f}"))
        own = _cold_of_disk(turns)
        sentences.append(_goal(f"{name} loads at {LEAST_OF_DISK} of the disk's speed", own, LEAST_OF_DISK, "{:.2f}"))
        for peer in (f"deepspeed-{name[-1]}", "fsdp2"):
            theirs = () if peer in absent else rounds.get(peer, ())
            for what, seconds in (("saves", durable), ("loads, cold,", cold), ("loads, warm,", warm)):
                speed = _ratio(theirs, seconds, turns, seconds)
                sentences.append(_goal(f"{name} {what} faster than {peer}", speed, 1.0, "{:.2f} times its speed"))
        stall = _copies(turns)
        sentences.append(_goal(f"{name} stalls for at most {MOST_COPIES} copies", stall, MOST_COPIES, "{:.2f}", -1))
    return sentences


def _goal(what: str, found: float | None, bound: float, form: str, sign: int = 1) -> str:
    if found is None:
        return f"{what}: not measured"
    return f"{what}: {form.format(found)}, {'met' if sign * found >= sign * bound else 'missed'}"


# -------------------------------------------------------------------- of a turn


def durable(turn: Turn) -> float | None:
    return turn.durable_s


def warm(turn: Turn) -> float | None:
    return turn.warm_s


def cold(turn: Turn) -> float | None:
    return turn.cold_s


def copy(turn: Turn) -> float | None:
    return turn.background.copy_s if turn.background else None


def _backgrounds(turns: Sequence[Turn]) -> list[Background]:
    return [turn.background for turn in turns if turn.background is not None]


def _cold_of_disk(turns: Sequence[Turn]) -> float | None:
    return _ratio(turns, lambda turn: turn.read_cold_s, turns, cold)


def _copies(turns: Sequence[Turn]) -> float | None:
    return _median(background.stall_s / background.copy_s for background in _backgrounds(turns))


# -------------------------------------------------------------------- over rounds


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _ms(seconds: Iterable[float | None]) -> float | None:
    median = _median(seconds)
    return None if median is None else 1e3 * median


def _ratio(
    ours: Sequence[Turn],
    above: Callable[[Turn], float | None],
    theirs: Sequence[Turn],
    below: Callable[[Turn], float | None],
) -> float | None:
    """The median over the rounds in which both were measured."""
    pairs = [(above(a), below(b)) for a, b in zip(ours, theirs, strict=False)]
    return _median(a / b for a, b in pairs if a is not None and b)
