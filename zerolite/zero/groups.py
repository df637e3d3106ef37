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

import functools
from collections.abc import Callable

import torch

from zerolite.comm import Chained, Communicator, Pending, Topology, collective, done, second_communicator
from zerolite.comm.communicator import empty
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
        rounds_values: gathers after an update round what they send, so the owner of a value keeps it elsewhere.
        reduce_scatter: sums a bucket over ``shard`` and ``replicate``, with the arguments and the result of
            :meth:`Communicator.reduce_scatter`. All ranks wait for their results in the order of the launches.
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
        self.is_first_replica = replicate is None or replicate.rank == 0
        self.is_first_owner = self.is_first_replica or states is not shard
        self.compression: Compression | None = None
        self.rounds_values = False
        # Without replicas nothing stands between a bucket and its communicator.
        self.reduce_scatter: Callable[[torch.Tensor, str, float, torch.dtype, int], Pending] = shard.reduce_scatter
        if replicate is not None:
            second = replicate.all_reduce if states is shard else replicate.reduce_scatter
            self.reduce_scatter = functools.partial(_reduce_in_two_hops, shard, second)

    @classmethod
    def of(cls, topology: Topology, policy: StagePolicy, all_split_states: bool = False) -> RankGroups:
        """Return the groups of parameters that every data-parallel rank has.

        Args:
            topology: the grid of ranks.
            policy: what is sharded. Where it is nothing, the data-parallel ranks only split the sums of the statistics.
            all_split_states: at stage 3 all data-parallel ranks split the states, not only those of ``shard``.
        """
        shard, replicate, data = topology.shard, topology.replicate, topology.data
        if not policy.shard_optimizer:
            return cls(data, None, data, topology.world, states=data, updated=None)
        if replicate is not None and all_split_states:
            return cls(shard, replicate, data, topology.world, states=data, updated=replicate)
        updated = None if policy.shard_parameters else shard
        return cls(shard, replicate, data, topology.world, states=shard, updated=updated)

    def compress(self, values: bool, gradients: bool, feedback: ErrorFeedback | None) -> None:
        """Send updated values, or gradients, in few bits between the sets of ranks."""
        if self.replicate is None:
            return
        self.compression = Compression(self.replicate, feedback)
        if gradients:
            hop = self.compression
            second = hop.all_reduce if self.states is self.shard else hop.reduce_scatter
            self.reduce_scatter = functools.partial(_reduce_in_two_hops, self.shard, second)
        if values and self.updated is self.replicate:
            self.updated, self.rounds_values = self.compression, True

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
        return RankGroups(shard, self.replicate, mean, self.agree, states, self.updated)


def _reduce_in_two_hops(
    shard: Communicator,
    second: Callable[..., Pending],
    full: torch.Tensor,
    tag: str,
    divisor: float,
    dtype: torch.dtype,
    key: int,
) -> Pending:
    # ``second`` sums a part between the sets: an all-reduce or a reduce-scatter over the replicas. Before it 16-bit
    # values become fp32, so that they are rounded once, to ``dtype``, at the end.
    exact = torch.float32 if full.dtype in HALF else full.dtype
    platform = current_platform()
    if not platform.queues(full):
        # The host would have to wait between the two sums, so the wait for the result launches the second one. All
        # ranks wait in the order of the launches.
        scattered = shard.reduce_scatter(full, tag, dtype=exact, key=key)
        summed = Chained(scattered, lambda part: second(part, tag, divisor=divisor, key=key))
        return Chained(summed, lambda total: done(total.to(dtype)))
    # NCCL sums 16-bit values in 16 bits within a set. A side stream waits for that, widens the result and issues the
    # second sum, directly behind the first in the order of launches, which is the same on all ranks. The compute stream
    # waits for neither before the result is used. All memory that is sent belongs to it, and is kept until then.
    scattered = shard.reduce_scatter(full, tag, key=key)
    wide = empty(full.numel() // shard.world_size, exact, full)
    summed = Chained(
        scattered,
        lambda part: second(wide.copy_(part), tag, divisor=divisor, key=key),
        keep=(*scattered.memory(), wide),
    )
    with platform.side_stream(full.device):
        summed.advance()
    return Chained(summed, lambda total: done(_on_this_stream(total, dtype)))


def _on_this_stream(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A reduce-scatter has allocated its result on the side stream, whose later work must not get the memory while this
    # stream still reads it.
    if total.is_cuda:  # not in a dry run
        total.record_stream(torch.cuda.current_stream(total.device))
    return total.to(dtype)
