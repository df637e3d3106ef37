"""Arrival of gradients: hooks move them from ``p.grad`` into their buckets while backward runs.

Every trainable parameter has a hook that fires when its gradient has been accumulated. What stays in ``p.grad`` is a
tensor without memory that stands for the mean over ranks.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zerolite.utils.memory_tags import listeners
from zerolite.zero.bucket_filler import GradientHolder, Segment
from zerolite.zero.bucket_memory import Backward, ReductionOptions
from zerolite.zero.gradient_bucket import BucketState, GradientBucket
from zerolite.zero.layout import PartitionLayout, Slot
from zerolite.zero.shown_gradients import GradientPlaceholder, MakeGradient, ShownGradients
from zerolite.zero.stage3.released_parameter import as_plain_tensors, set_grad

if TYPE_CHECKING:
    from zerolite.zero.grad_reducer import GradReducer


class UserHookSums:
    """For parameters with a hook of ``register_post_accumulate_grad_hook``: plain PyTorch shows such a hook the sum of
    all backwards since the last step, and the hook may change it. The engine's own hook runs last, and takes what has
    been added to the sum.

    ``indices``: indices of those parameters. Only they keep a copy of their gradient on this rank.
    """

    def __init__(self) -> None:
        self.indices: set[int] = set()
        self._sums: dict[int, torch.Tensor] = {}
        # Dicts of hooks that are older than the engine, each with the key of the engine's own hook.
        self._earlier_hooks: list[tuple[OrderedDict[int, Any], int]] = []

    def register(self, index: int, parameter: Any, hook: Callable[[torch.Tensor], None]) -> Any:
        """Register the engine's hook, which stays behind those of the user; return its handle."""
        earlier = parameter._post_accumulate_grad_hooks
        if not earlier:
            parameter._post_accumulate_grad_hooks = _EngineHookLast(index, self.indices)
        handle = parameter.register_post_accumulate_grad_hook(hook)
        if earlier:  # the handles of the user's hooks know this dict
            self._earlier_hooks.append((earlier, handle.id))
            self.indices.add(index)
        return handle

    def put_sums(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Before a backward: let autograd add to the sums."""
        for hooks, engine_key in self._earlier_hooks:
            # Hooks run in the order of this dict. One that the user has added since is behind the engine's now.
            if engine_key in hooks and next(reversed(hooks)) != engine_key:
                hooks[engine_key] = hooks.pop(engine_key)
        for index, total in self._sums.items():
            set_grad(parameters[index], total.clone())

    def remove_sums(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """After a backward, or when one has raised: what is in ``p.grad`` of these parameters, and is not what the
        engine shows, is this rank's sum."""
        for index in self.indices:
            with as_plain_tensors():
                if not isinstance(parameters[index].grad, GradientPlaceholder):
                    parameters[index].grad = None

    @torch.no_grad()
    def new_contribution(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what this backward and the hooks have added to the sum, which is ``gradient`` now."""
        before, total = self._sums.get(index), gradient.detach()
        self._sums[index] = total
        return total if before is None else total - before

    def drop(self, index: int) -> None:
        """The user has dropped the gradient of this parameter."""
        self._sums.pop(index, None)

    def clear(self) -> None:
        """No gradient is wanted any more."""
        self._sums.clear()


class _EngineHookLast(OrderedDict[int, Any]):
    """Hooks of a parameter, of which the engine's, the first to be registered, runs last."""

    def __init__(self, index: int, hooked_indices: set[int]) -> None:
        """hooked_indices: takes ``index`` when there is another hook."""
        super().__init__()
        self._index, self._hooked_indices = index, hooked_indices
        self._engine_key: int | None = None

    def __setitem__(self, key: int, hook: object) -> None:
        super().__setitem__(key, hook)
        if self._engine_key is None:
            self._engine_key = key
        elif key != self._engine_key and self._engine_key in self:
            super().__setitem__(self._engine_key, self.pop(self._engine_key))
            self._hooked_indices.add(self._index)


class GradientArrivals:
    """The hooks, and what they know. They run inside backward; everything else is called by the reducer.

    Attributes:
        parameters: of the layout, by index.
        used: the parameters that got a gradient in this accumulation.
        shown: what ``p.grad`` shows.
        contributions_known: contributions are known from a complete backward; of this rank alone, so it decides when a
            bucket is launched, never whether.
        handles: of the installed hooks.
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
        self._hook_sums = UserHookSums()
        self._holders: list[GradientHolder | None] = []  # by index of the parameter: where its hook may put a gradient
        self._some_open = False  # hooks hold gradients that have not been counted
        self._seen_gradient = False  # in this backward
        self._contributions: list[int] = []  # contributions of each parameter in this backward
        # The most contributions that a parameter has had in one backward: several where reentrant checkpointing runs a
        # backward inside it. Known after the first complete one. Where gradients rest whole, that one
        # reduces at its end only; elsewhere it does not wait, and reduces once more what has come late.
        self._expected_contributions: list[int] = []
        self.contributions_known = False

    def set_layout(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        strides: Sequence[tuple[int, ...]],
        buckets: Sequence[GradientBucket],
    ) -> None:
        """Have these buckets, those that there are first; between backwards."""
        self._slots, self.parameters, self._buckets = layout.slots, list(parameters), buckets
        self.shown.set_layout(layout, strides)
        more = len(self.parameters) - len(self._expected_contributions)
        self._holders = [buckets[slot.bucket].holder_of(slot.index) for slot in layout.slots]
        self._expected_contributions += [1] * more
        self._contributions += [0] * more
        self.contributions_known = False  # of the new ones nothing is known

    def attach(
        self,
        begin: Callable[[], None],
        check_first: Callable[[str], None] | None,
        on_gradient: Callable[[int], None] | None,
    ) -> None:
        """Install one hook per parameter. ``begin()`` is called before the first gradient of a backward that begins
        unannounced, and must begin it; ``check_first(name)`` before the first gradient of every backward is moved;
        ``on_gradient(index)`` before every one.

        The hooks know this object weakly: Python's cycle collector does not see the hooks of a tensor, and a model may
        outlive its engine.
        """
        self._begin, self._check_first, self._on_gradient = begin, check_first, on_gradient
        self.attach_new()

    def attach_new(self) -> None:
        """Install the hooks of the parameters that have none yet."""
        known = weakref.ref(self)
        for slot in self._slots[len(self.handles) :]:
            hook = _make_hook(known, slot)
            self.handles.append(self._hook_sums.register(slot.index, self.parameters[slot.index], hook))

    # ---------------------------------------------------------------- in a hook

    def _process(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Move a gradient by itself: a large one, the first of a backward, or one that must be looked at.

        The first one of a backward may be the first sign of it, because ``torch.autograd.backward`` on something else
        than the model's outputs passes no hook of ours. So it begins the backward before it is moved.
        """
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
            if slot.index in self._hook_sums.indices:
                gradient = self._hook_sums.new_contribution(slot.index, gradient)
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
        """Return the gradient in ``parameter.grad``, the first of a backward, or added to what the engine shows
        there."""
        if isinstance(gradient, GradientPlaceholder):  # autograd has added to it
            gradient = gradient.collect()
        elif self._backward.open:
            parameter.grad = None
        else:
            if self.shown.is_shown(slot.index):  # the user has taken out, or replaced, what was there
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
        holder, backward = self._holders[slot.index], self._backward
        if holder is not None and holder.open:
            self._close(bucket, holder)
        if bucket.state is not BucketState.OPEN:
            self._reducer.on_late_gradient(bucket, slot)
        if slot.index in bucket.held.gradients:  # what is held is moved, all of it
            self.close(bucket)
        # On a device a gradient that is moved at once frees its memory for the next one. By group the whole bucket
        # is filled in one call when its group's backward ends.
        at_once = self._options.copy_on_arrival and not backward.launches_by_group
        if not torch.is_grad_enabled():
            bucket.accumulate(slot, gradient, at_once, backward.factor, tag=bool(listeners))
            return
        with torch.no_grad():  # a backward with create_graph
            bucket.accumulate(slot, gradient.detach(), at_once, backward.factor, tag=bool(listeners))

    # ---------------------------------------------------------------- gradients that hooks hold

    def _open_holders(self) -> None:
        """Let the hooks of small parameters hold gradients with the least Python, where nothing looks at each."""
        backward = self._backward
        # Held gradients are looked at by nothing before their holder is complete: not by a check that names the
        # parameter, not by a count of memory, and not by create_graph, which must detach each.
        if backward.discards_gradients or self._on_gradient is not None or listeners or torch.is_grad_enabled():
            return
        by_group = backward.launches_by_group and not backward.learning  # no gradient launches anything
        for bucket in self._buckets:
            for holder in bucket.holders_to_open(by_group):
                if holder.placeholders is None:
                    holder.set_placeholders(self.shown.placeholders_of(holder.indices))
                if holder.placeholders is not None and self._hook_sums.indices.isdisjoint(holder.indices):
                    holder.begin()
                    self._some_open = True

    def _complete_holder(self, holder: GradientHolder) -> None:
        """The hooks of ``holder`` have held the last of its gradients."""
        bucket = self._buckets[holder.bucket]
        self._close(bucket, holder)
        if isinstance(
            holder, Segment
        ):  # others are moved when the bucket is launched, at the end of a group's backward
            bucket.copy_in_segment(holder, self._backward.factor)
            self._reducer.on_gradient(bucket)

    def close_all(self) -> None:
        """:meth:`close` for all buckets: afterwards ``used`` and ``shown`` are complete."""
        self._some_open = False
        for bucket in self._buckets:
            self.close(bucket)

    def close(self, bucket: GradientBucket) -> None:
        """Count what hooks hold of a bucket, and let every further gradient be counted when it comes."""
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
        self.shown.hide(self.parameters)
        if self._hook_sums.indices:
            self._hook_sums.put_sums(self.parameters)
        self._seen_gradient = False
        self._contributions = [0] * len(self.parameters)

    def end_backward(self, complete: bool) -> None:
        """complete: it has not been cut short."""
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
        """After a backward: show the gradients of the accumulation.

        On several ranks a parameter that this rank has not used shows a gradient too, because another rank may have
        used it: norms of all gradients must be the same numbers on all ranks, and so must what the user drops. Not
        after ``torch.autograd.grad`` alone, which gives no rank any.

        Args:
            several: also those of earlier backwards, which this one has hidden.
            all_ranks_know: it was not ``torch.autograd.grad``.
        """
        if self._hook_sums.indices:
            self._hook_sums.remove_sums(self.parameters)
        if len(self.used) < len(self.parameters) and (all_ranks_know or (self.used and self._world_size > 1)):
            self.show_all()
        elif several:
            self.shown.show(self.parameters, self.used)

    def show_all(self) -> None:
        trained = [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]
        self.shown.show(self.parameters, trained if not self.used or self._world_size > 1 else self.used)

    def drop(self, slot: Slot) -> None:
        """Forget what has come of one parameter's gradient and no reduction has seen."""
        self.close_all()
        self.used.discard(slot.index)
        self._hook_sums.drop(slot.index)
        self._buckets[slot.bucket].drop(slot)

    def clear(self) -> None:
        """The accumulation's gradients were consumed or are not wanted."""
        if self.shown.retire(self.parameters):
            for bucket in self._buckets:
                for holder in bucket.holders:
                    holder.set_placeholders(None)  # asked for anew
        if self._hook_sums.indices:
            self._hook_sums.clear()
        self.used.clear()


def _make_hook(known: weakref.ref[GradientArrivals], slot: Slot) -> Callable[[torch.Tensor], None]:
    index = slot.index

    # Called for every parameter in every backward: a closure, and no call of a method where the gradient is only held.
    def hook(parameter: torch.Tensor) -> None:
        arrivals = known()
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
