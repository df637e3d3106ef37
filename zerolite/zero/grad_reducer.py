"""Gradient reducer: reduces buckets while backward runs, with the same collectives on all ranks.

**Order.** A backward that reduces, reduces every bucket exactly once, in an order that all ranks share. So the ranks
launch the same collectives, whatever their graphs look like.

- Stages 0 to 2 launch a bucket when its gradients have come. The first such backward launches in the order of the
  index. At its end all ranks take over the order in which rank 0's gradients have come.
- A rank whose graph lacks a parameter launches its bucket, and those behind it, at the end of the backward only. So if
  the program launches collectives of its own within the backward (SyncBatchNorm, an all-to-all), nothing in the
  backward waits for a reduction: the peers' own collectives would wait for this rank's in a circle. If backwards of
  several engines run at once, their launches wait for the end, or they would mix in different orders.
- Stage 3 launches a bucket when the backward of a parameter group has ended. All ranks see these ends in the same order
  (:class:`LaunchPlan`).

**Late gradients.** In the first backwards it is not known which gradient of a bucket is its last. Reentrant
checkpointing runs a backward inside the backward, and a module may be used several times. A gradient that comes after
the launch of its bucket is late. At the end of such a backward the ranks exchange which buckets had late gradients, and
reduce those once more. They also agree when to launch buckets from then on. Later backwards exchange nothing.

**Between backwards** a bucket holds:

- ``local``: sum of this rank's gradients that have not been reduced yet; as long as the bucket;
- ``reduced``: mean over ranks of everything that has been reduced in this accumulation; the whole bucket at stage 0,
  this rank's shard at stages 1 to 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from zerolite.comm.flight_recorder import EVENTS
from zerolite.offload.offloaded_gradients import OffloadedGradients
from zerolite.utils.accelerator import host_values
from zerolite.utils.memory_tags import GRADIENTS
from zerolite.zero.bucket_memory import ALONE_NUMEL, IN_FLIGHT, Backward, BucketMemory, ReductionOptions
from zerolite.zero.gradient_arrivals import GradientArrivals
from zerolite.zero.gradient_bucket import BucketState, GradientBucket
from zerolite.zero.groups import RankGroups
from zerolite.zero.launch_order import LaunchOrder
from zerolite.zero.layout import Fragment, PartitionLayout, Slot
from zerolite.zero.observers import Observers
from zerolite.zero.shown_gradients import MakeGradient
from zerolite.zero.stage3.launch_plan import LaunchPlan


class GradReducer:
    """See the module. The hooks that run inside backward are :class:`GradientArrivals`.

    The step pipeline calls all methods, on all ranks, in the same order.

    Attributes:
        current: the backward under way, or the last one.
        order: order in which buckets are launched; equal on all ranks.
        parameters: parameters of the layout, by index.
        strides: strides of the whole parameters, by index.
        used: indices of parameters that got a gradient since the last step; complete between backwards.
        shown: tensors that ``p.grad`` shows; complete between backwards.
        losses: losses of this rank's backwards, 0-dim fp32.
        bucket_sums: sums of this rank's buckets, 0-dim. A sum is not finite if a gradient was not.
        reduces_each_backward: True if every backward reduces its buckets, and not only the last one of a step.
        keeps_shards: True if this rank keeps its shard of the mean gradient, and not the whole.
        program_communicates: True if the program launches collectives of its own within backwards. The ranks need not
            agree on it: only a rank that waits there can hold up the others.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        groups: RankGroups,
        options: ReductionOptions,
        strides: Sequence[tuple[int, ...]],
        offloaded: OffloadedGradients | None,
        observers: Observers,
        make_gradient: MakeGradient,
    ) -> None:
        """
        Args:
            offloaded: storage of the mean gradients; None if they stay on the device.
            make_gradient: makes the tensors that ``p.grad`` shows.
        """
        self._groups, self._options, self._offloaded, self._observers = groups, options, offloaded, observers
        self.reduces_each_backward, self.keeps_shards = options.reduce_each_backward, options.shard
        self.current = Backward(options.copy_factor)
        self.order = LaunchOrder()
        self._memory = BucketMemory(groups, options, self.order, self.current, offloaded)
        self._buckets: list[GradientBucket] = []
        rank, averaged = groups.shard.rank, groups.mean.world_size
        self.arrivals = GradientArrivals(options, self.current, self, rank, averaged, make_gradient)
        self.used, self.shown = self.arrivals.used, self.arrivals.shown
        self.losses: list[torch.Tensor] = []
        self.bucket_sums: list[torch.Tensor] = []
        self._lent: set[int] = set()  # buckets of which the user may have views
        self._engine_began = False  # a call of the engine, which all ranks make, has begun a backward
        self._in_flight: list[GradientBucket] = []
        self._plan: LaunchPlan | None = None
        self._new_buckets = False  # there are buckets that no backward has reduced yet; equal on all ranks
        self._late_error: RuntimeError | None = None  # for a late gradient, while the backward still matches its plan
        self.program_communicates = False
        self.use(layout, parameters, strides)

    def use(
        self,
        layout: PartitionLayout,
        parameters: Sequence[torch.nn.Parameter],
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        """Use ``layout``, which begins with the buckets that are there; called between backwards."""
        assert not self.current.open, "a backward counts the buckets that it began with"
        self.layout, self.strides = layout, list(strides)
        fragments = layout.fragments(self._groups.shard.rank) if self.keeps_shards else layout.full_fragments()
        self._fragments: dict[int, Fragment] = {fragment.slot.index: fragment for fragment in fragments}
        for bucket in layout.buckets[len(self._buckets) :]:
            parameter = parameters[bucket.slots[0].index]
            self._buckets.append(GradientBucket(bucket, parameter, strides, self._memory))
        self.arrivals.set_layout(layout, parameters, strides, self._buckets)
        self.parameters = self.arrivals.parameters
        if self._offloaded is not None:
            widest = max((bucket.numel for bucket in layout.buckets), default=0)
            self._offloaded.set_max_nbytes(4 * widest // self._groups.shard.world_size)  # sums are in fp32
        # Stage 0 keeps full gradients, so it keeps the memory of all buckets between steps. The other stages need
        # memory for the buckets in flight, for one that is completed, and for the next one that fills.
        self._memory.set_limit(IN_FLIGHT + 2 if self.keeps_shards else len(layout.buckets))
        follows_gradients = self._plan is None and self._options.overlap and self._groups.mean.world_size > 1
        self.order.set_buckets(len(layout.buckets), learns=follows_gradients)
        self._new_buckets = self.keeps_shards

    def use_launch_plan(self, plan: LaunchPlan) -> None:
        """Launch buckets when the backward of a parameter group ends, and not when their gradients have come."""
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
            reducing: True if this backward reduces its buckets; equal on all ranks.
            end_with_backward: True if this is called inside the backward; autograd then calls :meth:`end_backward` at
                its end. Otherwise the caller does.
            weight: weight of the loss. With 0 all gradients are dropped, whatever their values, as if no parameter
                had got any.
            divisor: number by which gradients are divided.
        """
        if self.current.open:
            return
        self._engine_began |= not end_with_backward
        factor = self._options.copy_factor / divisor
        if factor != self.current.factor:
            # Gradients that an earlier backward has left are multiplied by that backward's factor when they are moved.
            self._move_held()
        plan = self._plan
        if plan is not None:
            plan.begin_backward()
        self.current.begin(factor, reducing, weight == 0, plan is not None, plan is not None and not plan.is_learned)
        self.current.ended_by_call = not end_with_backward
        # A launch could wait for a peer that waits for a collective of the program's, in the backward of this rank.
        self.current.launches_at_end |= self.program_communicates and not self._groups.shard.launches_at_once
        if self.order.learning:
            self.order.begin_backward()
        self.arrivals.begin_backward()
        several, early, buckets = self.current.unreduced > 1, self.current.early, self._buckets
        if early:  # a gradient for one of these is late
            buckets = [bucket for bucket in buckets if bucket.bucket.index not in early]
            if reducing:
                self.order.begin_with(early)
        for bucket in buckets:
            bucket.open(several)
        if end_with_backward:
            # This runs in a hook inside the user's backward. No hook can know that its gradient is the last one, but
            # autograd calls its queued callbacks when all gradients have come.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_in_order)

    def _end_in_order(self) -> None:
        """End a backward that a hook has begun, behind one that a call of another engine has begun around it. That one
        may have launched buckets on this rank before this one began, and on a rank that lacks a parameter none."""
        outer = self.current.outer
        if outer is None or not outer.open:
            self.end_backward()
        else:
            outer.waiting.append(self.end_backward)

    @torch.no_grad()
    def _move_held(self) -> None:
        for bucket in self._buckets:
            self.arrivals.close(bucket)
            bucket.copy_in_held(self.current.factor)

    def end_backward(self, complete: bool = True) -> None:
        """End a backward: launch the remaining buckets, so that all ranks have launched the same collectives.

        Args:
            complete: False if an exception has cut the backward short.
        """
        if not self.current.open:
            return
        waiting = self.current.end()
        try:
            self.arrivals.end_backward(complete)
            if complete or not self.shown.all_none(self.parameters):  # else the user has dropped all gradients
                self.arrivals.show(self._engine_began, several=self.current.accumulated > 1)
            if self.current.reducing:  # decided before the backward, from counters that are equal on all ranks
                self._launch_all()
                if self.order.learning or self._late_possible or self._late_error is not None:
                    self._agree_on_late()
                self.current.on_all_reduced()
        finally:
            for notify in self._observers.on_backward_end:
                notify()
        for end in waiting:
            end()

    @torch.no_grad()
    def launch_early(self, buckets: Sequence[int]) -> None:
        """Launch buckets between backwards, because no later backward of the step brings them a gradient, unless every
        backward reduces, or the last one has. Called on all ranks, with the same buckets in the same order."""
        current = self.current
        if self._options.overlap and not (current.reducing or self.reduces_each_backward):
            for index in buckets:
                self._launch(self._buckets[index])
                current.early.append(index)

    def show_accumulated(self) -> None:
        """Show the gradients of the accumulation in ``p.grad`` again, after a backward that has raised."""
        self.arrivals.close_all()
        self.arrivals.show(self._engine_began, several=self.current.accumulated > 1)

    # ---------------------------------------------------------------- events inside it

    def on_gradient(self, bucket: GradientBucket) -> None:
        """Launch the buckets that are complete, after a gradient has come into ``bucket``.

        The order of the buckets is fixed, and nothing else is launched on this communicator before the backward has
        ended: it is the engines' own, and backwards of several engines at once launch at their ends. So each rank may
        launch at its own time, as in DDP.
        """
        if self._plan is not None:
            if self.current.learning:
                self._plan.on_gradient(bucket.bucket.index)
        elif bucket.missing <= 0:
            if self.order.learning:
                self.order.mark_complete(bucket.bucket.index)
            if (
                self.current.reducing
                and self._options.overlap
                and not self.current.launches_at_end
                and (self.arrivals.contributions_known or self._new_buckets)
            ):
                self._launch_all(only_complete=True)

    @torch.no_grad()
    def on_group_end(self, group: int) -> None:
        """Launch the buckets that are due when the backward of parameter group ``group`` has ended. Called on all
        ranks, in the same order."""
        if self._plan is None or not self.current.open:
            return
        launches = self.current.reducing and not self.current.launches_at_end
        for index in self._plan.on_group_end(group):
            if launches and self._buckets[index].state is BucketState.OPEN:
                self._launch(self._buckets[index])

    def on_late_gradient(self, bucket: GradientBucket, slot: Slot) -> None:
        """Note a gradient that has come after the launch of its bucket.

        Raises:
            RuntimeError: late gradients are no longer possible. At stage 3 :meth:`_agree_on_late` raises it later. The
                module execution of the gradient may depart from the plan, and all ranks see that at the plan's end.
        """
        if not self._late_possible:
            advice = (
                "Set zero_optimization.overlap_comm to false, so that buckets are reduced when backward has ended."
                if self._plan is None
                else "A parameter that is used in some steps only, outside the module that owns it, does this: put "
                "that module and its users in one parameter group (zero_optimization.leaf_modules)."
            )
            error = RuntimeError(
                f"parameter '{slot.name}' got another gradient in the same backward after its bucket was reduced: its "
                f"graph has more uses of the parameter than ever before. {advice}"
            )
            if self._plan is None:
                EVENTS.append(f"raised an error in a backward, for another gradient of parameter '{slot.name}'")
                raise error
            self._late_error = self._late_error or error
        bucket.mark_late()

    @property
    def _late_possible(self) -> bool:
        """True if gradients may come in this backward after their bucket has been launched; equal on all ranks.

        At stage 3 this may change within a backward, when a module execution ends that departs from the plan.
        """
        return self._new_buckets if self._plan is None else not self._plan.is_learned

    @torch.no_grad()
    def _agree_on_late(self) -> None:
        """Reduce the buckets again that had late gradients on any rank, and take over when to launch buckets from now
        on. Called at the end of a backward, on all ranks.

        Raises:
            RuntimeError: a gradient has come late where that is no longer possible.
        """
        possible, mean = self._late_possible, self._groups.mean
        unexpected, self._late_error = self._late_error, None
        if unexpected is not None and not possible:
            raise unexpected
        # A rank without late gradients takes part all the same: it cannot know if another rank had some.
        found = [int(bucket.state is BucketState.LATE) for bucket in self._buckets]
        if self._plan is not None:
            found += self._plan.last_gradients
        elif self.order.learning and (mean.rank == 0 or mean.peers_agree):
            found += self.order.completion()
        else:
            found += [0] * len(self._buckets)  # the maximum over ranks is then rank 0's order
        agreed = torch.tensor(found, dtype=torch.int64, device="cpu").to(self._buckets[0].device)
        self._wait_for_all()
        mean.all_reduce_max(agreed, "stats")
        values = found if mean.peers_agree else [int(value) for value in host_values(agreed)]
        self._reduce_again([bucket for bucket, late in zip(self._buckets, values, strict=False) if late])
        (self.order if self._plan is None else self._plan).learn(values[len(self._buckets) :])
        self._new_buckets = False
        self.order.stop_learning()

    def _reduce_again(self, late: Sequence[GradientBucket]) -> None:
        """Reduce late gradients, and round their sum with the earlier mean to the dtype of a single contribution."""
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
        """Launch the remaining buckets in their order.

        Args:
            only_complete: stop at the first bucket that still waits for gradients. Buckets behind it wait too, because
                all ranks launch in one order.
        """
        for place in range(self.current.launched, len(self._buckets)):
            bucket = self._buckets[self.order.buckets[place]]
            if only_complete and bucket.missing > 0:
                return
            if bucket.state is BucketState.OPEN:
                self._launch(bucket)
            self.current.on_launch(place + 1)

    def _launch(self, bucket: GradientBucket) -> None:
        """Launch the reduction of one bucket. The bucket is filled before this waits for earlier reductions, so that
        its copies overlap with them."""
        options = self._options
        self.arrivals.close(bucket)  # a gradient that comes from here on is late: its hook must run
        local = bucket.prepare_launch(self.current.factor)
        if options.sum_buckets:
            # bf16 has the range of fp32, and on the CPU a sum of another dtype would first copy the bucket.
            self.bucket_sums.append(local.sum(dtype=torch.float32 if local.dtype == torch.float16 else None))
        # Each reduction in flight holds the memory of a whole bucket, unless full gradients are kept anyway (stage 0).
        # So at most IN_FLIGHT are in flight, and a large one alone. A second reduction of the same bucket waits for the
        # first, because the bucket has one mean.
        unbound = bucket.reduces_in_place and not bucket.is_offloaded
        unbound |= self.program_communicates and self.current.open
        most = len(self._buckets) if unbound else 1 if bucket.bucket.numel >= ALONE_NUMEL else IN_FLIGHT
        while self._in_flight and (len(self._in_flight) >= most or bucket.pending is not None):
            self._in_flight.pop(0).finish_reduction()
        bucket.launch(local)
        self._in_flight.append(bucket)
        if not options.overlap:
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        while self._in_flight:
            self._in_flight.pop(0).finish_reduction()

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what no backward has reduced, and wait for all reductions. Every bucket then has ``reduced``. Called
        once per accumulation, on all ranks."""
        if self.current.open:
            self.end_backward(complete=False)
        self._wait_for_all()
        self.current.on_launch(0)
        # Both conditions depend on the backwards of the accumulation, which all ranks have begun alike. They do not
        # depend on gradients: a backward without any also opens and reduces every bucket.
        if self.current.unreduced or any(bucket.reduced is None for bucket in self._buckets):
            several = self.current.unreduced > 1
            for bucket in self._buckets:
                bucket.open(several)
            self._launch_all()
            # Another rank may have reduced in its backward, whose end exchanges late gradients with all ranks.
            if self._plan is None and (self.order.learning or self._new_buckets):
                self._agree_on_late()
            self.current.on_all_reduced()
        self._wait_for_all()

    def wait(self) -> None:
        """Wait for the reductions in flight, and for offloaded gradients that are still written to their storage."""
        self._wait_for_all()
        if self._offloaded is not None:
            self._offloaded.wait_all()

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (item of the memory report, tensor) for the tensors that are kept here now, small ones left out."""
        for bucket in self._buckets:
            yield from bucket.memory()
        yield from self._memory.unused()
        if self._offloaded is not None:
            yield from ((GRADIENTS, stored) for stored in self._offloaded.memory())

    # ---------------------------------------------------------------- what the step reads

    def reduced(self, bucket: int) -> torch.Tensor:
        """Return the mean gradient of a bucket in its storage: the whole bucket at stage 0, this rank's shard at stages
        1 to 3. Valid after :meth:`finish`."""
        return self._buckets[bucket].mean()

    def stored_reduced(self, bucket: int) -> torch.Tensor:
        """Return the same tensor as :meth:`reduced`, without waiting: an offloaded gradient may still be written."""
        value = self._buckets[bucket].reduced
        assert value is not None, "it is read after finish()"
        return value

    def owned_shards(self, without: Collection[int]) -> list[torch.Tensor | None]:
        """Return this rank's shard of the mean gradient of each bucket, at every stage, on the device; None for the
        buckets in ``without``."""
        found: list[torch.Tensor | None] = []
        for index, bucket in enumerate(self._buckets):
            value = None if index in without else bucket.fetch()
            found.append(value if value is None or self.keeps_shards else self._groups.shard.shard(value))
        return found

    def is_offloaded(self, bucket: int) -> bool:
        """Return True if the mean gradient is stored off the device."""
        return self._buckets[bucket].is_offloaded

    # ---------------------------------------------------------------- what the user changes

    @property
    def finished(self) -> bool:
        """True if :meth:`finish` would have nothing to do."""
        return not (self.current.open or self.current.unreduced or self._in_flight) and all(
            bucket.reduced is not None for bucket in self._buckets
        )

    def lend(self, bucket: int) -> torch.Tensor:
        """Return the memory of a bucket's mean gradient for the user, who may keep it: the reducer does not use it
        again."""
        self._lent.add(bucket)
        return self.reduced(bucket)

    def fragment(self, index: int) -> Fragment:
        """Return the range of a parameter's elements that :meth:`local_grad` has."""
        return self._fragments[index]

    def mean_dtype(self, index: int) -> torch.dtype:
        """Return the dtype of a parameter's mean gradient, the same on all ranks. Valid after :meth:`finish`."""
        return self.stored_reduced(self.layout.slots[index].bucket).dtype

    def local_grad(self, index: int) -> torch.Tensor | None:
        """Return this rank's part of a parameter's mean gradient, a view of its storage: flat, at stage 0 in the
        parameter's shape. None if this rank owns nothing of the parameter. Valid after :meth:`finish`."""
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
    def drop(self, index: int) -> list[torch.Tensor]:
        """Drop one parameter's gradient, without a collective. Return the parts of reduced gradients that were
        written."""
        self._wait_for_all()
        slot = self.layout.slots[index]
        self.arrivals.drop(slot)
        if self._buckets[slot.bucket].reduced is not None and (part := self.local_grad(index)) is not None:
            return [part.zero_()]
        return []

    def release(self, bucket: int) -> None:
        """Drop the mean gradient of a bucket after its use."""
        self._buckets[bucket].release(reuse=not self.keeps_shards and bucket not in self._lent)
        self._lent.discard(bucket)

    def clear(self) -> None:
        """Drop all gradients of the accumulation, after their use or unused."""
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
            self._memory.clear()  # stages 1 to 3 promise that no rank holds more than its shard between steps
        self.current.on_all_reduced(consumed=True)
        self._engine_began = False
        self.arrivals.clear()
        self.bucket_sums.clear()
        self.losses.clear()
