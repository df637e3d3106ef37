"""Text report of grids of ranks: pipeline stages, and grids side by side."""

from __future__ import annotations

from zerolite.planning.result import GridComparison, Plan, Traffic, total
from zerolite.planning.terminal import Screen, table
from zerolite.utils.memory_items import MODEL_STATES
from zerolite.utils.sizes import format_size

_SCHEDULES = {"gpipe": "all forwards, then all backwards (gpipe)", "1f1b": "one forward, one backward (1f1b)"}


def stages_lines(plan: Plan, screen: Screen) -> list[str]:
    """A row for each stage of the pipeline, and its bubble; nothing without one."""
    if plan.pipeline_stages == 1:
        return []
    rows = [["stage", "parameters", "states", "at rest", "peak", "sent", "between nodes", "in"]]
    for stage in plan.stages:
        across = "" if plan.nodes is None else format_size(_across(stage.traffic))
        sizes = [total(stage.states, MODEL_STATES), sum(stage.at_rest.values()), stage.peak.bytes, stage.sent]
        here = "<- shown below" if stage.rank == plan.rank else ""
        cells = [f"{stage.rank_parameters:,}", *map(format_size, sizes), across, f"{stage.peak.phase} {here}".rstrip()]
        rows.append([f"{stage.stage} (rank {stage.rank})", *cells])
    if plan.nodes is None:
        rows = [[*row[:6], row[7]] for row in rows]
    last = len(rows[0]) - 1
    schedule = _SCHEDULES.get(plan.schedule or "", plan.schedule)
    waits = screen.paragraph(
        f"Schedule: {schedule}, {plan.accumulation} micro-batch{'es' if plan.accumulation > 1 else ''}. Ranks wait "
        f"{100 * (plan.bubble or 0):.1f} % of a step (the bubble)."
    )
    return [*table(rows, screen.width, left=(0, last), optional=(3, 2, 1)), "", *waits]


def dimensions(plan: Plan) -> list[str]:
    """Those over which something is sent, the one with the most first."""
    sent: dict[str, int] = {}
    for entry in plan.traffic:
        sent[entry.dimension] = sent.get(entry.dimension, 0) + entry.sent
    return sorted(sent, key=lambda name: -sent[name])


def render_grids(comparison: GridComparison, screen: Screen) -> str:
    """One line for each grid, which of them is the fastest that fits, and what was left out."""
    sections = (
        _head(comparison, screen),
        _rows(comparison, screen),
        _choice(comparison, screen),
        [line for note in _notes(comparison) for line in screen.paragraph(note, "  ", "- ")],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(comparison: GridComparison, screen: Screen) -> list[str]:
    if not comparison.rows:
        return []
    plan = comparison.rows[0].plan
    nodes = "" if plan.nodes is None else f" on {plan.nodes} node{'' if plan.nodes == 1 else 's'}"
    samples = (plan.micro_batch or 0) * plan.accumulation * plan.data_parallel
    return [
        *screen.paragraph(f"{plan.model}: {plan.parameters:,} parameters"),
        *screen.paragraph(f"{plan.world_size:,} ranks{nodes}, {plan.precision}, {plan.device}"),
        *screen.paragraph(f"{samples:,} samples in a step, micro-batches of {plan.micro_batch}: {plan.batch}"),
    ]


def _rows(comparison: GridComparison, screen: Screen) -> list[str]:
    head = ["grid", "ZeRO", "micro-batches", "states", "peak", "sent", "between nodes", "bubble", "a step", "fits", ""]
    rows = [head]
    for index, row in enumerate(comparison.rows):
        plan = row.plan
        states = [stage.states for stage in plan.stages] or [plan.states]
        sizes = [max(total(items, MODEL_STATES) for items in states), plan.peak.bytes, plan.sent, plan.inter_node or 0]
        waits = "-" if plan.bubble is None else f"{100 * plan.bubble:.1f} %"
        fits = {None: "?", True: "yes", False: "no"}[plan.fits]
        mark = "<- fastest" if index == comparison.chosen else ""
        cells = [str(plan.stage), f"{plan.accumulation:,}", *map(format_size, sizes), waits, _time(row.seconds)]
        rows.append([row.name, *cells, fits, mark])
    return table(rows, screen.width, left=(0, len(head) - 1), optional=(3, 2, 5))


def _choice(comparison: GridComparison, screen: Screen) -> list[str]:
    if not comparison.rows:
        return screen.paragraph("No grid is left to plan.")
    memory = format_size(comparison.rows[0].plan.device_memory or 0)
    if comparison.chosen is None:
        smallest = min(comparison.rows, key=lambda row: row.plan.peak.bytes)
        return screen.paragraph(
            f"None of them fits in {memory}. The smallest is {smallest.name}, stage {smallest.plan.stage}."
        )
    row = comparison.rows[comparison.chosen]
    flops, within, between = comparison.speeds
    lines = screen.paragraph(
        f"The fastest that fits in {memory} is {row.name}, ZeRO stage {row.plan.stage}: computing, waiting in the "
        f"bubble and sending take the least there, {_time(row.seconds)} a step, if each device computes "
        f"{flops / 1e12:,.0f} TFLOP and sends {format_size(int(within))} within its node and "
        f"{format_size(int(between))} to others in a second, and nothing overlaps."
    )
    blocks = []
    if row.plan.tensor_parallel > 1:
        blocks.append(f'"tensor_parallel": {{"size": {row.plan.tensor_parallel}}}')
    if row.plan.pipeline_stages > 1:
        blocks.append(f'"pipeline": {{"stages": {row.plan.pipeline_stages}}}')
    blocks.append(f'"zero_optimization": {{"stage": {row.plan.stage}}}')
    blocks.append(f'"gradient_accumulation_steps": {row.plan.accumulation}')
    return [*lines, *screen.paragraph(f"In the config: {', '.join(blocks)}.")]


def _notes(comparison: GridComparison) -> dict[str, None]:
    """Each once. left_out first."""
    of_plans = [note for row in comparison.rows for note in row.plan.notes]
    return dict.fromkeys([*comparison.left_out, *of_plans])


def _across(rows: list[Traffic]) -> int:
    return sum(row.inter_node or 0 for row in rows)


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:,.2f} s"
