"""Training with the communication logger and with the FLOPs profiler."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from typing import Any

import torch
import torch.distributed as dist

import zerolite
from tests.distributed.cases.monitor import read_jsonl
from tests.distributed.cases.traffic import plain_calls
from tests.distributed.cases.training import WINDOWS, make_engine, snapshot

STEPS = 4
Setting = tuple[dict[str, Any], str, str]  # a config, the loop, the folder of its monitors or ""


def trained(settings: list[Setting], model: str = "OddModel") -> list[dict[str, Any]]:
    """A few windows with each of the settings; what this rank saw."""
    return [_trained(*setting, model) for setting in settings]


def _trained(config: dict[str, Any], loop: str, folder: str, model: str) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = make_engine(config, model)
        with zerolite.comm.record() as recorder:
            losses = [WINDOWS[loop](engine, model, step, engine.gradient_accumulation_steps) for step in range(STEPS)]
        logged = engine.comms_summary() if engine.comms_logger is not None else None
        parameters = snapshot(engine)
        watchers = [len(comm._watchers) for comm in _communicators(engine)]
    wrapped = sorted(vars(engine._pipeline).keys() & {"update", "reduce", "begin_backward", "publish"})
    plain = engine.call_module is engine._module
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    dist.barrier()
    return {
        "losses": losses,
        "parameters": parameters,
        "calls": plain_calls(recorder),
        "logged": logged,
        "printed": printed.getvalue(),
        "written": read_jsonl(folder) if folder else [],
        "watchers": watchers,
        "wrapped": wrapped,
        "plain": plain,
        "stack": torch._C._len_torch_dispatch_stack(),
        "gone": gone() is None,
    }


def _communicators(engine: Any) -> list[Any]:
    """The engine's, each once."""
    own = [engine._comm] + ([engine.coordinator.comm] if engine.coordinator is not None else [])
    return list({id(comm): comm for comm in own}.values())


def summary_without(config: dict[str, Any]) -> str:
    """What asking for a summary raises where nothing is logged."""
    engine = make_engine(config)
    try:
        engine.comms_summary()
    except RuntimeError as error:
        return str(error)
    return ""
