"""The warning about an update on the CPU with one thread."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from zerolite.offload.from_config import warn_of_few_threads
from zerolite.offload.placement import HostPlacement, Placement, Placements

CPU = torch.device("cpu")


def test_one_thread_of_several(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    placements = Placements(CPU, HostPlacement(pin=False), Placement(CPU), separate_memory=True)
    with caplog.at_level(logging.WARNING, "zerolite"):
        warn_of_few_threads(placements, {"LOCAL_WORLD_SIZE": "3"})
    assert "set OMP_NUM_THREADS=5" in caplog.text and "16 cores would do it with 15" in caplog.text
