"""Observers that act on the engine: step its learning rate schedule, print progress, log losses."""

from __future__ import annotations

from typing import Any

import torch

from zerolite.engine.components import EngineRef
from zerolite.zero.observers import StepObserver
from zerolite.zero.step_state import StepState


class Progress(StepObserver):
    """Prints a line every ``steps_per_print`` steps. Exists on rank 0 alone."""

    def __init__(self, engine: EngineRef) -> None:
        self._engine = engine

    def on_settled(self, step: int, norm: float) -> None:
        engine = self._engine()
        if engine is None:
            return
        if step == 1:
            engine.activation_checkpointing.check_used()
        every = engine.config.steps_per_print
        if every and step % every == 0:
            lr = ", ".join(f"{value:.3g}" for value in engine.get_lr())
            print(
                f"step {step}: skipped {engine.skipped_steps}, lr {lr}, grad norm {norm:.4g}, loss scale "
                f"{engine.loss_scale:g}",
                flush=True,
            )


class LearningRateSchedule(StepObserver):
    """Schedule of learning rates, if there is one: moved after every update that was not skipped."""

    def __init__(self, scheduler: Any, state: StepState) -> None:
        self.scheduler, self._state = scheduler, state

    def use(self, scheduler: object) -> None:
        """Step ``scheduler`` from now on; None for no schedule."""
        self.scheduler = scheduler

    def settle(self) -> None:
        """Bring the learning rates up to date: the schedule is stepped when the outcome of a step is read. Without a
        schedule nothing is read, so a loop that steps its own schedule does not wait for the device."""
        if self.scheduler is not None:
            self._state.settle()

    def on_updated(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()


class PipelineLoss:
    """Logs the loss of each step of a pipeline."""

    def __init__(self, engine: EngineRef) -> None:
        self._engine = engine

    def __call__(self, loss: torch.Tensor) -> None:
        engine = self._engine()
        if engine is not None and engine.step_log is not None:
            engine.step_log.add_loss(loss, 1.0, engine.global_steps, first=True)
