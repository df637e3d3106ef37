"""Hooks on modules and on their outputs: they report executions of parameter groups, and parameters read elsewhere."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.utils.module_hook import WeakHook, is_compiled, untraced
from zerolite.zero.stage3.metadata_reads import reads_metadata
from zerolite.zero.stage3.param_group import ParamGroup, groups_of_parameters, owns_released
from zerolite.zero.stage3.partitioned_parameter import AVAILABLE, handle_of

if TYPE_CHECKING:
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator

_current_graph_task = torch._C._current_graph_task_id


class ModuleExecution:
    """One forward of a group's module, and the hook on its outputs that begins its backward.

    Graphs outlive backwards (a loss that is kept keeps its graph), so it knows the coordinator weakly.

    Attributes:
        start: time of the forward's begin, by a clock that ticks at every begin and end.
        end: time of its end. So nesting is a comparison of times.
        task: the backward (autograd's graph task) that has entered it last.
    """

    __slots__ = ("coordinator", "end", "group", "start", "task")

    def __init__(
        self, coordinator: weakref.ref[PartitionedParameterCoordinator], group: ParamGroup, start: int
    ) -> None:
        self.coordinator = coordinator
        self.group = group
        self.start = start
        self.end = start
        self.task = -1

    def contains(self, other: ModuleExecution) -> bool:
        return self.start <= other.start and other.end <= self.end

    def end_forward(self, time: int) -> None:
        """The forward has ended."""
        self.end = time
        group = self.group
        group.open_executions -= 1
        if not group.open_executions:
            group.called_inside = None

    def __call__(self, gradient: torch.Tensor) -> None:
        """A gradient has reached an output. Of a backward the first counts."""
        task = _current_graph_task()
        coordinator = self.coordinator() if task != self.task else None
        if coordinator is not None:
            self.task = task
            coordinator.on_output_gradient(self, task)

    def hook(self, tensor: torch.Tensor) -> None:
        """Let a gradient that reaches ``tensor``, an output, begin the backward.

        torch's full backward hooks would not do: they are silent where a forward returns a dict or a list.
        """
        for hook in (tensor._backward_hooks or {}).values():  # None after a change in place: this execution made it
            if type(hook) is ModuleExecution and hook.coordinator is self.coordinator and hook.end < self.start:
                # The group hands on what an earlier execution has made (T5's position bias). A gradient comes when the
                # backward of that one begins, and says nothing of this one. Least of all where checkpointing repeats
                # this one: its hooks are the last on the tensor.
                return
        tensor.register_hook(self)


class _GroupHook(WeakHook["PartitionedParameterCoordinator"]):
    def __init__(self, coordinator: PartitionedParameterCoordinator, group: ParamGroup) -> None:
        super().__init__(coordinator)
        self._group = group


class _PreForwardHook(_GroupHook):
    @untraced
    def __call__(self, module: torch.nn.Module, args: object) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.enter_forward(self._group)


class _PostForwardHook(_GroupHook):
    @untraced
    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.leave_forward(self._group, module, outputs)


class _InnerPreForwardHook(_GroupHook):
    """Hook on modules inside a group's module that own some of its parameters.

    Where no group that has these is executed, the caller has reached into the group's module (a block may have methods
    of its own): then this is an execution of the group. Dynamo traces the loop.
    """

    def __init__(
        self, coordinator: PartitionedParameterCoordinator, group: ParamGroup, owners: Sequence[ParamGroup]
    ) -> None:
        """owners: the groups that have all parameters of the module."""
        super().__init__(coordinator, group)
        self._owners = tuple(owners)

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        for group in self._owners:
            if group.open_executions:
                return
        self._begin(module)

    @untraced
    def _begin(self, module: torch.nn.Module) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.enter_forward(self._group)
            self._group.call_inside(module)


class _InnerPostForwardHook(_GroupHook):
    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> None:
        if self._group.called_inside is module:
            self._end(module, outputs)

    @untraced
    def _end(self, module: torch.nn.Module, outputs: object) -> None:
        coordinator = self.owner()
        self._group.call_inside(None)
        if coordinator is not None:
            coordinator.leave_forward(self._group, module, outputs)


_GETATTR = torch.nn.Module.__getattr__.__code__


class GatherOnReadDict(dict[str, Any]):
    """A module's ``_parameters``: reading a parameter that is not available gathers it, inside a forward or backward.

    So a tied head that is called as a function finds its weight. ``module.weight.dtype`` and the like gather nothing
    (see metadata_reads.py).
    """

    def __init__(self, parameters: dict[str, Any], coordinator: PartitionedParameterCoordinator) -> None:
        super().__init__(parameters)
        self._coordinator = weakref.ref(coordinator)

    def __getitem__(self, name: str) -> Any:
        parameter = dict.__getitem__(self, name)
        if parameter is not None and getattr(parameter, "ds_status", AVAILABLE) is not AVAILABLE:
            coordinator = self._coordinator()
            if coordinator is not None and coordinator.busy:
                frame = sys._getframe(1)
                reader = frame.f_back if frame.f_code is _GETATTR else None
                if reader is None or not reads_metadata(reader):
                    coordinator.on_read(parameter._zero_handle)
        return parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(parameter, memo) for name, parameter in self.items()}


class _PlainDictRestorer:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def remove(self) -> None:
        """Give the module its plain dict back."""
        module = self._module()
        if module is not None and isinstance(module._parameters, GatherOnReadDict):
            module._parameters = dict(module._parameters)


def install_hooks(
    model: torch.nn.Module, groups: Sequence[ParamGroup], coordinator: PartitionedParameterCoordinator
) -> list[Any]:
    """Install all hooks. Returns handles whose ``remove()`` takes them away."""
    handles: list[Any] = []
    traced: set[int] = set()  # modules inside a compiled region
    groups_of = groups_of_parameters(groups)
    for group in groups:
        module = group.module
        enter: Any = _PreForwardHook(coordinator, group)
        leave: Any = _PostForwardHook(coordinator, group)
        if is_compiled(module):
            traced.update(id(inside) for inside in module.modules())
        handles.append(enter.install(module.register_forward_pre_hook, prepend=True))
        handles.append(leave.install(module.register_forward_hook, always_call=True))
        for inside in group.inside:
            if owns_released(inside) and id(inside) not in traced:
                own = [handle for p in inside._parameters.values() if (handle := handle_of(p)) in groups_of]
                owners = sorted(set.intersection(*(set(groups_of[handle]) for handle in own)))
                begin = _InnerPreForwardHook(coordinator, group, [groups[index] for index in owners])
                end = _InnerPostForwardHook(coordinator, group)
                handles.append(begin.install(inside.register_forward_pre_hook, prepend=True))
                # Not always called: Dynamo would compile each module anew. After an exception the execution around it,
                # or the next forward, ends this one.
                handles.append(end.install(inside.register_forward_hook))
    for module in model.modules():
        if owns_released(module) and id(module) not in traced:
            module._parameters = GatherOnReadDict(module._parameters, coordinator)
            handles.append(_PlainDictRestorer(module))
    return handles
