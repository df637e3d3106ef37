"""Engine without an optimizer, for models that are only evaluated: reference, reward and teacher models.

It is an engine whose layout has no buckets: all parameters are frozen, so there are no masters, gradients or states. At
stage 3 they are sharded and gathered like those of any other model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zerolite.comm import Communicator, largest
from zerolite.engine.components import Components
from zerolite.engine.engine import Engine
from zerolite.utils.module_hook import ModuleHook
from zerolite.zero.step import StepPipeline
from zerolite.zero.step_observers import ScheduleAgreement

_REMEDY = 'To train it, give zerolite.initialize a config with an "optimizer" block, or optimizer=...'


class EvaluationPipeline(StepPipeline):
    """A pipeline that never steps. A backward may pass through the model to its inputs."""

    def begin_backward(self, engine_scaled: bool | None = None, weight: float | None = None) -> None:
        """Check that no parameter has been unfrozen. There is nothing to begin."""
        self.check_available()
        for notify in self._observers.before_backward:
            notify()

    def use_agreement(self, agreement: ScheduleAgreement, comm: Communicator, device: torch.device) -> None:
        """Compare the ranks of ``comm`` by ``agreement``, at stage 3."""
        self._agreement, self._comm, self._device = agreement, comm, device

    def agree_on_schedule(self) -> None:
        """Let stage 3 follow its recorded schedule if all ranks have the same; the host waits for the answer. Called on
        all ranks."""
        own = self._agreement.collect()
        highest, lowest = largest([own, -own], self._comm, self._device, "stats")
        self._agreement.on_collected()
        self._agreement.note(lowest == -highest)
        self._agreement.before_update()


def check_frozen(model: torch.nn.Module) -> None:
    """Raise RuntimeError for a parameter that requires a gradient, which nothing would reduce or use."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            raise RuntimeError(
                f"parameter '{name}' requires a gradient, and its engine has no optimizer, so nothing would average or "
                f"use that gradient. {_REMEDY}, or call requires_grad_(False)"
            )


class CheckBeforeForward(ModuleHook):
    """Forward pre-hook that checks, if there may be a backward, that no parameter requires a gradient. It also runs
    where a loop calls the model past its engine; copies of the model do without it."""

    def __call__(self, model: torch.nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            check_frozen(model)


def _refuses(call: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"engine.{call}: expected an engine with an optimizer, got one without, which only evaluates its model. "
            f"{_REMEDY}"
        )

    return refuse


class EvaluationEngine(Engine):
    """Engine without an optimizer. ``optimizer`` is None, and methods that train raise RuntimeError."""

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        self.optimizer: Any = None
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, see :class:`Engine`."""
        # Ranks of an engine that trains compare the order of their modules in each step. Here no step follows, so stage
        # 3 compares it before calls 1, 2, 4, 8, …
        if self.coordinator is not None:
            self._calls += 1
            if not self._calls & (self._calls - 1):
                self._pipeline.agree_on_schedule()  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)

    forward = __call__

    backward = _refuses("backward")
    step = _refuses("step")
    train_batch = _refuses("train_batch")
    reduce_gradients = _refuses("reduce_gradients")
    clip_gradients = _refuses("clip_gradients")
    update = _refuses("update")
    publish = _refuses("publish")
    full_optimizer_state_dict = _refuses("full_optimizer_state_dict")

    def get_lr(self) -> list[float]:
        """Empty: there is no param group."""
        return []
