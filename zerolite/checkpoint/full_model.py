"""Full tensors of a sharded model, gathered over data, tensor and pipeline ranks.

The full model is the union of all stages. A tensor's values come from the first stage that has it. There each rank's
part is gathered over the data-parallel ranks. Then it is broadcast to the ranks of one copy of the model
(``Topology.model``, tensor × pipe), which put the parts together. This goes one tensor at a time, to save memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerolite.checkpoint.huggingface import exported_dtype
from zerolite.checkpoint.parameter_access import ParameterAccess
from zerolite.checkpoint.state import clean
from zerolite.comm import Communicator, HostGroup, Topology, collective
from zerolite.comm.initial_sync import broadcast_into
from zerolite.tensor_parallel.shard_spec import ShardSpec, names_of, shard_spec_of
from zerolite.utils.accelerator import address
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.flat import flattened
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
        in_model: it is a parameter or buffer, and not made by a hook of the state dict.
        trained: an engine trains it.
        keeps_dtype: it is a quantized weight or its scale, which no cast may change.
        stage: the first pipeline stage that has it.
        shards: the shard of each tensor-parallel rank of that stage; empty if each rank has the full tensor.
    """

    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    in_model: bool
    trained: bool
    keeps_dtype: bool
    stage: int = 0
    shards: tuple[ShardSpec, ...] = ()

    def exported_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of the full values if ``dtype`` was asked for; see
        :func:`~zerolite.checkpoint.huggingface.exported_dtype`."""
        return self.dtype if self.keeps_dtype else exported_dtype(self.dtype, dtype)


@collective
def merge_stages(local: Mapping[str, object], topology: Topology) -> dict[str, Any]:
    """Join the entries of all stages by name, :class:`FullTensor` or plain values. If several stages have a name,
    the first one's entry counts."""
    if topology.model.world_size == 1:
        return dict(local)
    rows = HostGroup(topology.model, "whole model").gather(local)  # not that of checkpoints: a save may be under way
    tensor = topology.tensor.world_size
    joined: dict[str, Any] = {}
    firsts: dict[str, FullTensor] = {}  # by owner
    for stage in range(topology.pipe.world_size):
        of_tensor = rows[stage * tensor : (stage + 1) * tensor]
        for name, entry in of_tensor[0].items():
            if isinstance(entry, FullTensor):
                of_experts = any(shard.dimension == "expert" for shard in entry.shards)  # each rank names all of them
                shards = entry.shards if of_experts else tuple(s for row in of_tensor for s in row[name].shards)
                entry = firsts.setdefault(entry.owner, replace(entry, stage=stage, shards=shards))
            joined.setdefault(name, entry)
    return joined


