"""Disks that are full, that fail, or that are not there."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.checkpoint.cases.resume import differences, facts, make_engine
from tests.distributed.cases.offload import RUNS, engine_loop
from zerolite.ops.async_io import AsyncIO, IOTask


@contextlib.contextmanager
def inside(directory: str, rank: int) -> Iterator[None]:
    """A working directory of the rank's own: what is relative lies elsewhere for each."""
    before = os.getcwd()
    os.chdir(Path(directory) / str(rank))
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def failing(at: int, count: int = 1) -> Iterator[list[str]]:
    """The requests from number ``at`` on to the disk fail, ``count`` of them: writes for want of room, reads at the end
    of the file. Gives the kinds of the requests so far."""
    seen: list[str] = []
    original = AsyncIO._begin
    full, empty = os.open("/dev/full", os.O_WRONLY), os.open("/dev/null", os.O_RDONLY)

    def begin(self: AsyncIO, write: bool, fd: int, *args: Any) -> IOTask:
        seen.append("write" if write else "read")
        if at <= len(seen) - 1 < at + count:
            fd = full if write else empty
        return original(self, write, fd, *args)

    try:
        with mock.patch.object(AsyncIO, "_begin", begin):
            yield seen
    finally:
        gc.collect()  # no request is under way
        os.close(full)
        os.close(empty)


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    """Return the message of the error that ``function`` raises; "" if there is none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def begin(
    directory: str, name: str, stage: int, zero: dict[str, Any], steps: int, config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the error, and its phase, where each rank's ``nvme_path`` is relative to a directory of its own."""
    rank = torch.distributed.get_rank()
    with inside(directory, rank):
        phase = "initialize"
        try:
            engine = make_engine(RUNS[name], stage, zero=zero, **(config or {}))
            for step in range(steps):
                phase = f"step {step}"
                list(engine_loop(engine, RUNS[name], step))
        except Exception as error:
            return {"phase": phase, "error": f"{type(error).__name__}: {error}"}
    return {"phase": "none", "error": ""}


def weights_and_states(engine: Any, states: tuple[str, ...]) -> dict[str, Any]:
    found = facts(engine, states)
    return {name: found[name] for name in ("masters", "parameters", *states)}


def breaks(directory: str, name: str, stage: int, zero: dict[str, Any], points: list[int]) -> list[dict[str, Any]]:
    """For each of ``points``: a run whose request of that number, counted from step 2 on, fails; what is refused then;
    how what is saved then differs from the weights and states of before that step; and whether it goes on from its
    checkpoint as if nothing had happened."""
    recipe = RUNS[name]
    engine = make_engine(recipe, stage, zero=zero)
    before: dict[int, dict[str, Any]] = {}  # by step
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(directory, tag="good")
        before[step] = weights_and_states(engine, recipe.states)
        list(engine_loop(engine, recipe, step))
    wanted = facts(engine, recipe.states)
    results = []
    for point in points:
        engine.load_checkpoint(directory, tag="good")
        result: dict[str, Any] = {"raised": ""}
        with failing(point) as seen:
            for step in (2, 3):
                try:
                    list(engine_loop(engine, recipe, step))
                except OSError as error:
                    result["raised"] = f"{type(error).__name__}: {error}"
                    break
        result["requests"] = len(seen)
        if result["raised"]:
            result["step"] = refusal(engine.step)
            result["save"] = refusal(engine.save_checkpoint, directory, tag="broken")
            result["loop"] = refusal(lambda: list(engine_loop(engine, recipe, 2)))
            result["export"] = refusal(engine.save_16bit_model, directory)
            if not result["save"]:
                engine.load_checkpoint(directory, tag="broken")
                result["saved"] = differences(before[step], weights_and_states(engine, recipe.states))
            engine.load_checkpoint(directory, tag="good")
            for step in (2, 3):
                list(engine_loop(engine, recipe, step))
        result["differences"] = differences(wanted, facts(engine, recipe.states))
        results.append(result)
    return results
