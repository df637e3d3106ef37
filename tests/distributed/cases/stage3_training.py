"""Training runs that tell more than tests.toolkit.training: evaluation, buffers, strides, and at stage 3 what
was partitioned, gathered and left behind."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests.toolkit.models import has_no_values
from tests.toolkit.training import BATCHES, LOSSES, make_engine, train_engine
from zerolite.zero import ZeroParamStatus
from zerolite.zero.layout import part_numel


def train(
    config: dict[str, Any],
    model: str,
    sizes: dict[str, Any] | None = None,
    steps: int = 6,
    loop: str = "engine",
) -> dict[str, Any]:
    """Train, evaluate once, and tell everything that a comparison may need; at stage 3 "partition" has the facts of
    :func:`partition_facts`. Called on all ranks."""
    engine = make_engine(config, model, sizes)
    with zerolite.comm.record() as calls:
        result = train_engine(engine, model, steps, loop)
    stage3 = config["zero_optimization"]["stage"] == 3
    if stage3:
        gathers = calls.select("all_gather", "parameters")
        counts = {"gathers": len(gathers), "gathered": sum(call.tensors for call in gathers)}
        result["partition"] = partition_facts(engine) | counts
    engine.eval()
    # torch runs a transformer layer as one kernel where no module has hooks, so not at stage 3; that rounds elsewhere.
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        result["evaluated"] = LOSSES[model](engine, BATCHES[model](steps, 0, dist.get_rank())).item()
    torch.backends.mha.set_fastpath_enabled(True)
    result["buffers"] = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    if stage3:
        result["partition"]["left after evaluation"] = gathered(engine)
    return result


def partition_facts(engine: Any) -> dict[str, Any]:
    """units: those with parameters to gather. followed: whether the last step ran as planned. persistent: names of
    what stays whole. left: names of what is gathered now, though it is not needed."""
    coordinator = engine.coordinator
    released = [handle for handle in coordinator.handles if not handle.persistent]
    for handle in released:
        assert handle.shard.numel() == part_numel(handle.numel, dist.get_world_size())
        assert has_no_values(handle.parameter), f"{handle.name} is partitioned and has memory or a shape of its own"
    return {
        "units": len(coordinator.units),
        "followed": coordinator.schedule.following,
        "released": sorted(handle.name for handle in released),
        "left": gathered(engine),
    }


def gathered(engine: Any) -> list[str]:
    """Names of the parameters that are gathered, less those that stay whole."""
    handles = [handle for handle in engine.coordinator.handles if not handle.persistent]
    return [handle.name for handle in handles if handle.status is not ZeroParamStatus.NOT_AVAILABLE]


def train_many(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several runs of :func:`train` in one call, by name."""
    return {name: train(**run) for name, run in runs.items()}
