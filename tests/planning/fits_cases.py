"""Engines where memory is short."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerolite
from zerolite.planning import fits, host_room

START = "tests.planning.fits_cases:start"
NUMEL = 8 * (64 * 64 + 64)  # of the stack
PLENTY = 10**12


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def start(
    config: dict[str, Any],
    free: list[int],
    partitioned: bool = False,
    host: list[int] | None = None,
    disk: list[int] | None = None,
) -> dict[str, Any]:
    """Make an engine while rank r has ``free[r]`` bytes on its device, and as much as ``host[r]`` and ``disk[r]`` say;
    what came of it."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    runs: list[Any] = []
    real = fits.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fits, "available_memory", lambda device: free[rank])
        patch.setattr(fits, "run", lambda job: runs.append(job.config.zero_optimization.stage) or real(job))
        if host is not None:
            patch.setattr(host_room, "share_of_host", lambda ranks: host[rank])
        if disk is not None:
            patch.setattr(host_room, "_free", lambda path: disk[rank])
        with zerolite.zero.Init(enabled=partitioned):
            model = stack()
        piped = config.get("pipeline", {}).get("stages", 1) > 1
        try:
            engine = zerolite.initialize(model, config, loss_fn=(lambda output, _: output.sum()) if piped else None)
        except MemoryError as error:
            return {"error": str(error)}
        if piped:
            engine.train_batch(iter([(torch.ones(2, 64), torch.ones(2))] * engine.gradient_accumulation_steps))
        else:
            engine.backward(engine(torch.ones(2, 64)).sum())
            engine.step()
        return {"stage": engine.config.zero_optimization.stage, "steps": engine.global_steps, "runs": runs}
