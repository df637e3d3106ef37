"""The warning about an update on the CPU with one thread."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from zerolite.offload.from_config import warn_of_few_threads
from zerolite.offload.placements import HostPlacement, Placement, Placements

CPU = torch.device("cpu")


def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, placements: Placements, threads: int, ranks: str
) -> list[str]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    with caplog.at_level(logging.WARNING, "zerolite"):
        warn_of_few_threads(placements, {"LOCAL_WORLD_SIZE": ranks})
    return [record.getMessage() for record in caplog.records]


def on_host(apart: bool = True) -> Placements:
    return Placements(CPU, HostPlacement(pin=False), Placement(CPU), apart=apart)


def test_one_thread_of_several(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = said(caplog, monkeypatch, on_host(), threads=1, ranks="3")
    assert "set OMP_NUM_THREADS=5" in message and "16 cores would do it with 15" in message
