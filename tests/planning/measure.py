"""Measurement of memory and traffic of real steps, for comparison with a plan of the same job."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from pydantic import BaseModel, ConfigDict, Field

from zerolite.comm import collective, local_rank, record
from zerolite.comm.transport import Message
from zerolite.config import load_config
from zerolite.engine.engine import Engine
from zerolite.engine.engine_base import parts_of
from zerolite.engine.initialize import initialize
from zerolite.monitor.memory_report import Holding, holdings
from zerolite.planning.dry_run import WARM_UP
from zerolite.planning.make import ConfigLike, batch_maker, silent
from zerolite.planning.result import AT_REST, Items, Traffic
from zerolite.planning.tracker import MemoryTracker
from zerolite.planning.traffic import Grid, summarize
from zerolite.planning.training_step import STEP, MakeBatch, loss_with_targets, train_one_step, walk_through_parameters
from zerolite.utils.accelerator import default_device
from zerolite.utils.lazy import collector_off
from zerolite.utils.memory_tags import DEVICE, DISK, HOST, ITEMS, LOCATIONS, OTHER, listeners
from zerolite.utils.nested import map_tensors

_MOST_STEPS = 50
_LONGER_S = 0.005
_REST_S = 0.02  # at the end of a step, for threads that have not run since its last wait


class Measurement(BaseModel):
    """Measurements of one rank of a real job, in bytes, in the step after a plan's warm-up.

    They are the fields of :class:`~zerolite.planning.result.Plan` that can be measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    world_size: int
    device: str = Field(description="cuda or cpu")
    states: Items = Field(description="model states and buffers, each item at its largest within the step")
    host: Items = Field(description="items and staging buffers on the host, each at its largest")
    disk: Items = Field(description="the same of the disk")
    at_rest: Items = Field(description='items after the step; "other" is all other counted memory')
    step_peak: int = Field(description="peak of the step; on the CPU without memory inside of operators")
    traffic: list[Traffic]


@collective
def measure(
    make_model: Callable[[], torch.nn.Module],
    config: ConfigLike,
    batch: Callable[..., Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
) -> Measurement:
    """Make the model and its engine in this process and train a few steps, as a plan does on tensors without memory.

    Memory that is allocated before does not count.

    Args:
        make_model: makes the model.
        config: as for ``zerolite.initialize``; monitors and profilers stay off.
        batch: as for ``zerolite.plan``; None: every parameter is used once, by itself.
        loss: as for ``zerolite.plan``.
    """
    meter = _MemoryMeter(default_device(local_rank()))
    with meter.counting():
        model = make_model()
        settings = silent(load_config(config))
        engine = initialize(model, settings, loss_fn=loss_with_targets(loss))
        made = batch_maker(batch, engine.train_micro_batch_size_per_gpu)
        if made is None:
            walk_through_parameters(model)

        def micro_batch() -> Any:
            return map_tensors(lambda tensor: tensor.to(engine.device), torch.zeros(()) if made is None else made())

        _warm_up(engine, micro_batch, loss)
        largest = _LargestItems(engine)
        meter.begin_step()
        with collector_off(), record() as recorder, largest.listening(), _waits_until_gloo_lets_go():
            train_one_step(engine, micro_batch, loss, largest.on_phase)
            parts_of(engine).param_gatherer.wait_all()
        time.sleep(_REST_S)
        rest, peak = meter.end_step()
        largest.update()
        held = engine.memory_report().items
    items = largest.items
    return Measurement(
        rank=engine.rank,
        world_size=engine.world_size,
        device=engine.device.type,
        states=dict.fromkeys(ITEMS, 0) | {item: items[DEVICE][item] for item in AT_REST},
        host=items[HOST],
        disk=items[DISK],
        at_rest={**held, OTHER: rest - sum(held.values())},
        step_peak=peak,
        traffic=summarize(recorder.calls, Grid.of(engine.topology)),
    )


@contextlib.contextmanager
def _waits_until_gloo_lets_go() -> Iterator[None]:
    """Context in which a wait for a message lasts some moments longer. The thread of gloo that wakes the waiting one
    holds the message's tensors until it runs again: on a busy machine long enough to count at the peak."""
    wait = Message.wait

    def wait_longer(message: Message, *args: Any) -> None:
        wait(message, *args)
        time.sleep(_LONGER_S)

    with mock.patch.object(Message, "wait", wait_longer):
        yield


def _warm_up(engine: Engine, micro_batch: MakeBatch, loss: Callable[..., torch.Tensor] | None) -> None:
    """Train the steps of a plan's warm-up, and more until the loss scale is small enough that no step is skipped."""
    for step in range(_MOST_STEPS):
        skipped = engine.skipped_steps
        train_one_step(engine, micro_batch, loss)
        if step + 1 >= WARM_UP and engine.skipped_steps == skipped:
            break
    parts_of(engine).param_gatherer.wait_all()
    gc.collect()


class _LargestItems:
    """Largest bytes of each item at each location that the engine reports.

    It reads the report at every tagged allocation, and before every update, when all gradients have been reduced.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.items = {location: dict.fromkeys(ITEMS, 0) for location in LOCATIONS}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        listeners.append(self)
        try:
            yield
        finally:
            listeners.remove(self)

    def tag_memory(self, storage: torch.UntypedStorage, item: str, location: str) -> None:
        there = HOST if location == DEVICE and storage.device.type != self._engine.device.type else location
        self.update({id(storage): Holding(item, storage.nbytes(), there)})  # the engine does not report it yet

    def resized(self, storage: torch.UntypedStorage) -> None:
        self.update()

    @contextlib.contextmanager
    def on_phase(self, phase: str) -> Iterator[None]:
        engine = self._engine
        if phase == STEP and engine.is_gradient_accumulation_boundary():
            engine.reduce_gradients()
            self.update()
        yield

    def update(self, allocated: dict[int, Holding] | None = None) -> None:
        now = {location: dict.fromkeys(ITEMS, 0) for location in LOCATIONS}
        for item, nbytes, location in (holdings(parts_of(self._engine)) | (allocated or {})).values():
            now[location][item] += nbytes
        for location, items in self.items.items():
            items.update({item: max(nbytes, now[location][item]) for item, nbytes in items.items()})


class _MemoryMeter:
    """Counter of the bytes that are allocated after its construction.

    On CUDA they are those of the caching allocator. The CPU's allocator has no statistics, so there the tensors that
    operators make are counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_cuda = device, device.type == "cuda"
        self._before = torch.cuda.memory_allocated(device) if self._on_cuda else 0
        self._tracker = MemoryTracker(separate_memory=False)

    def counting(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._on_cuda else self._tracker

    def begin_step(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._tracker.reset_peak()

    def end_step(self) -> tuple[int, int]:
        """Return the bytes at rest after the step, and the most within it."""
        if not self._on_cuda:
            return self._tracker.nbytes[DEVICE], self._tracker.peak.bytes
        torch.cuda.synchronize(self._device)
        held = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return held[0] - self._before, held[1] - self._before
