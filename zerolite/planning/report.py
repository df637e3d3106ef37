"""Report of a plan, or of several side by side: :func:`render` makes text for a terminal, :func:`draw` a picture."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from zerolite.planning.result import Comparison, Peak, Plan, item_label, total
from zerolite.utils.memory_tags import ITEMS, MODEL_STATES
from zerolite.utils.text import counted, format_size, with_unit

WIDTH = 100
"""Columns of paragraphs."""

_GIGA = 10**9
_LEFT = ("memory", "stage", "in", "traffic of a step", "for", "over", "setting", "")
"""Headings of columns that are aligned to the left."""


def render(result: Plan | Comparison) -> str:
    """Return the full report of a plan or a comparison."""
    sections = _one_plan(result) if isinstance(result, Plan) else _several_plans(result)
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _wrapped(*sentences: str, dash: str = "") -> list[str]:
    """Return the lines of sentences, each a paragraph of its own."""
    wrap = textwrap.TextWrapper(WIDTH, initial_indent=dash, subsequent_indent=" " * len(dash)).wrap
    return [line for sentence in sentences for line in wrap(sentence)]


def _table(rows: Sequence[Sequence[str]], without: Sequence[str] = ()) -> list[str]:
    """Return the aligned lines of a table.

    Args:
        rows: cells; the first row has the headings.
        without: headings of columns to leave out.
    """
    columns = [column for column in zip(*rows, strict=True) if column[0] not in without]
    widths = [max(map(len, column)) for column in columns]
    sides = ["<" if column[0] in _LEFT else ">" for column in columns]
    lines = zip(*columns, strict=True)
    cells = [[f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)] for line in lines]
    return ["  ".join(line).rstrip() for line in cells]


# -------------------------------------------------------------------- one plan


def _one_plan(plan: Plan) -> Iterator[list[str]]:
    trained = "" if plan.trained_parameters == plan.parameters else f", {plan.trained_parameters:,} of them trained"
    stage = f"{'ZeRO ' * bool(plan.grid)}stage {plan.stage}, rank {plan.rank} of {plan.world_size:,}"
    grid = [plan.grid] if plan.grid else []
    about = ", ".join([stage + _on_nodes(plan), *grid, plan.precision, plan.device])
    yield _wrapped(f"{plan.model}: {plan.parameters:,} parameters{trained}", about, _batch(plan))
    yield _memory(plan)
    yield _wrapped(*_peaks(plan))
    yield _wrapped(_device_verdict(plan), _host_verdict(plan))
    yield _traffic(plan)
    yield _wrapped(_flops(plan), _time(plan))
    yield _wrapped(*plan.notes, dash="- ")


def _on_nodes(plan: Plan) -> str:
    return "" if plan.nodes is None else f" on {counted(plan.nodes, 'node')}"


def _without_nodes(plan: Plan) -> Sequence[str]:
    """Return the heading of the column that a plan without a number of nodes lacks."""
    return ("between nodes",) if plan.nodes is None else ()


def _batch(plan: Plan) -> str:
    size = "" if plan.micro_batch is None else f" of {plan.micro_batch}"
    batch = f": {plan.batch}" if plan.batch else "; no batch was given, so there are no activations"
    return f"{counted(plan.accumulation, 'micro-batch', 'es')}{size} in a step{batch}"


def _memory(plan: Plan) -> list[str]:
    """Return the table of items."""
    held = {"at rest": plan.at_rest, "in a step": plan.states, "at the peak": plan.peak.items}
    held |= {name: items for name, items in (("host", plan.host), ("disk", plan.disk)) if items is not None}
    rows = [["memory", *held]]
    for item in ITEMS:
        if any(column[item] for column in held.values()):
            rows.append([item_label(item), *(_size(column[item]) for column in held.values())])
    rows.append(["  model states", *(_size(total(column, MODEL_STATES)) for column in held.values())])
    sums = [_size(sum(column.values())) for column in held.values()]
    rows.append(["  all", sums[0], "", *sums[2:]])  # states are at their largest at different moments
    return _table(rows)


def _peaks(plan: Plan) -> Iterator[str]:
    step, start = plan.step_peak, plan.peak.phase == "initialize"
    first = not start and plan.peak != step
    yield f"The peak is {format_size(plan.peak.bytes)}, {'in one of the first steps, ' * first}{_where(plan.peak)}."
    if plan.peak != step:
        yield f"{'A later step' if first else 'A step'} takes {format_size(step.bytes)} at most, {_where(step)}."
    if not start:
        yield f"While the engine is made, the peak is {format_size(plan.initialize_peak.bytes)}."


def _where(peak: Peak) -> str:
    at = "" if not peak.module_class else f", in {peak.module or 'the model itself'} ({peak.module_class})"
    return f"in {peak.phase}{at}{f', by {peak.op}' if peak.op else ''}"


def _device_verdict(plan: Plan) -> str:
    if plan.device_memory is None or plan.spare is None:
        return "Add --device-memory, as in --device-memory 80GB, to see if it fits."
    if plan.spare >= 0:
        return f"It fits: {format_size(plan.spare)} of {format_size(plan.device_memory)} are free at the peak."
    most = max(plan.peak.items, key=lambda item: plan.peak.items[item])
    return (
        f"It does not fit: the peak is {format_size(-plan.spare)} more than the {format_size(plan.device_memory)} of "
        f"the device. The largest item is {item_label(most)}, {format_size(plan.peak.items[most])}."
    )


def _host_verdict(plan: Plan) -> str:
    """Describe the host memory that the rank, and all ranks of its host, use; empty if nothing is offloaded."""
    if plan.host is None and plan.disk is None and plan.host_memory is None:
        return ""
    text, ranks = f"The rank uses up to {format_size(plan.host_peak)} of host memory", plan.ranks_per_host
    if ranks is None:
        return f"{text}. Add --nodes, which sets how many ranks share a host."
    text += f", and the {counted(ranks, 'rank')} of a host {format_size(ranks * plan.host_peak)}."
    if plan.host_memory is None or plan.host_spare is None:
        return f"{text} Add --host-memory, as in --host-memory 512GB, to see if it fits."
    memory = format_size(plan.host_memory)
    if plan.host_spare >= 0:
        return f"{text} That fits: {format_size(plan.host_spare)} of {memory} are free."
    return f"{text} That does not fit: it is {format_size(-plan.host_spare)} more than the host's {memory}."


def _traffic(plan: Plan) -> list[str]:
    """Return the table of collectives, and how often the host waits."""
    if not plan.traffic:
        return _wrapped("traffic of a step: none")
    rows = [["traffic of a step", "for", "over", "count", "bytes", "sent per rank", "between nodes"]]
    for row in plan.traffic:  # sorted, the most bytes sent first
        sizes = map(format_size, (row.nbytes, row.sent, row.inter_node or 0))
        rows.append([row.op, row.tag, f"{row.dimension} {row.ranks}", f"{row.count:,}", *sizes])
    sizes = map(format_size, (sum(row.nbytes for row in plan.traffic), plan.sent, plan.inter_node or 0))
    rows.append(["all", "", "", f"{sum(row.count for row in plan.traffic):,}", *sizes])
    waits = f"The host waits for the device {counted(plan.host_waits, 'time')} in a step." if plan.host_waits else ""
    return [*_table(rows, _without_nodes(plan)), *_wrapped(waits)]


def _flops(plan: Plan) -> str:
    if plan.flops is None:
        return ""
    flops, again = (with_unit(count, "FLOP") for count in (plan.flops, plan.recomputed_flops))
    more = f", and activation checkpointing recomputes {again} more" if plan.recomputed_flops else ""
    return (
        f"Forward and backward of a step take {flops} on each rank{more}. This counts matrix products (of experts: for "
        "the tokens routed to them), convolutions and attention (masked positions too), but no elementwise operations."
    )


def _time(plan: Plan) -> str:
    if plan.time is None:
        return ""
    time = plan.time
    return (
        f"A step takes {_ms(time.step)}: {_ms(time.products)} forward and backward, {_ms(time.passes)} passes over "
        f"gradients and states, {_ms(time.exposed)} in which the device waits for communication "
        f"({100 * time.exposed / (time.step or 1):.1f} %)."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"


# -------------------------------------------------------------------- several plans


def _several_plans(comparison: Comparison) -> Iterator[list[str]]:
    """Yield a line for each plan, then the lowest stage that fits and the settings that were left out."""
    plans = [plan for _, plan in comparison.rows]
    plan = plans[0]
    grid = [plan.grid] if plan.grid else []
    about = ", ".join([counted(plan.world_size, "rank") + _on_nodes(plan), *grid, plan.precision, plan.device])
    yield _wrapped(f"{plan.model}: {plan.parameters:,} parameters", about, _batch(plan))
    empty = [name for name in ("host", "disk") if not any(getattr(one, name) for one in plans)]
    empty += [] if any(one.time for one in plans) else ["step", "exposed"]
    rows = [["setting", *_cells(plan), ""]]
    for index, (name, one) in enumerate(comparison.rows):
        mark = "<- chosen" if index == comparison.chosen else ""
        rows.append([name, *_cells(one).values(), mark])
    yield _table(rows, (*empty, *_without_nodes(plan)))
    yield _wrapped(_choice(comparison))
    yield _wrapped(*dict.fromkeys([*comparison.left_out, *(note for one in plans for note in one.notes)]), dash="- ")


def _cells(plan: Plan) -> dict[str, str]:
    """Return the cells of a plan's row in a comparison, by column heading."""
    return {
        "states": format_size(plan.model_states),
        "peak": format_size(plan.peak.bytes),
        "sent": format_size(plan.sent),
        "between nodes": format_size(plan.inter_node or 0),
        "host": _size(sum((plan.host or {}).values())),
        "disk": _size(sum((plan.disk or {}).values())),
        "step": "-" if plan.time is None else _ms(plan.time.step),
        "exposed": "-" if plan.time is None else _ms(plan.time.exposed),
        "fits": {None: "?", True: "yes", False: "no" if (plan.spare or 0) < 0 else "no: host"}[plan.fits],
    }


