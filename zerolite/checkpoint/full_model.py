"""Full tensors of a sharded model, gathered over data, tensor and pipeline ranks.

The full model is the union of all stages. A tensor's values come from the first stage that has it. There each rank's
part is gathered over the data-parallel ranks. Then it is broadcast to the ranks of one copy of the model
(``Topology.model``, tensor × pipe), which put the parts together. This goes one tensor at a time, to save memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerolite.checkpoint.huggingface import exported_dtype
from zerolite.checkpoint.names import clean
from zerolite.checkpoint.parameter_access import ParameterAccess
from zerolite.comm import HostGroup, Topology, collective
from zerolite.comm.initial_sync import broadcast_into
from zerolite.tensor_parallel.shard_spec import ShardSpec, names_of, shard_spec_of
from zerolite.zero.stage3.gathered_parameters import GatheredParameters
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of, unpartitioned_shape

TAG = "checkpoint"


@dataclass(frozen=True)
class FullTensor:
    """Description of one tensor of the full model, equal on all ranks.

    Attributes:
        owner: its first name. Tied names have the same owner.
        shape: the full shape.
        parameter: it is a parameter, not a buffer.
        trained: an engine trains it.
        stage: the first pipeline stage that has it.
        shards: the shard of each tensor-parallel rank of that stage; empty if each rank has the full tensor.
    """

    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    trained: bool
    stage: int = 0
    shards: tuple[ShardSpec, ...] = ()


def describe(owner: str, tensor: torch.Tensor, value: torch.Tensor, trained: bool) -> FullTensor:
    """Describe ``tensor`` from this rank's point of view.

    Args:
        owner: the first of its names on this rank.
        value: its entry in the state dict, empty if the parameter is partitioned.
    """
    names, shard = names_of(tensor), shard_spec_of(tensor)
    shape = shard.full_shape if shard is not None else tuple(full_shape(tensor, value))
    parameter = isinstance(tensor, torch.nn.Parameter)
    first = owner if names is None else names[0]
    return FullTensor(first, shape, value.dtype, parameter, trained, shards=() if shard is None else (shard,))


def full_shape(tensor: torch.Tensor, value: torch.Tensor) -> torch.Size:
    """Return the shape that this rank's data-parallel ranks have together."""
    return unpartitioned_shape(tensor) if sharded_param_of(tensor) is not None else value.shape


@collective
def merge_stages(own: Mapping[str, object], topology: Topology) -> dict[str, Any]:
    """Join the entries of all stages by name, :class:`FullTensor` or plain values. If several stages have a name,
    the first one's entry counts."""
    if topology.model.world_size == 1:
        return dict(own)
    rows = HostGroup(topology.model, "whole model").gather(own)  # not that of checkpoints: a save may be under way
    tensor = topology.tensor.world_size
    found: dict[str, Any] = {}
    firsts: dict[str, FullTensor] = {}  # by owner
    for stage in range(topology.pipe.world_size):
        of_tensor = rows[stage * tensor : (stage + 1) * tensor]
        for name, entry in of_tensor[0].items():
            if isinstance(entry, FullTensor):
                shards = tuple(shard for row in of_tensor for shard in row[name].shards)
                entry = firsts.setdefault(entry.owner, replace(entry, stage=stage, shards=shards))
            found.setdefault(name, entry)
    return found


def owners_of(model: torch.nn.Module, state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict. Parameters and buffers themselves replace their entries, so that tied ones
    are one object."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)):
        found[clean(name)] = tensor  # some wrappers of modules leave their own name out of a state dict
    return {name: found.get(clean(name), value) for name, value in state.items() if isinstance(value, torch.Tensor)}


def first_names(tensors: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Return the first name of each tensor, by its id."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return first


class FullModel:
    """Entries of the full model's state dict. Made on all ranks.

    Args:
        state: state dict of this rank's part, in which partitioned parameters are empty.
        masters: access to the master weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        state: Mapping[str, Any],
        topology: Topology,
        device: torch.device,
        masters: ParameterAccess,
    ) -> None:
        self._topology, self._device, self._masters = topology, device, masters
        owners = owners_of(model, state)
        first = first_names(owners)
        self._trained = trained = masters.positions()
        own = {
            name: describe(first[id(owners[name])], owners[name], value, id(owners[name]) in trained)
            if name in owners
            else value
            for name, value in state.items()
        }
        self.entries = merge_stages(own, topology)
        self._local = {own[name].owner: (owner, state[name]) for name, owner in reversed(owners.items())}

    def tensors(self) -> Iterable[tuple[str, FullTensor]]:
        return ((name, entry) for name, entry in self.entries.items() if isinstance(entry, FullTensor))

    @collective
    def get(self, entry: FullTensor, dtype: torch.dtype | None, rank0_only: bool) -> torch.Tensor | None:
        """Return the full values, a copy on the CPU, or None on ranks that are not to have them. ``dtype``: see
        :func:`~zerolite.checkpoint.huggingface.exported_dtype`."""
        topology = self._topology
        needed = not rank0_only or topology.world.rank == 0
        if topology.model.world_size == 1:
            return self._part(entry, dtype, needed)
        receives = not rank0_only or topology.data.rank == 0  # in this copy of the model
        part = None
        if topology.pipe.rank == entry.stage:
            part = self._part(entry, dtype, receives and (bool(entry.shards) or topology.tensor.rank == 0))
        return self._assemble(entry, exported_dtype(entry.dtype, dtype), part, needed) if receives else None

    def _assemble(
        self, entry: FullTensor, dtype: torch.dtype, part: torch.Tensor | None, needed: bool
    ) -> torch.Tensor | None:
        """Receive the parts from the ranks of the stage that has them, and put them together."""
        model, first = self._topology.model, entry.stage * self._topology.tensor.world_size
        if not entry.shards:
            values = part if model.rank == first else torch.empty(entry.shape, dtype=dtype, device="cpu")
            assert values is not None
            broadcast_into(values, model, self._device, TAG, first)
            return values if needed else None
        full = torch.empty(entry.shape, dtype=dtype, device="cpu") if needed else None
        for source, shard in enumerate(entry.shards, first):
            values = part if model.rank == source else torch.empty(shard.local_shape, dtype=dtype, device="cpu")
            assert values is not None
            broadcast_into(values, model, self._device, TAG, source)
            if full is not None:
                shard.into(full, values)
        return full

    def _part(self, entry: FullTensor, dtype: torch.dtype | None, needed: bool) -> torch.Tensor | None:
        """Return the values that this rank's data-parallel ranks have together, on the CPU; None unless ``needed``.
        Called on all of these ranks."""
        owner, value = self._local[entry.owner]
        target = exported_dtype(value.dtype, dtype)
        index = self._trained.get(id(owner)) if target != value.dtype else None
        if index is not None:
            (master,) = self._masters.tensor_parallel_masters([index])
            return master.to("cpu", target) if needed else None
        partitioned = sharded_param_of(owner) is not None
        with GatheredParameters(owner, modifier_rank=None, enabled=partitioned, check=False):
            whole = owner.data if partitioned else value
            return whole.detach().to("cpu", target, copy=True) if needed else None
