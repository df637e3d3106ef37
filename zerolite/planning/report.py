"""Text report of one plan or several, for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from zerolite.planning.advice import advise
from zerolite.planning.palette import LOOKS, spoken
from zerolite.planning.report_grid import dimensions, stages_lines
from zerolite.planning.result import Comparison, Items, Moment, Peak, Plan, Traffic, total
from zerolite.planning.terminal import Screen, cut, table
from zerolite.utils.memory_items import MODEL_STATES
from zerolite.utils.sizes import format_size

_AT_REST = (*MODEL_STATES, "buffers")
"""What the lower part of the time line is: it is there in every moment."""

_SHORT = {"forward": "fwd", "backward": "bwd"}
"""Names of phases where there is little room."""

_CHART_ROWS = 10
_LEAST_BAR = 8


def render_plan(plan: Plan, screen: Screen) -> str:
    """Everything that a plan says, in lines of at most ``screen.width`` columns."""
    sections = (
        _head(plan, screen),
        stages_lines(plan, screen),
        _memory(plan, screen),
        _verdict(plan, screen),
        _timeline(plan, screen),
        _traffic(plan, screen),
        _amounts(plan, screen),
        [line for note in plan.notes for line in screen.paragraph(note, "  ", "- ")],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def render_comparison(comparison: Comparison, screen: Screen) -> str:
    """One line and one bar for each setting, and which of them is the cheapest that fits."""
    plans = [plan for _, plan in comparison.rows]
    notes = dict.fromkeys([*comparison.left_out, *(note for plan in plans for note in plan.notes)])
    sections = (
        _head(plans[0], screen, one=False),
        _settings(comparison, screen),
        _side_by_side(comparison, screen),
        _choice(comparison, screen),
        [line for note in notes for line in screen.paragraph(note, "  ", "- ")],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


# -------------------------------------------------------------------- one plan


def _head(plan: Plan, screen: Screen, one: bool = True) -> list[str]:
    """What was planned. one: with its stage, and which rank is shown."""
    trained = "" if plan.trained_parameters == plan.parameters else f", {plan.trained_parameters:,} of them trained"
    ranks = f"rank {plan.rank} of {plan.world_size:,}" if one else counted(plan.world_size, "rank")
    nodes = "" if plan.nodes is None else f" on {counted(plan.nodes, 'node')}"
    grid = [plan.grid] if plan.pipeline_stages * plan.tensor_parallel > 1 else []
    stage = f"{'ZeRO ' if grid else ''}stage {plan.stage}"
    setting = [*([stage] if one else []), ranks + nodes, *grid, plan.precision, plan.device]
    size = "" if plan.micro_batch is None else f" of {plan.micro_batch}"
    batch = f": {plan.batch}" if plan.batch else "; no batch was given, so there are no activations"
    return [
        *screen.paragraph(f"{plan.model}: {plan.parameters:,} parameters{trained}"),
        *screen.paragraph(", ".join(setting)),
        *screen.paragraph(f"{counted(plan.accumulation, 'micro-batch', 'es')}{size} in a step{batch}"),
    ]


def _memory(plan: Plan, screen: Screen) -> list[str]:
    """The items, and where the peak is."""
    columns = [plan.at_rest, plan.states, plan.peak.items]
    heads = ["at rest", "in a step", "at the peak"]
    for held, head in ((plan.host, "host"), (plan.disk, "disk")):
        if held is not None:
            columns.append(held)
            heads.append(head)
    items = [item for item in LOOKS if any(column[item] for column in columns)]
    rows = [["memory", *heads, "share"]]
    for item in items:
        sizes = [_size(column[item]) for column in columns]
        rows.append(
            [f"{LOOKS[item].letter} {spoken(item)}", *sizes, f"{_share(plan.peak.items[item], plan.peak.bytes)}"]
        )
    sums = [total(column, MODEL_STATES) for column in columns]
    rows.append(["  model states", *(_size(value) for value in sums), _share(sums[2], plan.peak.bytes)])
    whole = [_size(sum(column.values())) for column in columns]
    rows.append(["  all", whole[0], "", *whole[2:], _share(plan.peak.bytes, plan.peak.bytes)])
    lines = table(rows, screen.width, optional=(len(rows[0]) - 1, 2, 1))
    return [*_with_bars(lines, {item: plan.peak.items[item] for item in items}, screen), "", *_peaks(plan, screen)]


def _with_bars(lines: list[str], items: Items, screen: Screen) -> list[str]:
    """Bars of ``items`` at the ends of the lines after the first one, where there is room for them."""
    column = max(map(len, lines)) + 2
    room = min(screen.width - column, 40)
    if room < _LEAST_BAR:
        return lines
    longest = max([*items.values(), 1])
    bars = ["", *(screen.bar(item, size / longest, room) for item, size in items.items())]
    bars += [""] * (len(lines) - len(bars))
    return [f"{line:<{column}}{bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]


def _peaks(plan: Plan, screen: Screen) -> list[str]:
    step = plan.step_peak
    first = plan.peak.phase != "initialize" and plan.peak != step
    when = "in one of the first steps, " if first else ""
    lines = screen.paragraph(f"The peak is {format_size(plan.peak.bytes)}, {when}{_where(plan.peak)}.")
    if plan.peak != step:
        later = "A later step" if first else "A step"
        lines += screen.paragraph(f"{later} takes {format_size(step.bytes)} at most, {_where(step)}.")
    if plan.peak.phase != "initialize":
        lines += screen.paragraph(f"Making the engine takes {format_size(plan.initialize_peak.bytes)} at most.")
    return lines


def _where(peak: Peak) -> str:
    at = "" if not peak.module_class else f", in {peak.module or 'the model itself'} ({peak.module_class})"
    return f"in {peak.phase}{at}{f', by {peak.op}' if peak.op else ''}"


def _verdict(plan: Plan, screen: Screen) -> list[str]:
    """Whether it fits on the device and on the host, and what to try."""
    advice = [line for sentence in advise(plan) for line in screen.paragraph(sentence, "  ", "- ")]
    return [*_of_device(plan, screen), *_of_host(plan, screen), *advice]


def _of_device(plan: Plan, screen: Screen) -> list[str]:
    """A sentence, and a bar of the items against the device's memory."""
    if plan.device_memory is None or plan.spare is None:
        return screen.paragraph("Whether it fits depends on the memory of the device: --device-memory 80GB.")
    memory, spare = format_size(plan.device_memory), format_size(abs(plan.spare))
    if plan.spare >= 0:
        lines = screen.paragraph(f"It fits: {spare} of {memory} are free at the peak.")
    else:
        largest = max(plan.peak.items, key=lambda item: plan.peak.items[item])
        size = format_size(plan.peak.items[largest])
        lines = screen.paragraph(
            f"It does not fit: the peak is {spare} more than the {memory} of the device. What takes the most is "
            f"{spoken(largest)}, {size}."
        )
    return [*lines, _against_memory(plan.peak.items, plan.device_memory, plan.device_memory, screen, screen.width)]


