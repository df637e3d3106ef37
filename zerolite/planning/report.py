"""Report of a plan, or of several side by side: :func:`render` makes text for a terminal, :func:`draw` a picture."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zerolite.planning.result import Comparison, Peak, Plan, Traffic, counted, item_label, total
from zerolite.utils.memory_tags import ITEMS, MODEL_STATES
from zerolite.utils.text import format_size, with_unit

_NARROWEST, _WIDEST, _UNKNOWN = 40, 120, 100
_CHART_ROWS = 10
_LOWER, _UPPER = "█▒"
_GIGA = 10**9
_LEFT = ("memory", "stage", "in", "traffic of a step", "for", "over", "setting", "")
"""Headings of columns that are aligned to the left."""


class Screen(NamedTuple):
    """Output device of ``width`` columns, 40 to 120."""

    width: int = _UNKNOWN

    @staticmethod
    def of_terminal() -> Screen:
        """Return the terminal of standard output; the variable COLUMNS overrides its width."""
        return Screen(max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_UNKNOWN, 24)).columns)))

    def paragraph(self, text: str, dash: str = "") -> list[str]:
        return textwrap.wrap(text, self.width, initial_indent=dash, subsequent_indent=" " * len(dash))

    def listed(self, sentences: Sequence[str]) -> list[str]:
        """Return the lines of a list with a dash before each sentence."""
        return [line for sentence in sentences for line in self.paragraph(sentence, "- ")]

    def table(self, rows: Sequence[Sequence[str]], optional: Sequence[str] = ()) -> list[str]:
        """Return the aligned lines of a table.

        Args:
            rows: cells; the first row has the headings.
            optional: headings of columns to leave out, in this order, while the lines are too long. If that is not
                enough, the first column is truncated.
        """
        columns = list(zip(*rows, strict=True))
        while True:
            widths = [max(map(len, column)) for column in columns]
            excess = sum(widths) + 2 * (len(widths) - 1) - self.width
            left_out = [head for head in optional if any(column[0] == head for column in columns)]
            if excess <= 0 or not left_out:
                break
            columns = [column for column in columns if column[0] != left_out[0]]
        widths[0] = max(widths[0] - max(excess, 0), 4)
        lines = []
        for row in zip(*columns, strict=True):
            first = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 2] + ".."
            cells = zip((first, *row[1:]), widths, columns, strict=True)
            lines.append("  ".join(f"{cell:{'<' if head[0] in _LEFT else '>'}{width}}" for cell, width, head in cells))
        return [line.rstrip() for line in lines]


def render(result: Plan | Comparison, screen: Screen) -> str:
    """Return the full report of a plan or a comparison, in lines of at most ``screen.width`` columns."""
    sections = _one_plan(result, screen) if isinstance(result, Plan) else _several_plans(result, screen)
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


# -------------------------------------------------------------------- one plan


def _one_plan(plan: Plan, screen: Screen) -> Iterator[list[str]]:
    trained = "" if plan.trained_parameters == plan.parameters else f", {plan.trained_parameters:,} of them trained"
    stage = f"{'ZeRO ' * bool(plan.grid)}stage {plan.stage}, rank {plan.rank} of {plan.world_size:,}"
    grid = [plan.grid] if plan.grid else []
    yield [
        *screen.paragraph(f"{plan.model}: {plan.parameters:,} parameters{trained}"),
        *screen.paragraph(", ".join([stage + _on_nodes(plan), *grid, plan.precision, plan.device])),
        *screen.paragraph(_batch(plan)),
        *screen.paragraph("" if plan.longest is None else f"The longest sequences that fit: {plan.longest:,} tokens."),
    ]
    if plan.stages:
        yield from _stages(plan, screen)
    yield _memory(plan, screen)
    yield [line for sentence in _peaks(plan) for line in screen.paragraph(sentence)]
    yield [*screen.paragraph(_device_verdict(plan)), *screen.paragraph(_host_verdict(plan))]
    yield _timeline(plan, screen)
    yield _traffic(plan, screen)
    checkpoint = f"This rank writes {format_size(plan.checkpoint)} of a checkpoint."
    yield [*screen.paragraph(checkpoint), *screen.paragraph(_flops(plan)), *screen.paragraph(_time(plan))]
    yield screen.listed(plan.notes)


def _batch(plan: Plan) -> str:
    size = "" if plan.micro_batch is None else f" of {plan.micro_batch}"
    batch = f": {plan.batch}" if plan.batch else "; no batch was given, so there are no activations"
    return f"{counted(plan.accumulation, 'micro-batch', 'es')}{size} in a step{batch}"


def _stages(plan: Plan, screen: Screen) -> Iterator[list[str]]:
    """Yield a table with a row for each pipeline stage, and a sentence about the schedule."""
    heads = ["parameters", "states", "at rest", "peak", "sent", "between nodes"]
    rows = [["stage", *heads, "in"]]
    for stage in plan.stages:
        cells, here = _needs(stage), " <- shown below" if stage.rank == plan.rank else ""
        rows.append(
            [f"{stage.pipeline_stage} (rank {stage.rank})", *(cells[head] for head in heads), stage.peak.phase + here]
        )
    yield screen.table(_with_nodes(plan, rows), ("at rest", "states", "parameters"))
    text = f"Schedule: {plan.schedule}, {counted(plan.accumulation, 'micro-batch', 'es')}."
    if plan.schedule in ("gpipe", "1f1b"):
        waits = plan.pipeline_stages - 1
        bubble = 100 * waits / (plan.accumulation + waits)
        text += f" If all parts take equally long, ranks wait {bubble:.1f} % of a step (the bubble)."
    yield screen.paragraph(text)


def _memory(plan: Plan, screen: Screen) -> list[str]:
    """Return the table of items."""
    held = {"at rest": plan.at_rest, "in a step": plan.states, "at the peak": plan.peak.items}
    held |= {name: items for name, items in (("host", plan.host), ("disk", plan.disk)) if items is not None}
    rows = [["memory", *held, "share"]]
    for item in ITEMS:
        if any(column[item] for column in held.values()):
            at_peak = plan.peak.items[item]
            rows.append([item_label(item), *(_size(column[item]) for column in held.values()), _share(at_peak, plan)])
    states = [total(column, MODEL_STATES) for column in held.values()]
    rows.append(["  model states", *map(_size, states), _share(states[2], plan)])
    whole = [_size(sum(column.values())) for column in held.values()]
    rows.append(["  all", whole[0], "", *whole[2:], _share(plan.peak.bytes, plan)])
    return screen.table(rows, ("share", "in a step", "at rest"))


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
    """Describe the host memory and disk space that the rank, and all ranks of its host, use.

    Empty if nothing is offloaded and no host memory was given.
    """
    if plan.host is None and plan.disk is None and plan.host_memory is None:
        return ""
    ranks = plan.ranks_per_host

    def of_host(nbytes: int) -> str:
        return "" if ranks is None else f", and the {counted(ranks, 'rank')} of a host {format_size(ranks * nbytes)}"

    text = f"The rank uses up to {format_size(plan.host_peak)} of host memory{of_host(plan.host_peak)}."
    if ranks is None:
        text += " Add --nodes, which sets how many ranks share a host."
    elif plan.host_memory is None or plan.host_spare is None:
        text += " Add --host-memory, as in --host-memory 512GB, to see if it fits."
    elif plan.host_spare >= 0:
        text += f" That fits: {format_size(plan.host_spare)} of {format_size(plan.host_memory)} are free."
    else:
        more, memory = format_size(-plan.host_spare), format_size(plan.host_memory)
        text += f" That does not fit: it is {more} more than the host's {memory}."
    nbytes = sum((plan.disk or {}).values())
    return text if plan.disk is None else f"{text} It keeps {format_size(nbytes)} on disk{of_host(nbytes)}."


def _timeline(plan: Plan, screen: Screen) -> list[str]:
    """Draw the memory during a step. Each column stands for several moments and shows the one with the most memory."""
    if not plan.timeline:
        return []
    highest = max(point.bytes for point in plan.timeline)
    labels = [format_size(highest), *[""] * (_CHART_ROWS - 2), "0 B"]
    margin, count = max(map(len, labels)) + 1, len(plan.timeline)
    width = screen.width - margin - 1
    starts = [(column * count // width, (column + 1) * count // width) for column in range(width)]
    among = [plan.timeline[first : max(end, first + 1)] for first, end in starts]
    columns = [max(points, key=lambda point: point.bytes) for points in among]
    lines = screen.paragraph(f"memory during a step: {_LOWER} model states and buffers, {_UPPER} everything else")
    for row, label in zip(reversed(range(_CHART_ROWS)), labels, strict=True):
        middle = (row + 0.5) / _CHART_ROWS * highest
        cells = (_LOWER if p.at_rest >= middle else _UPPER if p.bytes >= middle else " " for p in columns)
        lines.append(f"{label:>{margin - 1}} |{''.join(cells)}".rstrip())
    phases = [(phase, len(list(points)) - 1) for phase, points in itertools.groupby(columns, lambda p: p.phase)]
    return [*lines, " " * margin + "".join(f"|{phase[:room]:<{room}}" for phase, room in phases).rstrip()]


def _traffic(plan: Plan, screen: Screen) -> list[str]:
    """Return the table of collectives, and a paragraph with their number and the alignment of their buffers."""
    if not plan.traffic:
        return screen.paragraph("traffic of a step: none")
    rows = [["traffic of a step", "for", "over", "count", "bytes", "sent per rank", "between nodes"]]
    over: dict[str, list[Traffic]] = {}
    for entry in plan.traffic:  # sorted, the most bytes sent first
        rows.append([entry.op, entry.tag, f"{entry.dimension} {entry.ranks}", *_sums([entry])])
        over.setdefault(entry.dimension, []).append(entry)
    if len(over) > 1:
        rows += [[f"  {dimension}", "", "", *_sums(entries)] for dimension, entries in over.items()]
    rows.append(["all", "", "", *_sums(plan.traffic)])
    kinds = ", ".join(f"{count:,} {op}" for op, count in plan.collectives.items())
    unaligned = sum(entry.unaligned for entry in plan.traffic)
    buffers = "Every buffer is" if not unaligned else f"All but {unaligned:,} buffers are"
    text = (
        f"A step launches {counted(sum(plan.collectives.values()), 'collective')}: {kinds or 'none'}. Tensors in one "
        f"group count as one launch. {buffers} aligned to 16 bytes, which NCCL's fast path needs."
    )
    if plan.host_waits:
        text += f" The host waits for the device {counted(plan.host_waits, 'time')} in a step."
    return [*screen.table(_with_nodes(plan, rows), ("bytes", "over", "for", "count")), *screen.paragraph(text)]


def _sums(rows: Sequence[Traffic]) -> list[str]:
    """Format the sums of count, bytes, bytes sent, and bytes sent to other nodes."""
    sums = [(entry.nbytes, entry.sent, entry.inter_node or 0) for entry in rows]
    return [f"{sum(entry.count for entry in rows):,}", *map(format_size, map(sum, zip(*sums, strict=True)))]


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


# -------------------------------------------------------------------- several plans

_HEADS = (
    *("states", "at rest", "peak", "sent", "collectives", "between nodes", "host", "disk"),
    *("step", "exposed", "fits"),
)
_OPTIONAL = ("collectives", "states", "at rest", "sent", "between nodes", "host", "disk")


def _several_plans(comparison: Comparison, screen: Screen) -> Iterator[list[str]]:
    """Yield a line for each plan, then the lowest stage that fits and the settings that were left out."""
    plans = [plan for _, plan in comparison.rows]
    plan = plans[0]
    grid = [plan.grid] if plan.grid else []
    yield [
        *screen.paragraph(f"{plan.model}: {plan.parameters:,} parameters"),
        *screen.paragraph(
            ", ".join([counted(plan.world_size, "rank") + _on_nodes(plan), *grid, plan.precision, plan.device])
        ),
        *screen.paragraph(_batch(plan)),
    ]
    empty = [name for name in ("host", "disk") if not any(getattr(plan, name) for plan in plans)]
    empty += [] if any(plan.time for plan in plans) else ["between nodes", "step", "exposed"]
    heads = [head for head in _HEADS if head not in empty]
    rows = [["setting", *heads, ""]]
    for index, (name, one) in enumerate(comparison.rows):
        cells = _cells(one)
        rows.append([name, *(cells[head] for head in heads), "<- chosen" if index == comparison.chosen else ""])
    yield screen.table(rows if "between nodes" in empty else _with_nodes(plan, rows), _OPTIONAL)
    yield screen.paragraph(_choice(comparison))
    yield screen.listed(list(dict.fromkeys([*comparison.left_out, *(note for plan in plans for note in plan.notes)])))


def _cells(plan: Plan) -> dict[str, str]:
    """Return the cells of a plan's row, by column heading."""
    states = [stage.states for stage in plan.stages] or [plan.states]
    return _needs(plan) | {
        "states": format_size(max(total(items, MODEL_STATES) for items in states)),
        "collectives": f"{sum(entry.count for entry in plan.traffic):,}",
        "host": _size(sum((plan.host or {}).values())),
        "disk": _size(sum((plan.disk or {}).values())),
        "step": "-" if plan.time is None else _ms(plan.time.step),
        "exposed": "-" if plan.time is None else _ms(plan.time.exposed),
        "fits": {None: "?", True: "yes", False: "no" if (plan.spare or 0) < 0 else "no: host"}[plan.fits],
    }


