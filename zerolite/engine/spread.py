"""Norm, overflow and tied-weight sums over model-parallel ranks, for the step.

Gradients that ranks share (tied weights, sequence-parallel weights) are summed once a step, when the data ranks have
reduced them: what a rank then owns of such a parameter, all ranks of its group own, so the sum is one all-reduce over
that.
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
    """Trained parameters (indices in the layout) whose gradient is the sum over ``comm``, where all ranks have them in
    this order and own the same parts of each."""

    comm: Communicator
    indices: tuple[int, ...]


class GradientSums:
    """All methods are called on all ranks, in the same order, by the step pipeline."""

    def __init__(self, groups: Sequence[SharedGradients], reducer: GradReducer, rank: int) -> None:
        """rank: among the data ranks."""
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
        """Sum what :meth:`GradReducer.finish` has left. Once for the gradients that have come by now."""
        if self._summed:
            return
        self._summed = True
        for group in self._groups:
            parts = self._parts(group)
            flags = [index in self._reducer.used for index in group.indices]
            # A rank may own no element of them. It asks a parameter for its dtype and device alone: at stage 3 values
            # would be gathered, from ranks that do not take part.
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
            if not all(flags):  # another rank may have used it
                known = zip(group.indices, host_values(used), strict=True)
                self._reducer.used.update(index for index, users in known if users)

    @torch.no_grad()
    def reopen(self) -> None:
        """More gradients are coming for the same step. The sum stays with the first rank of each group, so that the
        next one counts it once."""
        if self._summed:
            for group in self._groups:
                for part in self._parts(group) if group.comm.rank else ():
                    part.zero_()
        self._summed = False

    def clear(self) -> None:
        """The gradients have been consumed or dropped."""
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
    """For the trained parameters of this rank. Called on all ranks.

    Args:
        ties: by the id of a parameter that several stages have, which (``Tie``).
        shared: by the key of a tie, the communicator of its stages. The first call fills it, which is a collective,
            for frozen parameters too: where they begin to train, a later call comes on one stage while another waits
            for its message.
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
