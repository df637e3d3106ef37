"""``flops_profiler``: FLOPs of one step by module, and throughput of the steps after it.

Counting slows a step down, so the counted step is not timed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from zerolite.config.profiling import FlopsProfilerConfig
from zerolite.monitor.flop_count import CallHolder, FlopCount, ModuleFlops
from zerolite.utils.device_timers import DeviceTimers, TimingEvent
from zerolite.utils.text import table, with_unit

logger = logging.getLogger("zerolite")

Write = Callable[[int, Mapping[str, float]], None]
"""Function (step, values by name) that writes to the monitors."""


class FlopsProfiler:
    """Profiler of one rank. :meth:`end_step` is called after each optimizer step.

    Args:
        config: the block ``flops_profiler``.
        call: holder of the engine's call of the module, which is counted.
        module: the engine's module.
        device: the engine's device.
        every: a line of speed is printed after each step whose number is a multiple of it.
        print_text: prints text.
        write: writes values to the monitors.
    """

    def __init__(
        self,
        config: FlopsProfilerConfig,
        call: CallHolder,
        module: torch.nn.Module,
        device: torch.device,
        every: int,
        print_text: Callable[[str], None],
        write: Write,
    ) -> None:
        self._config, self._every, self._print, self._write = config, every, print_text, write
        self._count = FlopCount(call, module)
        self._timers = DeviceTimers(device)
        self._steps = 0  # since the engine was made
        self._last_step = 0  # number of the step that ended last
        self._model = 0.0  # FLOPs of a step
        self._hardware = 0.0
        self._since: tuple[int, TimingEvent] | None = None  # step after which the timing began, and its event
        if config.profile_step == 0:
            self._count.start()

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
        modules = self._count.modules()
        total = modules[0]
        # The counter misses recomputation inside compiled regions; the user can give its amount by the factor.
        again = max(float(total.recomputed), self._config.recompute_fwd_factor * total.forward)
        self._model, self._hardware = float(total.model), total.model + again
        self._show("\n".join(describe(step, modules, again, self._config)))
        values = {"forward": total.forward, "backward": total.backward, "recomputed": again, "model": total.model}
        self._write(step, {f"{name}_tflop_per_step": flops / 1e12 for name, flops in values.items()})

    def _show(self, text: str) -> None:
        path = self._config.output_file
        if path is None:
            self._print(text)
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("flops_profiler.output_file: %s could not be written, and is printed: %s", path, error)
            self._print(text)

    def _report_speed(self, step: int, steps: int, milliseconds: float) -> None:
        seconds = milliseconds / 1e3 / steps
        if not seconds:
            return
        values = {"step_seconds": seconds, "tflops": self._model / seconds / 1e12}
        text = f"step {step}: {with_unit(self._model / seconds, 'FLOP/s')} on rank 0 ({seconds * 1e3:.2f} ms a step)"
        if self._config.peak_tflops is not None:
            peak = self._config.peak_tflops * 1e12
            values |= {"mfu": self._model / seconds / peak, "hfu": self._hardware / seconds / peak}
            text += (
                f", model FLOPs utilization {values['mfu']:.2%}, hardware FLOPs utilization {values['hfu']:.2%} of "
                f"{with_unit(peak, 'FLOP/s')}"
            )
        self._print(text)
        self._write(step, values)


def describe(step: int, modules: Sequence[ModuleFlops], recomputed: float, config: FlopsProfilerConfig) -> list[str]:
    """Return the lines of the profile.

    Args:
        step: number of the counted step.
        modules: FLOPs of all modules, the model first.
        recomputed: FLOPs of the full model that were recomputed in backward.
        config: the block ``flops_profiler``.
    """
    total = modules[0]
    totals = (
        ("parameters", with_unit(total.parameters, "")),
        ("forward", with_unit(total.forward, "FLOP")),
        ("backward", with_unit(total.backward, "FLOP")),
        ("forward and backward", f"{with_unit(total.model, 'FLOP')} a step (model FLOPs)"),
        ("recomputed in backward", with_unit(recomputed, "FLOP")),
        ("all", f"{with_unit(total.model + recomputed, 'FLOP')} a step (hardware FLOPs)"),
    )
    lines = [f"step {step}: FLOPs of matrix products, convolutions and attention on rank 0, by torch's formulas"]
    lines += [f"  {name:24}{value}" for name, value in totals]
    deepest = max(module.depth for module in modules)
    depth = deepest if config.module_depth < 0 else min(config.module_depth, deepest)
    lines.append("most forward and backward FLOPs by depth:")
    for level in range(depth + 1):
        most = sorted((m for m in modules if m.depth == level and m.model), key=lambda m: -m.model)
        listed = (f"{_name(m)} {with_unit(m.model, 'FLOP')} ({_share(m, total)})" for m in most[: config.top_modules])
        lines.append(f"  {level}: {', '.join(listed) or 'none'}")
    if config.detailed:
        rows: list[tuple[str, ...]] = [("module", "class", "parameters", "forward", "backward", "recomputed", "share")]
        rows += [_row(module, total) for module in modules if module.depth <= depth]
        lines.append("by module, with all that is in it:")
        lines += [f"  {line}" for line in table(rows, left=2)]
    return lines


def _row(module: ModuleFlops, total: ModuleFlops) -> tuple[str, ...]:
    name = "  " * module.depth + (module.name.rpartition(".")[2] or "the model")
    flops = (with_unit(count, "FLOP") for count in (module.forward, module.backward, module.recomputed))
    return (name, module.kind, with_unit(module.parameters, ""), *flops, _share(module, total))


def _name(module: ModuleFlops) -> str:
    return f"{module.name or 'the model'} ({module.kind})"


def _share(module: ModuleFlops, total: ModuleFlops) -> str:
    return f"{module.model / total.model:.1%}" if total.model else "-"
