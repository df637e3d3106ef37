"""The communication logger: what it counts, when it reads its clock, what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.unit.conftest import Device
from zerolite.comm.communicator import Pending
from zerolite.config import load_config
from zerolite.monitor.comms_logger import CommsLogger

CPU = torch.device("cpu")


def logger(lines: list[str] | None = None, ranks: int = 4, **block: Any) -> CommsLogger:
    config = load_config({"comms_logger": {"enabled": True, **block}}).comms_logger
    return CommsLogger(config, ranks, CPU, lines.append if lines is not None else None)


def run(log: CommsLogger, device: Device, ms: float, op: str, numel: int, tag: str = "gradients") -> list[str]:
    """A collective of ``ms`` milliseconds; what happened to it, in order."""
    happened: list[str] = []

    def finish() -> torch.Tensor:
        happened.append("waited")
        device.now += ms
        return torch.zeros(1)

    def start() -> Pending:
        happened.append("launched")
        return Pending((), (), finish)

    log.launch((op, tag, numel, torch.float32, 0), start, False)
    return happened


def test_a_collective_is_waited_for_where_it_is_launched(device: Device) -> None:
    """4 million bytes in 2 ms are 2 GB/s."""
    log = logger()
    assert run(log, device, 2.0, "all_reduce", 10**6) == ["launched", "waited"]
    (row,) = log.summary()
    kind = {"op": "all_reduce", "tag": "gradients", "ranks": 4, "nbytes": 4 * 10**6, "count": 1}
    speed = {"mean_ms": 2.0, "algbw": pytest.approx(2.0), "busbw": pytest.approx(3.0)}
    assert row == {**kind, "total_bytes": 4 * 10**6, **speed}


def test_a_report_is_of_what_came_since_the_last_one(device: Device) -> None:
    lines: list[str] = []
    log = logger(lines)
    run(log, device, 2.0, "all_reduce", 10**6, "stats")
    run(log, device, 1.0, "reduce_scatter", 10**6)
    run(log, device, 3.0, "reduce_scatter", 10**5)
    values = log.report(10)
    assert values["reduce_scatter_count"] == 2 and values["reduce_scatter_bytes"] == 4_400_000
    speeds = [values[f"reduce_scatter_{name}"] for name in ("mean_ms", "algbw", "busbw")]
    assert speeds == pytest.approx([2.0, 1.1, 1.1 * 0.75]) and values["all_reduce_busbw"] == pytest.approx(3.0)
    title, head, *table = [re.split(r"\s{2,}", line.strip()) for line in lines[0].splitlines()]
    assert title[0].startswith("step 10: collectives of 4 ranks since the last table") and len(head) == 8
    assert table[0] == ["all_reduce", "stats", "4.00 MB", "1", "4.00 MB", "2.000", "2.000", "3.000"]
    assert [row[:3] for row in table[1:]] == [
        ["reduce_scatter", "gradients", size] for size in ("400.00 KB", "4.00 MB")
    ]
    assert log.report(20) == {} and len(lines) == 1
    assert sum(row["count"] for row in log.summary()) == 3, "the summary is of everything"
