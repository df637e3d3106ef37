"""Hooks that report the executions of parameter groups to the coordinator.

- A hook before and after the forward of each group's module reports a forward execution.
- A hook on each output tensor reports the begin of its backward.
- A hook on ``state_dict()`` puts full values there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.utils.module_hook import WeakHook, is_compiled
from zerolite.utils.nested import find_in_objects
from zerolite.utils.torch_private import current_backward, untraced
from zerolite.zero.stage3.group_plan import groups_of_parameters, owns_released
from zerolite.zero.stage3.live_view import GatheredStateDict
from zerolite.zero.stage3.param_group import ParamGroup
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

if TYPE_CHECKING:
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator


RECOMPUTED = -2
"""Round of an execution inside a backward: a checkpoint computes a forward again. It has a backward of its own if
checkpointing is reentrant."""


class ModuleExecution:
    """One forward of a group's module; as a hook on its outputs it begins the backward.

    A graph may outlive its backward, because a user may keep the loss. So the coordinator is referenced weakly.

    Attributes:
        start: time at which the forward began, on a clock that ticks at every begin and end of a forward.
        end: time at which the forward ended. Nesting is a comparison of these times.
        round: round of updates in which its backward is expected; -1 if none is, or RECOMPUTED.
        task: autograd's graph task (the backward) that has entered this execution last; -1 before any.
    """

    __slots__ = ("coordinator", "end", "group", "round", "start", "task")

    def __init__(
        self, coordinator: weakref.ref[PartitionedParameterCoordinator], group: ParamGroup, start: int
    ) -> None:
        self.coordinator = coordinator
        self.group = group
        self.start = start
        self.end = start
        self.round = self.task = -1

    def contains(self, other: ModuleExecution) -> bool:
        """Return True if ``other`` ran inside this forward."""
        return self.start <= other.start and other.end <= self.end

    def end_forward(self, time: int) -> None:
        """Note that the forward has ended at ``time``."""
        self.end = time
        group = self.group
        group.open_executions -= 1
        if group.called_inside is not None and not group.open_executions:
            group.set_called_inside(None)  # an exception has skipped the hook that does this

    def __call__(self, gradient: torch.Tensor) -> None:
        """Begin the backward: a gradient has reached an output. Later gradients of the same backward do nothing."""
        task = current_backward()
        coordinator = self.coordinator() if task != self.task else None
        if coordinator is not None:
            self.task = task
            coordinator.on_output_gradient(self, task)

    def hook(self, tensor: torch.Tensor) -> None:
        """Begin the backward when a gradient reaches ``tensor``, an output.

        torch's full backward hooks are not enough: they do not run where a forward returns a dict or a list.
        """
        # None after a change in place: then this execution has made the tensor.
        for hook in (tensor._backward_hooks or {}).values():
            if type(hook) is ModuleExecution and hook.coordinator is self.coordinator and hook.end < self.start:
                # This tensor is an output of an earlier execution, passed on unchanged (T5's position bias). Its
                # gradient marks the earlier execution's backward, not this one's; a recomputed forward would even hook
                # it last.
                return
        tensor.register_hook(self)

    def hook_outputs(
        self, coordinator: PartitionedParameterCoordinator, module: torch.nn.Module, outputs: object
    ) -> bool:
        """Hook every tensor through which a backward may reach the module: its outputs and tensors that it keeps as
        attributes. Return True if an output requires a gradient, so that a backward may follow.

        Parameters among the outputs stay gathered for the caller.
        """
        builds_graph = torch.is_grad_enabled()
        if builds_graph:
            if torch.Tensor in map(type, vars(module).values()):  # asked in C, because a module has twenty attributes
                for value in vars(module).values():
                    if type(value) is torch.Tensor and value.grad_fn is not None:
                        self.hook(value)
            if type(outputs) is torch.Tensor and outputs._base is None and outputs.grad_fn is not None:  # nearly always
                self.hook(outputs)
                return True
        hooked = False
        for tensor in find_in_objects(outputs):
            coordinator.pin_if_returned(self.group, tensor)
            base = tensor._base
            if builds_graph and base is not None and base.grad_fn is not None:
                self.hook(base)  # if a caller changes the view in place, gradients come through its base
            if builds_graph and tensor.grad_fn is not None:
                hooked = True
                self.hook(tensor)
        return hooked


class _GroupHook(WeakHook["PartitionedParameterCoordinator"]):
    """Hook of one parameter group, which references its coordinator weakly."""

    runs_around_any_call = True

    def __init__(self, coordinator: PartitionedParameterCoordinator, group: ParamGroup) -> None:
        super().__init__(coordinator)
        self._group = group


class _PreForwardHook(_GroupHook):
    """Hook that begins a forward execution."""

    @untraced
    def __call__(self, module: torch.nn.Module, args: object) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.enter_forward(self._group)


class _PostForwardHook(_GroupHook):
    """Hook that ends a forward execution."""

    @untraced
    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.leave_forward(self._group, module, outputs)


class _InnerPreForwardHook(_GroupHook):
    """Hook on a module inside a group's module that owns some of the group's parameters.

    If none of the groups with these parameters is executing, the caller has called the inner module directly. Another
    method of the block may do that. Then this call is an execution of the group.
    """

    def __init__(
        self, coordinator: PartitionedParameterCoordinator, group: ParamGroup, owners: Sequence[ParamGroup]
    ) -> None:
        """
        Args:
            owners: the groups that have all parameters of the inner module.
        """
        super().__init__(coordinator, group)
        self._owners = tuple(owners)

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        # Dynamo can trace this loop, for a block that is compiled later. Only `_begin` is excluded from its graph.
        for group in self._owners:
            if group.open_executions:
                return
        self._begin(module)

    @untraced
    def _begin(self, module: torch.nn.Module) -> None:
        coordinator = self.owner()
        if coordinator is not None:
            coordinator.enter_forward(self._group)
            self._group.set_called_inside(module)


class _InnerPostForwardHook(_GroupHook):
    """Hook that ends an execution that :class:`_InnerPreForwardHook` has begun."""

    def __call__(self, module: torch.nn.Module, args: object, outputs: object) -> None:
        if self._group.called_inside is module:
            self._end(module, outputs)

    @untraced
    def _end(self, module: torch.nn.Module, outputs: object) -> None:
        coordinator = self.owner()
        self._group.set_called_inside(None)
        if coordinator is not None:
            coordinator.leave_forward(self._group, module, outputs)


def install_hooks(
    model: torch.nn.Module, groups: Sequence[ParamGroup], coordinator: PartitionedParameterCoordinator
) -> list[Any]:
    """Install all hooks and return their handles, whose ``remove()`` takes them away."""
    handles: list[Any] = []
    traced: set[int] = set()  # modules inside a compiled region
    groups_of = groups_of_parameters(groups)
    for group in groups:
        module = group.module
        enter, leave = _PreForwardHook(coordinator, group), _PostForwardHook(coordinator, group)
        if is_compiled(module):
            traced.update(id(inside) for inside in module.modules())
        handles.append(enter.install(module.register_forward_pre_hook, prepend=True))
        handles.append(leave.install(module.register_forward_hook, always_call=True))
        for inside in group.inside:
            if owns_released(inside) and id(inside) not in traced:
                owners_of = [groups_of[p] for p in map(sharded_param_of, inside._parameters.values()) if p in groups_of]
                owners = [owner for owner in owners_of[0] if all(owner in others for others in owners_of)]
                begin = _InnerPreForwardHook(coordinator, group, owners)
                end = _InnerPostForwardHook(coordinator, group)
                handles.append(begin.install(inside.register_forward_pre_hook, prepend=True))
                # Without always_call=True, with which Dynamo would compile each module anew. After an exception the
                # execution around this one ends it, or the next forward does.
                handles.append(end.install(inside.register_forward_hook))
    for module in model.modules():
        if owns_released(module):
            handles.append(GatheredStateDict(coordinator).install(module.register_state_dict_post_hook))
    return handles
