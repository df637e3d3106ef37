"""Updates by Muon at every stage: momentum on the parts that a rank has, Newton-Schulz on whole matrices.

::

    momentum        on each rank's parts, in the dtype of the update; it is laid out like every other state
    to owners       the parts in bf16, in which Newton-Schulz computes anyway: 2 bytes for each element that a rank has
    Newton-Schulz   each matrix on one rank, matrices of one shape together
    to parts        the results in bf16
    update          of the parts, with weight decay

Every number is rounded where torch.optim.Muon rounds it (Liu et al., "Muon is Scalable for LLM Training", 2025, divide
it so between data-parallel ranks). Groups without ``use_muon`` are AdamW's, which updates parts by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zerolite.optim.muon import adjusted_lr, orthogonalize, uses_muon, work_of
from zerolite.utils.memory_tags import STAGING, tag_memory
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.flat import flattened
from zerolite.zero.owner_exchange import OwnerExchange, balanced_owners
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape
from zerolite.zero.torch_update import TorchUpdate
from zerolite.zero.update import OptimParamShard, SpanTensors, UpdateInputs

_SENT = torch.bfloat16


class MuonUpdate(TorchUpdate):
    """See the module. Each call of ``update`` exchanges once, so all ranks call it for the same buckets.

    Owners are chosen for each call. They keep nothing between two of them.
    """

    # With this many elements of its own a rank gets several matrices at a time, and is busy as long as the others.
    least_numel = 1 << 28

    def __init__(self, inner: Optimizer, buffer: ParameterBuffer) -> None:
        """The arguments are those of :class:`TorchUpdate`; ``inner`` is of a class in ``optim.muon.MUON``."""
        super().__init__(inner, buffer)
        self.can_skip_on_device = False
        self._exchanges: dict[tuple[int, ...], OwnerExchange | None] = {}  # by the indices of the buckets

    def leave_out(self, sub_group: Sequence[SpanTensors]) -> None:
        exchange = self._exchange_of(sub_group)
        if exchange is not None:
            whole = exchange.to_owners({}, _SENT)
            exchange.to_parts({index: flat.zero_() for index, flat in whole.items()}, _SENT)

    def _step_inner(
        self,
        sub_group: Sequence[SpanTensors],
        shards: Sequence[OptimParamShard],
        chosen: dict[int, list[torch.Tensor]],
        inputs: UpdateInputs,
    ) -> None:
        groups = self._inner.param_groups
        matrices = [shard for shard in shards if uses_muon(groups[shard.group])]
        others = {group: tensors for group, tensors in chosen.items() if not uses_muon(groups[group])}
        super()._step_inner(sub_group, [s for s in shards if s.group in others], others, inputs)
        directions = self._move_momentum(matrices)
        exchange = self._exchange_of(sub_group)
        if exchange is None:
            directions = self._orthogonalize(directions)
        else:
            whole = exchange.to_owners(directions, _SENT)
            used = {index: flat for index, flat in whole.items() if inputs.used is None or index in inputs.used}
            directions = exchange.to_parts({**whole, **self._orthogonalize(used)}, _SENT)
        for shard in matrices:
            group, tensor = groups[shard.group], shard.tensor
            rate, shape = float(group["lr"]), unpartitioned_shape(shard.parameter)
            tensor.mul_(1 - rate * group["weight_decay"])
            direction = directions[shard.index].to(tensor.device).view_as(tensor)
            tensor.add_(direction, alpha=-adjusted_lr(rate, group["adjust_lr_fn"], shape))

    def _move_momentum(self, shards: Sequence[OptimParamShard]) -> dict[int, torch.Tensor]:
        """Add the gradients to the momentum of the shards. Return the matrices' parts to orthogonalise, by index."""
        directions: dict[int, torch.Tensor] = {}
        for shard in shards:
            group, gradient = self._inner.param_groups[shard.group], shard.tensor.grad
            assert gradient is not None
            state = self._inner.state[shard.parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            directions[shard.index] = tag_memory(direction.to(self._buffer.placements.device, _SENT), STAGING)
        return directions

    def _orthogonalize(self, matrices: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the iterates of whole matrices by index, as flat as these are."""
        settings: dict[tuple[Any, ...], list[int]] = {}
        group_of = self._group_of()
        for index in matrices:
            group = group_of[index]
            key = (*group["ns_coefficients"], group["ns_steps"], group["eps"])
            settings.setdefault(key, []).append(index)
        results: dict[int, torch.Tensor] = {}
        for (*coefficients, steps, eps), indices in settings.items():
            whole = [self._as_matrix(index, matrices[index]) for index in indices]
            for index, result in zip(indices, orthogonalize(whole, coefficients, steps, eps), strict=True):
                is_flat = matrices[index].dim() == 1
                results[index] = flattened(result, self._strides(index)) if is_flat else result
        return results

    def _as_matrix(self, index: int, values: torch.Tensor) -> torch.Tensor:
        shape = unpartitioned_shape(self._buffer.parameters[index])
        return values if values.dim() > 1 else values.as_strided(shape, self._strides(index))

    def _strides(self, index: int) -> tuple[int, ...]:
        return self._buffer.buckets[self._buffer.layout.slots[index].bucket].strides[index]

    def _group_of(self) -> dict[int, dict[str, Any]]:
        """Return the param group of each matrix, by index."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._buffer.parameters)}
        groups = [group for group in self._inner.param_groups if uses_muon(group)]
        return {index_of[id(p)]: group for group in groups for p in group["params"] if id(p) in index_of}

    def _exchange_of(self, sub_group: Sequence[SpanTensors]) -> OwnerExchange | None:
        """Return the exchange of the matrices in some buckets; None where the ranks have whole matrices, or none."""
        buckets = [tensors.span.bucket for tensors in sub_group]
        key = tuple(bucket.index for bucket in buckets)
        if key not in self._exchanges:
            matrices = self._group_of()
            slots = [
                slot for bucket in buckets for slot in bucket.layout.slots if slot.index in matrices and slot.numel
            ]
            exchange = None
            if slots and self._buffer.shard:
                costs = [work_of(unpartitioned_shape(self._buffer.parameters[slot.index])) for slot in slots]
                comm = self._buffer.gradient_memory.groups.states
                owners = balanced_owners(costs, [0.0] * comm.world_size)
                exchange = OwnerExchange(self._buffer.layout, slots, owners, comm, self._buffer.placements.device)
            self._exchanges[key] = exchange
        return self._exchanges[key]
