"""Module hooks that report enter and leave, and detect parameters used outside their module.

Units, the modules that are gathered as one, are defined in units.py.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from zerolite.utils.module_hook import WeakHook, untraced
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator, Unit
from zerolite.zero.stage3.partitioned_parameter import AVAILABLE
from zerolite.zero.stage3.questions import asks_only
from zerolite.zero.stage3.units import UnitPlan, is_compiled, is_released, owns_released

_transform_level = torch._C._functorch.maybe_current_level  # None outside of torch.func's transforms


class _Hook(WeakHook[PartitionedParameterCoordinator]):
    def __init__(self, coordinator: PartitionedParameterCoordinator, unit: Unit) -> None:
        super().__init__(coordinator)
        self._unit = unit


class _Enter(_Hook):
    @untraced
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            self._enter(coordinator)

    def _enter(self, coordinator: PartitionedParameterCoordinator) -> None:
        if _transform_level() is not None:
            raise RuntimeError(
                f"module '{self._unit.name}' is called inside a transform of torch.func (grad, vmap, …), where "
                "stage 3 cannot gather its parameters; call a whole copy of the model: copy.deepcopy(engine.module)"
            )
        coordinator.enter_forward(self._unit)


class _Leave(_Hook):
    @untraced
    def __call__(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.leave_forward(self._unit, module, outputs)


class _EnterInside(_Enter):
    """On modules inside a unit that own some of its parameters. Where none of the units that have these is in use, the
    caller has reached into the unit (a block may have methods of its own): then this is a use of the unit. Dynamo
    traces the question."""

    def __init__(self, coordinator: PartitionedParameterCoordinator, unit: Unit, having: Sequence[Unit]) -> None:
        super().__init__(coordinator, unit)
        self._having = tuple(having)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        for unit in self._having:
            if unit.uses:
                return
        self._begin(module)

    @untraced
    def _begin(self, module: torch.nn.Module) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            self._enter(coordinator)
            self._unit.inside = module


class _LeaveInside(_Leave):
    def __call__(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        if self._unit.inside is module:
            self._end(module, outputs)

    @untraced
    def _end(self, module: torch.nn.Module, outputs: Any) -> None:
        coordinator = self.owner()
        self._unit.inside = None
        if coordinator is not None:
            coordinator.leave_forward(self._unit, module, outputs)


_GETATTR = torch.nn.Module.__getattr__.__code__


def _asks_only() -> bool:
    """Whether the code that reads a module's attribute, two frames above the caller, asks it a question only."""
    frame = sys._getframe(2)
    return frame.f_code is _GETATTR and frame.f_back is not None and asks_only(frame.f_back)


class WatchedParameters(dict[str, Any]):
    """A module's ``_parameters``. Reading a partitioned parameter that is not available, inside a forward or backward,
    gathers it, so that a tied head called as a function finds its weight; ``module.weight.dtype`` and the like do not
    (see questions.py)."""

    def __init__(self, parameters: dict[str, Any], coordinator: PartitionedParameterCoordinator) -> None:
        super().__init__(parameters)
        self._coordinator = weakref.ref(coordinator)

    def __getitem__(self, name: str) -> Any:
        parameter = dict.__getitem__(self, name)
        if parameter is not None and getattr(parameter, "ds_status", AVAILABLE) is not AVAILABLE:
            coordinator = self._coordinator()
            if coordinator is not None and coordinator.busy and not _asks_only():
                coordinator.on_read(parameter._zero_handle)
        return parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(parameter, memo) for name, parameter in self.items()}


def attach(
    model: torch.nn.Module, plans: Sequence[UnitPlan], coordinator: PartitionedParameterCoordinator
) -> list[Any]:
    """Install all hooks. Returns handles whose ``remove()`` takes them away."""
    handles: list[Any] = []
    traced: set[int] = set()  # modules inside a compiled region
    units_of: dict[int, frozenset[int]] = {}  # by id of a parameter
    for index, plan in enumerate(plans):
        units_of.update((id(p), units_of.get(id(p), frozenset()) | {index}) for p in plan.parameters)
    for plan, unit in zip(plans, coordinator.units, strict=True):
        enter: Any = _Enter(coordinator, unit)
        leave: Any = _Leave(coordinator, unit)
        if is_compiled(plan.module):
            traced.update(id(module) for module in plan.module.modules())
        handles.append(enter.install(plan.module.register_forward_pre_hook, prepend=True))
        handles.append(leave.install(plan.module.register_forward_hook, always_call=True))
        coordinator.assign(plan.module, unit)
        for module in plan.inside:
            coordinator.assign(module, unit)
            if owns_released(module) and id(module) not in traced:
                own = [id(p) for p in module._parameters.values() if p is not None and is_released(p)]
                having = sorted(frozenset.intersection(*(units_of[parameter] for parameter in own)))
                begin = _EnterInside(coordinator, unit, [coordinator.units[index] for index in having])
                end = _LeaveInside(coordinator, unit)
                handles.append(begin.install(module.register_forward_pre_hook, prepend=True))
                # Not always called: Dynamo would compile each module anew. After an exception the unit around it, or
                # the next forward, ends the use.
                handles.append(end.install(module.register_forward_hook))
    for module in model.modules():
        if owns_released(module) and id(module) not in traced:
            module._parameters = WatchedParameters(module._parameters, coordinator)
            handles.append(_Unwatch(module))
    return handles


class _Unwatch:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def remove(self) -> None:
        """Give the module its plain dict back."""
        module = self._module()
        if module is not None and isinstance(module._parameters, WatchedParameters):
            module._parameters = dict(module._parameters)
