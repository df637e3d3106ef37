"""Monitors, timers and profilers of an engine, opened from the config as observers of its steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch.utils.hooks import RemovableHandle

from zerolite.monitor import StepLog, open_monitor
from zerolite.monitor.flops import FlopCount, FlopsProfiler
from zerolite.monitor.memory_report import memory_report
from zerolite.monitor.wall_clock import DEFAULT_STEPS, PhaseClock, describe, watch_forward
from zerolite.zero.engine_parts import EngineParts

_OF_THE_ALLOCATOR = ("allocated", "allocated_peak", "reserved", "reserved_peak", "resident", "resident_peak")


class Monitoring:
    """Opens the config's monitors as observers of one engine. Its methods are called in the order below, as the parts
    of the engine are made. Called on all ranks."""

    def __init__(self, parts: EngineParts) -> None:
        config, topology, device, state = parts.config, parts.topology, parts.device, parts.pipeline.state
        self.monitor = monitor = open_monitor(config, topology.world, device, before_close=state.settle)
        self.log = StepLog(monitor, config.train_batch_size, parts.optimizer, parts.scaler)
        self._parts, self._config = parts, config
        self._is_rank0 = topology.data.is_rank0
        self._every = config.steps_per_print or DEFAULT_STEPS
        self._profiler: FlopsProfiler | None = None
        if monitor.enabled:
            parts.observers.add(self.log)
        if config.memory_breakdown and self._is_rank0:
            parts.observers.on_settled.append(self._report_memory)

    def watch_module(self) -> list[RemovableHandle]:
        """Measure forwards if the config asks for it, and return the hooks on the model."""
        module = self._parts.model
        if self._config.flops_profiler.enabled and self._is_rank0:

            def write(step: int, values: Mapping[str, float]) -> None:
                self.log.write(step, values, "Flops")

            settings, count = self._config.flops_profiler, FlopCount(self._parts.call, module)
            self._profiler = FlopsProfiler(settings, count, self._parts.device, self._every, write)
            self._parts.observers.on_step_end.append(self._profiler.end_step)
        if not self._config.wall_clock_breakdown or not self._is_rank0:
            return []

        def report(step: int, means: Mapping[str, float]) -> None:
            print(describe(step, means), flush=True)
            self.log.write(step, {f"elapsed_time_ms_{phase}": mean for phase, mean in means.items()})

        clock = PhaseClock(self._parts.device, self._every, report)
        self._parts.observers.add(clock)
        return watch_forward(clock, module)

    def end_with(self, engine: object) -> list[weakref.finalize[..., Any]]:
        """Write the last step and close when ``engine`` ends, or at the end of the process."""
        finalizers: list[weakref.finalize[..., Any]] = []
        if self.monitor.enabled:
            finalizers.append(weakref.finalize(engine, self.monitor.close))
        if self._profiler is not None:
            finalizers.append(weakref.finalize(engine, self._profiler.close))
        return finalizers

    def _report_memory(self, step: int, norm: float) -> None:
        if step % self._every:
            return
        memory = memory_report(self._parts)
        print(f"step {step}: {memory}", flush=True)
        others = {name: getattr(memory, name) for name in _OF_THE_ALLOCATOR}
        known_ones = {name: nbytes for name, nbytes in others.items() if nbytes is not None}
        elsewhere = {
            f"{category}_{place}": nbytes
            for place, items in (("host", memory.host), ("disk", memory.disk))
            for category, nbytes in items.items()
            if nbytes
        }
        self.log.write(step, memory.items | elsewhere | known_ones, "Memory")
