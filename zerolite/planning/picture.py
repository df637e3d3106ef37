"""Picture of one plan or several, as a PNG."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from zerolite.planning.errors import PlanError
from zerolite.planning.palette import LOOKS, spoken
from zerolite.planning.result import Comparison, Items, Plan
from zerolite.utils.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"), (1, "B"))
MATPLOTLIB_MISSING = "a picture needs matplotlib: pip install 'zerolite[plot]'"

_GREY = "#555555"
_DOTS = 120
_LEAST_ITEM = 0.001
"""Part of the highest bar up to which an item cannot be seen and is left out."""

_LEAST_PHASE = 0.05
"""Part of the time line's width below which a phase goes without its name."""


def draw(shown: Plan | Comparison, path: Path) -> None:
    """Write ``path``: bars of the items, and the memory in the course of a step of the plan, or of the setting that was
    chosen (the smallest, if none was). Raises PlanError without matplotlib, OSError if the file cannot be written."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise PlanError(MATPLOTLIB_MISSING) from None
    title = ""
    if isinstance(shown, Plan):
        plan, bars = shown, _bars_of(shown)
    else:
        title, plan = _most_wanted(shown)
        bars = [(_label(shown, row), entry.peak.items) for row, (_, entry) in enumerate(shown.rows)]
    held = [*(items for _, items in bars), *(moment.items for moment in plan.timeline)]
    least = _LEAST_ITEM * max(sum(entry.values()) for entry in held)
    items = [item for item in LOOKS if any(entry[item] > least for entry in held)]
    wide = 1.2 + 1.15 * len(bars)
    figure = Figure(figsize=(wide + 9, 5), dpi=_DOTS, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(wide, 7))
    _draw_bars(left, bars, items, plan.device_memory)
    left.set_title("the peak of each setting" if title else "memory", pad=22)
    _draw_timeline(right, plan, items, title)
    handles = [Patch(color=LOOKS[item].hex, label=spoken(item)) for item in reversed(items)]  # as they are stacked
    figure.legend(handles=handles, loc="outside right center", frameon=False)
    figure.suptitle(_title(plan))
    figure.savefig(path, format="png")


def _most_wanted(comparison: Comparison) -> tuple[str, Plan]:
    """What was chosen, or the smallest if nothing was."""
    if comparison.chosen is not None:
        return comparison.rows[comparison.chosen]
    return min(comparison.rows, key=lambda row: row[1].peak.bytes)


def _label(comparison: Comparison, row: int) -> str:
    """A setting in short lines."""
    parts = textwrap.wrap(comparison.rows[row][0], 13, break_long_words=False)
    return "\n".join([*parts, *(["(cheapest)"] if row == comparison.chosen else [])])


def _title(plan: Plan) -> str:
    ranks = f"{plan.world_size:,} rank{'' if plan.world_size == 1 else 's'}"
    return f"{plan.model}: {plan.parameters:,} parameters, {ranks}, {plan.precision}, memory of rank {plan.rank}"


def _bars_of(plan: Plan) -> list[tuple[str, Items]]:
    elsewhere = [("on the\nhost", plan.host), ("on disk", plan.disk)]
    return [
        ("at rest", plan.at_rest),
        ("making\nthe engine", plan.initialize_peak.items),
        ("peak of\na step", plan.step_peak.items),
        *((name, items) for name, items in elsewhere if items is not None),
    ]


def _draw_bars(axes: Axes, bars: list[tuple[str, Items]], items: list[str], memory: int | None) -> None:
    """One bar for each (name, items), what they sum to above it, and the device's memory as a line."""
    highest = max([memory or 0, 1, *(sum(held.values()) for _, held in bars)])
    factor, unit = _unit(highest)
    places = range(len(bars))
    bottoms = [0.0] * len(bars)
    for item in items:
        sizes = [held[item] / factor for _, held in bars]
        axes.bar(places, sizes, 0.7, bottoms, color=LOOKS[item].hex)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    _draw_memory(axes, memory, factor)
    for place, bottom, (_, held) in zip(places, bottoms, bars, strict=True):
        _write(axes, format_size(sum(held.values())), (place, bottom), (0, 3), va="bottom")
    axes.set_xticks(list(places), [name for name, _ in bars], fontsize=8)
    axes.set(ylabel=f"{unit} per rank", ylim=(0, 1.12 * highest / factor))
    _tidy(axes)