def _is_same(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if an entry of a state dict is the module's plain tensor itself."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.shape == tensor.shape and value.dtype == tensor.dtype and address(value) == address(tensor)


class FullModel:
    """Entries of the full model's state dict, and access to its tensors. Made on all ranks.

    Attributes:
        in_place: this rank's model has all tensors itself, in modules. So the entries hold as long as these have them.
    """

    def __init__(self, parts: EngineParts, state: Mapping[str, Any], masters: ParameterAccess) -> None:
        """
        Args:
            parts: of the engine.
            state: state dict of this rank's part, in which partitioned parameters are empty.
            masters: access to the master weights.
        """
        self._topology, self._device, self._masters = parts.topology, parts.device, masters
        self._keeps_dtype = parts.precision.keeps_dtype
        registered: dict[str, torch.Tensor] = {}  # some wrappers of modules leave their names out of a state dict
        for named in (parts.model.named_buffers, parts.model.named_parameters):
            registered.update((clean(name), tensor) for name, tensor in named(remove_duplicate=False))
        self._trained = masters.positions()
        first: dict[int, str] = {}  # first names, by the id of tensors
        self._local: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # tensor and entry in the state, by first name
        local = dict(state)
        self.in_place = parts.topology.model.world_size == 1
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                # Tied names have one parameter or buffer, but an entry each.
                tensor = registered.get(clean(name), value)
                first.setdefault(id(tensor), name)
                local[name] = entry = self._describe(first[id(tensor)], tensor, value, clean(name) in registered)
                is_own = sharded_param_of(tensor) is not None or _is_same(tensor, value)
                self.in_place &= entry.in_model and is_own
                self._local.setdefault(entry.owner, (tensor, tensor if is_own else value))
        self.entries = merge_stages(local, parts.topology)

    def _describe(self, owner: str, tensor: torch.Tensor, value: torch.Tensor, in_model: bool) -> FullTensor:
        """Describe ``tensor`` from this rank's point of view.

        Args:
            owner: the first of its names on this rank.
            value: its entry in the state dict, empty if the parameter is partitioned.
            in_model: see :class:`FullTensor`.
        """
        names, shard = names_of(tensor), shard_spec_of(tensor)
        shape = unpartitioned_shape(tensor) if sharded_param_of(tensor) is not None else value.shape
        return FullTensor(
            owner=owner if names is None else names[0],
            shape=tuple(shape) if shard is None else shard.full_shape,
            dtype=value.dtype,
            parameter=isinstance(tensor, torch.nn.Parameter),
            in_model=in_model,
            trained=id(tensor) in self._trained,
            keeps_dtype=not in_model or self._keeps_dtype(tensor),  # bitsandbytes adds scales to a state dict
            shards=() if shard is None else shard.of_all_ranks if shard.dimension == "expert" else (shard,),
        )

    def parameters(self, owners: Collection[str]) -> list[torch.nn.Parameter]:
        """Return the parameters on this rank that are called ``owners``."""
        tensors = (tensor for owner, (tensor, _) in self._local.items() if owner in owners)
        return [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]

    def tensors(self) -> Iterable[tuple[str, FullTensor]]:
        return ((name, entry) for name, entry in self.entries.items() if isinstance(entry, FullTensor))

    def local(self, entry: FullTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensor on this rank, and what has its values unless it is partitioned: itself, or an entry of the
        state dict in other memory."""
        return self._local[entry.owner]

    @collective
    def get(self, entry: FullTensor, dtype: torch.dtype | None, rank0_only: bool) -> torch.Tensor | None:
        """Return the full values, a copy on the CPU, or None on ranks that are not to have them. ``dtype``: see
        :meth:`FullTensor.exported_dtype`."""
        topology = self._topology
        needed = not rank0_only or topology.world.rank == 0
        if topology.model.world_size == 1 and not entry.shards:
            return self._part(entry, dtype, needed)
        if entry.shards and entry.shards[0].dimension == "expert":
            part = self._part(entry, dtype, needed=True)
            return self._assemble(entry, topology.expert, 0, entry.exported_dtype(dtype), part, needed)
        receives = not rank0_only or topology.data.rank == 0  # in this copy of the model
        part = None
        if topology.pipe.rank == entry.stage:
            part = self._part(entry, dtype, receives and (bool(entry.shards) or topology.tensor.rank == 0))
        if not receives:
            return None
        first = entry.stage * topology.tensor.world_size
        return self._assemble(entry, topology.model, first, entry.exported_dtype(dtype), part, needed)

    @collective
    def set(self, entry: FullTensor, full_values: torch.Tensor | None) -> None:
        """Send rank 0's full values ``full_values``, or this rank's part of them, into the tensor."""
        topology, device = self._topology, self._device
        tensor, _ = self._local.get(entry.owner, (None, None))  # None if this rank's stage does not have it
        partitioned = tensor is not None and sharded_param_of(tensor) is not None
        if topology.trivial and tensor is not None and not partitioned and shard_spec_of(tensor) is None:
            if full_values is not None:
                tensor.data.copy_(full_values)
            broadcast_into(tensor.data, topology.world, device, "parameters")
            return
        values, spec = full_values, None if tensor is None else shard_spec_of(tensor)
        if not topology.trivial or spec is not None:
            values = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            if full_values is not None:
                values.copy_(full_values)
            broadcast_into(values, topology.world, device, "parameters")
        if tensor is None:
            return
        if partitioned and spec is not None and spec.dimension == "expert":
            assert values is not None, "all ranks have received them"
            sharded_param = sharded_param_of(tensor)
            assert sharded_param is not None
            sharded_param.write(flattened(spec.of(values), sharded_param.strides))
            return
        with GatheredParameters(tensor, modifier_rank=0, enabled=partitioned):
            if values is not None and (topology.data.rank == 0 or not partitioned):
                tensor.data.copy_(values if spec is None else spec.of(values))

    def _assemble(
        self,
        entry: FullTensor,
        model: Communicator,
        first: int,
        dtype: torch.dtype,
        part: torch.Tensor | None,
        needed: bool,
    ) -> torch.Tensor | None:
        """Receive the parts from the ranks that have them, and put them together.

        Args:
            model: ranks of one copy of the model.
            first: the first of them that has a part.
            part: this rank's.
        """
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
        target = entry.exported_dtype(dtype)
        index = self._trained.get(id(owner)) if target != value.dtype else None
        if index is not None:
            (master,) = self._masters.tensor_parallel_masters([index])
            return master.to("cpu", target) if needed else None
        partitioned = sharded_param_of(owner) is not None
        with GatheredParameters(owner, modifier_rank=None, enabled=partitioned, check=False):
            values = owner.data if partitioned else value
            return values.detach().to("cpu", target, copy=True) if needed else None
