"""Picture of a plan or of several, as a PNG."""

from __future__ import annotations

import itertools
from pathlib import Path

from zerolite.planning.result import Comparison, Plan, spoken
from zerolite.utils.memory_tags import ITEMS
from zerolite.utils.sizes import format_size

_GB = 10**9


def draw(shown: Plan | Comparison, path: Path) -> None:
    """Write ``path``: bars of the items, and the memory in the course of a step of the plan, or of the setting that was
    chosen (the smallest, if none was). Raises OSError if the file cannot be written."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    if isinstance(shown, Plan):
        plan, title = shown, ""
        bars = {"at rest": plan.at_rest, "making\nthe engine": plan.initialize_peak.items}
        bars |= {"peak of\na step": plan.step_peak.items, "on the\nhost": plan.host or {}, "on disk": plan.disk or {}}
        bars = {name: items for name, items in bars.items() if items}
    else:
        smallest = min(range(len(shown.rows)), key=lambda row: shown.rows[row][1].peak.bytes)
        title, plan = shown.rows[smallest if shown.chosen is None else shown.chosen]
        bars = {name.replace(", ", ",\n"): entry.peak.items for name, entry in shown.rows}
    colours = [colormaps["tab20"](place) for place in range(len(ITEMS))]
    figure = Figure(figsize=(10 + 1.2 * len(bars), 5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2 + 1.2 * len(bars), 7))
    under = [0.0] * len(bars)
    for item, colour in zip(ITEMS, colours, strict=True):
        heights = [items.get(item, 0) / _GB for items in bars.values()]
        drawn = left.bar(list(bars), heights, 0.7, under, color=colour, label=spoken(item) if any(heights) else None)
        under = [low + height for low, height in zip(under, heights, strict=True)]
    left.bar_label(drawn, [format_size(sum(items.values())) for items in bars.values()])
    left.tick_params(axis="x", labelsize=7)
    left.set(title="the peak of each setting" if title else "memory", ylabel="GB per rank")
    right.set(title=f"memory in the course of a step{', ' * bool(title)}{title}", ylabel="GB per rank", xticks=[])
    right.set_xlabel("allocations and releases, in their order")
    if plan.timeline:
        layers = [[point.items[item] / _GB for point in plan.timeline] for item in ITEMS]
        right.stackplot(range(len(plan.timeline)), layers, colors=colours, step="post")
    begin = 0
    for phase, points in itertools.groupby(plan.timeline, key=lambda point: point.phase):
        right.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
        right.text(begin, 1.0, phase, transform=right.get_xaxis_transform(), va="top", color="grey", rotation=90)
        begin += len(list(points))
    if plan.device_memory is not None:
        left.axhline(plan.device_memory / _GB, color="black", linestyle="--", label="memory of the device")
        right.axhline(plan.device_memory / _GB, color="black", linestyle="--")
    figure.legend(loc="outside right center", frameon=False)
    ranks = f"{plan.world_size:,} rank{'' if plan.world_size == 1 else 's'}"
    figure.suptitle(f"{plan.model}: {plan.parameters:,} parameters, {ranks}, {plan.precision}, rank {plan.rank}")
    figure.savefig(path, format="png")
