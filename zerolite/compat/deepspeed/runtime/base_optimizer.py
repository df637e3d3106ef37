"""``deepspeed.runtime.base_optimizer``: the optimizer that ``initialize`` returns."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerolite.comm import collective
from zerolite.engine.engine import Engine
from zerolite.zero.optimizer import ShardedOptimizer
from zerolite.zero.stage3.group_plan import external_parameters

__all__ = ["DeepSpeedOptimizer", "Stage3Optimizer", "ZeROOptimizer"]


def forward_to(path: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method with the signature and docstring of ``method``, which calls it on the object at ``path``, names of
    attributes separated by dots."""
    get = operator.attrgetter(f"{path}.{method.__name__}")

    @functools.wraps(method)
    def forwarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return get(self)(*args, **kwargs)

    return forwarded


class DeepSpeedOptimizer:
    """An engine's optimizer with the members of DeepSpeed's optimizers.

    ``param_groups`` are the dicts that the update reads, also with the user's own optimizer. ``step`` does the same as
    ``engine.step()`` at a boundary.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that ``initialize`` was given, or that was made from the config."""
        return self._engine.optimizer.inner

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because of a gradient that was not finite. Waits for the step."""
        norm = self._engine.get_global_grad_norm()
        return norm is not None and not math.isfinite(norm)

    @property
    def loss_scale(self) -> float:
        """The loss scale of fp16; 1.0 otherwise."""
        return self._engine.loss_scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        fp16 = self._engine.config.fp16
        return fp16.enabled and fp16.loss_scale == 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._engine.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._engine.optimizer.param_groups = groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """This rank's states by parameter, as copied dicts.

        So the tensors that Lightning moves at its end, and writes into these dicts, change nothing. Set a state by
        ``deepspeed.utils.safe_set_full_optimizer_state``.
        """
        return {parameter: dict(states) for parameter, states in self._engine.optimizer.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @collective
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run ``engine.backward`` without the division by gradient_accumulation_steps."""
        self._engine.backward(loss, scale_wrt_gas=False, retain_graph=retain_graph)

    step = forward_to("_engine.optimizer", ShardedOptimizer.step)
    zero_grad = forward_to("_engine.optimizer", ShardedOptimizer.zero_grad)
    state_dict = forward_to("_engine.optimizer", ShardedOptimizer.state_dict)  # this rank's states
    load_state_dict = forward_to("_engine.optimizer", ShardedOptimizer.load_state_dict)
    add_param_group = forward_to("_engine.optimizer", ShardedOptimizer.add_param_group)


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer at stages 1 to 3, which offloads the engine's states."""

    offload_states = forward_to("_engine", Engine.offload_states)
    reload_states = forward_to("_engine", Engine.reload_states)


class Stage3Optimizer(ZeROOptimizer):
    """The optimizer at stage 3, with ``parameter_offload``, by which TRL removes hooks while a model generates."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.parameter_offload = ParameterOffload(engine.module)


class ParameterOffload:
    """The module at stage 3, with the members of DeepSpeed's owner of its hooks.

    The lists of hooks are empty, so a client that removes and restores them changes nothing. The real hooks need not be
    removed, because they do not gather parameters again that ``zero.GatheredParameters`` holds.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = ModuleAtStage3(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        for parameter in module.parameters():
            parameter.ds_active_sub_modules = set()  # type: ignore[attr-defined]

    def _register_deepspeed_module(self, module: object) -> None: ...

    _register_hooks_recursively = _register_deepspeed_module  # the name in older releases of TRL


def make_optimizer(engine: Engine) -> DeepSpeedOptimizer | ParameterOffload | None:
    """Return the attribute ``optimizer`` of a DeepSpeedEngine with ``engine``."""
    stage = engine.config.zero_optimization.stage
    optimizer: Any = engine.optimizer  # None in an engine that only evaluates
    if optimizer is None:
        return ParameterOffload(engine.module) if stage == 3 else None
    return (DeepSpeedOptimizer, ZeROOptimizer, ZeROOptimizer, Stage3Optimizer)[stage](engine)


class ModuleAtStage3:
    """A module with DeepSpeed's method :meth:`ds_external_parameters`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def ds_external_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that were registered with the module by ``zero.register_external_parameter``."""
        return ((str(number), p) for number, p in enumerate(external_parameters(self._module)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
