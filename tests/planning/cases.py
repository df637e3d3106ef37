"""Jobs of tests.planning.jobs, run and measured on every rank of the pool."""

from __future__ import annotations

import os
from typing import Any

from tests.planning.jobs import KINDS, settings
from zerolite.planning.measure import Measurement, measure


def measured(kind: str, shared_memory: bool = True, with_batch: bool = True, **setting: Any) -> Measurement:
    """``setting``: see :func:`tests.planning.jobs.settings`."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = "1" if shared_memory else "0"
    job = KINDS[kind]
    given = {"batch": job.batch, "loss": job.loss} if with_batch else {}
    return measure(job.make, settings(**setting), **given)


def several_measured(runs: dict[str, dict[str, Any]]) -> dict[str, Measurement]:
    """:func:`measured` by name."""
    return {name: measured(**run) for name, run in runs.items()}
