"""``flops_profiler``: FLOPs of one step, and the used share of the device's peak in the steps after it.

Counting slows a step down, so the counted step is not timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from zerolite.config.profiling import FlopsProfilerConfig
from zerolite.monitor.device_timers import DeviceTimers, TimingEvent
from zerolite.monitor.flops import FlopCount
from zerolite.utils.text import with_unit

Write = Callable[[int, Mapping[str, float]], None]
"""Function (step, values by name) that writes to the monitors."""


class FlopsProfiler:
    """Profiler of one rank. :meth:`end_step` is called after each optimizer step.

    Args:
        config: the block ``flops_profiler``.
        count: counts the FLOPs of the engine.
        device: the engine's device.
        every: a line of speed is printed after each step whose number is a multiple of it.
        write: writes values to the monitors.
    """

    def __init__(
        self, config: FlopsProfilerConfig, count: FlopCount, device: torch.device, every: int, write: Write
    ) -> None:
        self._config, self._count, self._every, self._write = config, count, every, write
        self._timers = DeviceTimers(device)
        self._steps = 0  # since the engine was made
        self._last_step = 0  # the latest step that has ended
        self._hardware = 0.0  # FLOPs of a step, recomputed ones included
        self._since: tuple[int, TimingEvent] | None = None  # first timed step - 1, and the event at its start
        if config.profile_step == 0:
            count.start()

    def end_step(self, step: int) -> None:
        """Note the end of step number ``step``. A second call with the same number does nothing."""
        if step == self._last_step:
            return
        self._last_step = step
        self._steps += 1
        if self._steps == self._config.profile_step:
            self._count.start()
        elif self._steps == self._config.profile_step + 1:
            self._count.stop()
            self._report(step)
            self._since = (step, self._timers.now())
        elif self._since is not None and step % self._every == 0:
            first, start = self._since
            end = self._timers.now()
            self._timers.add(start, end, functools.partial(self._report_speed, step, step - first), goes_on=True)
            self._since = (step, end)
        self._timers.read()

    def close(self) -> None:
        """Stop. Called when the engine is gone, perhaps in the middle of the counted step."""
        self._count.stop()
        self._timers.forget()

    def _report(self, step: int) -> None:
        flops = self._count.flops
        # The counter misses recomputation inside compiled regions; the user can give its amount by the factor.
        again = max(float(flops.recomputed), self._config.recompute_fwd_factor * flops.forward)
        self._hardware = flops.model + again
        values = {"forward": flops.forward, "backward": flops.backward, "recomputed": again, "model": flops.model}
        text = ", ".join(f"{name} {with_unit(count, 'FLOP')}" for name, count in values.items())
        unknown = f"; without {', '.join(sorted(flops.unknown))}" if flops.unknown else ""
        print(f"step {step}: matrix products, convolutions and attention on rank 0: {text}{unknown}", flush=True)
        self._write(step, {f"{name}_tflop_per_step": count / 1e12 for name, count in values.items()})

    def _report_speed(self, step: int, steps: int, milliseconds: float) -> None:
        seconds = milliseconds / 1e3 / steps
        if not seconds:
            return
        model = self._count.flops.model / seconds
        values = {"step_seconds": seconds, "tflops": model / 1e12}
        text = f"step {step}: {with_unit(model, 'FLOP/s')} on rank 0 ({seconds * 1e3:.2f} ms a step)"
        if self._config.peak_tflops is not None:
            peak = self._config.peak_tflops * 1e12
            values |= {"mfu": model / peak, "hfu": self._hardware / seconds / peak}
            text += (
                f", model FLOPs utilization {values['mfu']:.2%}, hardware FLOPs utilization {values['hfu']:.2%} of "
                f"{with_unit(peak, 'FLOP/s')}"
            )
        print(text, flush=True)
        self._write(step, values)
