"""Training with monitors and with the wall clock."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import time
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zerolite
from tests import models
from tests.distributed.cases.skips import Warnings, poison
from tests.distributed.cases.traffic import plain_calls
from tests.distributed.cases.training import WINDOWS, make_engine, snapshot
from zerolite.monitor.wall_clock import PhaseObserver

STEPS = 4


def read_jsonl(folder: str) -> list[dict[str, Any]]:
    """The objects in the folder's file; nothing if there is none."""
    path = Path(folder, "job", "events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events_of(engine: Any, kind: type) -> list[str]:
    """The events of an engine's steps that observers of class ``kind`` are told of."""
    observers = vars(engine._pipeline._observers)
    return sorted(
        event
        for event, listeners in observers.items()
        if any(isinstance(getattr(listener, "__self__", None), kind) for listener in listeners)
    )


def logged(config: dict[str, Any], loop: str = "engine", folder: str = "") -> dict[str, Any]:
    """A few windows, then a value of the user's own; what each rank saw, and what is in ``folder`` in the end. In the
    second step the gradient of the last rank is not finite."""
    torn = io.StringIO()
    with contextlib.redirect_stdout(torn), Warnings():
        engine = make_engine(config)
        losses, rates, norms, scales = [], [], [], []
        with zerolite.comm.record() as recorder:
            for step in range(STEPS):
                bad = step == 1 and dist.get_rank() == dist.get_world_size() - 1
                handle = poison(engine, "up.weight", float("inf")) if bad else None
                rates.append(engine.get_lr())
                scales.append(engine.loss_scale)
                losses.append(WINDOWS[loop](engine, "OddModel", step, engine.gradient_accumulation_steps))
                norms.append(engine.get_global_grad_norm())
                if handle is not None:
                    handle.remove()
        place = engine.global_steps if engine.global_samples is None else engine.global_samples
        engine.monitor.write([("accuracy", 0.5, place)])
        skipped = engine.skipped_steps
        parameters = snapshot(engine)
    del engine
    gc.collect()
    dist.barrier()
    return {
        "losses": losses,
        "lr": rates,
        "norms": norms,
        "scales": scales,
        "skipped": skipped,
        "parameters": parameters,
        "calls": plain_calls(recorder),
        "written": read_jsonl(folder) if folder else [],
        "printed": torn.getvalue(),
    }


def flushed(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """A window of three micro-batches that ends after two, then a full one."""
    engine = make_engine(config)
    losses = []
    for step, count in enumerate((2, 3)):
        for micro in range(count):
            loss = models.token_loss(engine, models.token_batch(step, micro, dist.get_rank()))
            engine.backward(loss)
            losses.append(loss.item())
            engine.step(flush=micro == 1 and count == 2)
    return {"losses": losses, "steps": engine.global_steps, "written": read_jsonl(folder)}


def refused(configs: list[dict[str, Any]]) -> str:
    """Rank 0 and the others have configs of their own; what initialize raises on this rank."""
    try:
        make_engine(configs[min(dist.get_rank(), 1)])
    except RuntimeError as error:
        return str(error)
    return ""


def timed(config: dict[str, Any], loop: str, pause: float, windows: int) -> dict[str, Any]:
    """Windows with a pause in each phase that a test can lengthen: forward, backward, and between steps."""
    engine = make_engine(config, "Mlp")
    out = io.StringIO()
    began = time.perf_counter()  # before the clock's first look, which engine.module takes: it waits for gathers
    engine.module.first.register_forward_hook(lambda *_: time.sleep(pause))
    with contextlib.redirect_stdout(out):
        for step in range(windows):
            x, y = models.float_batch(step, 0, dist.get_rank())
            engine.eval()
            engine(x)  # no part of training
            engine.train()
            output = engine(x)
            output.register_hook(lambda gradient: time.sleep(3 * pause))
            loss = (output - y).square().mean()
            if loop == "engine":
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    elapsed = (time.perf_counter() - began) * 1000.0
    root = engine.module
    watched = len(root._forward_pre_hooks), len(root._forward_hooks)
    measured = events_of(engine, PhaseObserver)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    left = len(root._forward_pre_hooks), len(root._forward_hooks)
    return {
        "printed": out.getvalue(),
        "elapsed": elapsed,
        "measured": measured,
        "hooks": watched,
        "left": left,
        "gone": gone() is None,
    }
