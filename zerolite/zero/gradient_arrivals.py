"""Arrival of gradients: hooks move them from ``p.grad`` into their buckets while backward runs.

Every trainable parameter has a hook that autograd calls when it has accumulated a gradient in ``p.grad``. The hook
takes the gradient out and leaves a placeholder, a tensor without memory that stands for the mean over ranks. There are
two ways through it:

- The short way: while a holder of small parameters is open, the hook puts the gradient into it and does nothing else.
- The long way, :meth:`GradientArrivals._process`: begin the backward, run the checks, count the gradient, copy it into
  its bucket, and tell the reducer, which may launch the bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.utils.memory_tags import listeners
from zerolite.zero.bucket_filler import GradientHolder, Segment
from zerolite.zero.bucket_memory import Backward, ReductionOptions
from zerolite.zero.gradient_bucket import BucketState, GradientBucket
from zerolite.zero.layout import PartitionLayout, Slot
from zerolite.zero.shown_gradients import GradientPlaceholder, MakeGradient, ShownGradients

if TYPE_CHECKING:
    from zerolite.zero.grad_reducer import GradReducer


class GradientArrivals:
    """The hooks and their state. The hooks run inside backward; the reducer calls everything else.

    Attributes:
        parameters: parameters of the layout, by index.
        used: indices of the parameters that got a gradient in this accumulation.
        shown: the placeholders in ``p.grad``.
        contributions_known: a complete backward has shown how many contributions each parameter gets. Known to this
            rank alone, so it may decide when a bucket is launched, and never if.
        handles: handles of the installed hooks.
    """

    def __init__(
        self,
        options: ReductionOptions,
        current: Backward,
        reducer: GradReducer,
        rank: int,
        world_size: int,
        make_gradient: MakeGradient,
    ) -> None:
        self._options, self._backward, self._world_size = options, current, world_size
        self._reducer = weakref.proxy(reducer)
        self._buckets: Sequence[GradientBucket] = ()
        self._slots: Sequence[Slot] = ()
        self.parameters: list[torch.nn.Parameter] = []
        self.shown = ShownGradients(options.shard, rank, make_gradient)
        self.used: set[int] = set()
        self.handles: list[Any] = []
        self._hook_dicts: list[dict[int, Any]] = []  # of each parameter: all its hooks of this kind, in their order
        self._holders: list[GradientHolder | None] = []  # by index of the parameter; None: always the long way
        self._some_open = False  # some holder is open
        self._seen_gradient = False  # this backward has brought a gradient
        self._contributions: list[int] = []  # of each parameter in this backward
        # Most contributions of each parameter in one backward: several if reentrant checkpointing runs a backward
        # inside it. Until a complete backward has shown them, stage 0 reduces at the end of backward only. The other
        # stages take one to be all, so that no rank needs memory for all gradients, and reduce late ones once more.
        self._expected_contributions: list[int] = []
        self.contributions_known = False

    def set_layout(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        strides: Sequence[tuple[int, ...]],
        buckets: Sequence[GradientBucket],
    ) -> None:
        """Set the layout, which begins with the parameters and buckets there are. Called between backwards.

        Args:
            layout: layout of all parameters.
            parameters: parameters of the layout, by index.
            strides: strides of the whole parameters, by index.
            buckets: buckets of the layout.
        """
        self._slots, self.parameters, self._buckets = layout.slots, list(parameters), buckets
        self.shown.set_layout(layout, strides)
        more = len(self.parameters) - len(self._expected_contributions)
        self._holders = [buckets[slot.bucket].holder_of(slot.index) for slot in layout.slots]
        self._expected_contributions += [1] * more
        self._contributions += [0] * more
        self.contributions_known = False  # not those of new parameters

    def attach(
        self,
        begin: Callable[[], None],
        check_first: Callable[[str], None] | None,
        on_gradient: Callable[[int], None] | None,
    ) -> None:
        """Install one hook per parameter.

        Args:
            begin: begins a backward whose first sign is a gradient, because it has passed no other hook of the engine.
            check_first: called with the parameter's name before the first gradient of every backward is moved.
            on_gradient: called with the parameter's index before each gradient is moved.
        """
        self._begin, self._check_first, self._on_gradient = begin, check_first, on_gradient
        self.attach_new()

    def attach_new(self) -> None:
        """Install hooks on the parameters that have none yet."""
        # Weak, because a model may outlive its engine, and Python's cycle collector does not see the hooks of a tensor.
        known = weakref.ref(self)
        for slot in self._slots[len(self.handles) :]:
            hook = _make_hook(known, slot)
            parameter: Any = self.parameters[slot.index]
            self.handles.append(parameter.register_post_accumulate_grad_hook(hook))
            self._hook_dicts.append(parameter._post_accumulate_grad_hooks)

    def _move_hooks_last(self) -> None:
        """Let hooks that the user has registered since run before the engine's, which takes the gradient out."""
        if sum(map(len, self._hook_dicts)) == len(self._hook_dicts):  # one pass in C, in every backward
            return
        for hooks, handle in zip(self._hook_dicts, self.handles, strict=True):
            if len(hooks) > 1 and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)

    # ---------------------------------------------------------------- in a hook

    def _process(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Take the long way with the gradient in ``parameter.grad``."""
        gradient = parameter.grad
        first = not (self._seen_gradient and self._backward.open)
        if first or isinstance(gradient, GradientPlaceholder):
            gradient = self._process_first(slot, parameter, gradient)
        if self._on_gradient is not None:
            self._on_gradient(slot.index)
        if gradient is None:
            return
        bucket = self._buckets[slot.bucket]
        if self._backward.discards_gradients:
            parameter.grad = None
            bucket.count(min(1, slot.numel))
        else:
            if gradient.layout is not torch.strided:
                parameter.grad = None
                raise RuntimeError(
                    f"expected a dense gradient for parameter '{slot.name}', got one with layout {gradient.layout}; "
                    "sparse gradients are not supported: build the embedding with sparse=False"
                )
            self.shown.show_one(slot, parameter)
            self.used.add(slot.index)
            if slot.numel:
                self._accumulate(slot, bucket, gradient)
        if slot.numel:
            self._contributions[slot.index] += 1
            self._reducer.on_gradient(bucket)
        if first:
            self._open_holders()

    def _process_first(self, slot: Slot, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the new gradient, if it is the first of a backward or autograd has added it to a placeholder.

        The first gradient may be the first sign of a backward. ``torch.autograd.backward`` on another tensor than the
        model's outputs passes no earlier hook of the engine. Then it begins the backward.

        Args:
            slot: slot of the parameter.
            parameter: the parameter.
            gradient: content of ``parameter.grad``.
        """
        if isinstance(gradient, GradientPlaceholder):  # autograd has added to it
            gradient = gradient.pop_added()
        elif self._backward.open:
            parameter.grad = None
        else:
            # The engine did not know of this backward, so a placeholder would still be in ``p.grad``. It is not: the
            # user has removed or replaced it.
            if self.shown.is_shown(slot.index):
                self._reducer.drop(slot.index)
                self.shown.replace(slot.index, None)
            self.shown.restore(slot, parameter)
        if not self._backward.open:
            self._begin()
        if not self._seen_gradient:
            if self._check_first is not None:
                self._check_first(slot.name)
            self._seen_gradient = True
        return gradient

    def _accumulate(self, slot: Slot, bucket: GradientBucket, gradient: torch.Tensor) -> None:
        """Pass a gradient to its bucket."""
        holder, backward = self._holders[slot.index], self._backward
        if holder is not None and holder.open:
            self._close(bucket, holder)
        if bucket.state is not BucketState.OPEN:
            self._reducer.on_late_gradient(bucket, slot)
        if slot.index in bucket.held.gradients:  # a second contribution: all held gradients are copied in first
            self.close(bucket)
        # A gradient that is copied at once frees its memory for the next one. At stage 3 gradients are held: the
        # bucket is filled in one call when its group's backward ends, soon after.
        at_once = self._options.copy_on_arrival and not backward.launches_by_group
        if not torch.is_grad_enabled():
            bucket.accumulate(slot, gradient, at_once, backward.factor, tag=bool(listeners))
            return
        with torch.no_grad():  # backward(create_graph=True) runs hooks with autograd on
            bucket.accumulate(slot, gradient.detach(), at_once, backward.factor, tag=bool(listeners))

    # ---------------------------------------------------------------- gradients that hooks hold

    def _open_holders(self) -> None:
        """Open the short way for small parameters in this backward, unless each gradient must be looked at."""
        backward = self._backward
        # On the short way nothing drops a gradient, calls `on_gradient`, tags its memory or detaches it.
        if backward.discards_gradients or self._on_gradient is not None or listeners or torch.is_grad_enabled():
            return
        by_group = backward.launches_by_group and not backward.learning  # no gradient launches anything
        for bucket in self._buckets:
            for holder in bucket.holders_to_open(by_group):
                if holder.placeholders is None:
                    holder.set_placeholders(self.shown.placeholders_of(holder.indices))
                if holder.placeholders is not None:
                    holder.begin()
                    self._some_open = True

    def _complete_holder(self, holder: GradientHolder) -> None:
        """Copy in a holder's gradients, the last of which has come."""
        bucket = self._buckets[holder.bucket]
        self._close(bucket, holder)
        # The holder of a sliced bucket is copied in when the bucket is launched, at the end of a group's backward.
        if isinstance(holder, Segment):
            bucket.copy_in_segment(holder, self._backward.factor)
            self._reducer.on_gradient(bucket)

    def close_all(self) -> None:
        """Close the holders of all buckets. Afterwards ``used`` and ``shown`` are complete."""
        self._some_open = False
        for bucket in self._buckets:
            self.close(bucket)

    def close(self, bucket: GradientBucket) -> None:
        """Close a bucket's holders, and count their gradients. Further gradients take the long way."""
        for holder in bucket.holders:
            if holder.open:
                self._close(bucket, holder)

    def _close(self, bucket: GradientBucket, holder: GradientHolder) -> None:
        held = bucket.close_holder(holder)
        self.used.update(held)
        self.shown.mark_shown(held)
        for index in held:
            self._contributions[index] += 1

    # ---------------------------------------------------------------- a backward

    def begin_backward(self) -> None:
        """Empty ``p.grad`` before the first gradient of a backward."""
        self.shown.hide(self.parameters)
        self._move_hooks_last()
        self._seen_gradient = False
        self._contributions = [0] * len(self.parameters)

    def end_backward(self, complete: bool) -> None:
        """Count what hooks still hold, and what to expect from now on. complete: no exception has cut it short."""
        self._seen_gradient = False
        if self._some_open:
            self.close_all()
        if not complete:
            return
        self.contributions_known = True
        if max(self._contributions, default=0) > 1:
            self._expected_contributions = list(map(max, self._expected_contributions, self._contributions))
            for bucket in self._buckets:
                bucket.expect(
                    sum(self._expected_contributions[slot.index] for slot in bucket.bucket.slots if slot.numel)
                )

    def show(self, all_ranks_know: bool, several: bool) -> None:
        """Show the gradients of the accumulation in ``p.grad`` after a backward.

        On several ranks a parameter that this rank has not used shows a gradient too, because another rank may have
        used it. So norms, and the gradients that the user may drop, are the same on all ranks. Nothing is shown after
        ``torch.autograd.grad`` alone, which leaves no gradient on any rank.

        Args:
            all_ranks_know: all ranks have called the engine for this backward, so it was not ``torch.autograd.grad``.
            several: show also the gradients of earlier backwards, which :meth:`begin_backward` has hidden.
        """
        if len(self.used) < len(self.parameters) and (all_ranks_know or (self.used and self._world_size > 1)):
            self.show_all()
        elif several:
            self.shown.show(self.parameters, self.used)

    def show_all(self) -> None:
        """Show the gradients of all trained parameters; on one rank only of those that got one, if any did."""
        trained = [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]
        self.shown.show(self.parameters, trained if not self.used or self._world_size > 1 else self.used)

    def drop(self, slot: Slot) -> None:
        """Drop the gradient of one parameter as far as it has not been reduced."""
        self.close_all()
        self.used.discard(slot.index)
        self._buckets[slot.bucket].drop(slot)

    def clear(self) -> None:
        """Forget the gradients of the accumulation, which were used or dropped."""
        if self.shown.retire(self.parameters):
            for bucket in self._buckets:
                for holder in bucket.holders:
                    holder.set_placeholders(None)  # some have been replaced; the next backward asks again
        self.used.clear()


def _make_hook(arrivals_ref: weakref.ref[GradientArrivals], slot: Slot) -> Callable[[torch.Tensor], None]:
    """Return the hook of one parameter. It is called for every parameter in every backward, so the short way through
    it is a closure that calls no method."""
    index = slot.index

    def hook(parameter: torch.Tensor) -> None:
        arrivals = arrivals_ref()
        if arrivals is None:
            return
        holder = arrivals._holders[index]
        if holder is not None and holder.open and index not in holder.gradients:
            gradient = parameter.grad
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                holder.gradients[index] = gradient
                parameter.grad = holder.placeholders[index]  # type: ignore[index]
                if len(holder.gradients) == holder.count:
                    arrivals._complete_holder(holder)
                return
        arrivals._process(slot, parameter)

    return hook
