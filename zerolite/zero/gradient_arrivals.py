"""Arrival of gradients: hooks move them from ``p.grad`` into their buckets while backward runs.

Every trainable parameter has a hook that fires when its gradient has been accumulated. What stays in ``p.grad`` is a
tensor without memory that stands for the mean over ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zerolite.utils.memory_tags import listeners
from zerolite.zero.bucket_filler import Held, Run
from zerolite.zero.bucket_state import ReductionOptions
from zerolite.zero.gradient_bucket import GradientBucket, Pass, PassState
from zerolite.zero.hook_sums import HookSums
from zerolite.zero.layout import PartitionLayout, Slot
from zerolite.zero.shown_gradients import GradientPlaceholder, MakeGradient, ShownGradients


class Launcher(Protocol):
    """Receiver of gradient events: the reducer."""

    def drop(self, index: int) -> None:
        """The user has dropped what has come of a parameter's gradient, reduced or not."""

    def on_late_gradient(self, state: GradientBucket, slot: Slot) -> None:
        """A gradient has come after the launch of its bucket, and is moved next. Raises RuntimeError if none may come
        any more."""

    def on_gradient(self, bucket: int) -> None:
        """A gradient of a bucket has come in a pass of which it is learned when that happens."""

    def on_bucket_complete(self, bucket: int) -> None:
        """All contributions to a bucket that this pass waits for have come."""


