"""From what was measured to the table. Nothing here imports torch."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol


def positive(text: str) -> int:
    """A number of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


class Measured(Protocol):
    """One round: seconds of each step, CPU seconds of the round."""

    @property
    def step_s(self) -> list[float]: ...
    @property
    def cpu_s(self) -> float: ...


class Footprint(Protocol):
    """What the warm-up told about the size of things."""

    @property
    def parameters(self) -> int: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def resident_bytes(self) -> int | None: ...


@dataclass(frozen=True)
class Row:
    """One competitor. Ratios are of times: below 1 is faster. `tokens_per_s`: all ranks; `cpu_ms`: a step, the mean of
    the ranks; bytes: the rank that has most. `to_peer`: over the one that does the same by other means; `to_peer_cpu`:
    of processor times."""

    name: str
    absent: str | None = None
    step_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    cpu_ms: float | None = None
    tokens_per_s: float | None = None
    parameters: int | None = None
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    to_ddp: float | None = None
    to_compute: float | None = None
    to_fsdp2: float | None = None
    to_deepspeed_3: float | None = None
    to_peer: float | None = None
    to_peer_cpu: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    started: dict[str, Any],
    rounds: dict[str, list[Any]],
    absent: dict[str, str],
    tokens_per_step: int,
    peers: Mapping[str, str | None] | None = None,
) -> list[Row]:
    """One row for each key of `rounds`, in that order; competitors in `absent` get the reason instead of figures.
    peers: whom a competitor is compared with besides those whom all are."""
    present: dict[str, list[Any]] = {name: results for name, results in rounds.items() if name not in absent}
    rows = []
    for name, results in rounds.items():
        if name in absent:
            rows.append(Row(name, absent=absent[name]))
            continue
        row = _row(name, started[name], results, present, tokens_per_step)
        peer = present.get((peers or {}).get(name) or "")
        rows.append(replace(row, to_peer=_ratio(results, peer), to_peer_cpu=_cpu_ratio(results, peer)))
    return rows


def _row(
    name: str, footprint: Footprint, results: list[Measured], present: dict[str, list[Any]], tokens_per_step: int
) -> Row:
    steps = [seconds for result in results for seconds in result.step_s]
    median = statistics.median(steps)
    return Row(
        name=name,
        step_ms=1e3 * median,
        min_ms=1e3 * min(steps),
        max_ms=1e3 * max(steps),
        cpu_ms=1e3 * statistics.median(result.cpu_s / len(result.step_s) for result in results),
        tokens_per_s=tokens_per_step / median,
        parameters=footprint.parameters,
        peak_bytes=footprint.peak_bytes,
        resident_bytes=footprint.resident_bytes,
        to_ddp=_ratio(results, present.get("ddp")),
        to_compute=_ratio(results, present.get("compute")),
        to_fsdp2=_ratio(results, present.get("fsdp2")),
        to_deepspeed_3=_ratio(results, present.get("deepspeed-3")),
    )


def _ratio(ours: list[Measured], theirs: list[Measured] | None) -> float | None:
    """The median over rounds of the ratio of the two medians in that round."""
    if theirs is None:
        return None
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(statistics.median(a.step_s) / statistics.median(b.step_s) for a, b in pairs)


def _cpu_ratio(ours: list[Measured], theirs: list[Measured] | None) -> float | None:
    if theirs is None:
        return None
    return statistics.median(a.cpu_s / b.cpu_s for a, b in zip(ours, theirs, strict=True))


def disagreement(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> str | None:
    """Where the losses first leave the reference's by more than `tolerance` (not a number counts), in words."""
    for step, (ours, theirs) in enumerate(zip(losses, reference, strict=True), 1):
        gap = abs(ours - theirs)
        if not gap <= tolerance:  # also true for NaN
            return f"the loss of step {step} is {gap:.2e} from the reference's, allowed is {tolerance:.0e}"
    return None


# Title, attribute of the row, format. Attributes that end in _bytes are shown in MB.
Columns = Sequence[tuple[str, str, str]]
COLUMNS: Columns = (
    ("competitor", "name", "{}"),
    ("step ms", "step_ms", "{:.0f}"),
    ("min", "min_ms", "{:.0f}"),
    ("max", "max_ms", "{:.0f}"),
    ("CPU ms", "cpu_ms", "{:.0f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("peak MB", "peak_bytes", "{:.0f}"),
    ("resident MB", "resident_bytes", "{:.0f}"),
    ("x DDP", "to_ddp", "{:.2f}"),
    ("x compute", "to_compute", "{:.2f}"),
    ("x FSDP2", "to_fsdp2", "{:.2f}"),
    ("x DeepSpeed 3", "to_deepspeed_3", "{:.2f}"),
    ("x peer", "to_peer", "{:.2f}"),
    ("CPU x peer", "to_peer_cpu", "{:.2f}"),
)


def columns_in_use(rows: Sequence[Any], columns: Columns = COLUMNS) -> Columns:
    """Without the ratios that no row has, because the one they are over did not take part."""
    return [
        column
        for column in columns
        if not column[1].startswith("to_") or any(getattr(row, column[1]) is not None for row in rows)
    ]


def render_table(rows: Sequence[Any], markdown: bool = False, columns: Columns = COLUMNS) -> str:
    """The table as aligned text or Markdown. MB are 10^6 bytes.

    Rows have the attributes that `columns` names, and `name` and `absent`; absent ones keep their line, with the
    reason.
    """
    header = [title for title, _, _ in columns]
    cells = [_cells(row, columns) for row in rows]
    if markdown:
        ruler = ["---"] + ["---:"] * (len(header) - 1)
        return "\n".join("| " + " | ".join(line) + " |" for line in [header, ruler, *cells])
    measured = [line for line, row in zip(cells, rows, strict=True) if row.absent is None]
    widths = [max(len(line[i]) for line in [header, *measured]) for i in range(len(header))]
    widths[0] = max(len(line[0]) for line in [header, *cells])
    lines = []
    for line, row in [(header, None), *zip(cells, rows, strict=True)]:
        if row is not None and row.absent is not None:
            lines.append(f"{line[0]:<{widths[0]}}  {row.absent}")
        else:
            numbers = (f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
            lines.append(f"{line[0]:<{widths[0]}}  " + "  ".join(numbers))
    return "\n".join(lines)


def _cells(row: Any, columns: Columns) -> list[str]:
    if row.absent is not None:
        return [row.name, f"absent ({row.absent})"] + [""] * (len(columns) - 2)
    cells = []
    for _, attribute, form in columns:
        value = getattr(row, attribute)
        if attribute.endswith("_bytes") and value is not None:
            value /= 1e6
        cells.append("-" if value is None else form.format(value))
    return cells
