"""The backward under way: what buckets and engines know of it, and the hooks that bring its gradients.

Autograd calls the hook of a parameter when it has accumulated a gradient in ``p.grad``. The hook takes the gradient out
and leaves a tensor without memory, which stands for the mean over ranks. The hook of a small parameter only puts the
gradient into ``LocalSum.held``, once a first gradient has begun the backward and opened the buckets for that. All
others go through :meth:`GradientHooks._process`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import unserializable_hook

from zerolite.utils.memory_tags import listeners
from zerolite.utils.torch_private import current_backward
from zerolite.zero.bucket import Bucket, BucketState
from zerolite.zero.layout import Slot
from zerolite.zero.sharded_gradient import ShardedGradient

if TYPE_CHECKING:
    from zerolite.zero.reducer import Reducer
    from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator


@dataclass(eq=False)
class Backward:
    """The current backward, or the last one. Only the reducer writes it.

    Backwards of several engines may be open at once, for a loss through all of them. Then none of them launches before
    its end, because each rank would mix their launches in an order of its own.

    Attributes:
        factor: factor of gradients that are copied into a bucket.
        open: it has begun and not ended.
        reducing: it reduces every bucket; equal on all ranks.
        discards_gradients: its gradients are dropped when they come, because its loss has weight 0.
        launches_by_group: a bucket is launched when the backward of a parameter group ends (stage 3), and not when its
            own gradients have come.
        launches_at_end: no bucket is launched before it has ended.
        launched: number of buckets that it has launched, in launch order.
        unreduced: backwards since ``local`` was last reduced; equal on all ranks.
        accumulated: backwards since the last step.
        lost_gradient: since the last step a gradient came too late on this rank, which raised an error.
        early: buckets that were launched between backwards, before the one that reduces the others.
        peers_may_wait: a rank may wait in it for a collective of the program, or for a gather of another engine at
            stage 3. So nothing in it waits for a reduction: a rank that lacks a parameter launches that at the end.
        ended_by_call: a call of the engine ends it, after autograd has ended.
        outer: backward of another engine that was open when this one began, and that a call ends; None without one.
        waiting: ends of such inner backwards, which come behind the end of this one.
        task: the backward of autograd in which it began; -1 if a call of the engine began it.
    """

    factor: float
    open: bool = False
    reducing: bool = False
    discards_gradients: bool = False
    launches_by_group: bool = False
    launches_at_end: bool = False
    launched: int = 0
    unreduced: int = 0
    accumulated: int = 0
    lost_gradient: bool = False
    early: list[Bucket] = field(default_factory=list)
    peers_may_wait: bool = False
    ended_by_call: bool = False
    outer: Backward | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)
    task: int = -1

    def begin(self, factor: float, reducing: bool, discards_gradients: bool, launches_by_group: bool) -> None:
        self.factor, self.open, self.reducing, self.discards_gradients = factor, True, reducing, discards_gradients
        self.launches_by_group, self.launched = launches_by_group, len(self.early)
        self.launches_at_end = self.peers_may_wait = False
        self.task = current_backward()
        for other in tuple(_open):
            # An exception has ended its backward of autograd. Other ranks may have had none, so it must change nothing.
            if other.task != -1 and self.task == -1:
                _open.discard(other)
                continue
            # Ends of groups come in one order on all ranks, also those of several engines.
            if not (launches_by_group and other.launches_by_group):
                self.launches_at_end = other.launches_at_end = True
            if other.ended_by_call:
                self.outer = other
        _open.add(self)
        self.unreduced += 1
        self.accumulated += 1

    def expect_waiting_peers(self, launches_at_once: bool) -> None:
        """Set ``peers_may_wait``. launches_at_once: a launch itself waits for no other rank."""
        self.peers_may_wait = True
        self.launches_at_end |= not launches_at_once

    def on_failure(self) -> None:
        """Let other engines launch as if this backward had ended: an exception has ended autograd's, on this rank."""
        _open.discard(self)

    def on_gradient_lost(self) -> None:
        """Note that everything is reduced but a gradient that came too late."""
        self.on_all_reduced()
        self.lost_gradient = True

    def end(self) -> list[Callable[[], None]]:
        """End the backward. Return ``waiting``, which the caller runs when this one has launched everything."""
        self.open, self.outer = False, None
        _open.discard(self)
        waiting, self.waiting = self.waiting, []
        return waiting

    def on_all_reduced(self, consumed: bool = False) -> None:
        """Note that no bucket has unreduced gradients. consumed: a step has also used them, or they were dropped."""
        self.unreduced = 0
        self.early.clear()
        if consumed:
            self.accumulated, self.lost_gradient = 0, False