class GradientArrivals:
    """The hooks, and what they know. They run inside backward; everything else is called by the reducer.

    Attributes:
        parameters: of the layout, by index.
        used: the parameters that got a gradient in this accumulation.
        shown: what ``p.grad`` shows.
        learned: contributions are known from a complete pass; of this rank alone, so it decides when a bucket is
            launched in a pass, never whether.
        handles: of the installed hooks.
    """

    def __init__(
        self,
        options: ReductionOptions,
        current: Pass,
        launcher: Launcher,
        rank: int,
        world_size: int,
        make_gradient: MakeGradient,
    ) -> None:
        self._options, self._pass, self._world_size = options, current, world_size
        self._launcher = weakref.proxy(launcher)
        self._states: Sequence[GradientBucket] = ()
        self._slots: Sequence[Slot] = ()
        self.parameters: list[torch.nn.Parameter] = []
        self.shown = ShownGradients(options.shard, rank, make_gradient)
        self.used: set[int] = set()
        self.handles: list[Any] = []
        self._hook_sums = HookSums()
        self._hooked: list[Held | None] = []  # by index of the parameter: where its hook may put a gradient
        self._some_open = False  # hooks hold gradients that have not been counted
        self._seen_gradient = False  # in this pass
        self._fires: list[int] = []  # contributions of each parameter in this pass
        # The most contributions that a parameter has had in one pass: several where reentrant checkpointing runs a
        # backward inside the backward. Known after the first complete pass. Where gradients rest whole, that one
        # reduces at its end only; elsewhere it does not wait, and reduces once more what has come late.
        self._expected: list[int] = []
        self.learned = False

    def use(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        strides: Sequence[tuple[int, ...]],
        states: Sequence[GradientBucket],
    ) -> None:
        """Have these buckets, those that there are first; between passes."""
        self._slots, self.parameters, self._states = layout.slots, list(parameters), states
        self.shown.use(layout, strides)
        more = len(self.parameters) - len(self._expected)
        self._hooked = [states[slot.bucket].hooks_of(slot.index) for slot in layout.slots]
        self._expected += [1] * more
        self._fires += [0] * more
        self.learned = False  # of the new ones nothing is known

    def attach(
        self,
        begin: Callable[[], None],
        check_first: Callable[[str], None] | None,
        on_gradient: Callable[[int], None] | None,
    ) -> None:
        """Install one hook per parameter. ``begin()`` is called before the first gradient of a backward that has not
        begun a pass, and must begin one; ``check_first(name)`` before the first gradient of every pass is moved;
        ``on_gradient(index)`` before every one.

        The hooks know this object weakly: Python's cycle collector does not see the hooks of a tensor, and a model may
        outlive its engine.
        """
        self._begin, self._check_first, self._on_gradient = begin, check_first, on_gradient
        self.attach_rest()

    def attach_rest(self) -> None:
        """Install the hooks of the parameters that have none yet."""
        known = weakref.ref(self)
        for slot in self._slots[len(self.handles) :]:
            hook = _make_hook(known, slot)
            self.handles.append(self._hook_sums.register(slot.index, self.parameters[slot.index], hook))

    # ---------------------------------------------------------------- in a hook

    def _take(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Move a gradient by itself: a large one, the first of a pass, or one that must be looked at."""
        gradient = parameter.grad
        first = not (self._seen_gradient and self._pass.open)
        if first or isinstance(gradient, GradientPlaceholder):
            gradient = self._take_first(slot, parameter, gradient)
        if self._on_gradient is not None:
            self._on_gradient(slot.index)
        if gradient is None:
            return
        if self._pass.void:
            parameter.grad = None
            if slot.numel:
                self._states[slot.bucket].count(1)
                self._count(slot)
            return
        if slot.index in self._hook_sums.users:
            gradient = self._hook_sums.taken(slot.index, gradient)
        if gradient.layout is not torch.strided:
            parameter.grad = None
            raise RuntimeError(
                f"expected a dense gradient for parameter '{slot.name}', got one with layout {gradient.layout}; "
                "sparse gradients are not supported: build the embedding with sparse=False"
            )
        self.shown.put(slot, parameter)
        self.used.add(slot.index)
        if slot.numel:
            self._accept(slot, gradient)
            self._count(slot)
        if first:
            self._open_runs()

    def _take_first(self, slot: Slot, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient in ``parameter.grad``, the first of a pass, or added to what the engine shows there."""
        if isinstance(gradient, GradientPlaceholder):  # autograd has added to it
            gradient = gradient.collect()
        elif self._pass.open:
            parameter.grad = None
        else:
            if self.shown.is_shown(slot.index):  # the user has taken out, or replaced, what was there
                self._launcher.drop(slot.index)
                self.shown.replace(slot.index, None)
            self.shown.put_back(slot, parameter)
        if not self._pass.open:
            self._begin()
        if not self._seen_gradient:
            if self._check_first is not None:
                self._check_first(slot.name)
            self._seen_gradient = True
        return gradient

    def _accept(self, slot: Slot, gradient: torch.Tensor) -> None:
        state, hooked = self._states[slot.bucket], self._hooked[slot.index]
        if hooked is not None and hooked.open:
            self._close(state, hooked)
        if state.state is not PassState.OPEN:
            self._launcher.on_late_gradient(state, slot)
        if slot.index in state.held:  # what is held is moved, all of it
            self.close(state)
        at_once = self._options.copy_on_arrival and not self._pass.follows_units
        if not torch.is_grad_enabled():
            state.accept(slot, gradient, at_once, self._pass.factor, tag=bool(listeners))
            return
        with torch.no_grad():  # a backward with create_graph
            state.accept(slot, gradient.detach(), at_once, self._pass.factor, tag=bool(listeners))

    def _count(self, slot: Slot) -> None:
        """A contribution to the pass has come; its bucket is complete if it was the last."""
        self._fires[slot.index] += 1
        if self._pass.follows_units:
            if self._pass.learning:
                self._launcher.on_gradient(slot.bucket)
        elif self._states[slot.bucket].missing <= 0:
            self._launcher.on_bucket_complete(slot.bucket)

    # ---------------------------------------------------------------- gradients that hooks hold

    def _open_runs(self) -> None:
        """Let the hooks of small parameters hold gradients with the least Python, where nothing looks at each."""
        if self._pass.void or self._on_gradient is not None or listeners or torch.is_grad_enabled():
            return
        fresh = self.shown.renewed()  # what the user has kept of a step is not shown again
        follows = self._pass.follows_units and not self._pass.learning  # no gradient launches anything
        for state in self._states:
            for run in state.runs:
                self._open(run, fresh)
            hooked = state.hooked
            if hooked is not None and follows and state.local is None and not state.launched:
                self._open(hooked, fresh, swaps=state)

    def _open(self, run: Held, fresh: bool, swaps: GradientBucket | None = None) -> None:
        if run.shown is None or fresh:
            run.show(self.shown.made(run.indices))
        if run.shown is not None and self._hook_sums.users.isdisjoint(run.indices):
            if swaps is not None:
                swaps.swap_hooked()
            run.begin()
            self._some_open = True

    def _complete_run(self, run: Held) -> None:
        """The hooks of ``run`` have held the last of its gradients."""
        state = self._states[run.bucket]
        self._close(state, run)
        if not isinstance(run, Run):
            return  # the bucket is launched at the end of a unit's backward
        state.put_run(run, self._pass.factor)
        if state.missing <= 0:
            self._launcher.on_bucket_complete(run.bucket)

    def close_all(self) -> None:
        """:meth:`close` for all buckets: afterwards ``used`` and ``shown`` are complete."""
        if self._some_open:
            self._some_open = False
            for state in self._states:
                self.close(state)

    def close(self, state: GradientBucket) -> None:
        """Count what hooks hold of a bucket, and let every further gradient be counted when it comes."""
        for run in state.runs:
            if run.open:
                self._close(state, run)
        if state.hooked is not None and state.hooked.open:
            self._close(state, state.hooked)

    def _close(self, state: GradientBucket, run: Held) -> None:
        held = run.end()
        self.used.update(held)
        self.shown.note(held)
        state.count(len(held))
        for index in held:
            self._fires[index] += 1
        if run is state.hooked:
            state.swap_hooked()

    # ---------------------------------------------------------------- a pass

    def begin_pass(self) -> None:
        self.shown.hide(self.parameters)
        if self._hook_sums.users:
            self._hook_sums.show(self.parameters)
        self._seen_gradient = False
        self._fires = [0] * len(self.parameters)

    def end_pass(self, complete: bool) -> None:
        """End a backward, or (not ``complete``) one that was cut short."""
        self._seen_gradient = False
        self.close_all()
        if not complete:
            return
        self.learned = True
        if max(self._fires, default=0) > 1:
            self._expected = list(map(max, self._expected, self._fires))
            for state in self._states:
                state.expect(sum(self._expected[slot.index] for slot in state.bucket.slots if slot.numel))

    def show(self, all_ranks_know: bool, several: bool) -> None:
        """After a backward: show the gradients of the accumulation.

        On several ranks a parameter that this rank has not used shows a gradient too, because another rank may have
        used it: norms of all gradients must be the same numbers on all ranks, and so must what the user drops. Not
        after ``torch.autograd.grad`` alone, a pass that gives no rank any.

        Args:
            several: also those of earlier passes, which this one has hidden.
            all_ranks_know: it was not such a pass.
        """
        self.close_all()
        if self._hook_sums.users:
            self._hook_sums.hide(self.parameters)
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
        self._hook_sums.forget(slot.index)
        self._states[slot.bucket].drop(slot)

    def clear(self) -> None:
        """The accumulation's gradients were consumed or are not wanted."""
        self.shown.retire(self.parameters)
        if self._hook_sums.users:
            self._hook_sums.clear()
        self.used.clear()


def _make_hook(known: weakref.ref[GradientArrivals], slot: Slot) -> Callable[[torch.Tensor], None]:
    index = slot.index

    def hook(parameter: torch.Tensor) -> None:
        arrivals = known()
        if arrivals is None:
            return
        run = arrivals._hooked[index]
        if run is not None and run.open and index not in run.held:
            gradient = parameter.grad
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                run.held[index] = gradient
                parameter.grad = run.shown[index]  # type: ignore[index]
                if len(run.held) == run.count:
                    arrivals._complete_run(run)
                return
        arrivals._take(slot, parameter)

    return hook
