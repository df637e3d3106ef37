"""Gradient reducer: reduce buckets while backward runs, the same collectives on all ranks.

A backward is one *pass* over the buckets; a reducing pass reduces every bucket exactly once, in one order for all
ranks, so that they launch the same collectives whatever their graphs look like.

At stages 0 to 2 a bucket is launched when its gradients are there. The first reducing pass takes the order of the
index; at its end the ranks take over the order in which rank 0's gradients have come. At stage 3 a bucket is launched
when a unit's backward has ended, which all ranks see in the same order (:class:`LaunchPlan`).

What a bucket holds between passes:

- ``local``: the sum of this rank's gradients that no reduction has seen yet, full length;
- ``reduced``: the mean over ranks of all that has been reduced in this accumulation; full at stage 0, this rank's part
  above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zerolite.comm import Communicator
from zerolite.offload.offloaded_gradients import OffloadedGradients
from zerolite.utils.memory_tags import GRADIENTS
from zerolite.zero.bucket_state import ALONE_NUMEL, IN_FLIGHT, ReductionOptions
from zerolite.zero.commands import Command, Commands
from zerolite.zero.gradient_arrivals import GradientArrivals
from zerolite.zero.gradient_bucket import BucketMemory, GradientBucket, Pass
from zerolite.zero.late_gradients import LateGradients
from zerolite.zero.launch_order import LaunchOrder
from zerolite.zero.layout import Fragment, PartitionLayout, Slot
from zerolite.zero.observers import Observers
from zerolite.zero.shown_gradients import MakeGradient
from zerolite.zero.stage3.launch_plan import LaunchPlan


class GradReducer:
    """See the module. Called by the step pipeline on all ranks in the same order; what runs inside backward is
    :class:`GradientArrivals`.

    Attributes:
        current: the backward under way, or the last one.
        order: of the launches of buckets; equal on all ranks.
        parameters: of the layout, by index.
        used: the parameters that got a gradient since the last step; complete between backwards.
        shown: what ``p.grad`` shows; complete between backwards.
        losses: of this rank's backwards, 0-dim fp32.
        probes: sums of this rank's buckets: not finite if a gradient was not.
        reduces_each_pass: a pass reduces its buckets whether it is the last of a step or not.
        keeps_shards: :meth:`reduced` gives this rank's part, and not the whole.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        comm: Communicator,
        options: ReductionOptions,
        strides: Sequence[tuple[int, ...]],
        offloaded: OffloadedGradients | None,
        observers: Observers,
        make_gradient: MakeGradient,
    ) -> None:
        """
        Args:
            offloaded: where mean gradients rest, None where that is the device.
            make_gradient: makes what ``p.grad`` shows.
        """
        self._observers = observers
        self.layout = layout
        self.strides: list[tuple[int, ...]] = []  # of the parameters when they are whole
        self._lent: set[int] = set()  # buckets of which the user may have views
        self.losses: list[torch.Tensor] = []
        self.probes: list[torch.Tensor] = []
        self._comm = comm
        self._options = options
        self.reduces_each_pass, self.keeps_shards = options.reduce_each_pass, options.shard
        self._offloaded = offloaded
        self.current = Pass(options.arrival_factor)
        self.order = LaunchOrder()
        self._memory = BucketMemory(comm, options, self.order, self.current, offloaded)
        self._states: list[GradientBucket] = []
        self.arrivals = GradientArrivals(options, self.current, self, comm.rank, comm.world_size, make_gradient)
        self.used, self.shown = self.arrivals.used, self.arrivals.shown
        self._late = LateGradients(comm, options, self.order, self.current, self._reduce_now)
        self._announced = False  # a pass of this accumulation, by a call of the engine that all ranks make
        self.commands = Commands()
        self.share = 1.0  # what the gradients of the next pass are multiplied by, unless the loss has a weight
        self._in_flight: list[GradientBucket] = []
        self._plan: LaunchPlan | None = None
        self.use(layout, parameters, strides)

    def use(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        """Take a layout that begins with the buckets there are; between passes."""
        assert not self.current.open, "a pass counts the buckets that it began with"
        self.layout, self.strides = layout, list(strides)
        fragments = layout.fragments(self._comm.rank) if self._options.shard else layout.full_fragments()
        self._fragments: dict[int, Fragment] = {fragment.slot.index: fragment for fragment in fragments}
        for bucket in layout.buckets[len(self._states) :]:
            state = GradientBucket(bucket, parameters[bucket.slots[0].index], strides, self._memory)
            self._states.append(state)
            state.reserve(bucket.numel // self._comm.world_size)
        self.arrivals.use(layout, parameters, strides, self._states)
        self.parameters = self.arrivals.parameters
        if self._offloaded is not None:
            widest = max((bucket.numel for bucket in layout.buckets), default=0)
            self._offloaded.expect(4 * widest // self._comm.world_size)  # sums are in fp32
        # Where gradients rest full, so do their buckets between steps; elsewhere some travel while one is completed and
        # the next one fills.
        self._memory.use(IN_FLIGHT + 2 if self._options.shard else len(layout.buckets))
        follows_gradients = self._plan is None and self._options.overlap and self._comm.world_size > 1
        self.order.use(len(layout.buckets), learns=follows_gradients)
        self._late.use(self._states)

    # ---------------------------------------------------------------- a pass

    def begin_pass(
        self,
        reducing: bool,
        end_with_backward: bool = True,
        weight: float | None = None,
        divisor: int = 1,
    ) -> None:
        """Open the buckets before the first gradient of a backward.

        Args:
            reducing: the pass reduces its buckets; equal on all ranks.
            end_with_backward: called inside backward, which is to call :meth:`end_pass` when it ends; otherwise the
                caller does.
            weight: of the loss; it says all about how much a rank counts. 0: gradients are dropped, as if no parameter
                had got any, whatever their values.
            divisor: what gradients are divided by.
        """
        if self.current.open:
            return
        self._announced |= not end_with_backward
        factor = self._options.arrival_factor * (self.share if weight is None else 1.0) / divisor
        if factor != self.current.factor:
            self._change_factor(factor)
        if self._plan is not None:
            self._plan.begin_pass()
        self.current.begin(reducing, void=weight == 0, learning=self._plan is not None and not self._plan.settled)
        self.order.begin_pass()
        self.arrivals.begin_pass()
        for state in self._states:
            state.begin_pass()
        if end_with_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    @torch.no_grad()
    def _change_factor(self, factor: float) -> None:
        for state in self._states:  # what an earlier pass has left
            self.arrivals.close(state)
            state.put_held(self.current.factor)
        self.current.multiply_by(factor)

    def end_pass(self, complete: bool = True) -> None:
        """When backward has ended, or was cut short (``complete=False``): launch what is left, so that ranks stay
        in step."""
        if not self.current.open:
            return
        self.current.end()
        try:
            with self.commands(Command.PASS_END):
                self.arrivals.end_pass(complete)
                if complete or not self.shown.all_none(self.parameters):  # or the user has dropped what it has shown
                    self.show_held()
                if self.current.reducing:  # decided before the pass began, from counters that all ranks count alike
                    self._launch_until(len(self._states))
                    self._late.agree()
                    self.current.on_all_reduced()
        finally:
            for notify in self._observers.on_backward_end:
                notify()

    def show_held(self) -> None:
        """After a backward, or one that has raised: let ``p.grad`` show the gradients of the accumulation."""
        self.arrivals.show(self._announced, several=self.current.in_accumulation > 1)

    # ---------------------------------------------------------------- what gradients launch

    def on_late_gradient(self, state: GradientBucket, slot: Slot) -> None:
        self._late.note(state, slot)

    def on_gradient(self, bucket: int) -> None:
        if self._plan is not None:
            self._plan.on_gradient(bucket)

    def on_bucket_complete(self, bucket: int) -> None:
        self.order.complete(bucket)
        # When this rank launches is its own affair, as DDP's ranks do: the order of the buckets is fixed, and nothing
        # else is launched on this communicator before the pass has ended.
        if self.current.reducing and self._options.overlap and (self.arrivals.learned or self._late.possible):
            self._launch_ready()

    # ---------------------------------------------------------------- reduction

    def _launch_ready(self) -> None:
        while self.order.next < len(self._states) and self._states[self.order.buckets[self.order.next]].missing <= 0:
            self._launch_until(self.order.next + 1)

    @torch.no_grad()
    def _launch_until(self, end: int) -> None:
        """Launch the buckets whose place in the order is below ``end``, unless they have been."""
        while self.order.next < end:
            state = self._states[self.order.buckets[self.order.next]]
            if not state.launched:
                self._launch(state)
            self.order.next += 1

    def _launch(self, state: GradientBucket) -> None:
        """Start the reduction of one bucket. It is filled before earlier reductions are waited for, so that the copies
        run beside them."""
        options = self._options
        self.arrivals.close(state)
        local = state.complete(self.current.factor)
        if options.probes:
            self.probes.append(local.sum(dtype=torch.float32))
        self._make_room(state)
        local = state.convert(local)
        if options.predivide != 1.0:
            local.div_(options.predivide)
        divisor = self._comm.world_size * options.arrival_factor / options.predivide
        number = state.bucket.index + 1
        if options.shard and options.use_reduce_scatter:
            pending = self._comm.reduce_scatter(local, "gradients", divisor, state.mean_dtype, number)
        else:
            pending = self._comm.all_reduce(local, "gradients", divisor, number)
        state.launch(pending, local)
        self._in_flight.append(state)
        if not options.overlap:
            self._wait_for_all()

    def _make_room(self, state: GradientBucket) -> None:
        """Wait, in the order of launches, until the reduction of ``state`` may be launched: for one of the same bucket,
        and where buckets cost memory only while they travel, until fewer than IN_FLIGHT are under way, and none beside
        a large one."""
        unbound = state.travels_in_place and not state.away
        most = len(self._states) if unbound else 1 if state.bucket.numel >= ALONE_NUMEL else IN_FLIGHT
        while self._in_flight and (len(self._in_flight) >= most or state.pending is not None):
            self._complete(self._in_flight.pop(0))

    def _wait_for_all(self) -> None:
        while self._in_flight:
            self._complete(self._in_flight.pop(0))

    def _complete(self, state: GradientBucket) -> None:
        """Wait for one reduction, and keep its mean."""
        total = state.receive()
        if self._options.shard and not self._options.use_reduce_scatter:
            total = self._comm.part(total).clone()
        state.keep(total)

    def _reduce_now(self, states: Sequence[GradientBucket]) -> None:
        """Reduce these buckets, and wait for all reductions."""
        for state in states:
            self._launch(state)
        self._wait_for_all()

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what no pass has reduced, wait for all. Afterwards every bucket has ``reduced``. Called once per
        accumulation on all ranks."""
        self.end_pass(complete=False)
        self._wait_for_all()
        self.order.next = 0
        # Both follow from the passes of the accumulation, which all ranks have begun alike, and not from the gradients
        # that came in them: a pass without any still opens, and reduces, every bucket.
        if self.current.in_local or any(state.reduced is None for state in self._states):
            for state in self._states:
                state.reopen()
            self._launch_until(len(self._states))
            if self._plan is None:  # another rank may have reduced in its backward
                self._late.agree()
            self.current.on_all_reduced()
        self._wait_for_all()

    def wait(self) -> None:
        """Wait for the reductions that are under way, and for gradients on their way to their storage."""
        self._wait_for_all()
        if self._offloaded is not None:
            self._offloaded.wait_all()

    def follow(self, plan: LaunchPlan) -> None:
        """Launch buckets when units end, not when gradients are there."""
        self._plan = plan
        self._late.follow(plan)
        self.current.follow_units()
        self.order.stop_learning()

    @torch.no_grad()
    def on_use_end(self, unit: int) -> None:
        """A unit's backward has ended. Called on all ranks, in the same order."""
        if self._plan is None or not self.current.open:
            return
        with self.commands(Command.USE_END, unit):
            for bucket in self._plan.on_use_end(unit):
                if self.current.reducing and not self._states[bucket].launched:
                    self._launch(self._states[bucket])

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are kept here now, and the items of memory that they belong to; small ones are left out."""
        for state in self._states:
            yield from state.memory()
        yield from self._memory.waiting()
        if self._offloaded is not None:
            yield from ((GRADIENTS, home) for home in self._offloaded.memory())

    @property
    def follows_units(self) -> bool:
        """True if buckets are launched when units end."""
        return self._plan is not None

    # ---------------------------------------------------------------- what the step reads

    def reduced(self, bucket: int) -> torch.Tensor:
        """The mean gradient of the accumulation where it rests: the full bucket at stage 0, this rank's part above.
        Valid after :meth:`finish`."""
        return self._states[bucket].offloaded_mean()

    def place_of_reduced(self, bucket: int) -> torch.Tensor:
        """The same, where it may still be on its way."""
        value = self._states[bucket].reduced
        assert value is not None, "it is read after finish()"
        return value

    def owned_part(self, bucket: int) -> torch.Tensor:
        """This rank's part of the mean gradient, at every stage, on the device."""
        value = self._states[bucket].fetch()
        return value if self._options.shard else self._comm.part(value)

    def away(self, bucket: int) -> bool:
        """True if the mean gradient does not rest on the device."""
        return self._states[bucket].away

    # ---------------------------------------------------------------- what the user changes

    @property
    def finished(self) -> bool:
        """True if :meth:`finish` would have nothing to do."""
        return not (self.current.open or self.current.in_local or self._in_flight) and all(
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
        self.arrivals.drop(slot)
        if self._states[slot.bucket].reduced is not None and (part := self.part(index)) is not None:
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

    def release(self, bucket: int) -> None:
        """Drop the gradient of a bucket that has been consumed."""
        self._states[bucket].release(reuse=not self._options.shard and bucket not in self._lent)
        self._lent.discard(bucket)

    def clear(self) -> None:
        """Drop everything: the accumulation's gradients were consumed or are not wanted."""
        if self._offloaded is not None:
            self._offloaded.clear()
        self.end_pass(complete=False)
        self._wait_for_all()
        for state in self._states:
            state.clear()
            self.release(state.bucket.index)
        if self._options.shard:
            self._memory.clear()  # between steps no rank holds more than its part
        self.current.end_accumulation()
        self._announced = False
        self.arrivals.clear()
        self.probes.clear()
        self.losses.clear()
