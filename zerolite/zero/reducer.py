"""Reducer: moves gradients from ``p.grad`` into buckets while backward runs, and reduces these alike on all ranks.

Gradients come through the hooks of backward.py.

**Order.** A backward that reduces, reduces every bucket exactly once, in an order that all ranks share. So the ranks
launch the same collectives, whatever their graphs look like.

- Stages 0 to 2 launch a bucket when its gradients have come. The first such backward launches in the order of the
  index. At its end all ranks take over the order in which rank 0's gradients have come.
- A rank whose graph lacks a parameter launches its bucket, and those behind it, at the end of the backward only. So if
  the program launches collectives of its own within the backward (SyncBatchNorm, an all-to-all), or it goes through
  another engine at stage 3, which gathers, nothing in the backward waits for a reduction: the peers' collectives would
  wait for this rank's in a circle. If backwards of several engines run at once, their launches wait for the end, or
  they would mix in different orders.
- Stage 3 launches a bucket when the backwards of its parameter groups have ended. All ranks see these ends in the same
  order, and know from the forwards how many there will be. A rank must not launch a bucket as soon as its own gradients
  are there: where ranks use different parameters, it would launch between other gathers than its peers.

**Late gradients.** In the first backwards it is not known which gradient of a bucket is its last: reentrant
checkpointing runs a backward inside the backward. A gradient that comes after the launch of its bucket is late. At
stages 0 to 2 the ranks exchange at the end of such a backward which buckets had late gradients, and reduce those once
more. They also agree when to launch buckets from then on. Later backwards exchange nothing. At stage 3 a bucket is
reduced once more if the backward of one of its groups has ended after its launch, which all ranks see.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from zerolite.comm import Pending, collective
from zerolite.comm.flight_recorder import EVENTS
from zerolite.utils.accelerator import host_values
from zerolite.utils.memory_tags import GRADIENTS
from zerolite.utils.torch_private import after_backward
from zerolite.zero.backward import GradientHooks, ShownGradients, coordinators
from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.gradient_dtypes import ALONE_NUMEL, IN_FLIGHT
from zerolite.zero.layout import Slot
from zerolite.zero.local_sum import BucketState
from zerolite.zero.observers import Observers
from zerolite.zero.stage3.param_group import ParamGroup
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of


class Reducer:
    """See the module. The step pipeline calls all methods but those of the hooks, on all ranks, in the same order.

    Attributes:
        buffer: the buckets.
        groups: groups of ranks that reduce.
        current: the backward under way, or the last one.
        order: the buckets in the order of their launches; equal on all ranks.
        parameters: parameters of the layout, by index.
        used: indices of parameters that got a gradient since the last step; complete between backwards.
        shown: tensors that ``p.grad`` shows; complete between backwards.
        losses: losses of this rank's backwards, 0-dim fp32.
        bucket_sums: sums of this rank's buckets, 0-dim. A sum is not finite if a gradient was not.
        reduces_each_backward: True if every backward reduces its buckets, and not only the last one of a step.
        keeps_shards: True if this rank keeps its shard of the mean gradient, and not the whole.
        by_group: True at stage 3, where ends of groups' backwards launch buckets, and no gradient.
        program_communicates: True if the program launches collectives of its own within backwards. The ranks need not
            agree on it: only a rank that waits there can hold up the others.
        offloads: copies of mean gradients off the device; None if all stay on it.
        hooks: hooks that bring the gradients.
    """

    def __init__(self, buffer: ParameterBuffer, observers: Observers) -> None:
        memory = buffer.gradient_memory
        self.buffer, self._memory, self._observers = buffer, memory, observers
        self.groups, self._options, self.current = memory.groups, memory.options, memory.current
        self.offloads = memory.offloads
        self.reduces_each_backward, self.keeps_shards = memory.options.reduce_each_backward, memory.options.shard
        self.order: list[Bucket] = []
        self.used: set[int] = set()
        self.shown = ShownGradients()
        self.losses: list[torch.Tensor] = []
        self.bucket_sums: list[torch.Tensor] = []
        self._engine_began = False  # a call of the engine, which all ranks make, has begun a backward
        self._in_flight: list[Bucket] = []
        self._learning = False  # the order is replaced at the end of the next backward that reduces
        self._completed: dict[Bucket, None] = {}  # an ordered set: buckets by their latest gradient in this backward
        self._new_buckets = False  # below stage 3: no backward has reduced some buckets yet; equal on all ranks
        # A complete backward has shown how many contributions each parameter gets. Until then stage 0 reduces at the
        # end of backward only. The other stages take one to be all, so that no rank needs memory for all gradients and
        # reduce late ones once more. Known to this rank alone: it may decide when a bucket is launched, and never if.
        self._contributions_known = False
        self.program_communicates = False
        self.hooks = GradientHooks(self)
        self.use_layout()

    def use_layout(self) -> None:
        """Take over the buckets that have been added since the last call; called between backwards."""
        assert not self.current.open, "a backward counts the buckets that it began with"
        buffer = self.buffer
        self.by_group = any(bucket.layout.rows for bucket in buffer.buckets)
        self.current.use_groups(self.by_group)
        self.parameters, slots = buffer.parameters, buffer.layout.slots
        self.bucket_of = [buffer.buckets[slot.bucket] for slot in slots]
        numels = [bucket.layout.numel * bucket.layout.spread for bucket in buffer.buckets]
        self._memory.use(len(buffer.buckets), max(numels, default=0))
        self.shown.use(slots, self.parameters, [bucket.strides[i] for i, bucket in enumerate(self.bucket_of)])
        self._set_order([*self.order, *buffer.buckets[len(self.order) :]])
        follows_gradients = not self.by_group and self._options.overlap and self.groups.mean.world_size > 1
        self._learning = follows_gradients and len(self.order) > 1
        self._contributions_known = False  # not those of new parameters
        self._new_buckets = self.keeps_shards and not self.by_group

    def _set_order(self, order: list[Bucket]) -> None:
        self.order = order
        for place, bucket in enumerate(order):
            bucket.local.set_place(place)

    # ---------------------------------------------------------------- a backward

    def begin_backward(
        self,
        reducing: bool,
        end_with_backward: bool = True,
        discards: bool = False,
        divisor: int = 1,
    ) -> None:
        """Open the buckets before the first gradient of a backward.

        Args:
            reducing: True if this backward reduces its buckets; equal on all ranks.
            end_with_backward: True if this is called inside the backward; autograd then calls :meth:`end_backward` at
                its end. Otherwise the caller does.
            discards: all gradients are dropped, whatever their values, as if no parameter had got any, because the
                loss has the weight 0.
            divisor: number by which gradients are divided.
        """
        if self.current.open:
            return
        self._engine_began |= not end_with_backward
        current = self.current
        current.begin(self._options.copy_factor / divisor, reducing, discards, self.keeps_shards)
        current.ended_by_call = not end_with_backward
        gathers = not self.by_group and any(coordinator.has_graph for coordinator in coordinators)
        if self.program_communicates or gathers:
            current.expect_waiting_peers(self.groups.shard.launches_at_once)
        self._completed.clear()
        self.shown.begin_backward()
        self.hooks.begin_backward()
        for bucket in self.order:
            bucket.local.open(multiple_backwards=current.unreduced > 1)
        if end_with_backward:
            # This runs in a hook inside the user's backward. No hook can know that its gradient is the last one, but
            # autograd calls its queued callbacks when all gradients have come.
            after_backward(self._end_in_order)

    def _end_in_order(self) -> None:
        """End a backward that a hook has begun, behind one that a call of another engine has begun around it. That one
        may have launched buckets on this rank before this one began, and on a rank that lacks a parameter none."""
        outer = self.current.outer
        if outer is None or not outer.open:
            self.end_backward()
        else:
            outer.waiting.append(self.end_backward)

    @torch.no_grad()
    def end_backward(self, complete: bool = True) -> None:
        """End a backward: launch the remaining buckets, so that all ranks have launched the same collectives.

        It stays open if a launch or a wait raises (no memory): the call that ends it launches what this rank owes the
        others.

        Args:
            complete: False if an exception has cut the backward short.
        """
        current = self.current
        if not current.open:
            return
        if complete:
            self._contributions_known = True
            for bucket in self.order:
                if bucket.local.repeats:
                    bucket.local.learn_contributions()
        reducing = current.reducing  # decided before the backward, from counters that all ranks share
        if reducing:
            self._launch_all()
            if self.program_communicates and self.keeps_shards:  # nothing in the backward has waited for them
                self._wait_for_all(but=IN_FLIGHT)
        else:  # a later backward may have another factor
            for bucket in self.order:
                bucket.local.copy_in_held()
        waiting = current.end()
        try:
            some_hidden = len(self.used) < len(self.parameters) or current.accumulated > 1
            if some_hidden and (complete or not self.shown.all_dropped()):  # else the user has dropped all gradients
                self._show()
            if reducing and self.by_group:  # last, because the other ranks may have had no late gradient
                self._check_late(complete)
        finally:
            for notify in self._observers.on_backward_end:
                notify()
        for end in waiting:
            end()

    def on_failure(self) -> None:
        """Let ``p.grad`` show the gradients of the accumulation after a backward has raised, so that a user who catches
        the error can drop them. What this backward has left there is dropped."""
        self.current.on_failure()
        self.shown.restore()
        self._show()

    def _show(self) -> None:
        """Show the gradients of the accumulation in ``p.grad`` after a backward.

        On several ranks a parameter that this rank has not used shows a gradient too, because another rank may have
        used it. So norms, and the gradients that the user may drop, are the same on all ranks. Nothing is shown after
        ``torch.autograd.grad`` alone, which leaves no gradient on any rank.
        """
        several_ranks = self.groups.mean.world_size > 1
        if len(self.used) < len(self.parameters) and (self._engine_began or (self.used and several_ranks)):
            trained = [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]
            self.shown.show(trained if not self.used or several_ranks else self.used)
        elif self.current.accumulated > 1:  # those of earlier backwards have been hidden
            self.shown.show(self.used)

    # ---------------------------------------------------------------- events inside it

    def on_gradient(self, bucket: Bucket) -> None:
        """Launch the buckets that are complete, after a gradient has come into ``bucket``.

        The order of the buckets is fixed, and nothing else is launched on this communicator before the backward has
        ended: it is the engines' own, and backwards of several engines at once launch at their ends. So each rank may
        launch at its own time, as in DDP.
        """
        current = self.current
        if not self.by_group and bucket.local.missing <= 0:
            if self._learning:
                self._completed.pop(bucket, None)
                self._completed[bucket] = None
            launches = current.reducing and self._options.overlap and not current.launches_at_end
            if launches and (self._contributions_known or self._new_buckets):
                self._launch_all(only_complete=True)

    @collective
    @torch.no_grad()
    def on_group_end(self, group: ParamGroup) -> None:
        """Launch the buckets that are due when a backward of ``group`` has ended."""
        current = self.current
        if current.open and current.reducing and not current.launches_at_end:
            for bucket in group.buckets:
                if bucket.local.on_group_end():
                    self._launch(bucket)

    def on_late_gradient(self, bucket: Bucket, slot: Slot) -> None:
        """Note a gradient that has come after the launch of its bucket.

        Raises:
            RuntimeError: late gradients are no longer possible. At stage 3 the end of the backward raises it, if no end
                of a group follows that brings the gradient.
        """
        if not (self.by_group or self._new_buckets):
            EVENTS.append(f"raised an error in a backward, for another gradient of parameter '{slot.name}'")
            raise _late_error(
                slot.name,
                "Set zero_optimization.overlap_comm to false, so that buckets are reduced when backward has ended.",
            )
        bucket.local.mark_late(slot.name)

    def _check_late(self, complete: bool) -> None:
        """Check at the end of a backward of stage 3 that every gradient has been reduced, and had its values.

        Args:
            complete: False if an exception has cut the backward short: then its values may be gone.

        Raises:
            RuntimeError: a gradient has come late, and no backward of its group has ended after that; or one has come,
                and no backward of a group has gathered the values.
        """
        for bucket in self.order:
            local = bucket.local
            if local.state is BucketState.LATE:
                self.current.on_gradient_lost()
                raise _late_error(
                    local.late_name,
                    "A parameter that is used where no hook sees it, outside the module that owns it, does this: put "
                    "that module and its users in one parameter group (zero_optimization.leaf_modules).",
                )
            if complete and not (local.ends_last or all(group.is_entered for group in local.groups)):
                self._check_unused(bucket)

    def _check_unused(self, bucket: Bucket) -> None:
        """Raise RuntimeError if a parameter whose values no backward has gathered has got a gradient on this rank."""
        groups = bucket.local.groups
        entered = {id(known) for group in groups if group.is_entered for known in group.parameters}
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            sharded_param = sharded_param_of(parameter)
            if slot.index in self.used and id(sharded_param) not in entered:
                self.current.on_gradient_lost()
                name = next((group.name for group in groups if sharded_param in group.parameters), groups[0].name)
                raise RuntimeError(
                    f"module '{name}': expected the tensors that it computes in what its "
                    f"forward returns, got a gradient of parameter '{slot.name}' in a backward that reached none of "
                    "them, so its values were not there; return them, or put the module and the one that uses them in "
                    "one parameter group (zero_optimization.leaf_modules)"
                )

    def _agree_on_late(self) -> None:
        """Let all ranks know which buckets had late gradients on any of them, and take over rank 0's order."""
        mean, buckets = self.groups.mean, self.buffer.buckets
        # A rank without late gradients takes part all the same: it cannot know if another rank had some.
        numbers = [int(bucket.local.state is BucketState.LATE) for bucket in buckets]
        if self._learning and (mean.rank == 0 or mean.is_dry):
            completed = {bucket: position for position, bucket in enumerate(self._completed)}
            numbers += [completed.get(bucket, len(buckets)) for bucket in buckets]
        else:
            numbers += [0] * len(buckets)  # the maximum over ranks is then rank 0's order
        agreed = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(buckets[0].device)
        self._wait_for_all()
        mean.all_reduce_max(agreed, "stats")
        values = numbers if mean.is_dry else [int(value) for value in host_values(agreed)]
        for bucket in buckets:
            if values[bucket.index]:
                bucket.local.expect_again()
        if self._learning:
            self._set_order(sorted(self.order, key=lambda bucket: values[len(buckets) + bucket.index]))
        self._new_buckets = self._learning = False

    # ---------------------------------------------------------------- reduction

    @torch.no_grad()
    def _launch_all(self, only_complete: bool = False) -> None:
        """Launch the remaining buckets in their order, and at the end of a backward once more those that had late
        gradients on any rank. Below stage 3 the ranks agree on them before. After an error another call goes on where
        this one has stopped.

        Args:
            only_complete: it is not the end. Stop at the first bucket that still waits for gradients. Buckets behind it
                wait too, because all ranks launch in one order.
        """
        for place in range(self.current.launched, len(self.order)):
            bucket = self.order[place]
            if only_complete and bucket.local.missing > 0:
                return
            if bucket.local.state is BucketState.FILL:
                self._launch(bucket, waits=not (only_complete and self.current.peers_may_wait))
            self.current.launched = place + 1
        if only_complete:
            return
        if self._learning or self._new_buckets:
            self._agree_on_late()
        if again := [bucket for bucket in self.buffer.buckets if bucket.local.again]:
            for bucket in again:
                self._launch(bucket)
            self._wait_for_all()

    def _launch(self, bucket: Bucket, waits: bool = True) -> None:
        """Launch the reduction of one bucket.

        Args:
            bucket: it is filled before this waits for earlier reductions, so that its copies overlap with them.
            waits: this may wait for other ranks.
        """
        options, local = self._options, bucket.local
        full = local.complete()
        if options.sum_buckets:
            # bf16 has the range of fp32, and on the CPU a sum of another dtype would first copy the bucket.
            self.bucket_sums.append(full.sum(dtype=torch.float32 if full.dtype == torch.float16 else None))
        # Each reduction in flight holds the memory of a whole bucket, unless full gradients are kept anyway (stage 0).
        # So at most IN_FLIGHT are in flight, and a large one alone. A second reduction of the same bucket waits for the
        # first, because the bucket has one mean.
        others = 0 if local.pending is not None or bucket.layout.numel >= ALONE_NUMEL else IN_FLIGHT - 1
        unbound = not waits or (bucket.dtypes.reduces_in_place and not bucket.is_offloaded)
        if len(self._in_flight) > others and not (unbound and local.pending is None):
            self._wait_for_all(but=others)
        local.launch(full, has_mean=bucket.reduced is not None)
        self._in_flight.append(bucket)
        if not options.overlap:
            self._wait_for_all()

    def _wait_for_all(self, but: int = 0) -> None:
        """Wait for the reductions in flight, ``but`` for so many of the latest."""
        while len(self._in_flight) > but:
            try:
                self._in_flight[0].finish()
            except BaseException:
                self.current.on_gradient_lost()
                raise
            del self._in_flight[0]  # not before: what has raised is waited for again

    def replace_mean(self, bucket: Bucket, pending: Pending) -> None:
        """Replace a bucket's mean gradient by the result of ``pending``, into which it has been sent. If this raises,
        the result is waited for again, and nothing is launched again."""
        bucket.release()
        bucket.local.use_pending(pending)
        self._in_flight.append(bucket)
        self._wait_for_all()

    @collective
    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what no backward has reduced, and wait for all reductions. Every bucket then has ``reduced``.
        Called once per accumulation."""
        if self.current.open:
            self.end_backward(complete=False)
        self._wait_for_all()
        # Both conditions depend on the backwards of the accumulation, which all ranks have begun alike. They do not
        # depend on gradients: a backward without any also opens and reduces every bucket.
        if self.current.unreduced or any(bucket.reduced is None for bucket in self.order):
            for bucket in self.order:
                bucket.local.open(multiple_backwards=self.current.unreduced > 1)
            self.current.reopen()  # as in a backward: if a launch raises, the rest is launched later
            self._launch_all()  # another rank may have reduced in its backward, and then agrees there on late gradients
            self.current.end()
        self._wait_for_all()

    def wait(self) -> None:
        """Wait for the reductions in flight, and for offloaded gradients that are still written to their storage."""
        self._wait_for_all()
        for bucket in self.buffer.buckets:
            bucket.wait_for_storage()

    @property
    def finished(self) -> bool:
        """True if :meth:`finish` would have nothing to do, and no sum over replicas waits."""
        return not (self.current.open or self.current.unreduced or self._in_flight or self.groups.partial) and all(
            bucket.reduced is not None for bucket in self.order
        )

    def memory(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (item of the memory report, tensor) for the tensors that are kept here now, small ones left out."""
        for bucket in self.buffer.buckets:
            yield from bucket.memory()
        if self.groups.compression is not None:
            yield from ((GRADIENTS, error) for error in self.groups.compression.memory())
        yield from self._memory.unused()

    # ---------------------------------------------------------------- mean gradients

    def owned_shards(self, without: Collection[int]) -> list[torch.Tensor | None]:
        """Return this rank's shard of the mean gradient of each bucket, at every stage, on the device; None for the
        buckets in ``without``."""
        shards: list[torch.Tensor | None] = []
        for bucket in self.buffer.buckets:
            value = None if bucket.index in without else bucket.fetch() if bucket.is_offloaded else bucket.reduced
            shards.append(value if value is None or self.keeps_shards else bucket.groups.states.shard(value))
        return shards

    def drop_reads(self) -> None:
        """Note that a stored gradient was written as a tensor: see :meth:`Placements.drop_reads`."""
        try:
            self.buffer.placements.drop_reads()
        except OSError as error:
            if self.offloads is None:
                raise
            self.offloads.on_lost(error)

    @torch.no_grad()
    def drop(self, index: int) -> None:
        """Drop one parameter's gradient, without a collective."""
        self._wait_for_all()
        self.used.discard(index)
        bucket = self.bucket_of[index]
        bucket.local.drop(index)
        if bucket.reduced is not None and (part := bucket.mean_part(index)) is not None:
            part.zero_()
            self.drop_reads()

    def clear(self) -> None:
        """Drop all gradients of the accumulation, after their use or unused."""
        if self.current.open:
            self.end_backward(complete=False)
        self._wait_for_all()
        for bucket in self.buffer.buckets:
            if bucket.reduced is not None or bucket.local.flat is not None or bucket.local.held:
                bucket.clear()
        if self.keeps_shards:
            self._memory.clear()  # stages 1 to 3 promise that no rank holds more than its shard between steps
        self.current.on_consumed()
        self._engine_began = False
        if self.offloads is not None:  # last: what is written until here is dropped too
            for bucket in self.buffer.buckets:
                bucket.clear_storage()
            self.offloads.clear()
        self.shown.close()
        self.used = set()  # the statistics of the last step still have this one
        self.bucket_sums.clear()
        self.losses.clear()


def _late_error(name: str, advice: str) -> RuntimeError:
    return RuntimeError(
        f"parameter '{name}' got another gradient in the same backward after its bucket was reduced: its graph has "
        f"more uses of the parameter than ever before. {advice}"
    )