def _needs(rank: Plan) -> dict[str, str]:
    """Return the cells of a rank's parameters, memory and traffic, by column heading."""
    return {
        "parameters": f"{rank.rank_parameters:,}",
        "states": format_size(total(rank.states, MODEL_STATES)),
        "at rest": format_size(sum(rank.at_rest.values())),
        "peak": format_size(rank.peak.bytes),
        "sent": format_size(rank.sent),
        "between nodes": format_size(sum(entry.inter_node or 0 for entry in rank.traffic)),
    }


def _choice(comparison: Comparison) -> str:
    memory = comparison.rows[0][1].device_memory
    if memory is None:
        return "Add --device-memory, as in --device-memory 80GB, to see which of them fit."
    if comparison.chosen is None:
        smallest, _ = min(comparison.rows, key=lambda row: row[1].peak.bytes)
        host = max((row.host_memory for _, row in comparison.rows if row.host_memory is not None), default=None)
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
        drawn = left.bar(
            list(bars), heights, 0.7, under, color=colour, label=item_label(item) if any(heights) else None
        )
        under = [low + height for low, height in zip(under, heights, strict=True)]
    left.bar_label(drawn, [format_size(sum(items.values())) for items in bars.values()])
    left.tick_params(axis="x", labelsize=7)
    left.set(title="the peak of each setting" if title else "memory", ylabel="GB per rank")
    right.set(title=f"memory during a step{', ' * bool(title)}{title}", ylabel="GB per rank", xticks=[])
    right.set_xlabel("allocations and releases, in order")
    if plan.timeline:
        layers = [[point.items[item] / _GIGA for point in plan.timeline] for item in ITEMS]
        right.stackplot(range(len(plan.timeline)), layers, colors=colours, step="post")
    begin = 0
    for phase, points in itertools.groupby(plan.timeline, key=lambda point: point.phase):
        right.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
        right.text(begin, 1.0, phase, transform=right.get_xaxis_transform(), va="top", color="grey", rotation=90)
        begin += len(list(points))
    if plan.device_memory is not None:
        left.axhline(plan.device_memory / _GIGA, color="black", linestyle="--", label="memory of the device")
        right.axhline(plan.device_memory / _GIGA, color="black", linestyle="--")
    figure.legend(loc="outside right center", frameon=False)
    ranks = counted(plan.world_size, "rank")
    figure.suptitle(f"{plan.model}: {plan.parameters:,} parameters, {ranks}, {plan.precision}, rank {plan.rank}")
    figure.savefig(path, format="png")


def _on_nodes(plan: Plan) -> str:
    return "" if plan.nodes is None else f" on {counted(plan.nodes, 'node')}"


def _with_nodes(plan: Plan, rows: list[list[str]]) -> list[list[str]]:
    """Return ``rows``, without the column about nodes if their number was not given."""
    column = rows[0].index("between nodes")
    return rows if plan.nodes is not None else [row[:column] + row[column + 1 :] for row in rows]


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"


def _share(part: int, plan: Plan) -> str:
    return f"{100 * part / max(plan.peak.bytes, 1):.1f} %" if part else ""
