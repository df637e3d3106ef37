"""The step where other ranks have parts of the model: tensor parallelism and pipelines.

Norm, overflow and used parameters are those of the full model, which one more small all-reduce of the statistics
gives. Gradients of shared parameters (tied weights, sequence-parallel weights) are summed once a step, after the data
ranks have reduced them. By then all ranks of a group own the same part of such a parameter, so the sum is one
all-reduce of that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerolite.comm import Communicator, Topology, collective, stages_communicator
from zerolite.comm.initial_sync import content_hash
from zerolite.diagnostics.rank_comparison import Description, check_equal_on_ranks
from zerolite.tensor_parallel.shard_spec import is_partial, shard_spec_of
from zerolite.utils.accelerator import host_values
from zerolite.utils.memory_tags import BUCKETS, tag_memory
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.layout import Fragment
from zerolite.zero.observers import StepObserver
from zerolite.zero.reducer import Reducer
from zerolite.zero.stats import SAME_BATCH

if TYPE_CHECKING:
    from zerolite.pipe.prepare import TiedParam


_COMPARED = 1 << 16  # at most about so many elements of an input are hashed


@dataclass(frozen=True)
class SharedParams:
    """Trained parameters whose gradient is the sum over the ranks of ``comm``.

    Attributes:
        comm: all its ranks have these parameters in this order, and own the same part of each.
        indices: of the parameters in the layout.
    """

    comm: Communicator
    indices: tuple[int, ...]


class InputComparison(StepObserver):
    """Comparison of the inputs of ranks that are given the same ones: they have parts of one copy of the model, or will
    take parts of the same sequences. With different inputs their gradients are of no batch."""

    def __init__(self, batch: Communicator, copies: int, device: torch.device) -> None:
        """
        Args:
            batch: ranks with other inputs.
            copies: number of ranks that are given the same inputs.
        """
        self._batch, self._copies, self._device = batch, copies, device
        self._hash: torch.Tensor | None = None  # of the inputs of forwards since the last step
        self.slice_size = 2 * batch.world_size  # a hash for each of them, and its square

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the inputs of a forward, which the next statistics compare."""
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            hashed = content_hash(flat[:: max(1, flat.numel() // _COMPARED)], self._device)
            self._hash = hashed if self._hash is None else self._hash * 31 + hashed

    def write_slice(self, numbers: torch.Tensor) -> None:
        if self._hash is not None:
            # Below 2^20, so that sums over ranks of the hash and of its square are exact in float64.
            short = (self._hash % 1_048_573).double() + 1.0
            numbers[self._batch.rank] = short
            numbers[self._batch.rank + self._batch.world_size] = short**2
        self._hash = None

    def read_slice(self, written: None, sums: torch.Tensor) -> Exception | None:
        # n equal hashes h have the sum n h and the sum of squares n h²; different ones have a larger sum of squares.
        hashes, squares = sums.view(2, -1)
        if not (squares * self._copies != hashes**2).any():
            return None
        return RuntimeError(
            "expected the same batches on all ranks that hold parts of one copy of the model (tensor_parallel, "
            f"pipeline) or of one sequence (sequence_parallel), got different ones in this step; {SAME_BATCH}"
        )


@collective
class SharedGradReducer(StepObserver):
    """All-reduce of the gradients of shared parameters."""

    def __init__(
        self,
        topology: Topology,
        buffer: ParameterBuffer,
        ties: Mapping[int, TiedParam],
        reducer: Reducer,
        device: torch.device,
    ) -> None:
        """
        Args:
            ties: the ``TiedParam`` of each parameter that several stages have, by the parameter's id.
        """
        self._topology, self._buffer, self._ties = topology, buffer, ties
        self._reducer, self._device = reducer, device
        self._shared: dict[str, Communicator] = {}  # by the key of a tie
        self._summed = False

    def on_layout_changed(self) -> None:
        """Find the shared parameters in the layout as it is now.

        The first call makes the communicators, a collective, for frozen parameters too. When such a parameter is
        unfrozen later, one stage calls this while another waits for its message, so no collective could run then.
        """
        topology, trained = self._topology, self._buffer.parameters
        partial = tuple(i for i, p in enumerate(trained) if is_partial(p) and shard_spec_of(p) is None)
        slots = self._buffer.layout.slots
        offloaded = [i for i in partial if self._reducer.bucket_of[i].is_offloaded]
        if offloaded:
            raise ValueError(
                f"zero_optimization.offload_optimizer: expected no parameter whose gradient tensor-parallel ranks must "
                f"sum on the device, got '{slots[offloaded[0]].name}'; leave the block out"
            )
        groups = [SharedParams(topology.tensor, partial)]
        indices = {id(parameter): index for index, parameter in enumerate(trained)}
        for tie in sorted(self._ties.values(), key=lambda tie: str(tie.key)):
            if tie.key not in self._shared:
                self._shared[tie.key] = self._communicator(tie)
            if id(tie.parameter) in indices:
                groups.append(SharedParams(self._shared[tie.key], (indices[id(tie.parameter)],)))
        self._groups = [group for group in groups if group.indices and group.comm.world_size > 1]
        self._fragments = {group.indices: self._fragments_of(group) for group in self._groups}

    def _communicator(self, tie: TiedParam) -> Communicator:
        comm = stages_communicator(self._topology, tuple(tie.ranks), self._device)
        dtype = {f"parameter '{tie.key}', which stages share,": {"dtype": str(tie.parameter.dtype)}}
        different = "zerolite.initialize: stages compute in different dtypes"
        check_equal_on_ranks(Description(dtype), comm, self._device, different)
        return comm

    @property
    def comms(self) -> list[Communicator]:
        """Communicators over which the sums are taken."""
        return [group.comm for group in self._groups]

    @torch.no_grad()
    def on_reduced(self) -> None:
        """Sum the gradients. Later calls do nothing until new gradients come."""
        if self._summed:
            return
        self._summed = True
        for group in self._groups:
            parts = self._local_gradients(group)
            flags = [index in self._reducer.used for index in group.indices]
            # A rank may own no element of these parameters. It then reads dtype and device of a parameter. Reading
            # values would launch a gather at stage 3, and not all of its ranks are here.
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
    def before_backward(self) -> None:
        """Prepare for more gradients of the same step. Only the first rank of each group keeps the sum, so that the
        next sum counts it once."""
        if self._summed:
            for group in self._groups:
                for part in self._local_gradients(group) if group.comm.rank else ():
                    part.zero_()
        self._summed = False

    def on_gradients_dropped(self) -> None:
        self._summed = False

    def _local_gradients(self, group: SharedParams) -> list[torch.Tensor]:
        """Return this rank's gradients of the group, flat, in the order of its indices."""
        sharded = self._reducer.keeps_shards
        fragments, bucket_of = self._fragments[group.indices], self._reducer.bucket_of
        return [
            bucket_of[f.slot.index].mean().narrow(0, f.shard_start if sharded else f.bucket_start, f.numel)
            for f in fragments
        ]

    def _fragments_of(self, group: SharedParams) -> list[Fragment]:
        layout, sharded = self._reducer.buffer.layout, self._reducer.keeps_shards
        order = {index: place for place, index in enumerate(group.indices)}
        fragments = layout.fragments(self._reducer.buffer.rank) if sharded else layout.full_fragments()
        return sorted((f for f in fragments if f.slot.index in order), key=lambda f: order[f.slot.index])


def counts_once(topology: Topology, buffer: ParameterBuffer, ties: Mapping[int, TiedParam]) -> Callable[[int], bool]:
    """Return the rule of the norm: of a parameter that several ranks hold, the first stage and tensor rank counts."""

    def counts(index: int) -> bool:
        parameter = buffer.parameters[index]
        tie = ties.get(id(parameter))
        if tie is not None and tie.ranks[0] != topology.pipe.rank:
            return False
        return shard_spec_of(parameter) is not None or topology.tensor.rank == 0

    return counts
