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

import dataclasses
from dataclasses import dataclass

import torch

from zerolite.comm import Communicator, Pending, Topology, second_communicator
from zerolite.utils.dtypes import HALF


@dataclass(frozen=True)
class RankGroups:
    """The groups of this rank for one kind of parameter.

    Attributes:
        shard: ranks that split masters, states and reduced gradients. Updated values are gathered over them.
        replicate: ranks that hold the same shard; None if there are no others.
        mean: ranks over whose gradients the mean is taken. They have the same buckets and launch the same collectives,
            so they agree on the order of launches, and rank 0's initial values are sent to all of them.
        agree: all ranks of the job. They decide together whether a step is skipped, and raise errors together.
    """

    shard: Communicator
    replicate: Communicator | None
    mean: Communicator
    agree: Communicator

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

    @property
    def is_first_replica(self) -> bool:
        """True if this rank's shard counts where replicas count once: in norms and in checkpoints."""
        return self.replicate is None or self.replicate.rank == 0

    def for_gathers(self, device: torch.device) -> RankGroups:
        """Return the same groups with communicators of their own, so that gathers and reductions need no common order.

        Called on all ranks, in the same order.
        """
        shard = second_communicator(self.shard, device)
        mean = shard if self.mean is self.shard else second_communicator(self.mean, device)
        return dataclasses.replace(self, shard=shard, mean=mean)

    def reduce_scatter(self, full: torch.Tensor, tag: str, divisor: float, dtype: torch.dtype, key: int) -> Pending:
        """Sum ``full`` over all ranks of ``shard`` and ``replicate``, divided by ``divisor``. ``wait()`` returns this
        rank's part.

        Args as for :meth:`Communicator.reduce_scatter`. All ranks wait for their results in the order of the launches.
        """
        if self.replicate is None:
            return self.shard.reduce_scatter(full, tag, divisor, dtype, key)
        # Between the two sums 16-bit values are fp32, so that they are rounded once, to ``dtype``, at the end.
        exact = torch.float32 if full.dtype in HALF else full.dtype
        scattered = self.shard.reduce_scatter(full, tag, dtype=exact, key=key)
        return _ReplicatedSum(scattered, self.replicate, tag, divisor, dtype, key)


class _ReplicatedSum(Pending):
    """A reduce-scatter whose result is then summed over the replicas. The wait launches this second sum: replicas are
    far from each other, and the sum within the shard's ranks comes first."""

    def __init__(
        self, scattered: Pending, replicate: Communicator, tag: str, divisor: float, dtype: torch.dtype, key: int
    ) -> None:
        def finish() -> torch.Tensor:
            return replicate.all_reduce(scattered.wait(), tag, divisor, key).wait().to(dtype)

        super().__init__((), (), finish)
        self._scattered = scattered

    def arrived(self) -> bool:
        return self._finish is None

    def memory(self) -> list[torch.Tensor]:
        return list(self._scattered.memory())
