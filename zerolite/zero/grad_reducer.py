"""Gradient reducer: reduce buckets while backward runs, the same collectives on all ranks.

A backward that reduces, reduces every bucket exactly once, in one order for all ranks, so that they launch the same
collectives whatever their graphs look like.

At stages 0 to 2 a bucket is launched when its gradients are there. The first such backward takes the order of the
index; at its end the ranks take over the order in which rank 0's gradients have come. At stage 3 a bucket is launched
when a group's backward has ended, which all ranks see in the same order (:class:`LaunchPlan`).

Until it is known when each bucket's last gradient comes, one may come too late: reentrant checkpointing runs a backward
inside the backward, and a module may be used several times. At the end of such a backward the ranks agree on what was
late, which is reduced once more, and on when buckets are launched from then on. Later backwards do not ask.

What a bucket holds between backwards:

- ``local``: the sum of this rank's gradients that no reduction has seen yet, full length;
- ``reduced``: the mean over ranks of all that has been reduced in this accumulation; full at stage 0, this rank's part
  above.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from zerolite.comm import Communicator
from zerolite.offload.offloaded_gradients import OffloadedGradients
from zerolite.utils.accelerator import host_values
from zerolite.utils.memory_tags import GRADIENTS
from zerolite.zero.bucket_memory import ALONE_NUMEL, IN_FLIGHT, Backward, BucketMemory, ReductionOptions
from zerolite.zero.commands import Command, Commands
from zerolite.zero.gradient_arrivals import GradientArrivals
from zerolite.zero.gradient_bucket import BucketState, GradientBucket
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
        order: order in which buckets are launched; equal on all ranks.
        parameters: the layout's parameters, by index.
        strides: strides of the whole parameters, by index.
        used: indices of parameters that got a gradient since the last step; complete between backwards.
        shown: the tensors that ``p.grad`` shows; complete between backwards.
        losses: losses of this rank's backwards, 0-dim fp32.
        bucket_sums: sums of this rank's buckets, 0-dim. A sum is not finite if a gradient was not.
        rank_factor: factor of the next backward's gradients, if its loss has no weight.
        reduces_each_backward: every backward reduces its buckets, and not only the last one of a step.
        keeps_shards: this rank keeps its part of the mean gradient, and not the whole.
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
        self._comm, self._options, self._offloaded, self._observers = comm, options, offloaded, observers
        self.reduces_each_backward, self.keeps_shards = options.reduce_each_backward, options.shard
        self.current = Backward(options.arrival_factor)
        self.order = LaunchOrder()
        self._memory = BucketMemory(comm, options, self.order, self.current, offloaded)
        self._buckets: list[GradientBucket] = []
        self.arrivals = GradientArrivals(options, self.current, self, comm.rank, comm.world_size, make_gradient)
        self.used, self.shown = self.arrivals.used, self.arrivals.shown
        self.commands = Commands()
        self.rank_factor = 1.0
        self.losses: list[torch.Tensor] = []
        self.bucket_sums: list[torch.Tensor] = []
        self._lent: set[int] = set()  # buckets of which the user may have views
        self._engine_began = False  # a backward of this accumulation, by a call of the engine that all ranks make
        self._in_flight: list[GradientBucket] = []
        self._plan: LaunchPlan | None = None
        self._new_buckets = False  # no backward has reduced them all yet; equal on all ranks
        self._late_error: RuntimeError | None = None  # a late gradient in a backward that follows a plan so far
        self.use(layout, parameters, strides)

    def use(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        """Take a layout that begins with the buckets there are; between backwards."""
        assert not self.current.open, "a backward counts the buckets that it began with"
        self.layout, self.strides = layout, list(strides)
        fragments = layout.fragments(self._comm.rank) if self.keeps_shards else layout.full_fragments()
        self._fragments: dict[int, Fragment] = {fragment.slot.index: fragment for fragment in fragments}
        for bucket in layout.buckets[len(self._buckets) :]:
            parameter = parameters[bucket.slots[0].index]
            self._buckets.append(GradientBucket(bucket, parameter, strides, self._memory))
        self.arrivals.use(layout, parameters, strides, self._buckets)
        self.parameters = self.arrivals.parameters
        if self._offloaded is not None:
            widest = max((bucket.numel for bucket in layout.buckets), default=0)
            self._offloaded.expect(4 * widest // self._comm.world_size)  # sums are in fp32
        # Where gradients rest full, so do their buckets between steps; elsewhere some travel while one is completed and
        # the next one fills.
        self._memory.use(IN_FLIGHT + 2 if self.keeps_shards else len(layout.buckets))
        follows_gradients = self._plan is None and self._options.overlap and self._comm.world_size > 1
        self.order.use(len(layout.buckets), learns=follows_gradients)
        self._new_buckets = self.keeps_shards

    def use_launch_plan(self, plan: LaunchPlan) -> None:
        """Launch buckets when groups end, not when gradients are there."""
        self._plan = plan
        self.order.stop_learning()

    # ---------------------------------------------------------------- a backward

    def begin_backward(
        self,
        reducing: bool,
        end_with_backward: bool = True,
        weight: float | None = None,
        divisor: int = 1,
    ) -> None:
        """Open the buckets before the first gradient of a backward.

        Args:
            reducing: this backward reduces its buckets; equal on all ranks.
            end_with_backward: this is called inside of the backward, and autograd calls :meth:`end_backward` at its
                end. Otherwise the caller does.
            weight: weight of the loss; it takes the place of :attr:`rank_factor`. With 0 all gradients are dropped,
                whatever their values, as if no parameter had got any.
            divisor: number by which gradients are divided.
        """
        if self.current.open:
            return
        self._engine_began |= not end_with_backward
        factor = self._options.arrival_factor * (self.rank_factor if weight is None else 1.0) / divisor
        if factor != self.current.factor:
            # What an earlier backward has left is multiplied by that backward's factor, when it is moved.
            self._move_held()
        plan = self._plan
        if plan is not None:
            plan.begin_backward()
        self.current.begin(factor, reducing, weight == 0, plan is not None, plan is not None and not plan.settled)
        if self.order.learning:
            self.order.begin_backward()
        self.arrivals.begin_backward()
        several = self.current.unreduced > 1
        for bucket in self._buckets:
            bucket.open(several)
        if end_with_backward:
            # This is a hook in the user's backward. Autograd calls its callbacks when all gradients are there; a hook
            # of the last gradient cannot know that it is the last.
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    @torch.no_grad()
    def _move_held(self) -> None:
        for bucket in self._buckets:
            self.arrivals.close(bucket)
            bucket.put_held(self.current.factor)

    def end_backward(self, complete: bool = True) -> None:
        """End a backward: launch the remaining buckets, so that all ranks have launched the same collectives.

        complete: False if an exception has cut the backward short.
        """
        if not self.current.open:
            return
        self.current.end()
        try:
            with self.commands(Command.BACKWARD_END):
                self.arrivals.end_backward(complete)
                if complete or not self.shown.all_none(self.parameters):  # or the user has dropped what it has shown
                    self.arrivals.show(self._engine_began, several=self.current.accumulated > 1)
                if self.current.reducing:  # decided before it began, from counters that all ranks count alike
                    self._launch_all()
                    if self.order.learning or self._late_possible or self._late_error is not None:
                        self._agree_on_late()
                    self.current.on_all_reduced()
        finally:
            for notify in self._observers.on_backward_end:
                notify()

    def show_held(self) -> None:
        """Let ``p.grad`` show the gradients of the accumulation again, after a backward that has raised."""
        self.arrivals.close_all()
        self.arrivals.show(self._engine_began, several=self.current.accumulated > 1)

    # ---------------------------------------------------------------- events inside it

    def on_gradient(self, bucket: GradientBucket) -> None:
        """Count a gradient that has come into ``bucket``, and launch buckets that are complete.

        The order of the buckets is fixed, and nothing else is launched on this communicator before the backward has
        ended. So each rank may launch at its own time, as DDP's ranks do.
        """
        if self._plan is not None:
            if self.current.learning:
                self._plan.on_gradient(bucket.bucket.index)
        elif bucket.missing <= 0:
            if self.order.learning:
                self.order.complete(bucket.bucket.index)
            if self.current.reducing and self._options.overlap and (self.arrivals.learned or self._new_buckets):
                self._launch_all(only_complete=True)

    @torch.no_grad()
    def on_group_end(self, group: int) -> None:
        """Launch the buckets that are due when the backward of ``group`` has ended. Called on all ranks, in the same
        order."""
        if self._plan is None or not self.current.open:
            return
        with self.commands(Command.GROUP_END, group):
            for index in self._plan.on_group_end(group):
                if self.current.reducing and self._buckets[index].state is BucketState.OPEN:
                    self._launch(self._buckets[index])

    def on_late_gradient(self, bucket: GradientBucket, slot: Slot) -> None:
        """Note a gradient that has come after the launch of its bucket.

        Raises RuntimeError if no such gradient may come any more. At stage 3 :meth:`_agree_on_late` raises it later:
        the module execution that has brought the gradient may depart from the plan, which all ranks see at its end.
        """
        if not self._late_possible:
            advice = (
                "Set zero_optimization.overlap_comm to false, so that buckets are reduced when backward has ended."
                if self._plan is None
                else "A parameter that is used in some steps only, outside the module that owns it, does this: put "
                "that module and its users in one unit (zero_optimization.leaf_modules)."
            )
            error = RuntimeError(
                f"parameter '{slot.name}' got another gradient in the same backward after its bucket was reduced: the "
                f"graph has contributions to it that it never had before. {advice}"
            )
            if self._plan is None:
                raise error
            self._late_error = self._late_error or error
        bucket.note_late()

    @property
    def _late_possible(self) -> bool:
        """True if gradients may come in this backward after their bucket has been launched; equal on all ranks. At
        stage 3 that may change within it, at the end of a use that departs from the plan."""
        return self._new_buckets if self._plan is None else not self._plan.settled

    @torch.no_grad()
    def _agree_on_late(self) -> None:
        """At the end of a backward: reduce again the buckets that got gradients after they were launched, on any rank;
        take over when buckets are launched from now on. Raises RuntimeError if a gradient has come late where none may.
        Called on all ranks."""
        possible = self._late_possible
        unexpected, self._late_error = self._late_error, None
        if unexpected is not None and not possible:
            raise unexpected
        # A rank whose gradients came in time takes part all the same: it cannot know whether another one's were late.
        found = [int(bucket.state is BucketState.LATE) for bucket in self._buckets]
        if self._plan is not None:
            found += self._plan.arrivals
        elif self.order.learning and (self._comm.rank == 0 or self._comm.peers_agree):
            found += self.order.completion()
        else:
            found += [0] * len(self._buckets)  # so that the maximum over ranks is what rank 0 says
        agreed = torch.tensor(found, dtype=torch.int64, device="cpu").to(self._buckets[0].device)
        self._wait_for_all()
        self._comm.all_reduce_max(agreed, "stats")
        values = found if self._comm.peers_agree else [int(value) for value in host_values(agreed)]
        self._reduce_again([bucket for bucket, late in zip(self._buckets, values, strict=False) if late])
        (self.order if self._plan is None else self._plan).learn(values[len(self._buckets) :])
        self._new_buckets = False
        self.order.stop_learning()

    def _reduce_again(self, late: Sequence[GradientBucket]) -> None:
        """Reduce what has come late, and keep it together with what has been reduced before as one contribution."""
        for bucket in late:
            self._launch(bucket)
        self._wait_for_all()
        if self.current.accumulated <= 1 and not self._options.several_expected:
            for bucket in late:
                mean = bucket.fetch()
                if mean.dtype != bucket.dtype:
                    bucket.store(mean.to(bucket.dtype))

    # ---------------------------------------------------------------- reduction

    @torch.no_grad()
    def _launch_all(self, only_complete: bool = False) -> None:
        """Launch the buckets that have not been, in their order. only_complete: up to the first that still waits for
        gradients: buckets behind it wait with it, because all ranks launch in one order."""
        for place in range(self.current.launched, len(self._buckets)):
            bucket = self._buckets[self.order.buckets[place]]
            if only_complete and bucket.missing > 0:
                return
            if bucket.state is BucketState.OPEN:
                self._launch(bucket)
            self.current.on_launch(place + 1)

    def _launch(self, bucket: GradientBucket) -> None:
        """Start the reduction of one bucket. It is filled before earlier reductions are waited for, so that the copies
        run beside them."""
        options = self._options
        self.arrivals.close(bucket)  # a gradient that comes from here on is late, and must be seen
        local = bucket.complete(self.current.factor)
        if options.sum_buckets:
            # bf16 has the range of fp32, and on the CPU a sum of another dtype would first copy the bucket.
            self.bucket_sums.append(local.sum(dtype=torch.float32 if local.dtype == torch.float16 else None))
        # Each reduction under way holds a full bucket of memory, unless gradients rest whole anyway. So at most
        # IN_FLIGHT are under way, and none beside a large one. A reduction of the same bucket ends first: there is one
        # place for its mean.
        unbound = bucket.travels_in_place and not bucket.is_offloaded
        most = len(self._buckets) if unbound else 1 if bucket.bucket.numel >= ALONE_NUMEL else IN_FLIGHT
        while self._in_flight and (len(self._in_flight) >= most or bucket.pending is not None):
            self._in_flight.pop(0).receive()
        bucket.launch(local)
        self._in_flight.append(bucket)
        if not options.overlap:
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        while self._in_flight:
            self._in_flight.pop(0).receive()

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what no backward has reduced, wait for all. Afterwards every bucket has ``reduced``. Called once per
        accumulation on all ranks."""
        if self.current.open:
            self.end_backward(complete=False)
        self._wait_for_all()
        self.current.on_launch(0)
        # Both follow from the backwards of the accumulation, which all ranks have begun alike, and not from the
        # gradients that came in them: a backward without any still opens, and reduces, every bucket.
        if self.current.unreduced or any(bucket.reduced is None for bucket in self._buckets):
            several = self.current.unreduced > 1
            for bucket in self._buckets:
                bucket.open(several)
            self._launch_all()
            # Another rank may have reduced in its backward, and asks.
            if self._plan is None and (self.order.learning or self._new_buckets):
                self._agree_on_late()
            self.current.on_all_reduced()
        self._wait_for_all()

    def wait(self) -> None:
        """Wait for the reductions that are under way, and for gradients on their way to their storage."""
        self._wait_for_all()
        if self._offloaded is not None:
            self._offloaded.wait_all()

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are kept here now, and the items of memory that they belong to; small ones are left out."""
        for bucket in self._buckets:
            yield from bucket.memory()
        yield from self._memory.waiting()
        if self._offloaded is not None:
            yield from ((GRADIENTS, stored) for stored in self._offloaded.memory())

    # ---------------------------------------------------------------- what the step reads

    def reduced(self, bucket: int) -> torch.Tensor:
        """The mean gradient of the accumulation where it rests: the full bucket at stage 0, this rank's part above.
        Valid after :meth:`finish`."""
        return self._buckets[bucket].mean()

    def stored_reduced(self, bucket: int) -> torch.Tensor:
        """Return the tensor of the mean gradient where it rests; an offloaded one may still be on its way there."""
        value = self._buckets[bucket].reduced
        assert value is not None, "it is read after finish()"
        return value

    def owned_parts(self, without: Collection[int]) -> list[torch.Tensor | None]:
        """Return this rank's part of the mean gradient of each bucket, at every stage, on the device; None for those in
        ``without``."""
        found: list[torch.Tensor | None] = []
        for index, bucket in enumerate(self._buckets):
            value = None if index in without else bucket.fetch()
            found.append(value if value is None or self.keeps_shards else self._comm.part(value))
        return found

    def is_offloaded(self, bucket: int) -> bool:
        """True if the mean gradient does not rest on the device."""
        return self._buckets[bucket].is_offloaded

    # ---------------------------------------------------------------- what the user changes

    @property
    def finished(self) -> bool:
        """True if :meth:`finish` would have nothing to do."""
        return not (self.current.open or self.current.unreduced or self._in_flight) and all(
            bucket.reduced is not None for bucket in self._buckets
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
        return self.stored_reduced(self.layout.slots[index].bucket).dtype

    def part(self, index: int) -> torch.Tensor | None:
        """Return this rank's part of a parameter's mean gradient where it rests, a view: flat, or at stage 0 in the
        parameter's shape. None if this rank owns nothing of it. Valid after :meth:`finish`."""
        fragment = self._fragments.get(index)
        if fragment is None:
            return None
        flat = self.reduced(fragment.slot.bucket)
        if self.keeps_shards:
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
        if self._buckets[slot.bucket].reduced is not None and (part := self.part(index)) is not None:
            part.zero_()

    @torch.no_grad()
    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take ``gradient`` as one that a backward has brought to this rank, between two of them. It is multiplied by
        nothing that is particular to one: neither divided by the micro-batches nor by the ranks that go on."""
        slot = self.layout.slots[index]
        self.used.add(index)
        if not slot.numel:
            return
        self._buckets[slot.bucket].add(slot, gradient, self._options.arrival_factor)

    def release(self, bucket: int) -> None:
        """Drop the gradient of a bucket that has been consumed."""
        self._buckets[bucket].release(reuse=not self.keeps_shards and bucket not in self._lent)
        self._lent.discard(bucket)

    def clear(self) -> None:
        """Drop everything: the accumulation's gradients were consumed or are not wanted."""
        if self._offloaded is not None:
            self._offloaded.clear()
        if self.current.open:
            self.end_backward(complete=False)
        if self._in_flight:
            self._wait_for_all()
        for bucket in self._buckets:
            bucket.clear()
            if bucket.reduced is not None:
                self.release(bucket.bucket.index)
        if self.keeps_shards:
            self._memory.clear()  # stages 1 to 3 promise that between steps no rank holds more than its part
        self.current.on_all_reduced(consumed=True)
        self._engine_began = False
        self.arrivals.clear()
        self.bucket_sums.clear()
        self.losses.clear()