def _draw_timeline(axes: Axes, plan: Plan, items: list[str], title: str) -> None:
    """The items stacked, moment by moment, and the phases."""
    heading = "memory in the course of a step"
    axes.set_title(f"{heading}, {title}" if title else heading, pad=22)
    axes.set(xlabel="allocations and releases, in their order", xticks=[])
    _tidy(axes)
    if not plan.timeline:
        axes.text(0.5, 0.5, "no step was planned", transform=axes.transAxes, ha="center", color=_GREY)
        axes.set_yticks([])
        return
    count = len(plan.timeline)
    peak = max(range(count), key=lambda index: plan.timeline[index].bytes)
    highest = max(plan.timeline[peak].bytes, 1)
    memory = plan.device_memory if plan.device_memory is not None and plan.device_memory <= 1.5 * highest else None
    factor, unit = _unit(highest)
    moments = [*plan.timeline, plan.timeline[-1]]
    layers = [[moment.items[item] / factor for moment in moments] for item in items]
    axes.stackplot(range(count + 1), layers, colors=[LOOKS[item].hex for item in items], step="post", linewidth=0)
    top = max(highest, memory or 0) / factor
    axes.set(xlim=(0, count), ylim=(0, 1.2 * top), ylabel=f"{unit} per rank")
    _draw_memory(axes, memory, factor)
    _mark_phases(axes, plan)
    module = _short(plan.timeline[peak].module or "the model itself")
    axes.plot([peak + 0.5] * 2, [highest / factor, 1.08 * top], color="black", linewidth=0.8)
    side = "right" if peak > count / 2 else "left"
    _write(axes, f"{format_size(highest)}: {module}", (peak + 0.5, 1.08 * top), (0, 2), va="bottom", ha=side)


def _mark_phases(axes: Axes, plan: Plan) -> None:
    """A line where each phase begins, and its name above it where there is room."""
    begin = 0
    for phase, moments in itertools.groupby(plan.timeline, key=lambda moment: moment.phase):
        length = len(list(moments))
        if begin > 0:
            axes.axvline(begin, color=_GREY, linewidth=0.8, linestyle=":")
        if length >= _LEAST_PHASE * len(plan.timeline):
            axes.text(begin + length / 2, 1.01, phase, transform=axes.get_xaxis_transform(), ha="center", color=_GREY)
        begin += length


def _draw_memory(axes: Axes, memory: int | None, factor: int) -> None:
    """The device's memory as a line, its size beside the axes."""
    if memory is not None:
        axes.axhline(memory / factor, color="black", linewidth=1.2, linestyle="--")
        label = f" device:\n {format_size(memory)}"
        axes.text(1.0, memory / factor, label, transform=axes.get_yaxis_transform(), va="center", fontsize=9)


def _write(
    axes: Axes, text: str, place: tuple[float, float], offset: tuple[int, int], va: str, ha: str = "center"
) -> None:
    """A small text, ``offset`` points from a place in the axes' units, readable across lines."""
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axes.annotate(text, place, offset, textcoords="offset points", ha=ha, va=va, fontsize=9, bbox=behind)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _unit(highest: int) -> tuple[int, str]:
    """The largest unit of which ``highest`` bytes are at least one."""
    return next((unit for unit in _UNITS if highest >= unit[0]), _UNITS[-1])


def _short(name: str, length: int = 40) -> str:
    return name if len(name) <= length else f"...{name[-length + 3 :]}"
