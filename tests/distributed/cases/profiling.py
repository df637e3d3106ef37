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
from tests import models
from tests.distributed.cases.monitor import events_of, read_jsonl
from tests.distributed.cases.traffic import plain_calls
from tests.distributed.cases.training import WINDOWS, make_engine, snapshot
from zerolite.monitor.flops_profiler import FlopsProfiler

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
    watched = events_of(engine, FlopsProfiler)
    plain = engine.call.call_module is engine._module
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
        "watched": watched,
        "plain": plain,
        "stack": torch._C._len_torch_dispatch_stack(),
        "gone": gone() is None,
    }


def _communicators(engine: Any) -> list[Any]:
    """The engine's, each once."""
    own = [engine._comm] + ([engine.coordinator.comm] if engine.coordinator is not None else [])
    return list({id(comm): comm for comm in own}.values())


def summary_without(config: dict[str, Any]) -> str:
    """Return the error about a summary where nothing is logged."""
    engine = make_engine(config)
    try:
        engine.comms_summary()
    except RuntimeError as error:
        return str(error)
    return ""


def interrupted(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Four windows with each config; in the second one, which a profiler counts, a forward and a backward raise."""
    return [_interrupted(config) for config in configs]


def _interrupted(config: dict[str, Any]) -> dict[str, Any]:
    stacks: list[int] = []
    with contextlib.redirect_stdout(io.StringIO()):
        engine = make_engine(config, "Mlp")
        for step in range(STEPS):
            if step == 1:
                for where in ("forward", "backward"):
                    with contextlib.suppress(_Stopped):
                        _stop_in(engine, where)
                    stacks.append(torch._C._len_torch_dispatch_stack())
                    engine.zero_grad()
            WINDOWS["engine"](engine, "Mlp", step, 1)
        return {"stacks": stacks, "parameters": snapshot(engine)}


class _Stopped(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Stopped


def _stop_in(engine: Any, where: str) -> None:
    x, y = models.float_batch(9, 0, dist.get_rank())
    module = engine.module
    handle = module.second.register_forward_pre_hook(_stop) if where == "forward" else None
    hidden: list[torch.Tensor] = []
    watch = module.first.register_forward_hook(lambda _module, _args, output: hidden.append(output))
    try:
        output = engine(x)
        hidden[0].register_hook(_stop)
        engine.backward((output - y).square().mean())
    finally:
        watch.remove()
        if handle is not None:
            handle.remove()
    raise AssertionError("nothing has raised")
