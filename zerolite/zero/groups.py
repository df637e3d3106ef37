"""The groups of ranks behind one kind of parameter: who splits its states, who holds the same shard, who agrees.

                    replicate
              rank 0 ------- rank 2      A gradient is summed over ``shard``, each rank keeping a part, and that part
      shard     |              |         over ``replicate``. Divided by the size of ``mean``, here 4, it is the mean of
              rank 1 ------- rank 3      all ranks. Updates are the same on all replicas, so updated values are gathered
                                         over ``shard`` alone.
                     mean

Replicas, experts and split sequences are other memberships of these groups, and no other code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from zerolite.comm import Chained, Communicator, Pending, Topology, collective, done, second_communicator
from zerolite.comm.communicator import empty
from zerolite.utils.dtypes import HALF


class RankGroups:
    """The groups of this rank for one kind of parameter.

    Attributes:
        shard: ranks that split masters, states and reduced gradients. Updated values are gathered over them.
        replicate: ranks that hold the same shard; None if there are no others.
        mean: ranks over whose gradients the mean is taken. They have the same buckets and launch the same collectives,
            so they agree on the order of launches, and rank 0's initial values are sent to all of them.
        agree: all ranks of the job. They decide together whether a step is skipped, and raise errors together.
        is_first_replica: this rank's shard counts where replicas count once: in norms and in checkpoints.
        reduce_scatter: sums a bucket over ``shard`` and ``replicate``, with the arguments and the result of
            :meth:`Communicator.reduce_scatter`. All ranks wait for their results in the order of the launches.
    """

    def __init__(
        self, shard: Communicator, replicate: Communicator | None, mean: Communicator, agree: Communicator
    ) -> None:
        self.shard, self.replicate, self.mean, self.agree = shard, replicate, mean, agree
        self.is_first_replica = replicate is None or replicate.rank == 0
        # Without replicas nothing stands between a bucket and its communicator.
        self.reduce_scatter: Callable[[torch.Tensor, str, float, torch.dtype, int], Pending] = (
            shard.reduce_scatter if replicate is None else functools.partial(_reduce_replicated, shard, replicate)
        )

    @classmethod
    def of(cls, topology: Topology, shards_states: bool) -> RankGroups:
        """Return the groups of parameters that every data-parallel rank has.

        Args:
            topology: the grid of ranks.
            shards_states: False if each rank keeps full states. The data-parallel ranks then only split the sums of
                the statistics.
        """
        if not shards_states:
            return cls(topology.data, None, topology.data, topology.world)
        return cls(topology.shard, topology.replicate, topology.data, topology.world)

    @classmethod
    def over(cls, comm: Communicator) -> RankGroups:
        """Return the groups where all ranks of ``comm`` split all states."""
        return cls(comm, None, comm, comm)

    @collective
    def for_gathers(self, device: torch.device) -> RankGroups:
        """Return the same groups with communicators of their own, so that gathers and reductions need no common
        order."""
        shard = second_communicator(self.shard, device)
        mean = shard if self.mean is self.shard else second_communicator(self.mean, device)
        return RankGroups(shard, self.replicate, mean, self.agree)


def _reduce_replicated(
    shard: Communicator,
    replicate: Communicator,
    full: torch.Tensor,
    tag: str,
    divisor: float,
    dtype: torch.dtype,
    key: int,
) -> Pending:
    # Between the two sums 16-bit values are fp32, so that they are rounded once, to ``dtype``, at the end.
    exact = torch.float32 if full.dtype in HALF else full.dtype
    if not full.is_cuda:
        # The host would have to wait between the two sums, so the wait for the result launches the second one. All
        # ranks wait in the order of the launches.
        scattered = shard.reduce_scatter(full, tag, dtype=exact, key=key)
        summed = Chained(scattered, lambda part: replicate.all_reduce(part, tag, divisor, key))
        return Chained(summed, lambda total: done(total.to(dtype)))
    # NCCL sums 16-bit values in 16 bits within a set. A side stream waits for that, widens the result and issues the
    # second sum, directly behind the first in the order of launches, which is the same on all ranks. The compute stream
    # waits for neither before the result is used. All memory belongs to it, and is kept until then.
    scattered = shard.reduce_scatter(full, tag, key=key)
    wide = empty(full.numel() // shard.world_size, exact, full)
    summed = Chained(
        scattered,
        lambda part: replicate.all_reduce(wide.copy_(part), tag, divisor, key),
        keep=(*scattered.memory(), wide),
    )
    with torch.cuda.stream(_side_stream(full.device)):
        summed.advance()
    return Chained(summed, lambda total: done(total.to(dtype)))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
