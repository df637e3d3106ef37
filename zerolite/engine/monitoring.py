"""Monitors, timers and profilers of an engine, attached to the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zerolite.comm import Communicator, Topology
from zerolite.monitor import Monitor, StepLog, open_monitor
from zerolite.monitor.comms_logger import CommsLogger
from zerolite.monitor.flops_profiler import FlopsProfiler
from zerolite.monitor.wall_clock import DEFAULT_STEPS, PhaseClock, around, describe, watch_gathers, watch_phases
from zerolite.precision.loss_scaler import LossScaler
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.publisher import Publisher
from zerolite.zero.step import StepPipeline

if TYPE_CHECKING:
    from zerolite.engine.engine import Engine


_OF_THE_ALLOCATOR = ("allocated", "allocated_peak", "reserved", "reserved_peak", "resident", "resident_peak")


class Monitoring(NamedTuple):
    """What an engine is watched by; ``hooks`` are those on its module."""

    hooks: list[Any]
    clock: PhaseClock | None
    comms_logger: CommsLogger | None

    def watch_communication(self, engine: Engine, comm: Communicator, publisher: Publisher) -> None:
        """When all parts of the engine are connected, and whoever compares collectives watches already."""
        if self.clock is not None and engine.config.zero_optimization.stage != 0:
            watch_gathers(self.clock, publisher, engine.coordinator)
        if self.comms_logger is not None:
            self.comms_logger.watch(comm)
            if engine.coordinator is not None and engine.coordinator.comm is not comm:
                self.comms_logger.watch(engine.coordinator.comm)
            topology = engine.topology
            for beside in {id(c): c for c in (topology.tensor, topology.model) if c.world_size > 1}.values():
                self.comms_logger.watch(beside)


def start_monitoring(
    engine: Engine,
    module: Any,
    pipeline: StepPipeline,
    reducer: GradReducer,
    scaler: LossScaler | None,
    topology: Topology,
) -> Monitoring:
    """Give ``engine`` its monitor, and begin to log and to measure what the config asks for. After
    ``pipeline.on_applied`` and ``on_settled`` are set, before others take hold of its methods. Called on all ranks."""
    config = engine.config
    comm = topology.data
    engine.monitor = monitor = open_monitor(config, topology.world, engine.device)
    log = StepLog(monitor, config.train_batch_size, engine.optimizer, scaler)
    if monitor.enabled:
        engine.step_log = log
        _follow(log, pipeline)
        settle = weakref.WeakMethod(pipeline.settle)
        monitor.on_close = lambda: _call(settle)
        weakref.finalize(engine, _finish, pipeline, monitor)  # at the end of the process at the latest
    every = config.steps_per_print or DEFAULT_STEPS
    if config.comms_logger.enabled:
        engine.comms_logger = _log_collectives(engine, pipeline, comm, log, every)
    if config.memory_breakdown and comm.main:
        _break_memory_down(engine, pipeline, log, every)
    if config.flops_profiler.enabled and comm.main:
        _profile_flops(engine, module, pipeline, log, every)
    if not config.wall_clock_breakdown or not comm.main:
        return Monitoring([], None, engine.comms_logger)

    def report(step: int, means: Mapping[str, float]) -> None:
        _print(describe(step, means))
        log.write(step, {f"elapsed_time_ms_{phase}": mean for phase, mean in means.items()})

    clock = PhaseClock(engine.device, every, report)
    return Monitoring(watch_phases(clock, module, pipeline, reducer), clock, engine.comms_logger)


def _print(text: str) -> None:
    print(text, flush=True)


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


def _log_collectives(
    engine: Engine, pipeline: StepPipeline, comm: Communicator, log: StepLog, every: int
) -> CommsLogger:
    """A logger that reports every ``every`` steps."""
    say = _print if comm.main else None
    logger = CommsLogger(engine.config.comms_logger, comm.world_size, engine.device, say)
    _every(every, pipeline, lambda step: log.write(step, logger.report(step), "Comms"))
    return logger


def _break_memory_down(engine: Engine, pipeline: StepPipeline, log: StepLog, every: int) -> None:
    """Report what this rank's memory holds every ``every`` steps."""
    known = weakref.ref(engine)

    def report(step: int) -> None:
        engine = known()
        if engine is not None:
            memory = engine.memory_report()
            _print(f"step {step}: {memory}")
            others = {name: getattr(memory, name) for name in _OF_THE_ALLOCATOR}
            known_ones = {name: nbytes for name, nbytes in others.items() if nbytes is not None}
            elsewhere = {
                f"{item}_{place}": nbytes
                for place, items in (("host", memory.host), ("disk", memory.disk))
                for item, nbytes in items.items()
                if nbytes
            }
            log.write(step, memory.items | elsewhere | known_ones, "Memory")

    _every(every, pipeline, report)


def _every(steps: int, pipeline: StepPipeline, report: Callable[[int], None]) -> None:
    """Call ``report`` with the number of each step that is a multiple of ``steps``, when it is settled."""
    settled, known = pipeline.on_settled, weakref.ref(pipeline)

    def on_settled(norm: float) -> None:
        settled(norm)
        caller = known()
        assert caller is not None
        if caller.global_steps % steps == 0:
            report(caller.global_steps)

    pipeline.on_settled = on_settled


def _profile_flops(engine: Engine, module: Any, pipeline: StepPipeline, log: StepLog, every: int) -> None:
    """Count and time the engine's steps."""

    def write(step: int, values: Mapping[str, float]) -> None:
        log.write(step, values, "Flops")

    profiler = FlopsProfiler(engine.config.flops_profiler, engine, module, engine.device, every, _print, write)
    known = weakref.ref(pipeline)

    def end_step() -> None:
        caller = known()
        assert caller is not None
        profiler.end_step(caller.global_steps)

    around(pipeline, "apply", lambda: None, end_step)
    weakref.finalize(engine, profiler.close)


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
