"""Gradient reducer: copy gradients into buckets and reduce the buckets while backward runs.

Every trainable parameter has a hook that fires when its gradient has been accumulated. The hook moves the gradient
into its bucket and marks it ready. A backward is one *pass* over the buckets; a reducing pass reduces every bucket
exactly once, in one order for all ranks, so that they launch the same collectives whatever their graphs look like.

At stages 0 to 2 a bucket is launched when its gradients are there. The first reducing pass takes the order of the
index; at its end the ranks take over the order in which rank 0's gradients have come. At stage 3 a bucket is launched
when a unit's backward has ended, which all ranks see in the same order (:class:`LaunchPlan`).

What a bucket holds between passes:

- ``local``: the sum of this rank's gradients that no reduction has seen yet, full length;
- ``reduced``: the mean over ranks of all that has been reduced in this window; full at stage 0, this rank's part
  above.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerolite.comm import Communicator
from zerolite.offload.resting_gradients import RestingGradients
from zerolite.utils.accelerator import host_values
from zerolite.utils.memory_items import GRADIENTS, listeners
from zerolite.zero.bucket_filler import Held, Run
from zerolite.zero.bucket_state import ALONE_NUMEL, IN_FLIGHT, ReductionOptions
from zerolite.zero.commands import Command, Commands, unannounced
from zerolite.zero.gradient_bucket import BucketMemory, GradientBucket, Pass, PassState
from zerolite.zero.hook_sums import HookSums
from zerolite.zero.launch_order import LaunchOrder
from zerolite.zero.layout import Fragment, PartitionLayout, Slot
from zerolite.zero.observers import Observers
from zerolite.zero.sharded_grad import ShardedGradient
from zerolite.zero.shown_gradients import ShownGradients
from zerolite.zero.stage3.launch_plan import LaunchPlan


class GradReducer:
    """See the module. ``on_gradient`` runs inside backward; everything else is called by the step pipeline on all
    ranks in the same order."""

    def __init__(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        options: ReductionOptions,
        pass_reduces: Callable[[], bool],
        strides: Sequence[tuple[int, ...]],
        resting: RestingGradients,
        observers: Observers,
    ) -> None:
        self._observers = observers
        self.layout = layout
        self.resting = resting
        self.strides: list[tuple[int, ...]] = []  # of the parameters when they are whole
        self._used: set[int] = set()
        self.hook_sums = HookSums()
        self._shown = ShownGradients(options.shard, comm.rank)
        self._lent: set[int] = set()  # buckets of which the user may have views
        self._some_open = False  # runs whose hooks hold gradients that have not been counted
        self.losses: list[torch.Tensor] = []  # of this rank's backwards, 0-dim fp32
        self.probes: list[torch.Tensor] = []  # sums of this rank's local buckets: not finite if a gradient was not
        self.parameters: list[torch.nn.Parameter] = []
        self._comm = comm
        self._options = options
        self._pass_reduces = pass_reduces
        self._pass = Pass(options.arrival_factor)
        self._order = LaunchOrder()
        self._memory = BucketMemory(comm, options, self._order, self._pass)
        self._states: list[GradientBucket] = []
        self._hooked: list[Held | None] = []  # by index of the parameter: where its hook may put a gradient
        self._fires: list[int] = []  # contributions of each parameter in this pass
        # The most contributions that a parameter has had in one pass: several where reentrant checkpointing runs a
        # backward inside the backward. Known after the first complete pass. Where gradients rest whole, that one
        # reduces at its end only; elsewhere it does not wait, and reduces once more what has come late.
        self._expected: list[int] = []
        self._learned = False
        self._looks_for_late = False  # in the first pass that reduces; equal on all ranks
        self._seen_gradient = False  # in this pass
        self._void = False  # what comes in this pass counts as nothing
        self._announced = False  # a pass of this window, by a call of the engine that all ranks make
        self.commands: Commands = unannounced
        self.share = 1.0  # what the gradients of the next pass are multiplied by
        self.divisor = 1  # what they are divided by
        self._in_flight: list[GradientBucket] = []
        self._plan: LaunchPlan | None = None
        self._learning = False  # when each bucket's last gradient comes
        self.handles: list[Any] = []  # of the installed hooks
        self.use(layout, parameters, strides)

    def use(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        """Take a layout that begins with the buckets there are; between passes."""
        assert not self._pass.open, "a pass counts the buckets that it began with"
        self.layout = layout
        self.parameters, self.strides = list(parameters), list(strides)
        device = self.parameters[0].device if parameters else torch.device("cpu")  # an engine that trains nothing
        more = len(self.parameters) - len(self._expected)
        self.shown.use(layout, strides)
        fragments = layout.fragments(self._comm.rank) if self._options.shard else layout.full_fragments()
        self._fragments: dict[int, Fragment] = {fragment.slot.index: fragment for fragment in fragments}
        for bucket in layout.buckets[len(self._states) :]:
            dtype = self.parameters[bucket.slots[0].index].dtype
            state = GradientBucket(bucket, dtype, device, strides, self._memory)
            self._states.append(state)
            if self.resting.away(bucket.index):
                self.resting.home(bucket.index, bucket.numel // self._comm.world_size, state.reduced_dtype)
        self._hooked = [self._states[slot.bucket].hooks_of(slot.index) for slot in layout.slots]
        # Where gradients rest full, so do their buckets between steps; elsewhere some travel while one is completed and
        # the next one fills.
        widest = max((bucket.numel for bucket in layout.buckets), default=0)
        self.resting.longest = 4 * widest // self._comm.world_size  # sums are in fp32
        buckets = IN_FLIGHT + 2 if self._options.shard else len(layout.buckets)
        self._memory.use(buckets)
        self._learned, self._looks_for_late = False, self._options.shard  # of the new ones nothing is known
        follows_gradients = self._plan is None and self._options.overlap and self._comm.world_size > 1
        self._order.use(len(layout.buckets), learns=follows_gradients)
        self._expected += [1] * more
        self._fires += [0] * more
        self._count_expected()

    @property
    def order(self) -> list[int]:
        """Buckets in the order of their launches; equal on all ranks."""
        return self._order.buckets

    @property
    def used(self) -> set[int]:
        """The parameters that got a gradient in this window."""
        if self._some_open:
            self._close_runs()
        return self._used

    @property
    def shown(self) -> ShownGradients:
        """What ``p.grad`` shows."""
        if self._some_open:
            self._close_runs()
        return self._shown

    # ---------------------------------------------------------------- hooks

    def attach(self, on_first_gradient: Callable[[int], None], on_gradient: Callable[[int], None] | None) -> None:
        """Install one hook per parameter. ``on_first_gradient(index)`` is called before the first gradient of a pass
        is moved, and must begin the pass; ``on_gradient(index)``, if given, before every one.

        The hooks know the reducer weakly: Python's cycle collector does not see the hooks of a tensor, and a model
        may outlive its engine.
        """
        self._on_first_gradient = on_first_gradient
        self._on_gradient = on_gradient
        self.attach_rest()

    def attach_rest(self) -> None:
        """Install the hooks of the parameters that have none yet."""
        known = weakref.ref(self)
        for slot in self.layout.slots[len(self.handles) :]:
            hook = _make_hook(known, slot)
            self.handles.append(self.hook_sums.register(slot.index, self.parameters[slot.index], hook))

    def _take(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The hook, which runs for every parameter in every backward."""
        gradient = parameter.grad
        first = not self._seen_gradient
        if first or type(gradient) is ShardedGradient:
            gradient = self._take_first(slot, parameter, gradient)
        if self._on_gradient is not None:
            self._on_gradient(slot.index)
        if gradient is None:
            return
        if slot.index in self.hook_sums.users and not self._void:
            gradient = self.hook_sums.taken(slot.index, gradient)
        if self._void:
            parameter.grad = None
            self._count(slot)
            return
        if gradient.layout is not torch.strided:
            parameter.grad = None
            raise RuntimeError(
                f"expected a dense gradient for parameter '{slot.name}', got one with layout {gradient.layout}; "
                "sparse gradients are not supported: build the embedding with sparse=False"
            )
        self._shown.put(slot, parameter)
        self._used.add(slot.index)
        if slot.numel:
            if torch.is_grad_enabled():  # a backward with create_graph
                with torch.no_grad():
                    self._accept(slot, gradient.detach())
            else:
                self._accept(slot, gradient)
            self._count(slot)
        if first:
            self._open_runs()

    def _take_first(self, slot: Slot, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient in ``parameter.grad``, where the pass begins only now, or the parameter had one in it before."""
        if type(gradient) is ShardedGradient:  # autograd has added to it
            gradient = gradient.collect()
        else:
            if self.shown.is_shown(slot.index):  # the user has taken out, or replaced, what was there
                self.drop(slot.index)
                self.shown.replace(slot.index, None)
            self.shown.put_back(slot, parameter)
        if not self._seen_gradient:
            self._on_first_gradient(slot.index)
            self._seen_gradient = True
        return gradient

    def _open_runs(self) -> None:
        """Let the hooks of small parameters hold gradients with the least Python, where nothing looks at each."""
        if self._void or self._on_gradient is not None or listeners or torch.is_grad_enabled():
            return
        fresh = self._shown.renewed()  # what the user has kept of a step is not shown again
        follows = self._plan is not None and not self._learning  # units' ends: no gradient launches anything
        for state in self._states:
            for run in state.runs:
                self._open(run, fresh)
            hooked = state.hooked
            if hooked is not None and follows and state.local is None and not state.launched:
                state.swap_hooked()
                self._open(hooked, fresh)
                if not hooked.open:
                    state.swap_hooked()

    def _open(self, run: Held, fresh: bool) -> None:
        if run.shown is None or fresh:
            run.shown = self._shown.made(run.indices)
        run.open = run.shown is not None and self.hook_sums.users.isdisjoint(run.indices)
        run.counted = len(run.held)
        self._some_open |= run.open

    def _hold(self, run: Held) -> None:
        """The hooks of ``run`` have held the last of its gradients."""
        state = self._states[run.bucket]
        self._close(state, run)
        if not isinstance(run, Run):
            return  # the bucket is launched at the end of a unit's backward
        state.put_run(run, self._pass.factor)
        if state.missing <= 0:
            self._bucket_complete(run.bucket)

    def _close_runs(self) -> None:
        self._some_open = False
        for state in self._states:
            self._close_all(state)

    def _close_all(self, state: GradientBucket) -> None:
        for run in state.runs:
            self._close(state, run)
        if state.hooked is not None:
            self._close(state, state.hooked)

    def _close(self, state: GradientBucket, run: Held) -> None:
        """Count what the hooks of ``run`` hold, and let every further gradient be counted when it comes."""
        if run.open:
            run.open = False
            held = list(run.held)[run.counted :]
            self._used.update(held)
            self._shown.note(held)
            state.count(len(held))
            for index in held:
                self._fires[index] += 1
            if run is state.hooked:
                state.swap_hooked()

    # ---------------------------------------------------------------- a pass

    @property
    def pass_open(self) -> bool:
        return self._pass.open

    def will_reduce(self) -> bool:
        """Whether a pass that begins now reduces its buckets."""
        return self._options.reduce_each_pass or self._pass_reduces()

    def begin_pass(self, reducing: bool, end_with_backward: bool = True, void: bool = False) -> None:
        """Before the first gradient of a backward. ``reducing``: :meth:`will_reduce`. ``end_with_backward``: called
        inside backward, which is to call :meth:`end_pass` when it ends; otherwise the caller does. ``void``: its
        gradients are dropped, as if no parameter had got any, whatever their values."""
        if self._pass.open:
            return
        self._pass.open, self._void = True, void
        self._announced |= not end_with_backward
        self.shown.hide(self.parameters)
        self.hook_sums.show(self.parameters)
        self._seen_gradient = False
        self._pass.reducing = reducing
        self._use_share()
        self._pass.in_local += 1
        self._pass.in_window += 1
        self._order.begin_pass()
        if self._plan is not None:
            self._plan.begin_pass()
            self._learning = not self._plan.settled
        self._fires = [0] * len(self.parameters)
        for state in self._states:
            state.begin_pass()
        if end_with_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    def _use_share(self) -> None:
        factor = self._options.arrival_factor * self.share / self.divisor
        if factor != self._pass.factor:
            with torch.no_grad():
                for state in self._states:  # what an earlier pass has left
                    self._close_all(state)
                    state.put_held(self._pass.factor)
            self._pass.factor = factor

    def _count_expected(self) -> None:
        for state in self._states:
            state.expect(sum(self._expected[slot.index] for slot in state.bucket.slots if slot.numel))

    def end_pass(self, complete: bool = True) -> None:
        """When backward has ended, or was cut short (``complete=False``): launch what is left, so that ranks stay
        in step."""
        if not self._pass.open:
            return
        self._pass.open = self._seen_gradient = False
        try:
            with self.commands(Command.PASS_END):
                self._end_pass(complete)
        finally:
            for notify in self._observers.on_backward_end:
                notify()

    def _end_pass(self, complete: bool) -> None:
        self._close_runs()
        if complete:
            self._learned = True  # of this rank alone: it decides when a bucket is launched in a pass, never whether
            if max(self._fires, default=0) > 1:
                self._expected = list(map(max, self._expected, self._fires))
                self._count_expected()
        if complete or not self.shown.all_none(self.parameters):  # or the user has dropped what it has shown
            self.show_held()
        if self._pass.reducing:  # decided before the pass began, from counters that all ranks have counted alike
            self._launch_until(len(self._states))
            self._agree()
            self._pass.in_local = 0

    def show_held(self) -> None:
        """After a backward: show the gradients of the window, also those of earlier passes, which this one has hidden.

        On several ranks a parameter that this rank has not used shows a gradient too, because another rank may have
        used it: norms of all gradients must be the same numbers on all ranks, and so must what the user drops. Not
        after ``torch.autograd.grad`` alone, a pass that gives no rank any.
        """
        self.hook_sums.hide(self.parameters)
        if len(self.used) < len(self.parameters) and (self._announced or (self.used and self._comm.world_size > 1)):
            self._show_all()
        elif self._pass.in_window > 1:
            self.shown.show(self.parameters, self.used)

    def _show_all(self) -> None:
        trained = [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]
        self.shown.show(self.parameters, trained if not self.used or self._comm.world_size > 1 else self.used)

    def _accept(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Move a gradient into its bucket, or hold it until it is moved with others."""
        state, hooked = self._states[slot.bucket], self._hooked[slot.index]
        if hooked is not None:
            self._close(state, hooked)
        if state.state is not PassState.OPEN:
            self._note_late(state, slot)
        if slot.index in state.held:  # what is held is moved, all of it
            self._close_all(state)
        at_once = self._options.copy_on_arrival and self._plan is None
        state.accept(slot, gradient, at_once, self._pass.factor, tag=bool(listeners))

    def _note_late(self, state: GradientBucket, slot: Slot) -> None:
        """A gradient has come after its bucket was launched."""
        if not self._may_be_late():
            advice = (
                "Set zero_optimization.overlap_comm to false, so that buckets are reduced when backward has ended."
                if self._plan is None
                else "A parameter that is used in some steps only, outside the module that owns it, does this: put "
                "that module and its users in one unit (zero_optimization.leaf_modules)."
            )
            raise RuntimeError(
                f"parameter '{slot.name}' got another gradient in the same backward after its bucket was reduced: the "
                f"graph has contributions to it that it never had before. {advice}"
            )
        state.note_late()

    def _count(self, slot: Slot) -> None:
        """A contribution to the pass has come; its bucket is launched if it was the last."""
        if not slot.numel:
            return
        self._fires[slot.index] += 1
        state = self._states[slot.bucket]
        state.count()
        if self._plan is not None:
            if self._learning:
                self._plan.on_gradient(slot.bucket)
        elif state.missing <= 0:
            self._bucket_complete(slot.bucket)

    def _bucket_complete(self, bucket: int) -> None:
        """All contributions to a bucket that this pass waits for have come."""
        self._order.complete(bucket)
        # When this rank launches is its own affair, as DDP's ranks do: the order of the buckets is fixed, and nothing
        # else is launched on this communicator before the pass has ended.
        if self._pass.reducing and self._options.overlap and (self._learned or self._looks_for_late):
            self._launch_ready()

    # ---------------------------------------------------------------- reduction

    def _launch_ready(self) -> None:
        while self._order.next < len(self._states) and self._states[self.order[self._order.next]].missing <= 0:
            self._launch_until(self._order.next + 1)

    @torch.no_grad()
    def _launch_until(self, end: int) -> None:
        """Launch the buckets whose place in the order is below ``end``, unless they have been."""
        while self._order.next < end:
            state = self._states[self.order[self._order.next]]
            if not state.launched:
                self._launch(state)
            self._order.next += 1

    def _launch(self, state: GradientBucket) -> None:
        """Start the reduction of one bucket. It is filled before earlier reductions are waited for, so that the copies
        run beside them."""
        options = self._options
        self._pass.launching = True
        try:
            self._close_all(state)
            local = state.complete(self._pass.factor)
        finally:
            self._pass.launching = False
        if options.probes:
            self.probes.append(local.sum(dtype=torch.float32))
        self._make_room(state)
        wanted = options.travelling_dtype(state.bucket, state.dtype, self._pass.in_local)
        local = state.convert(local, wanted)
        if options.predivide != 1.0:
            local.div_(options.predivide)
        divisor = self._comm.world_size * options.arrival_factor / options.predivide
        if options.shard and options.use_reduce_scatter:
            dtype, number = state.reduced_dtype, state.bucket.index + 1
            pending = self._comm.reduce_scatter(local, "gradients", divisor, dtype, number)
        else:
            pending = self._comm.all_reduce(local, "gradients", divisor, state.bucket.index + 1)
        state.launch(pending, local)
        self._in_flight.append(state)
        if not options.overlap:
            self._wait_for_all()

    def _make_room(self, state: GradientBucket) -> None:
        """Wait, in the order of launches, until the reduction of ``state`` may be launched: for one of the same bucket,
        and where buckets cost memory only while they travel, until fewer than IN_FLIGHT are under way, and none beside
        a large one."""
        unbound = state.travels_in_place and not self.resting.away(state.bucket.index)
        most = len(self._states) if unbound else 1 if state.bucket.numel >= ALONE_NUMEL else IN_FLIGHT
        while self._in_flight and (len(self._in_flight) >= most or state.pending is not None):
            self._complete(self._in_flight.pop(0))

    def _wait_for_all(self) -> None:
        while self._in_flight:
            self._complete(self._in_flight.pop(0))

    def _complete(self, state: GradientBucket) -> None:
        """Wait for one reduction and add its mean to ``reduced``."""
        options = self._options
        total = state.receive()
        if options.shard and not options.use_reduce_scatter:
            total = self._comm.part(total).clone()
        dtype, bucket = state.reduced_dtype, state.bucket.index
        if state.reduced is None:
            mean = total.to(dtype)
        else:
            mean = self.resting.fetch(bucket, state.reduced).to(dtype).add_(total)
        state.keep(mean, self.resting.keep(bucket, mean))

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what no pass has reduced, wait for all. Afterwards every bucket has ``reduced``. Called once per
        window on all ranks."""
        self.end_pass(complete=False)
        self._wait_for_all()
        self._order.next = 0
        # Both follow from the passes of the window, which all ranks have begun alike, and not from the gradients that
        # came in them: a pass without any still opens, and reduces, every bucket.
        if self._pass.in_local or any(state.reduced is None for state in self._states):
            for state in self._states:
                state.reopen()
            self._launch_until(len(self._states))
            if self._plan is None:  # another rank may have reduced in its backward
                self._agree()
            self._pass.in_local = 0
        self._wait_for_all()

    def wait(self) -> None:
        """For the reductions that are under way, and for gradients on their way to where they rest."""
        self._wait_for_all()
        self.resting.wait_all()

    def follow(self, plan: LaunchPlan) -> None:
        """Launch buckets when units end, not when gradients are there."""
        self._plan = plan
        self._pass.follows_units = True
        self._order.stop_learning()

    @torch.no_grad()
    def on_use_end(self, unit: int) -> None:
        """A unit's backward has ended. Called on all ranks, in the same order."""
        if self._plan is None or not self._pass.open:
            return
        with self.commands(Command.USE_END, unit):
            for bucket in self._plan.on_use_end(unit):
                if self._pass.reducing and not self._states[bucket].launched:
                    self._launch(self._states[bucket])

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are kept here now, and the items of memory that they belong to; small ones are left out."""
        for state in self._states:
            yield from state.memory(rests_here=not self.resting.away(state.bucket.index))
        yield from self._memory.waiting()
        yield from ((GRADIENTS, home) for home in self.resting.memory())

    @property
    def follows_units(self) -> bool:
        """Whether buckets are launched when units end."""
        return self._plan is not None

    def _may_be_late(self) -> bool:
        """Whether gradients may come in this pass after their bucket has been launched; equal on all ranks."""
        return self._looks_for_late if self._plan is None else not self._plan.settled

    @torch.no_grad()
    def _agree(self) -> None:
        """After a pass of which something is to be learned: reduce again the buckets that got gradients after they were
        launched, on any rank; take over when buckets are launched from now on. Called on all ranks."""
        if not self._may_be_late() and not self._order.learning:
            return
        late = [int(state.state is PassState.LATE) for state in self._states]
        learned = self._completion_on_rank_0() if self._plan is None else self._plan.arrivals
        found = [*late, *learned]
        agreed = torch.tensor(found, dtype=torch.int64, device="cpu").to(self.parameters[0].device)
        self._wait_for_all()
        self._comm.all_reduce_max(agreed, "stats")
        values = found if self._comm.peers_agree else [int(value) for value in host_values(agreed)]
        self._reduce_again([state for state, again in zip(self._states, values, strict=False) if again])
        learned = values[len(late) :]
        if self._plan is not None:
            self._plan.learn(learned)
        else:
            self._order.learn(learned)
        self._looks_for_late = False
        self._order.stop_learning()

    def _completion_on_rank_0(self) -> list[int]:
        """Return the places in which rank 0 has completed the buckets in this pass. Zeros on other ranks, so that the
        maximum over ranks is what rank 0 says."""
        speaks = self._comm.rank == 0 or self._comm.peers_agree
        return self._order.completion() if self._order.learning and speaks else [0] * len(self._states)

    def _reduce_again(self, late_states: Sequence[GradientBucket]) -> None:
        """Reduce what has come late, and keep it together with what has been reduced before as one contribution."""
        for state in late_states:
            self._launch(state)
        self._wait_for_all()
        if self._pass.in_window <= 1 and not self._options.several_expected:
            for state in late_states:
                assert state.reduced is not None
                mean = self.resting.fetch(state.bucket.index, state.reduced)
                if mean.dtype != state.dtype:
                    state.rest(self.resting.keep(state.bucket.index, mean.to(state.dtype)))

    # ---------------------------------------------------------------- what the step reads

    def reduced(self, bucket: int) -> torch.Tensor:
        """The mean gradient of the window where it rests: the full bucket at stage 0, this rank's part above. Valid
        after :meth:`finish`."""
        value = self.place_of_reduced(bucket)
        self.resting.wait(bucket)
        return value

    def place_of_reduced(self, bucket: int) -> torch.Tensor:
        """The same, where it may still be on its way."""
        value = self._states[bucket].reduced
        assert value is not None, "reduced() is read after finish()"
        return value

    def owned_part(self, bucket: int) -> torch.Tensor:
        """This rank's part of the mean gradient, at every stage, on the device."""
        value = self.resting.fetch(bucket, self.reduced(bucket))
        return value if self._options.shard else self._comm.part(value)

    # ---------------------------------------------------------------- what the user changes

    @property
    def finished(self) -> bool:
        """Whether :meth:`finish` would have nothing to do."""
        return not (self._pass.open or self._pass.in_local or self._in_flight) and all(
            state.reduced is not None for state in self._states
        )

    def lend(self, bucket: int) -> torch.Tensor:
        """Return the memory of a bucket's mean gradient for the user, who may keep it: it is not used again."""
        self._lent.add(bucket)
        return self.reduced(bucket)

    def fragment(self, index: int) -> Fragment:
        """Return which elements of a parameter :meth:`part` has."""
        return self._fragments[index]

    def mean_dtype(self, index: int) -> torch.dtype:
        """Return the dtype of a parameter's mean gradient, the same on all ranks. Valid after :meth:`finish`."""
        return self.place_of_reduced(self.layout.slots[index].bucket).dtype

    def part(self, index: int) -> torch.Tensor | None:
        """Return this rank's part of a parameter's mean gradient where it rests, a view: flat, or at stage 0 in the
        parameter's shape. None if this rank owns nothing of it. Valid after :meth:`finish`."""
        fragment = self._fragments.get(index)
        if fragment is None:
            return None
        flat = self.reduced(fragment.slot.bucket)
        if self._options.shard:
            return flat.narrow(0, fragment.shard_start, fragment.numel)
        parameter = self.parameters[index]
        shape = getattr(parameter, "ds_shape", parameter.shape)
        return flat.as_strided(shape, self.strides[index], flat.storage_offset() + fragment.bucket_start)

    @torch.no_grad()
    def drop(self, index: int) -> None:
        """Forget what has come of one parameter's gradient. Nothing is launched for it."""
        self._wait_for_all()
        slot = self.layout.slots[index]
        state = self._states[slot.bucket]
        self.used.discard(index)  # closes what hooks hold
        self.hook_sums.forget(index)
        state.drop(slot)
        if state.reduced is not None and (part := self.part(index)) is not None:
            part.zero_()

    @torch.no_grad()
    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take ``gradient`` as one that a backward has brought to this rank, between two passes. It is multiplied by
        nothing that is particular to a pass: neither divided by the micro-batches nor by the ranks that go on."""
        slot = self.layout.slots[index]
        self.used.add(index)
        if not slot.numel:
            return
        self._states[slot.bucket].add(slot, gradient, self._options.arrival_factor)

    @property
    def keeps_shards(self) -> bool:
        """Whether what :meth:`reduced` gives is this rank's part, and not the whole."""
        return self._options.shard

    def release(self, bucket: int) -> None:
        """Drop the gradient of a bucket that has been consumed."""
        reduced = self._states[bucket].reduced
        self._states[bucket].rest(None)
        if reduced is not None and not self._options.shard and bucket not in self._lent:
            self._memory.give_back(reduced)
        self._lent.discard(bucket)

    def clear(self) -> None:
        """Drop everything: the window's gradients were consumed or are not wanted."""
        self.resting.clear()
        self.end_pass(complete=False)
        self._wait_for_all()
        for state in self._states:
            state.clear()
            self.release(state.bucket.index)
        if self._options.shard:
            self._memory.clear()  # between steps no rank holds more than its part
        self._pass.in_local = self._pass.in_window = 0
        self._announced = False
        self.shown.retire(self.parameters)
        self.hook_sums.clear()
        self.used.clear()
        self.probes.clear()
        self.losses.clear()


def _make_hook(known: weakref.ref[GradReducer], slot: Slot) -> Callable[[torch.Tensor], None]:
    index = slot.index

    def hook(parameter: torch.Tensor) -> None:
        reducer = known()
        if reducer is None:
            return
        run = reducer._hooked[index]
        if run is not None and run.open and index not in run.held:
            gradient = parameter.grad
            if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                run.held[index] = gradient
                parameter.grad = run.shown[index]  # type: ignore[index]
                if len(run.held) == run.count:
                    reducer._hold(run)
                return
        reducer._take(slot, parameter)

    return hook
