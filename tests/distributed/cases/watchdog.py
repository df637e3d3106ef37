"""Runs whose ranks part from each other."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerolite
from tests.distributed.configs import ADAMW, PARTITIONED, config
from zerolite.comm import flight
from zerolite.diagnostics import watchdog
from zerolite.diagnostics.position import WATCHDOG
from zerolite.utils import failure_record

FOR_EVER = 1000.0
ODD = 1  # the rank that parts from the others
AT = 2  # in this step, from 0


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 6)
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        if self.odd:
            return nn.functional.pad(self.second(x), (0, 2))
        return self.first(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.experts = Experts()
        self.head = nn.Linear(8, 1)
        self.sleep_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        time.sleep(self.sleep_s)
        return self.head(self.experts(x))


def part(
    how: str, stage: int, timeout_s: float, directory: str, shared_memory: bool = True, caught: bool = False
) -> dict[str, Any]:
    """Train; rank 1 does something else than the others in its third step, as ``how`` says. caught: ranks go on after
    they have raised that they differ, and rank 1 sleeps."""
    os.environ["ZEROLITE_SHARED_MEMORY"] = str(int(shared_memory))
    rank = int(torch.distributed.get_rank())
    os.environ[failure_record.VARIABLE] = str(Path(directory) / f"record.{rank}.json")
    if how == "exited":
        watchdog._EXITED_S = 1.0
    torch.manual_seed(0)
    model = Model()
    settings = config(stage, zero=PARTITIONED["moving"] if stage == 3 else None, optimizer=ADAMW)
    engine = zerolite.initialize(model, {**settings, "desync_timeout_s": timeout_s})
    odd = rank == ODD
    raised = ""
    for step in range(4):
        doing = how if odd and step == AT else ""
        model.sleep_s = FOR_EVER if doing == "sleep in forward" else 0.0
        model.experts.odd = doing == "branch"
        if how == "slow" and odd:
            time.sleep(0.6 * timeout_s)
        if doing == "sleep":
            time.sleep(FOR_EVER)
        elif (
            doing == "exited"
        ):  # as the launcher says it; a process that stands still breaks no connection, as with NCCL
            store = torch.distributed.distributed_c10d._get_default_store()
            while isinstance(store, torch.distributed.PrefixStore):
                store = store.underlying_store
            store.set(failure_record.NUMBERED_EXIT.format(store.add(failure_record.EXIT_COUNT, 1)), str(rank))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif doing == "stop":
            time.sleep(0.5)  # until it has said in which step it is
            os.kill(os.getpid(), signal.SIGSTOP)
        elif doing == "fewer":
            _wait_outside()
        elif doing == "save":
            engine.save_checkpoint(directory)
        try:
            if doing == "metric":
                engine.reduce(1.0)
            loss = engine(torch.randn(2, 8)).square().mean()
            engine.backward(loss)
            if doing == "gradient":
                torch.sort(model.inner.weight.grad)  # type: ignore[call-overload]
            if doing == "skip the step":
                continue
            engine.step()
        except flight.Mismatch as error:
            raised = str(error)
            if not caught:
                break
            if odd:
                time.sleep(FOR_EVER)
            zerolite.comm.HostGroup(engine.parts.comm, "after").gather("hello")
    found = {"steps": engine.global_steps, "raised": raised, "rank": rank}
    del engine
    return found


def _wait_outside() -> None:
    time.sleep(FOR_EVER)


def beats(stage: int, steps: int) -> dict[str, Any]:
    """Return how often the watchdog writes to its store and what the main thread does there."""
    settings = config(stage, zero=PARTITIONED["moving"] if stage == 3 else None)
    engine = zerolite.initialize(Model(), {**settings, "desync_timeout_s": 1.0})
    assert watchdog._current is not None
    dog = watchdog._current
    calls: list[tuple[str, str, str]] = []
    real = dog._store

    class Counting:
        alone = False

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                calls.append((name, str(args[0]), threading.current_thread().name))
                return getattr(real, name)(*args)

            return call

    dog._store = Counting()  # type: ignore[assignment]
    try:
        for _ in range(steps):
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
            time.sleep(0.15)
        time.sleep(0.3)
    finally:
        dog._store = real
    del engine
    threads = [thread for thread in threading.enumerate() if thread.name == WATCHDOG]
    return {"calls": calls, "threads": len(threads)}


def signalled() -> str:
    """Return the output of SIGUSR1 while the main thread waits for another rank."""
    rank = int(torch.distributed.get_rank())
    engine = zerolite.initialize(Model(), config(2))
    assert watchdog._current is not None
    dog = watchdog._current
    if not dog._signalled:  # the pool listens to that signal itself: write what the handler would
        real, read, written = sys.stderr, *os.pipe()
        sys.stderr = os.fdopen(written, "w", buffering=1)
        try:
            if rank == 0:
                timer = threading.Timer(0.3, lambda: os.write(dog._woken, b"Current thread: a stack"))
                timer.start()
            else:
                time.sleep(1.0)
            engine.backward(engine(torch.randn(2, 8)).square().mean())
            engine.step()
            time.sleep(0.3)
        finally:
            sys.stderr.close()
            sys.stderr = real
        with os.fdopen(read) as file:
            said = file.read()
    del engine
    return said


def lost(stage: int, last_words: str) -> str:
    """Return the error of a collective when another process has gone, which rank 1 pretends."""
    rank = int(torch.distributed.get_rank())
    engine = zerolite.initialize(Model(), config(stage))
    assert watchdog._current is not None
    dog = watchdog._current
    said = ""
    if rank == ODD:
        dog._say_ended(last_words)
    torch.distributed.barrier()
    if rank != ODD:
        error = dog.explain(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:17320"))
        said = str(error)
        assert dog.explain(RuntimeError("shape mismatch")) is None
    torch.distributed.barrier()
    if rank == ODD:
        dog._store.add("endings", -1)
    torch.distributed.barrier()
    del engine
    return said
