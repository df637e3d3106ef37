"""Hooks on modules and on their outputs: they report uses of units, and of parameters outside their module.

Units, the modules that are gathered as one, are defined in units.py.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.utils.module_hook import WeakHook, is_compiled, untraced
from zerolite.zero.stage3.partitioned_parameter import AVAILABLE
from zerolite.zero.stage3.questions import asks_only
from zerolite.zero.stage3.units import UnitPlan, is_released, owns_released, units_of_parameters

if TYPE_CHECKING:
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator

_current_graph_task = torch._C._current_graph_task_id


class Unit:
    """A module or a subtree that is gathered as one. ``uses`` is how many of its uses are open, in which its values are
    there; ``inside`` the module in it that was called without it, in the use under way. ``is_table``: its backward
    needs no values (``UnitPlan.is_table``)."""

    __slots__ = ("index", "inside", "is_table", "name", "uses")

    def __init__(self, index: int, name: str, is_table: bool) -> None:
        self.index = index
        self.name = name
        self.is_table = is_table
        self.uses = 0
        self.inside: torch.nn.Module | None = None

    def call_inside(self, module: torch.nn.Module | None) -> None:
        """``module`` in it is called without the unit, whose use this is; None: it has returned."""
        self.inside = module

    def need_values(self) -> None:
        """Note that the backward needs values from now on."""
        self.is_table = False

    def end_use(self) -> None:
        """One use of the unit has ended."""
        self.uses -= 1
        if not self.uses:
            self.inside = None

    def reset(self) -> None:
        """No use is open any more."""
        self.uses, self.inside = 0, None


class Use:
    """One forward of a unit, and the hook on its outputs until its backward. ``start`` and ``end`` are times of a clock
    that ticks at every begin and end, so that nesting is a comparison. Graphs outlive backwards (a loss that is kept
    keeps its graph), so it knows the coordinator weakly."""

    __slots__ = ("coordinator", "end", "start", "task", "unit")

    def __init__(self, coordinator: weakref.ref[PartitionedParameterCoordinator], unit: Unit, start: int) -> None:
        self.coordinator = coordinator
        self.unit = unit
        self.start = start
        self.end = start
        self.task = -1  # the backward (autograd's graph task) that has entered it last

    def contains(self, other: Use) -> bool:
        return self.start <= other.start and other.end <= self.end

    def close(self, time: int) -> None:
        """The forward has ended."""
        self.end = time
        self.unit.end_use()

    def __call__(self, gradient: torch.Tensor) -> None:
        """A gradient has reached an output. Of a backward the first counts."""
        task = _current_graph_task()
        coordinator = self.coordinator() if task != self.task else None
        if coordinator is not None:
            self.task = task
            coordinator.on_output_gradient(self, task)

    def hook(self, tensor: torch.Tensor) -> None:
        """Let a gradient that reaches ``tensor``, an output, begin the backward.

        Not where the unit hands on what a use that ended before this one has made (T5's position bias). A gradient that
        reaches it comes when the backward of that use begins, and says nothing of this one; least of all of one that
        checkpointing repeats, whose hooks are the last on the tensor."""
        for hook in (tensor._backward_hooks or {}).values():  # None after a change in place: this use has made it
            if type(hook) is Use and hook.coordinator is self.coordinator and hook.end < self.start:
                return
        tensor.register_hook(self)


class _Hook(WeakHook["PartitionedParameterCoordinator"]):
    def __init__(self, coordinator: PartitionedParameterCoordinator, unit: Unit) -> None:
        super().__init__(coordinator)
        self._unit = unit


class _Enter(_Hook):
    @untraced
    def __call__(self, module: torch.nn.Module, args: object) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.enter_forward(self._unit)


class _Leave(_Hook):
    @untraced
    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.leave_forward(self._unit, module, outputs)


class _EnterInside(_Hook):
    """On modules inside a unit that own some of its parameters. Where none of the units that have these is in use, the
    caller has reached into the unit (a block may have methods of its own): then this is a use of the unit. Dynamo
    traces the question."""

    def __init__(self, coordinator: PartitionedParameterCoordinator, unit: Unit, having: Sequence[Unit]) -> None:
        super().__init__(coordinator, unit)
        self._having = tuple(having)

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        for unit in self._having:
            if unit.uses:
                return
        self._begin(module)

    @untraced
    def _begin(self, module: torch.nn.Module) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.enter_forward(self._unit)
            self._unit.call_inside(module)


class _LeaveInside(_Hook):
    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> None:
        if self._unit.inside is module:
            self._end(module, outputs)

    @untraced
    def _end(self, module: torch.nn.Module, outputs: object) -> None:
        coordinator = self.owner()
        self._unit.call_inside(None)
        if coordinator is not None:
            coordinator.leave_forward(self._unit, module, outputs)


_GETATTR = torch.nn.Module.__getattr__.__code__


def _asks_only() -> bool:
    """True if the code that reads a module's attribute, two frames above the caller, asks it a question only."""
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
    units_of = units_of_parameters(plans)
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
                having = sorted(set.intersection(*(set(units_of[parameter]) for parameter in own)))
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
