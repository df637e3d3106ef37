"""The backward under way: what buckets and engines know of it, the hooks that bring its gradients, and what they leave.

Autograd calls the hook of a parameter when it has accumulated a gradient in ``p.grad``. The hook moves the gradient to
its bucket and leaves a tensor without memory, which stands for the mean over ranks. The first gradient of a backward is
looked at before (:meth:`GradientHooks._examine`), and others that are not plain tensors.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import unserializable_hook

from zerolite.utils.memory_tags import BUCKETS, GRADIENTS
from zerolite.utils.torch_private import as_plain_tensors, current_backward
from zerolite.zero.layout import Slot
from zerolite.zero.local_sum import BucketState
from zerolite.zero.sharded_gradient import ShardedGradient, Window

if TYPE_CHECKING:
    from zerolite.zero.grads import Gradients
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
        memory_category: category of gradients that are not reduced yet (memory_tags.py).
        seen_gradient: it has brought a gradient.
        takes_plain: hooks pass on a plain tensor without another look at it.
        discards_gradients: its gradients are dropped when they come, because its loss has weight 0.
        launches_by_group: a bucket is launched when the backward of a parameter group ends (stage 3), and not when its
            own gradients have come.
        launches_at_end: no bucket is launched before it has ended.
        launched: number of buckets that it has launched, in launch order.
        unreduced: backwards since ``local`` was last reduced; equal on all ranks.
        accumulated: backwards since the last step.
        lost_gradient: since the last step an error has lost a gradient on this rank, after its bucket was launched.
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
    memory_category: str = GRADIENTS
    seen_gradient: bool = False
    takes_plain: bool = False
    discards_gradients: bool = False
    launches_by_group: bool = False
    launches_at_end: bool = False
    launched: int = 0
    unreduced: int = 0
    accumulated: int = 0
    lost_gradient: bool = False
    peers_may_wait: bool = False
    ended_by_call: bool = False
    outer: Backward | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)
    task: int = -1

    def use_groups(self, launches_by_group: bool) -> None:
        """Set how buckets are launched in all backwards from now on."""
        self.launches_by_group = launches_by_group

    def begin(self, factor: float, reducing: bool, discards_gradients: bool, keeps_shards: bool) -> None:
        """Begin a backward. keeps_shards: full gradients are kept until their reduction only."""
        self.factor, self.open, self.reducing, self.discards_gradients = factor, True, reducing, discards_gradients
        self.launched = 0
        self.takes_plain = self.seen_gradient = self.launches_at_end = self.peers_may_wait = False
        self.task = current_backward()
        for other in tuple(_open):
            # An exception has ended its backward of autograd. Other ranks may have had none, so it must change nothing.
            if other.task != -1 and self.task == -1:
                _open.discard(other)
                continue
            # Ends of groups come in one order on all ranks, also those of several engines.
            if not (self.launches_by_group and other.launches_by_group):
                self.launches_at_end = other.launches_at_end = True
            if other.ended_by_call:
                self.outer = other
        _open.add(self)
        self.unreduced += 1
        self.accumulated += 1
        in_transit = keeps_shards and reducing and self.unreduced == 1
        self.memory_category = BUCKETS if in_transit else GRADIENTS

    def expect_waiting_peers(self, launches_at_once: bool) -> None:
        """Set ``peers_may_wait``. launches_at_once: a launch itself waits for no other rank."""
        self.peers_may_wait = True
        self.launches_at_end |= not launches_at_once

    def on_first_gradient(self) -> None:
        """Note that it has brought a gradient."""
        self.seen_gradient, self.takes_plain = True, not self.discards_gradients

    def on_failure(self) -> None:
        """Let other engines launch as if this backward had ended: an exception has ended autograd's, on this rank."""
        self.takes_plain = False
        _open.discard(self)

    def on_gradient_lost(self) -> None:
        """Note that a gradient of this rank came too late, or that its reduction has failed here."""
        self.lost_gradient = True

    def reopen(self) -> None:
        """Open it again, to reduce what no backward has reduced."""
        self.open = self.reducing = True
        self.launched = 0

    def end(self) -> list[Callable[[], None]]:
        """End the backward, when it has launched everything. Return ``waiting``, which the caller runs last."""
        self.open, self.takes_plain, self.outer = False, False, None
        _open.discard(self)
        if self.reducing:
            self.unreduced = 0
        waiting, self.waiting = self.waiting, []
        return waiting

    def on_consumed(self) -> None:
        """Note that a step has used all gradients, or that they were dropped."""
        self.unreduced = self.accumulated = 0
        self.lost_gradient = False


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

    def __init__(self, reducer: Reducer) -> None:
        """
        Args:
            reducer: the reducer, which keeps this object.
        """
        self._reducer: Reducer = weakref.proxy(reducer)
        self._current = reducer.current
        self.handles: list[Any] = []
        self.early: dict[int, Any] = {}
        self._came_first: set[int] = set()
        self._assigned = -1  # parameter to whose gradient autograd has added while the user's tensor was in `p.grad`
        self._hook_dicts: list[dict[int, Any]] = []  # of each parameter: all its hooks of this kind, in their order

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

    def _look_early_at(self, index: int) -> None:
        """Look at ``p.grad`` early where a gradient has come first, and nowhere else."""
        self._came_first.add(index)
        if index not in self.early:
            self._look_early(index)
        for other in self.early.keys() - self._came_first:
            self.early.pop(other).remove()

    def begin_backward(self) -> None:
        """Let hooks that the user has registered since run before the engine's, which takes the gradient out."""
        # One pass in C, because this runs in every backward and usually finds the engine's hooks alone.
        if sum(map(len, self._hook_dicts)) > len(self._hook_dicts):
            for hooks, handle in zip(self._hook_dicts, self.handles, strict=True):
                if len(hooks) > 1 and handle.id in hooks:
                    hooks[handle.id] = hooks.pop(handle.id)

    def _examine(self, slot: Slot, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient in ``parameter.grad`` that goes to the bucket; None if there is none.

        The first one is checked, and may be the first sign of a backward: ``torch.autograd.backward`` on another tensor
        than the model's outputs passes no earlier hook of the engine. Then it begins the backward.
        """
        gradient, current = parameter.grad, self._current
        first = not (current.open and current.seen_gradient)
        if isinstance(gradient, ShardedGradient):  # autograd has added to what it shows
            added, gradient.added = gradient.added, None
            gradient = added
        elif first and self._assigned != slot.index:  # otherwise the beginning finds and refuses it
            # If the engine did not know of this backward, what it has shown would still be in ``p.grad``, unless the
            # user has removed it. Beginning the backward then finds None there, as on ranks where another parameter's
            # gradient comes first.
            parameter.grad = None
        if first:
            if not current.open:
                self._begin()
            if len(self.early) != len(self._came_first) or slot.index not in self._came_first:
                self._look_early_at(slot.index)
            if self._check_first is not None:
                self._check_first(slot.name)
            current.on_first_gradient()
        if gradient is None:
            return None
        if current.discards_gradients:
            parameter.grad = None
            if slot.numel:
                bucket = self._reducer.bucket_of[slot.index]
                bucket.local.add(slot, None)
                self._reducer.on_gradient(bucket)
            return None
        if gradient.layout is not torch.strided:
            parameter.grad = None
            raise RuntimeError(
                f"expected a dense gradient for parameter '{slot.name}', got one with layout {gradient.layout}; "
                "sparse gradients are not supported: build the embedding with sparse=False"
            )
        return gradient.detach()  # backward(create_graph=True) brings gradients with a graph


def _make_hook(hooks_ref: weakref.ref[GradientHooks], slot: Slot) -> Callable[[torch.Tensor], None]:
    """Return the hook of one parameter. It is called for every parameter in every backward."""
    index, plain, strided, fill = slot.index, torch.Tensor, torch.strided, BucketState.FILL

    def hook(parameter: torch.Tensor) -> None:
        hooks = hooks_ref()
        if hooks is None:
            return
        reducer, gradient = hooks._reducer, parameter.grad
        if (
            type(gradient) is not plain
            or gradient.layout is not strided
            or gradient.requires_grad
            or not hooks._current.takes_plain
        ):
            gradient = hooks._examine(slot, parameter)
            if gradient is None:
                return
        shown, bucket = reducer.shown, reducer.bucket_of[index]
        shown.expected[index] = parameter.grad = shown.window.gradients[index]
        reducer.used.add(index)
        if slot.numel:
            local = bucket.local
            if local.state is not fill:
                reducer.on_late_gradient(bucket, slot)
            local.add(slot, gradient)
            if local.missing <= 0:
                reducer.on_gradient(bucket)

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


class ShownGradients:
    """Tensors that the engine has put into each ``p.grad``.

    Two windows take turns, so that a reference to a gradient that outlives its step raises. A window that the user has
    operated on is not shown again at all.

    Attributes:
        parameters: by index.
        window: the present window.
        expected: what the engine has left in each ``p.grad``, by index.
    """

    def __init__(self) -> None:
        self.parameters: Sequence[torch.nn.Parameter] = ()
        self.window, self._other, self._is_used = Window(None), Window(None), False
        self.expected: list[torch.Tensor | None] = []
        self._slots: Sequence[Slot] = ()
        self._strides: Sequence[tuple[int, ...]] = ()

    def connect(self, source: Gradients) -> None:
        """Read and write values through ``source``."""
        self.window.source = self._other.source = weakref.ref(source)

    def use(
        self, slots: Sequence[Slot], parameters: Sequence[torch.nn.Parameter], strides: Sequence[tuple[int, ...]]
    ) -> None:
        """Use parameters that begin with the present ones. strides: of the full parameters, by index."""
        self._slots, self.parameters, self._strides = slots, parameters, strides
        self.expected += [None] * (len(parameters) - len(self.expected))
        self._fill(self.window)
        self._fill(self._other)

    def _fill(self, window: Window) -> None:
        for slot in self._slots[len(window.gradients) :]:
            parameter, strides = self.parameters[slot.index], self._strides[slot.index]
            shape = getattr(parameter, "ds_shape", parameter.shape)
            window.gradients.append(ShardedGradient.of(window, slot, shape, strides, parameter))

    def begin_backward(self) -> None:
        """Empty every ``p.grad``, for autograd to write to."""
        self._is_used = True
        if any(map(operator.is_not, self.expected, itertools.repeat(None))):
            self.hide()

    def show(self, indices: Iterable[int]) -> None:
        """Show the gradients of these parameters. A tensor of the user's stays in ``p.grad``, where it is found."""
        with as_plain_tensors():
            for index in indices:
                if self.expected[index] is None and self.parameters[index].grad is None:
                    self.put(index, self.window.gradients[index])

    def restore(self) -> None:
        """Take out what a backward that has raised has left in ``p.grad`` but the engine's own gradients."""
        for gradient in self.window.gradients:
            gradient.added = None
        for index, left in self.changed().items():
            if left is not None:
                self.put(index, self.expected[index])

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Put ``gradient`` into ``p.grad``, whatever is there."""
        self._is_used = True
        self.expected[index] = gradient
        self.parameters[index].grad = gradient

    def hide(self) -> None:
        """Set every ``p.grad`` to None."""
        with as_plain_tensors():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = None
        self.expected = [None] * len(self.parameters)

    def close(self) -> None:
        """Hide the gradients, because a step has used them or they were dropped. The other window comes next."""
        self.hide()
        if self._is_used:
            self.window, self._other, self._is_used = self._other, self.window, False
            if self.window.touched:
                self.window = Window(self.window.source)
                self._fill(self.window)

    def changed(self) -> Mapping[int, torch.Tensor | None]:
        """Return, by index, each ``p.grad`` that is not what the engine has put there."""
        with as_plain_tensors():
            gradients = [parameter.grad for parameter in self.parameters]
        # One pass in C, because this runs in every step and usually finds nothing.
        if not any(map(operator.is_not, gradients, self.expected)):
            return {}
        pairs = enumerate(zip(gradients, self.expected, strict=True))
        return {index: gradient for index, (gradient, expected) in pairs if gradient is not expected}

    def is_in_place(self, index: int, gradient: torch.Tensor | None) -> bool:
        """Return True if ``gradient`` is in ``p.grad`` of this parameter."""
        with as_plain_tensors():
            return self.parameters[index].grad is gradient

    def all_dropped(self) -> bool:
        """Return True if some gradients are shown and the user has set ``p.grad`` of all parameters to None."""
        with as_plain_tensors():
            shown = any(map(operator.is_not, self.expected, itertools.repeat(None)))
            return shown and all(parameter.grad is None for parameter in self.parameters)