def _of_host(plan: Plan, screen: Screen) -> list[str]:
    """What the rank, and all ranks of its host, take of the host's memory and disk, where that was asked or is much."""
    if plan.host is None and plan.disk is None and plan.host_memory is None:
        return []
    ranks = plan.ranks_per_host
    text = f"Of its host's memory the rank takes {format_size(plan.host_peak)} at most"
    if ranks is None:
        text += "; --nodes tells how many ranks share one."
    else:
        text += f", {counted(ranks, 'rank')} of a host {format_size(ranks * plan.host_peak)}."
        text += _host_fits(plan)
    if plan.disk is not None:
        nbytes = sum(plan.disk.values())
        text += f" On disk it keeps {format_size(nbytes)}"
        text += "." if ranks is None else f", {counted(ranks, 'rank')} of a host {format_size(ranks * nbytes)}."
    return screen.paragraph(text)


def _host_fits(plan: Plan) -> str:
    if plan.host_memory is None or plan.host_spare is None:
        return " Whether that is there depends on the host: --host-memory 512GB."
    memory, spare = format_size(plan.host_memory), format_size(abs(plan.host_spare))
    if plan.host_spare >= 0:
        return f" That fits: {spare} of its {memory} are left."
    return f" That does not fit: it is {spare} more than the host's {memory}."


def _against_memory(items: Items, memory: int | None, largest: int, screen: Screen, width: int) -> str:
    """A stacked bar in which the device's memory ends at a "|"; ``largest`` bytes are the whole width."""
    used = sum(items.values())
    scale = max(used, largest, 1)
    bar = screen.stacked(items, scale, width - 1)
    if memory is None:
        return bar
    taken, end = round((width - 1) * used / scale), round((width - 1) * memory / scale)
    if end >= taken:
        return bar + "." * (end - taken) + "|"
    fitting = dict(zip(items, _first(items, memory), strict=True))
    rest = {item: items[item] - fitting[item] for item in items}
    return screen.stacked(fitting, scale, width - 1) + "|" + screen.stacked(rest, scale, width - 1)