_open: weakref.WeakSet[Backward] = weakref.WeakSet()  # backwards that have begun and not ended, of all engines

coordinators: weakref.WeakSet[PartitionedParameterCoordinator] = weakref.WeakSet()
"""Coordinators of all engines at stage 3. A backward through a graph of theirs gathers, on all ranks together."""


class GradientHooks:
    """The hooks of one engine. They run inside backward, and call the reducer.

    A backward may pass no hook of the engine before the first gradient has been accumulated. A tensor of the user's in
    that ``p.grad`` has become a part of a sum by then. So a second hook looks at ``p.grad`` before: at first on all
    parameters, and from the first backward on where a gradient has come first. (The first time that another one does,
    nothing sees a tensor there. All others are seen when the backward begins.)

    Attributes:
        handles: handles of the installed hooks.
        early: handles of the hooks that run before a gradient is accumulated, by index of the parameter.
    """

    def __init__(self, reducer: Reducer, copy_on_arrival: bool) -> None:
        """
        Args:
            reducer: the reducer, which keeps this object.
            copy_on_arrival: see :class:`ReductionOptions`.
        """
        self._reducer: Reducer = weakref.proxy(reducer)
        self._current, self._copy_on_arrival = reducer.current, copy_on_arrival
        self.handles: list[Any] = []
        self.early: dict[int, Any] = {}
        self._came_first: set[int] = set()
        self._assigned = -1  # parameter to whose gradient autograd has added while the user's tensor was in `p.grad`
        self._hook_dicts: list[dict[int, Any]] = []  # of each parameter: all its hooks of this kind, in their order
        self._seen_gradient = False  # this backward has brought a gradient

    def attach(self, begin: Callable[[], None], check_first: Callable[[str], None] | None) -> None:
        """Install one hook per parameter.

        Args:
            begin: begins a backward whose first sign is a gradient, because it has passed no other hook of the engine.
            check_first: called with the parameter's name before the first gradient of every backward is moved.
        """
        self._begin, self._check_first = begin, check_first
        self.attach_new()

    def attach_new(self) -> None:
        """Install hooks on the parameters that have none yet."""
        # Weak, because a model may outlive its engine, and Python's cycle collector does not see the hooks of a tensor.
        reducer, known = self._reducer, weakref.ref(self)
        for slot in reducer.buffer.layout.slots[len(self.handles) :]:
            hook = _make_hook(known, slot)
            parameter: Any = reducer.parameters[slot.index]
            self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
            self._hook_dicts.append(parameter._post_accumulate_grad_hooks)
            self._look_early(slot.index)

    def _look_early(self, index: int) -> None:
        parameter: Any = self._reducer.parameters[index]
        self.early[index] = parameter.register_hook(_make_early_hook(weakref.ref(self), index))

    def _on_first(self, index: int) -> None:
        """Look at ``p.grad`` early where a gradient has come first, and nowhere else."""
        self._came_first.add(index)
        if index not in self.early:
            self._look_early(index)
        for other in self.early.keys() - self._came_first:
            self.early.pop(other).remove()

    def begin_backward(self) -> None:
        """Let hooks that the user has registered since run before the engine's, which takes the gradient out."""
        self._seen_gradient = False
        # One pass in C, because this runs in every backward and usually finds the engine's hooks alone.
        if sum(map(len, self._hook_dicts)) > len(self._hook_dicts):
            for hooks, handle in zip(self._hook_dicts, self.handles, strict=True):
                if len(hooks) > 1 and handle.id in hooks:
                    hooks[handle.id] = hooks.pop(handle.id)

    def _process(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Process the gradient in ``parameter.grad``: begin the backward, run the checks, pass the gradient to its
        bucket, and launch what is complete."""
        gradient, reducer = parameter.grad, self._reducer
        first = not (self._seen_gradient and self._current.open)
        if first or isinstance(gradient, ShardedGradient):
            gradient = self._process_first(slot, parameter, gradient)
        if gradient is None:
            return
        bucket = reducer.bucket_of[slot.index]
        if self._current.discards_gradients:
            parameter.grad = None
            if slot.numel:
                bucket.local.discard(slot.index)
        else:
            if gradient.layout is not torch.strided:
                parameter.grad = None
                raise RuntimeError(
                    f"expected a dense gradient for parameter '{slot.name}', got one with layout {gradient.layout}; "
                    "sparse gradients are not supported: build the embedding with sparse=False"
                )
            reducer.shown.expected[slot.index] = parameter.grad = reducer.gradients[slot.index]
            reducer.used.add(slot.index)
            if slot.numel:
                self._add(slot, bucket, gradient)
        if slot.numel:
            reducer.on_gradient(bucket)
        if first:
            self._open_directly()

    def _process_first(self, slot: Slot, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the new gradient, if it is the first of a backward or autograd has added it to what ``p.grad`` shows.

        The first gradient may be the first sign of a backward. ``torch.autograd.backward`` on another tensor than the
        model's outputs passes no earlier hook of the engine. Then it begins the backward.

        Args:
            slot: slot of the parameter.
            parameter: the parameter.
            gradient: content of ``parameter.grad``.
        """
        if isinstance(gradient, ShardedGradient):  # autograd has added to it
            added, gradient.added = gradient.added, None
            gradient = added
        elif self._assigned != slot.index:  # otherwise the beginning finds and refuses it
            # If the engine did not know of this backward, what it has shown would still be in ``p.grad``, unless the
            # user has removed it. Beginning the backward then finds None there, as on ranks where another parameter's
            # gradient comes first.
            parameter.grad = None
        if not self._current.open:
            self._begin()
        if not self._seen_gradient:
            if len(self.early) != len(self._came_first) or slot.index not in self._came_first:
                self._on_first(slot.index)
            if self._check_first is not None:
                self._check_first(slot.name)
            self._seen_gradient = True
        return gradient

    def _add(self, slot: Slot, bucket: Bucket, gradient: torch.Tensor) -> None:
        """Pass a gradient to its bucket."""
        reducer = self._reducer
        if bucket.state is not BucketState.FILL:
            reducer.on_late_gradient(bucket, slot)
        if slot.index in bucket.local.held:  # a second contribution: all held gradients are copied in first
            reducer.close(bucket)
        # A gradient that is copied at once frees its memory for the next one. At stage 3 gradients are held: the
        # bucket is filled in one call when its group's backward ends, soon after.
        at_once = self._copy_on_arrival and not self._current.launches_by_group
        if not torch.is_grad_enabled():
            bucket.local.add(slot, gradient, at_once, self._current.factor, tag=bool(listeners))
            return
        with torch.no_grad():  # backward(create_graph=True) runs hooks with autograd on
            bucket.local.add(slot, gradient.detach(), at_once, self._current.factor, tag=bool(listeners))

    def _open_directly(self) -> None:
        """Let hooks put small gradients into their buckets without another call, unless each must be looked at."""
        current = self._current
        # Such a hook drops no gradient, tags no memory and detaches nothing.
        if current.discards_gradients or listeners or torch.is_grad_enabled():
            return
        for bucket in self._reducer.order:
            if bucket.state is BucketState.FILL:  # a gradient for one that has been launched is late
                bucket.local.open_directly(current.launches_by_group)


def _make_hook(hooks_ref: weakref.ref[GradientHooks], slot: Slot) -> Callable[[torch.Tensor], None]:
    """Return the hook of one parameter. It is called for every parameter in every backward, so for small parameters it
    calls no method."""
    index = slot.index

    def hook(parameter: torch.Tensor) -> None:
        hooks = hooks_ref()
        if hooks is None:
            return
        reducer = hooks._reducer
        local = reducer.bucket_of[index].local
        if index in local.direct and index not in local.held:
            gradient = parameter.grad
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                local.held[index] = gradient
                parameter.grad = reducer.gradients[index]
                if len(local.held) == local.waits_for:
                    reducer.on_gradient(reducer.bucket_of[index])
                return
        hooks._process(slot, parameter)

    return hook


def _make_early_hook(hooks_ref: weakref.ref[GradientHooks], index: int) -> Callable[[torch.Tensor], None]:
    """Return the hook that looks at ``p.grad`` before autograd adds to it. ``torch.autograd.grad`` calls it too, and
    adds nothing: so it only takes a note."""

    @unserializable_hook
    def early(gradient: torch.Tensor) -> None:
        hooks = hooks_ref()
        if hooks is not None and not hooks._current.open:
            content = hooks._reducer.parameters[index].grad
            hooks._assigned = -1 if content is None or isinstance(content, ShardedGradient) else index

    return early
