"""Engines that refuse a part of the methods: without an optimizer, and of one stage of a pipeline.

An engine without an optimizer evaluates reference, reward and teacher models. It is an engine whose layout has no
buckets: all parameters are frozen, so there are no masters, gradients or states. At stage 3 they are sharded and
gathered like those of any other model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zerolite.comm import collective
from zerolite.engine.engine import Engine
from zerolite.utils.accelerator import HostRead
from zerolite.utils.module_hook import ModuleHook
from zerolite.zero.step_observers import ScheduleAgreement

if TYPE_CHECKING:
    from zerolite.pipe.runner import PipelineRunner

_REMEDY = 'To train it, give zerolite.initialize a config with an "optimizer" block, or optimizer=...'


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


def _refuses(sentence: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(sentence)

    return refuse


def _only_evaluates(call: str) -> Callable[..., NoReturn]:
    return _refuses(
        f"engine.{call}: expected an engine with an optimizer, got one without, which only evaluates its model. "
        f"{_REMEDY}"
    )


class EvaluationEngine(Engine):
    """Engine without an optimizer. ``optimizer`` is None, and methods that train raise RuntimeError."""

    _calls = 0  # forwards so far
    _agreement: ScheduleAgreement | None = None

    def compare_schedules_by(self, agreement: ScheduleAgreement | None) -> None:
        """Let ``agreement`` compare the ranks' schedules of stage 3."""
        self._agreement = agreement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, see :class:`Engine`."""
        # Ranks of an engine that trains compare the order of their modules in each step. Here no step follows, so stage
        # 3 compares it before calls 1, 2, 4, 8, …
        if self._agreement is not None:
            self._calls += 1
            if not self._calls & (self._calls - 1):
                self._agree_on_schedule(self._agreement)
        return super().__call__(*args, **kwargs)

    @collective
    def _agree_on_schedule(self, agreement: ScheduleAgreement) -> None:
        """Let stage 3 follow its recorded schedule if all ranks have the same; the host waits for the answer."""
        numbers = torch.zeros(agreement.slice_size, dtype=torch.float64, device=self.device)
        written = agreement.write_slice(numbers)
        self.topology.data.all_reduce(numbers, tag="stats").wait()
        agreement.read_slice(written, HostRead(numbers).get())
        agreement.before_update()

    forward = __call__

    backward = _only_evaluates("backward")
    step = _only_evaluates("step")
    train_batch = _only_evaluates("train_batch")
    reduce_gradients = _only_evaluates("reduce_gradients")
    clip_gradients = _only_evaluates("clip_gradients")

    def get_lr(self) -> list[float]:
        """Empty: there is no param group."""
        return []


def refuse_in_pipeline(call: str) -> NoReturn:
    """Raise RuntimeError for ``call``, a method that belongs to a user's own training loop."""
    raise RuntimeError(_IN_PIPELINE.format(call))


_IN_PIPELINE = (
    "{}: a pipeline runs forwards, backwards and updates in an order of its own; use engine.train_batch(data_iter) and "
    "engine.eval_batch(data_iter)"
)


class PipelineEngine(Engine):
    """Engine of one pipeline stage. ``train_batch`` and ``eval_batch`` run over all stages. Methods for single
    forwards, backwards and steps raise RuntimeError."""

    @property
    def runner(self) -> PipelineRunner:
        """The runner of steps over all stages."""
        assert self._runner is not None, "build_engine has made it"
        return self._runner

    __call__ = forward = _refuses(_IN_PIPELINE.format("engine(...)"))
    backward = _refuses(_IN_PIPELINE.format("engine.backward"))
    step = _refuses(_IN_PIPELINE.format("engine.step"))
    no_sync = _refuses(_IN_PIPELINE.format("engine.no_sync"))
    set_gradient_accumulation_boundary = _refuses(_IN_PIPELINE.format("engine.set_gradient_accumulation_boundary"))


class PipelineEvaluationEngine(EvaluationEngine, PipelineEngine):
    """A stage of a pipeline without an optimizer."""