def _first(items: Items, limit: int) -> Iterable[int]:
    """What of each item lies within the first ``limit`` bytes of all of them in a row."""
    for size in items.values():
        part = min(size, limit)
        limit -= part
        yield part


# -------------------------------------------------------------------- the course of a step


def _timeline(plan: Plan, screen: Screen) -> list[str]:
    if not plan.timeline:
        return []
    highest = max(moment.bytes for moment in plan.timeline)
    labels = [format_size(highest), *[""] * (_CHART_ROWS - 2), "0 B"]
    margin = max(map(len, labels)) + 1
    columns = _columns(plan.timeline, screen.width - margin - 1)
    bars = [(total(moment.items, _AT_REST), moment.bytes) for moment in columns]
    rows = screen.chart(bars, highest, _CHART_ROWS)
    lower, upper = ("█", "▒") if screen.blocks else ("#", ":")
    return [
        *screen.paragraph(f"memory in the course of a step: {lower} model states and buffers, {upper} everything else"),
        *(f"{label:>{margin - 1}} |{row}" for label, row in zip(labels, rows, strict=True)),
        " " * margin + _phases(columns),
    ]


def _columns(timeline: list[Moment], width: int) -> list[Moment]:
    """As many moments as columns: the fullest of those that fall into each."""
    count = len(timeline)
    columns = []
    for column in range(width):
        first = column * count // width
        among = timeline[first : max((column + 1) * count // width, first + 1)]
        columns.append(max(among, key=lambda moment: moment.bytes))
    return columns


def _phases(columns: list[Moment]) -> str:
    """The names of the phases, each under the column with which it begins."""
    line = ""
    for phase, moments in itertools.groupby(columns, key=lambda moment: moment.phase):
        room = len(list(moments)) - 1
        name = phase if len(phase) <= room else _SHORT.get(phase, phase)
        line += "|" + name[:room].ljust(room)
    return line.rstrip()


# -------------------------------------------------------------------- traffic and amounts


def _traffic(plan: Plan, screen: Screen) -> list[str]:
    if not plan.traffic:
        return screen.paragraph("traffic of a step: none")
    over = dimensions(plan)
    rows = [["traffic of a step", "for", "over", "count", "bytes", "sent per rank", "between nodes"]]
    for entry in plan.traffic:
        rows.append([entry.op, entry.tag, f"{entry.dimension} {entry.ranks}", *_sums([entry])])
    for dimension in over if len(over) > 1 else ():
        rows.append([f"  {dimension}", "", "", *_sums([row for row in plan.traffic if row.dimension == dimension])])
    rows.append(["all", "", "", *_sums(plan.traffic)])
    if plan.nodes is None:
        rows = [row[:-1] for row in rows]
    if plan.pipeline_stages * plan.tensor_parallel == 1:
        rows = [[*row[:2], *row[3:]] for row in rows]
        lines = table(rows, screen.width, left=(0, 1), optional=(3, 1, 2))
    else:
        lines = table(rows, screen.width, left=(0, 1, 2), optional=(4, 3, 2))
    return [*lines, *screen.paragraph(_launches(plan))]


def _launches(plan: Plan) -> str:
    """Say what is counted, and whether NCCL's fast path is open to all of it."""
    kinds = ", ".join(f"{count:,} {op}" for op, count in plan.collectives.items())
    unaligned = sum(entry.unaligned for entry in plan.traffic)
    buffers = "Every buffer begins" if not unaligned else f"All but {unaligned:,} buffers begin"
    return (
        f"A step launches {counted(sum(plan.collectives.values()), 'collective')}: {kinds or 'none'}. Tensors that "
        f"travel in one group are one launch. {buffers} on 16 bytes, as NCCL's fast path asks."
    )


def _sums(rows: list[Traffic]) -> list[str]:
    """Count, bytes, sent, and sent to other nodes."""
    count, nbytes, sent = (sum(values) for values in zip(*((e.count, e.nbytes, e.sent) for e in rows), strict=True))
    return [f"{count:,}", format_size(nbytes), format_size(sent), format_size(sum(e.inter_node or 0 for e in rows))]


def _amounts(plan: Plan, screen: Screen) -> list[str]:
    lines = screen.paragraph(f"This rank writes {format_size(plan.checkpoint)} of a checkpoint.")
    if plan.flops is not None:
        lines += screen.paragraph(_flops(plan.flops, plan.recomputed_flops))
    return lines


def _flops(flops: int, recomputed: int) -> str:
    again = f", and what activation checkpointing recomputes {format_flops(recomputed)} more" if recomputed else ""
    return (
        f"Forward and backward of a step take {format_flops(flops)} on each rank{again}. Counted are matrix products "
        "(experts: of the tokens routed to them), convolutions and attention (masked positions too), not elementwise "
        "work."
    )


# -------------------------------------------------------------------- several plans


def _settings(comparison: Comparison, screen: Screen) -> list[str]:
    rows = [["setting", "states", "at rest", "peak", "sent", "collectives", "host", "disk", "fits", ""]]
    for index, (setting, plan) in enumerate(comparison.rows):
        at_rest = format_size(sum(plan.at_rest.values()))
        count = sum(entry.count for entry in plan.traffic)
        sizes = [format_size(plan.model_states), at_rest, format_size(plan.peak.bytes), format_size(plan.sent)]
        mark = "<- cheapest" if index == comparison.chosen else ""
        away = [_size(sum((place or {}).values())) for place in (plan.host, plan.disk)]
        rows.append([setting, *sizes, f"{count:,}", *away, _fits(plan), mark])
    plans = [plan for _, plan in comparison.rows]
    unseen = {7} if not any(plan.disk for plan in plans) else set()
    unseen |= {6} if not any(plan.host for plan in plans) else set()
    shown = [[cell for column, cell in enumerate(row) if column not in unseen] for row in rows]
    last = len(shown[0]) - 1
    return table(shown, screen.width, left=(0, last), optional=(5, 2, 1, 4, *range(6, last - 1)))


def _fits(plan: Plan) -> str:
    if plan.fits is False and (plan.spare is None or plan.spare >= 0):
        return "no: host"
    return {None: "?", True: "yes", False: "no"}[plan.fits]


def _side_by_side(comparison: Comparison, screen: Screen) -> list[str]:
    """Bars of the items at the peak, all on one scale."""
    names = [setting for setting, _ in comparison.rows]
    margin = min(max(map(len, names)), screen.width // 2) + 1
    memory = comparison.rows[0][1].device_memory
    largest = max(memory or 0, *(plan.peak.bytes for _, plan in comparison.rows))
    held = [item for item in LOOKS if any(plan.peak.items[item] for _, plan in comparison.rows)]
    legend = ", ".join(f"{LOOKS[item].letter} {spoken(item)}" for item in held)
    until = "" if memory is None else f"; the device's {format_size(memory)} end at |"
    bars = [
        f"{cut(setting, margin - 1):<{margin}}"
        + _against_memory(plan.peak.items, memory, largest, screen, screen.width - margin)
        for setting, plan in comparison.rows
    ]
    return [*screen.paragraph(f"memory at the peak: {legend}{until}"), *bars]


def _choice(comparison: Comparison, screen: Screen) -> list[str]:
    memory = comparison.rows[0][1].device_memory
    if memory is None:
        return screen.paragraph("Which of them fit depends on the memory of the device: --device-memory 80GB.")
    if comparison.chosen is not None:
        setting, plan = comparison.rows[comparison.chosen]
        text = (
            f"The cheapest that fits in {format_size(memory)} is {setting}: of those that fit, it sends the least in a "
            f"step, {format_size(plan.sent)} per rank."
        )
        if plan.offloaded:
            text += f" It keeps {format_size(plan.offloaded)} of each rank's model states off the device."
            if plan.host_spare is None:
                text += " Whether a host has room for that depends on --nodes and --host-memory."
        return screen.paragraph(text)
    setting, plan = min(comparison.rows, key=lambda row: row[1].peak.bytes)
    host = max((row.host_memory for _, row in comparison.rows if row.host_memory is not None), default=None)
    both = "" if host is None else f" and a host's {format_size(host)}"
    lines = screen.paragraph(f"None of them fits in {format_size(memory)}{both}. The smallest is {setting}.")
    advice = advise(plan, stages=False)  # the other stages are above
    return lines + [line for sentence in advice for line in screen.paragraph(sentence, "  ", "- ")]


# -------------------------------------------------------------------- words


def counted(count: int, noun: str, plural: str = "s") -> str:
    """As in "1 rank", "64 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def format_flops(flops: int) -> str:
    """As people read it: "12.30 TFLOP"."""
    for power, letter in ((6, "E"), (5, "P"), (4, "T"), (3, "G"), (2, "M")):
        if flops >= 1000**power:
            return f"{flops / 1000**power:.2f} {letter}FLOP"
    return f"{flops:,} FLOP"


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %" if part else ""
