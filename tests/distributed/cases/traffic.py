"""Logical collectives per step, the first synchronisation, buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests import models
from tests.distributed.cases.training import engine_window, make_engine, snapshot


def plain_calls(recorder: Any) -> list[tuple[str, int, str, int, str]]:
    return [(call.op, call.numel, str(call.dtype), call.nbytes, call.tag) for call in recorder.calls]


def calls_per_step(config: dict[str, Any], model: str = "OddModel") -> dict[str, Any]:
    """The collectives of the third window and of reading its norm, and the number of trained elements."""
    engine = make_engine(config, model)
    for step in range(3):
        with zerolite.comm.record() as recorder:
            engine_window(engine, model, step, config["gradient_accumulation_steps"])
            engine.get_global_grad_norm()
            engine.module  # noqa: B018 waits for the gathers that are still in flight
    trained = [p.numel() for p in engine.module.parameters() if p.requires_grad]
    return {"calls": plain_calls(recorder), "numel": sum(trained)}


def initial_sync(config: dict[str, Any], same: bool) -> dict[str, Any]:
    """Build with one seed or with one seed per rank."""
    model = models.build(models.Buffered, seed=5 if same else 5 + dist.get_rank())
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    with zerolite.comm.record() as recorder:
        engine = zerolite.initialize(model, config)
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return {"mine": mine, "parameters": snapshot(engine), "buffers": buffers, "calls": plain_calls(recorder)}


def buffers_after_training(config: dict[str, Any], broadcast: bool) -> dict[str, Any]:
    engine = make_engine(config, "Buffered", broadcast_buffers=broadcast)
    with torch.no_grad():
        engine.module.offset.fill_(float(dist.get_rank()))
        engine.module.calls.fill_(10 * dist.get_rank())
    with zerolite.comm.record() as recorder:
        engine_window(engine, "Buffered", 0, 1)
    engine.eval()
    with zerolite.comm.record() as evaluation, torch.no_grad():
        engine(models.float_batch(0, 0, 0)[0])
    return {
        "offset": engine.module.offset.clone(),
        "calls": engine.module.calls.clone(),
        "broadcasts": recorder.count(tag="buffers"),
        "in evaluation": len(evaluation.calls),
    }


def different_models(config: dict[str, Any]) -> str:
    width = 5 + dist.get_rank()
    try:
        make_engine(config, "OddModel", {"width": width})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")
