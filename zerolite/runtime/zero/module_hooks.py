"""Turns the events of modules into enter and leave, and finds parameters that are used outside their module.

What is gathered as one is decided here too (:func:`plan_units`): every module that owns partitioned parameters, or a
whole subtree where it is so small that a collective per module would not pay, or where the user said so.
"""

from __future__ import annotations

import copy
import fnmatch
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerolite.runtime.module_hook import WeakHook, untraced
from zerolite.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, Unit
from zerolite.runtime.zero.partitioned_parameter import (
    AVAILABLE,
    PartitionedParameter,
    handle_of,
    whole_numel,
)
from zerolite.runtime.zero.questions import asks_only

_transform_level = torch._C._functorch.maybe_current_level  # None outside of torch.func's transforms

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


@dataclass
class UnitPlan:
    """One unit to be: its module, its parameters, and the modules inside that are gathered with it."""

    name: str
    module: torch.nn.Module
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    inside: list[torch.nn.Module] = field(default_factory=list)


LeafRule = Callable[[str, torch.nn.Module], bool]


def leaf_rule(
    patterns: Sequence[str], classes: Sequence[str] = (), names: Sequence[str] = (), suffixes: Sequence[str] = ()
) -> LeafRule:
    """Whether a module, by its name in the model and its class, is to be gathered as one with all that is in it."""

    def is_leaf(name: str, module: torch.nn.Module) -> bool:
        cls = type(module)
        own = {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
        if own & set(classes) or name in names or any(name.endswith(suffix) for suffix in suffixes):
            return True
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (name, *own))

    return is_leaf


def plan_units(
    model: torch.nn.Module, is_leaf: Callable[[str, torch.nn.Module], bool], granularity: int
) -> list[UnitPlan]:
    """The units of ``model``, the root first. A subtree with at most ``granularity`` elements that can be released
    is one unit, so is a compiled module and one for which ``is_leaf`` says so."""
    units: list[UnitPlan] = [UnitPlan("", model)]
    seen: set[int] = set()

    def walk(name: str, module: torch.nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        whole = [p for p in module.parameters() if _released(p)]
        small = 0 < sum(whole_numel(p) for p in whole) <= granularity and not isinstance(module, _CONTAINERS)
        if whole and (small or is_leaf(name, module) or _compiled(module)):
            inside = [child for child in module.modules() if child is not module]
            seen.update(id(child) for child in inside)
            add(name, module, whole, inside)
            return
        own = [p for p in module.parameters(recurse=False) if _released(p)]
        own += [p for p in external_parameters(module) if _released(p) and all(p is not q for q in own)]
        if own:
            add(name, module, own, [])
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)

    def add(name: str, module: torch.nn.Module, own: list[Any], inside: list[torch.nn.Module]) -> None:
        if module is model:
            units[0] = UnitPlan(name, module, own, inside)
        else:
            units.append(UnitPlan(name, module, own, inside))

    walk("", model)
    return units


def _released(parameter: torch.nn.Parameter) -> bool:
    handle = handle_of(parameter)
    return handle is not None and not handle.persistent


def _compiled(module: torch.nn.Module) -> bool:
    """Hooks inside a compiled region would be traced with it, so it is one unit."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def external_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters registered by ``register_external_parameter``."""
    found: list[torch.nn.Parameter] = module.__dict__.get("_zero_external_parameters", [])
    return found


class _Hook(WeakHook[PartitionedParameterCoordinator]):
    def __init__(self, coordinator: PartitionedParameterCoordinator, unit: Unit) -> None:
        super().__init__(coordinator)
        self._unit = unit


class _Enter(_Hook):
    @untraced
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        coordinator = self.owner()
        if coordinator is not None:
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


class _Guard(_Hook):
    """On modules inside a unit: somebody may call one directly, without the unit."""

    def __init__(
        self, coordinator: PartitionedParameterCoordinator, unit: Unit, handles: Sequence[PartitionedParameter]
    ) -> None:
        super().__init__(coordinator, unit)
        self._handles = tuple(handles)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        for handle in self._handles:
            if handle.status is not AVAILABLE:
                self._gather()
                return

    @untraced
    def _gather(self) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.gather_stray([i for h in self._handles if (i := coordinator.index_of(h)) is not None])


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
    for plan, unit in zip(plans, coordinator.units, strict=True):
        enter: Any = _Enter(coordinator, unit)
        leave: Any = _Leave(coordinator, unit)
        if _compiled(plan.module):
            traced.update(id(module) for module in plan.module.modules())
        handles.append(enter.install(plan.module.register_forward_pre_hook, prepend=True))
        handles.append(leave.install(plan.module.register_forward_hook, always_call=True))
        coordinator.assign(plan.module, unit)
        for module in plan.inside:
            coordinator.assign(module, unit)
            own = [h for p in module._parameters.values() if (h := handle_of(p)) and not h.persistent]
            if own and id(module) not in traced:
                guard = _Guard(coordinator, unit, own)
                handles.append(guard.install(module.register_forward_pre_hook, prepend=True))
    for module in model.modules():
        releasable = any(p is not None and _released(p) for p in module._parameters.values())
        if releasable and id(module) not in traced:
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
