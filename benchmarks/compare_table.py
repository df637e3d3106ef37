"""From rounds of `compare.py` to the figures of its table."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.competitors import COMPETITORS
from benchmarks.report import Row, ratio
from benchmarks.training import RoundResult

COLUMNS = (
    ("competitor", "name", "{}"),
    ("step ms", "step_ms", "{:.1f}"),
    ("min", "min_ms", "{:.1f}"),
    ("max", "max_ms", "{:.1f}"),
    ("CPU ms", "cpu_ms", "{:.0f}"),
    ("host ms", "host_ms", "{:.1f}"),
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
COMPARED = ("ddp", "compute", "fsdp2", "deepspeed-3")  # with whom all are


def figures(contest: Any, name: str) -> Row:
    """Return the figures of one competitor.

    Times are of a step. Ratios are of times, below 1 is faster: over those whom all are compared with, and over the
    peer that does the same by other means.
    """
    present, args = {name: contest.rounds[name] for name in contest.present()}, contest.args
    own, started, peer = present[name], contest.started[name], present.get(COMPETITORS[name].peer or "", [])
    steps = [seconds for result in own for seconds in result.step_s]
    host = [seconds for result in own for seconds in result.host_s]
    row: Row = {
        "step_ms": 1e3 * median(steps),
        "min_ms": 1e3 * min(steps),
        "max_ms": 1e3 * max(steps),
        "cpu_ms": 1e3 * median(result.cpu_s / len(result.step_s) for result in own),
        "host_ms": 1e3 * median(host) if host else None,
        "tokens_per_s": args.nproc * args.micro_batch * args.context / median(steps),
        "parameters": started.parameters,
        "peak_bytes": started.peak_bytes,
        "resident_bytes": started.resident_bytes,
        "to_peer": over(own, peer),
        "to_peer_cpu": ratio([result.cpu_s for result in own], [result.cpu_s for result in peer]),
        "losses": contest.losses(name),
        "step_s": [result.step_s for result in own],
    }
    for other in COMPARED:
        row[f"to_{other.replace('-', '_')}"] = over(own, present.get(other, []))
    return row


def over(ours: list[RoundResult], theirs: list[RoundResult]) -> float | None:
    """Return the ratio of step times."""
    return ratio(*([median(result.step_s) for result in results] for results in (ours, theirs)))
