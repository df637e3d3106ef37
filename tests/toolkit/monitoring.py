"""Runs that monitors and profilers watch, and readers of the files that they write."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.toolkit.faults import Warnings, poison
from tests.toolkit.traffic import plain_calls
from tests.toolkit.training import WINDOWS, make_engine, snapshot
from zerolite.comm import record
from zerolite.monitor import Event, Writer
from zerolite.monitor.flops import FlopsProfiler
from zerolite.monitor.writers import group_by_step

STEPS = 4


def monitors(folder: Path) -> dict[str, Any]:
    """The sections of a config whose monitors write into ``folder``."""
    place = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return {"csv_monitor": place}


class Lines(Writer):
    """A writer that keeps a line for each step of a write."""

    name = "lines"

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def write(self, events: Sequence[Event]) -> None:
        self.lines += [{"step": step, **values} for step, values in group_by_step(events).items()]


def events_of(engine: Any, kind: type) -> list[str]:
    """The events of an engine's steps that observers of class ``kind`` are told of."""
    observers = vars(engine._parts.pipeline._observers)
    return sorted(
        event
        for event, listeners in observers.items()
        if any(isinstance(getattr(listener, "__self__", None), kind) for listener in listeners)
    )


def run_watched(
    config: dict[str, Any],
    loop: str = "engine",
    folder: Path | None = None,
    model: str = "OddModel",
    spoil: bool = False,
) -> dict[str, Any]:
    """Train for a few windows; return what this rank saw, and what its monitors wrote into ``folder``.

    spoil: in the second step the gradient of the last rank is not finite; behind the last one the user writes a value.
    """
    printed, kept = io.StringIO(), Lines()
    seen: dict[str, Any] = {"losses": [], "lr": [], "norms": [], "scales": []}
    with contextlib.redirect_stdout(printed), Warnings():
        engine = make_engine(config | monitors(folder) if folder else config, model)
        if engine.monitor.enabled:
            engine.monitor._writers.append(kept)
        with record() as recorder:
            for step in range(STEPS):
                bad = spoil and step == 1 and dist.get_rank() == dist.get_world_size() - 1
                handle = poison(engine, "up.weight", float("inf")) if bad else None
                seen["lr"].append(engine.get_lr())
                seen["scales"].append(engine.loss_scale)
                seen["losses"].append(WINDOWS[loop](engine, model, step, engine.gradient_accumulation_steps))
                seen["norms"].append(engine.get_global_grad_norm())
                if handle is not None:
                    handle.remove()
        if spoil:
            place = engine.global_steps if engine.global_samples is None else engine.global_samples
            engine.monitor.write([("accuracy", 0.5, place)])
            assert engine.skipped_steps == 1
        seen["parameters"] = snapshot(engine)
    seen["watched"] = events_of(engine, FlopsProfiler)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    dist.barrier()
    assert gone() is None and torch._C._len_torch_dispatch_stack() == 0
    written = [kept.lines]
    dist.broadcast_object_list(written)  # rank 0's
    return {**seen, "calls": plain_calls(recorder), "printed": printed.getvalue(), "written": written[0]}
