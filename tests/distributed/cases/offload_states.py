"""Runs that bring the engine's states to the host in their middle, beside runs that do not."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerolite
from tests import models
from tests.distributed.cases.memory_report import Mixed


def refused(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """By name, the first words of what each call raises; empty for what goes through."""
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)
    return said


class Copies(TorchDispatchMode):
    """Counts copies, of one tensor or of several."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_):
            self.count += len(args[0]) if isinstance(args[0], list) else 1
        return function(*args, **(kwargs or {}))


def run(config: dict[str, Any], out: list[str] | None, offloads: bool, non_blocking: bool = False) -> dict[str, Any]:
    """Four windows. offloads: states go out in the middle of the third (after its first backward), and come back."""
    model = models.build(Mixed)
    engine = zerolite.initialize(model, config)
    losses, found = [], {}
    for window in range(4):
        for micro in range(engine.gradient_accumulation_steps):
            loss = models.square_loss(engine, models.float_batch(window, micro, engine.rank))
            engine.backward(loss)
            losses.append(float(loss))
            if offloads and window == 2 and micro == 0:
                before = engine.memory_report().items
                engine.offload_states(out, non_blocking=non_blocking)
                report = engine.memory_report()
                found["before"], found["during"], found["host"] = before, report.items, report.host
                found["refused"] = refused(calls_of(engine))
                engine.reload_states()
                engine.reload_states()
                found["after"] = engine.memory_report().items
            with Copies() as copies:
                engine.step()
    found["copies"] = copies.count  # of the last step
    state = engine.full_state_dict()
    first = list(model.parameters())[0]
    moment = zerolite.get_full_optimizer_state(first, "exp_avg_sq")
    return {"losses": losses, "state": state, "moment": moment, **found}


def calls_of(engine: Any) -> dict[str, Callable[[], Any]]:
    first: nn.Parameter = list(engine.module.parameters())[0]

    def forward() -> None:
        with torch.no_grad():
            engine(models.float_batch(0, 0, engine.rank)[0])

    return {
        "forward": forward,
        "step": engine.optimizer.step,
        "reduce": engine.reduce_gradients,
        "set gradient": lambda: zerolite.set_full_grad(first, None),
        "join": lambda: contextlib.ExitStack().enter_context(engine.join()),
        "read": lambda: first.data.sum(),
        "save": lambda: engine.save_checkpoint(tempfile.gettempdir()),
        "gradient": lambda: zerolite.get_full_grad(first),
        "state": lambda: zerolite.get_full_optimizer_state(first, "exp_avg"),
        "again": engine.offload_states,
    }


def several(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: run(**arguments) for name, arguments in runs.items()}


def wrong_arguments(config: dict[str, Any]) -> dict[str, str]:
    engine = zerolite.initialize(models.build(Mixed), config)
    said = {}
    for name, arguments in {"include": {"include": ["moments"]}, "device": {"device": "nvme"}}.items():
        try:
            engine.offload_states(**arguments)
        except ValueError as error:
            said[name] = str(error)
    return said


def engine_goes(config: dict[str, Any]) -> bool:
    """True if a model has its values back when its engine goes while they are out."""
    model = models.build(Mixed)
    engine = zerolite.initialize(model, config)
    before = engine.full_state_dict()
    engine.offload_states()
    del engine
    gc.collect()
    with zerolite.zero.GatheredParameters(model):
        return all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)


def no_memory(config: dict[str, Any]) -> dict[str, Any]:
    """The host has no memory for the third storage: nothing has changed, and the next call works."""
    from unittest import mock

    from zerolite.engine import state_offload

    engine = zerolite.initialize(models.build(Mixed), config)
    engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)))
    engine.step()
    real, left = state_offload.host_memory, [2]

    def fails(nbytes: int, pin: bool) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no room")
        return real(nbytes, pin)

    said = ""
    with mock.patch.object(state_offload, "host_memory", fails):
        try:
            engine.offload_states()
        except MemoryError as error:
            said = str(error)
    engine.backward(models.square_loss(engine, models.float_batch(1, 0, engine.rank)))
    engine.step()
    trained = engine.full_state_dict()
    engine.offload_states(["optim_states"])
    engine.reload_states()
    state = engine.full_state_dict()
    return {"said": said, "kept": all(torch.equal(value, trained[name]) for name, value in state.items())}