def _choice(comparison: Comparison) -> str:
    memory = comparison.rows[0][1].device_memory
    if memory is None:
        return "Add --device-memory, as in --device-memory 80GB, to see which of them fit."
    if comparison.chosen is None:
        smallest, _ = min(comparison.rows, key=lambda row: row[1].peak.bytes)
        host = comparison.rows[0][1].host_memory
        both = "" if host is None else f" and a host's {format_size(host)}"
        return f"None of them fits in {format_size(memory)}{both}. The smallest is {smallest}."
    name, plan = comparison.rows[comparison.chosen]
    which = "first" if plan.time is None else "fastest"
    text = f"{name[0].upper()}{name[1:]} is the {which} that fits in {format_size(memory)}. It sends"
    text += f" {format_size(plan.sent)} per rank in a step."
    if plan.offloaded:
        text += f" It keeps {format_size(plan.offloaded)} of each rank's model states off the device."
        if plan.host_spare is None:
            text += " Add --nodes and --host-memory to see if a host has room for them."
    return text


# -------------------------------------------------------------------- a picture


def draw(result: Plan | Comparison, path: Path) -> None:
    """Draw bars of the items, and the memory during a step, to a PNG file at ``path``.

    For a comparison, the step is that of the chosen setting, or else of the smallest one. Raises OSError if the file
    cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    if isinstance(result, Plan):
        plan, title = result, ""
        bars = {"at rest": plan.at_rest, "making\nthe engine": plan.initialize_peak.items}
        bars |= {"peak of\na step": plan.step_peak.items, "on the\nhost": plan.host or {}, "on disk": plan.disk or {}}
        bars = {name: items for name, items in bars.items() if items}
    else:
        smallest = min(range(len(result.rows)), key=lambda row: result.rows[row][1].peak.bytes)
        title, plan = result.rows[smallest if result.chosen is None else result.chosen]
        bars = {name.replace(", ", ",\n"): entry.peak.items for name, entry in result.rows}
    colours = [colormaps["tab20"](index) for index in range(len(ITEMS))]
    figure = Figure(figsize=(10 + 1.2 * len(bars), 5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2 + 1.2 * len(bars), 7))
    under = [0.0] * len(bars)
    for item, colour in zip(ITEMS, colours, strict=True):
        heights = [items.get(item, 0) / _GIGA for items in bars.values()]
        label = item_label(item) if any(heights) else None
        left.bar(list(bars), heights, 0.7, under, color=colour, label=label)
        under = [low + height for low, height in zip(under, heights, strict=True)]
    left.tick_params(axis="x", labelsize=7)
    left.set(title="the peak of each setting" if title else "memory", ylabel="GB per rank")
    right.set(title=f"memory during a step{', ' * bool(title)}{title}", ylabel="GB per rank", xticks=[])
    layers = [[point.items[item] / _GIGA for point in plan.timeline] for item in ITEMS]
    right.stackplot(range(len(plan.timeline)), layers, colors=colours, step="post")
    begin = 0
    for phase, points in itertools.groupby(plan.timeline, key=lambda point: point.phase):
        right.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
        right.text(begin, 1.0, phase, transform=right.get_xaxis_transform(), va="top", color="grey", rotation=90)
        begin += len(list(points))
    if plan.device_memory is not None:
        for axes in (left, right):
            axes.axhline(plan.device_memory / _GIGA, color="black", linestyle="--")
    figure.legend(loc="outside right center", frameon=False)
    figure.suptitle(f"{plan.model}: {plan.parameters:,} parameters, {counted(plan.world_size, 'rank')}")
    figure.savefig(path, format="png")
