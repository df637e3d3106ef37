"""Norm, overflow and tied-weight sums over model-parallel ranks, for the step.

Gradients of shared parameters (tied weights, sequence-parallel weights) are summed once a step, after the data ranks
have reduced them. By then all ranks of a group own the same part of such a parameter, so the sum is one all-reduce of
that part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerolite.comm import Communicator, Topology, stages_communicator
from zerolite.diagnostics.rank_comparison import Description, check_equal_on_ranks
from zerolite.tensor_parallel.shard_spec import is_partial, shard_spec_of
from zerolite.utils.accelerator import host_values
from zerolite.utils.memory_tags import BUCKETS, tag_memory
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.grad_reducer import GradReducer
from zerolite.zero.grad_stats import Across
from zerolite.zero.layout import Fragment

if TYPE_CHECKING:
    from zerolite.pipe.prepare import Tie


@dataclass(frozen=True)
class SharedGradients:
    """Trained parameters whose gradient is the sum over the ranks of ``comm``.

    Attributes:
        comm: all its ranks have these parameters in this order, and own the same part of each.
        indices: of the parameters in the layout.
    """

    comm: Communicator
    indices: tuple[int, ...]


class GradientSums:
    """Sums of the gradients of shared parameters. The step pipeline calls all methods on all ranks, in the same
    order."""

    def __init__(self, groups: Sequence[SharedGradients], reducer: GradReducer, rank: int) -> None:
        """``rank``: this rank's index among the data ranks."""
        self._groups = [group for group in groups if group.indices and group.comm.world_size > 1]
        self._reducer = reducer
        self._rank = rank
        self._summed = False
        self._fragments = {group.indices: self._fragments_of(group) for group in self._groups}

    @property
    def comms(self) -> list[Communicator]:
        """Communicators over which the sums are taken."""
        return [group.comm for group in self._groups]

    @torch.no_grad()
    def run(self) -> None:
        """Sum the gradients after :meth:`GradReducer.finish`. Later calls do nothing until new gradients come."""
        if self._summed:
            return
        self._summed = True
        for group in self._groups:
            parts = self._parts(group)
            flags = [index in self._reducer.used for index in group.indices]
            # A rank may own no element of these parameters. It then reads dtype and device of a parameter, but no
            # values: at stage 3 that would launch a gather, and not all of its ranks are here.
            like: torch.Tensor = parts[0] if parts else self._reducer.parameters[group.indices[0]]
            dtype, device = like.dtype, like.device
            uses = torch.ones(len(flags), dtype=dtype, device=device)
            if not all(flags):
                uses = torch.tensor(flags, dtype=dtype, device="cpu").to(device)
            flat = tag_memory(torch.cat([*parts, uses]), BUCKETS)
            group.comm.all_reduce(flat, "shared_gradients").wait()
            *totals, used = flat.split([*(part.numel() for part in parts), len(flags)])
            for part, total in zip(parts, totals, strict=True):
                part.copy_(total)
            if not all(flags):  # another rank may have used a parameter that this rank has not
                known = zip(group.indices, host_values(used), strict=True)
                self._reducer.used.update(index for index, users in known if users)

    @torch.no_grad()
    def reopen(self) -> None:
        """Prepare for more gradients of the same step. Only the first rank of each group keeps the sum, so that the
        next sum counts it once."""
        if self._summed:
            for group in self._groups:
                for part in self._parts(group) if group.comm.rank else ():
                    part.zero_()
        self._summed = False

    def clear(self) -> None:
        """Forget the sum, after the gradients have been used or dropped."""
        self._summed = False

    def _parts(self, group: SharedGradients) -> list[torch.Tensor]:
        """Return this rank's gradients of the group, flat, in the order of its indices."""
        sharded = self._reducer.keeps_shards
        return [
            self._reducer.reduced(f.slot.bucket).narrow(0, f.shard_start if sharded else f.bucket_start, f.numel)
            for f in self._fragments[group.indices]
        ]

    def _fragments_of(self, group: SharedGradients) -> list[Fragment]:
        layout = self._reducer.layout
        wanted = {index: place for place, index in enumerate(group.indices)}
        fragments = layout.fragments(self._rank) if self._reducer.keeps_shards else layout.full_fragments()
        return sorted((f for f in fragments if f.slot.index in wanted), key=lambda f: wanted[f.slot.index])


def spread_over(
    topology: Topology,
    buffer: ParameterBuffer,
    ties: Mapping[int, Tie],
    shared: dict[str, Communicator],
    reducer: GradReducer,
    device: torch.device,
) -> tuple[Across, GradientSums]:
    """Make the norm's rule and the gradient sums for this rank's trained parameters. Called on all ranks.

    Args:
        ties: the ``Tie`` of each parameter that several stages have, by the parameter's id.
        shared: communicators by the key of a tie. The first call makes them, a collective, for frozen parameters too.
            When such a parameter is unfrozen later, one stage calls this while another waits for its message, so no
            collective could run then.
    """

    def counts(index: int) -> bool:
        parameter = buffer.parameters[index]
        tie = ties.get(id(parameter))
        if tie is not None and tie.ranks[0] != topology.pipe.rank:
            return False
        return shard_spec_of(parameter) is not None or topology.tensor.rank == 0

    across = Across(topology.model, counts)
    trained = buffer.parameters
    partial = tuple(i for i, p in enumerate(trained) if is_partial(p) and shard_spec_of(p) is None)
    away = [i for i in partial if reducer.is_offloaded(buffer.layout.slots[i].bucket)]
    if away:
        raise ValueError(
            f"zero_optimization.offload_optimizer: expected no parameter whose gradient tensor-parallel ranks must sum "
            f"on the device, got '{buffer.layout.slots[away[0]].name}'; leave the block out"
        )
    groups = [SharedGradients(topology.tensor, partial)]
    indices = {id(parameter): index for index, parameter in enumerate(trained)}
    for tie in sorted(ties.values(), key=lambda tie: str(tie.key)):
        if tie.key not in shared:
            comm = shared[tie.key] = stages_communicator(topology, tuple(tie.ranks), device)
            dtype = {f"parameter '{tie.key}', which stages share,": {"dtype": str(tie.parameter.dtype)}}
            different = "zerolite.initialize: stages compute in different dtypes"
            check_equal_on_ranks(Description(dtype), comm, device, different)
        if id(tie.parameter) in indices:
            groups.append(SharedGradients(shared[tie.key], (indices[id(tie.parameter)],)))
    return across, GradientSums(groups, reducer, topology.data.rank)
