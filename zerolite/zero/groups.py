"""The groups of ranks behind one kind of parameter: who splits its states, who holds the same shard, who agrees.

                    replicate
              rank 0 ------- rank 2      A gradient is summed over ``shard``, each rank keeping a part, and that part
      shard     |              |         over ``replicate``. Divided by the size of ``mean``, here 4, it is the mean of
              rank 1 ------- rank 3      all ranks.

                     mean

Who updates what follows from ``states``, the ranks that split masters and optimizer states:

- ``shard``: each rank updates all of its part. Updates are the same on all replicas.
- ``mean``: each rank updates a part of its part, the rest of which its replicas send it after the update. At stage 3
  parameters then stay divided over ``shard``.

Replicas, experts and split sequences are other memberships of these groups, and no other code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from zerolite.comm import Chained, Communicator, Pending, Topology, collective, done, second_communicator
from zerolite.comm.communicator import divide, empty
from zerolite.utils.accelerator import current_platform
from zerolite.utils.dtypes import HALF
from zerolite.zero.compression import Compression, ErrorFeedback
from zerolite.zero.stages import StagePolicy


class RankGroups:
    """The groups of this rank for one kind of parameter.

    Attributes:
        shard: ranks that split a bucket; at stage 3 its parameters, which are gathered over them.
        replicate: ranks that hold the same shard; None if there are no others.
        states: ranks that split masters, optimizer states and reduced gradients: ``shard``, or ``mean``.
        updated: ranks over which values are gathered after an update; None where none are: stage 0, where all ranks
            have them, and stage 3 with states split over ``shard``, which gathers before it uses them.
        mean: ranks over whose gradients the mean is taken. They have the same buckets and launch the same collectives,
            so they agree on the order of launches, and rank 0's initial values are sent to all of them.
        agree: all ranks of the job. They decide together whether a step is skipped, and raise errors together.
        is_first_replica: this rank's part of the parameters counts where replicas count once.
        is_first_owner: so does its part of the states, in norms and in checkpoints.
        compression: carries what goes over ``replicate`` in few bits; None if nothing does.
        divisor: number of ranks whose losses the gradients are the mean of: those of ``mean``, and for experts all that
            may have sent them tokens. 1 if gradients are sums.
        spread: neighbouring ranks that have other parameters: see :class:`~zerolite.zero.layout.BucketLayout`.
        experts: groups of the parameters of experts, which neighbouring data ranks have others of; None if all of them
            have the same.
        rounds_values: gathers after an update round what they send, so the owner of a value keeps it elsewhere.
        reduce_scatter: sums a bucket over ``shard`` and ``replicate``, with the arguments and the result of
            :meth:`Communicator.reduce_scatter`. All ranks wait for their results in the order of the launches.
        two_hops: sums over ``shard`` and between the sets; None without other sets.
        partial: buckets whose gradients are not summed over ``replicate`` yet (replica_sums.py).
    """

    def __init__(
        self,
        shard: Communicator,
        replicate: Communicator | None,
        mean: Communicator,
        agree: Communicator,
        states: Communicator,
        updated: Communicator | Compression | None,
    ) -> None:
        self.shard, self.replicate, self.mean, self.agree = shard, replicate, mean, agree
        self.states, self.updated = states, updated
        self.divisor, self.spread = mean.world_size, 1
        self.experts: RankGroups | None = None
        self.is_first_replica = replicate is None or replicate.rank == 0
        self.is_first_owner = self.is_first_replica or states is not shard
        self.compression: Compression | None = None
        self.rounds_values = False
        self.partial: Collection[int] = ()
        # Without replicas nothing stands between a bucket and its communicator.
        self.reduce_scatter: Callable[[torch.Tensor, str, float, torch.dtype, int], Pending] = shard.reduce_scatter
        self.two_hops: TwoHops | None = None
        if replicate is not None:
            self._use_second_hop(replicate.all_reduce if self.has_replicas else replicate.reduce_scatter)

    @property
    def has_replicas(self) -> bool:
        """True if other ranks hold the same parameters, masters and states."""
        return self.replicate is not None and self.states is self.shard

    @classmethod
    def of(cls, topology: Topology, policy: StagePolicy, all_split_states: bool = False) -> RankGroups:
        """Return the groups of parameters that every data-parallel rank has.

        Args:
            topology: the grid of ranks.
            policy: what is sharded. Where it is nothing, the data-parallel ranks only split the sums of the statistics.
            all_split_states: at stage 3 all data-parallel ranks split the states, not only those of ``shard``.
        """
        return cls._chosen(topology, policy, all_split_states, topology.shard, topology.data)

    @classmethod
    def of_experts(cls, topology: Topology, policy: StagePolicy, all_split_states: bool = False) -> RankGroups:
        """Return the groups of the experts that this rank has, as :meth:`of` does. A rank's backward brings the
        gradients of the tokens that it was sent: so a sum over the ranks with the same experts is one over all."""
        # Each set of ranks has all experts, so ranks at one place of all sets have the same shard of the same ones.
        groups = cls._chosen(topology, policy, all_split_states, topology.expert_shard, topology.expert_data)
        groups.divisor, groups.spread = topology.data.world_size, topology.expert_spread
        return groups

    @classmethod
    def _chosen(
        cls, topology: Topology, policy: StagePolicy, all_split_states: bool, shard: Communicator, mean: Communicator
    ) -> RankGroups:
        """Return the groups of parameters that the ranks of ``mean`` have, and those of ``shard`` within a set."""
        replicate, job = topology.replicate, topology.world
        if not policy.shard_optimizer:
            return cls(mean, None, mean, job, states=mean, updated=None)
        if replicate is not None and all_split_states:
            return cls(shard, replicate, mean, job, states=mean, updated=replicate)
        updated = None if policy.shard_parameters else shard
        return cls(shard, replicate, mean, job, states=shard, updated=updated)

    def spread_experts(self, experts: RankGroups) -> None:
        """Let the parameters of experts have groups of their own."""
        self.experts = experts
        if self.two_hops is not None and experts.two_hops is not None:
            experts.two_hops.behind = self.two_hops.behind  # one order of launches between the sets

    def take_sums(self) -> None:
        """Let gradients be the sums over ranks, not the means."""
        for groups in filter(None, (self, self.experts)):
            groups.divisor = 1

    def of_spread(self, spread: int) -> RankGroups:
        """Return the groups of a bucket: see :class:`~zerolite.zero.layout.BucketLayout`."""
        if spread == 1:
            return self
        assert self.experts is not None, "the layout has been made with these groups"
        return self.experts

    def compress(self, values: bool, gradients: bool, feedback: ErrorFeedback | None) -> None:
        """Send updated values, or gradients, in few bits between the sets of ranks."""
        if self.replicate is None:
            return
        self.compression = Compression(self.replicate, feedback)
        if gradients:
            hop = self.compression
            self._use_second_hop(hop.all_reduce if self.has_replicas else hop.reduce_scatter)
        if values and self.updated is self.replicate:
            self.updated, self.rounds_values = self.compression, True

    def _use_second_hop(self, hop: Callable[..., Pending]) -> None:
        self.two_hops = TwoHops(self.shard, hop)
        self.reduce_scatter = self.two_hops.reduce_scatter

    @classmethod
    def over(cls, comm: Communicator) -> RankGroups:
        """Return the groups where all ranks of ``comm`` split all states at stage 3."""
        return cls(comm, None, comm, comm, states=comm, updated=None)

    @collective
    def for_gathers(self, device: torch.device) -> RankGroups:
        """Return the same groups with communicators of their own, so that gathers and reductions need no common
        order."""
        shard = second_communicator(self.shard, device)
        mean = shard if self.mean is self.shard else second_communicator(self.mean, device)
        states = shard if self.states is self.shard else mean
        groups = RankGroups(shard, self.replicate, mean, self.agree, states, self.updated)
        groups.divisor, groups.spread = self.divisor, self.spread
        if self.experts is not None:
            groups.spread_experts(self.experts.for_gathers(device))
        return groups


class TwoHops:
    """Sums over the ranks of a set, and of this rank's part of each between the sets.

    Attributes:
        second: sums a part between the sets, with the arguments of :meth:`Communicator.all_reduce`.
        behind: at most one sum, whose second hop could not be launched.
    """

    def __init__(self, shard: Communicator, second: Callable[..., Pending]) -> None:
        self._shard, self.second = shard, second
        self.behind: list[Chained] = []

    @collective
    def reduce_scatter(
        self,
        full: torch.Tensor,
        tag: str,
        divisor: float,
        dtype: torch.dtype,
        key: int,
        earlier: torch.Tensor | None = None,
    ) -> Pending:
        """Sum ``full`` over both groups.

        Args:
            full, tag, divisor, dtype, key: as of :meth:`Communicator.reduce_scatter`.
            earlier: a result of :func:`reduce_in_set`, which the second hop sums too.
        """
        # Before the second hop 16-bit values become fp32, so that they are rounded once, to ``dtype``, at the end.
        exact, keep = exact_dtype(full.dtype), () if earlier is None else (earlier,)

        def add_earlier(part: torch.Tensor) -> torch.Tensor:
            return part if earlier is None else part.add_(earlier, alpha=divisor)

        def sum_between(part: torch.Tensor) -> Pending:
            return self.second(part, tag, divisor=divisor, key=key)

        if not current_platform().queues(full):
            # The host would have to wait between the two sums, so the wait for the result launches the second one. All
            # ranks wait in the order of the launches.
            part = self._shard.reduce_scatter(full, tag, dtype=exact, key=key)
            if earlier is not None:
                part = Chained(part, lambda part: done(add_earlier(part)), keep)
            return Chained(Chained(part, sum_between), lambda total: done(total.to(dtype)))
        # NCCL sums 16-bit values in 16 bits within a set. A side stream waits for that, widens the result and issues
        # the second sum, directly behind the first in the order of launches, which is the same on all ranks. The
        # compute stream waits for neither before the result is used. All memory that is sent belongs to it, and is kept
        # until then.
        if self.behind:
            self.behind[0].advance()  # first: if it still cannot be launched, neither is this one
            self.behind.clear()
        wide = empty(full.numel() // self._shard.world_size, exact, full)
        scattered = self._shard.reduce_scatter(full, tag, key=key)
        memory = (*scattered.memory(), wide, *keep)
        summed = _Beside(scattered, lambda part: sum_between(add_earlier(wide.copy_(part))), memory)
        try:
            summed.advance()
        except RuntimeError:  # such as no memory. The next launch or the wait for the result tries again, and raises
            self.behind.append(summed)
        return Chained(summed, lambda total: done(_on_this_stream(total, dtype)))


class _Beside(Chained):
    """Two collectives, of which a side stream waits for the first and launches the second."""

    def advance(self) -> None:
        if self._second is None:
            with current_platform().side_stream(self._keep[0].device):
                super().advance()


def reduce_in_set(shard: Communicator, full: torch.Tensor, tag: str, divisor: float, key: int) -> Pending:
    """Sum ``full`` over ``shard`` alone, divided by ``divisor``, as the first of two hops does: ``wait()`` returns this
    rank's part in fp32 or more."""
    exact = exact_dtype(full.dtype)
    scattered = shard.reduce_scatter(full, tag, dtype=full.dtype if current_platform().queues(full) else exact, key=key)
    return Chained(scattered, lambda part: done(divide(part.to(exact), divisor)))


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums between sets of gradients in ``dtype``."""
    return torch.float32 if dtype in HALF else dtype


def _on_this_stream(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A reduce-scatter has allocated its result on the side stream, whose later work must not get the memory while this
    # stream still reads it.
    if total.is_cuda:  # not in a dry run
        total.record_stream(torch.cuda.current_stream(total.device))
    return total.to(dtype)
