"""An engine's monitors and its wall clock: opened and fed here, from the hooks of the step pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolite.comm import Communicator
from zerolite.monitor import Monitor, StepLog, open_monitor
from zerolite.runtime.loss_scaler import LossScaler
from zerolite.runtime.step import StepPipeline
from zerolite.runtime.wall_clock import DEFAULT_STEPS, PhaseClock, describe, watch_phases
from zerolite.runtime.zero.grad_reducer import GradReducer

if TYPE_CHECKING:
    from zerolite.runtime.engine import Engine


def start_monitoring(
    engine: Engine,
    module: Any,
    pipeline: StepPipeline,
    reducer: GradReducer,
    scaler: LossScaler | None,
    comm: Communicator,
) -> list[Any]:
    """Give ``engine`` its monitor, and begin to log and to measure what the config asks for; returns the hooks on
    ``module``. After ``pipeline.on_applied`` and ``on_settled`` are set, before others take hold of its methods. Called
    on all ranks."""
    config = engine.config
    engine.monitor = monitor = open_monitor(config, comm, engine.device)
    log = StepLog(monitor, config.train_batch_size, engine.optimizer, scaler)
    if monitor.enabled:
        engine.step_log = log
        _follow(log, pipeline)
        settle = weakref.WeakMethod(pipeline.settle)
        monitor.on_close = lambda: _call(settle)
        weakref.finalize(engine, _finish, pipeline, monitor)  # at the end of the process at the latest
    if not config.wall_clock_breakdown or comm.rank != 0:
        return []

    def report(step: int, means: Mapping[str, float]) -> None:
        print(describe(step, means), flush=True)
        log.write(step, {f"elapsed_time_ms_{phase}": mean for phase, mean in means.items()})

    clock = PhaseClock(engine.device, config.steps_per_print or DEFAULT_STEPS, report)
    return watch_phases(clock, module, pipeline, reducer)


def _follow(log: StepLog, pipeline: StepPipeline) -> None:
    """Let ``log`` see every step, beside those who do already."""
    applied, settled, known = pipeline.on_applied, pipeline.on_settled, weakref.ref(pipeline)

    def on_applied() -> None:
        log.on_applied()
        applied()

    def on_settled(norm: float) -> None:
        settled(norm)
        caller = known()
        assert caller is not None
        log.on_settled(caller.global_steps, norm)

    pipeline.on_applied, pipeline.on_settled = on_applied, on_settled


def _call(method: weakref.WeakMethod[Any]) -> None:
    bound = method()
    if bound is not None:
        bound()


def _finish(pipeline: StepPipeline, monitor: Monitor) -> None:
    """The engine is gone or the process ends: write the last step, whose outcome nobody may have read yet."""
    try:
        pipeline.settle()
    finally:
        monitor.close()
