"""Updates by optimizers that need whole parameters: each parameter belongs to one rank, which keeps its states.

Gradients and masters are divided as for every optimizer. An update sends both to the owners, lets the optimizer update
the whole parameters there, in their shapes, and sends the masters back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from zerolite.zero.bucket import Bucket
from zerolite.zero.buffer import ParameterBuffer
from zerolite.zero.flat import flattened
from zerolite.zero.layout import Fragment
from zerolite.zero.owner_exchange import OwnerExchange, balanced_owners
from zerolite.zero.stage3.partitioned_parameter import unpartitioned_shape
from zerolite.zero.torch_update import TorchUpdate
from zerolite.zero.update import SpanTensors, UpdateInputs


def set_owners(buckets: Sequence[Bucket], buffer: ParameterBuffer) -> None:
    """Choose an owner for each parameter of these buckets, balanced by elements with those that have owners."""
    loads = [0.0] * buffer.gradient_memory.groups.states.world_size
    for bucket in buffer.buckets:
        for index, owner in bucket.owners.items():
            loads[owner] += buffer.layout.slots[index].numel
    slots = [(bucket, slot) for bucket in buckets for slot in bucket.layout.slots]
    owners = balanced_owners([slot.numel for _, slot in slots], loads)
    for (bucket, slot), owner in zip(slots, owners, strict=True):
        bucket.owners[slot.index] = owner


def whole_parameters(bucket: Bucket, device: torch.device) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """Yield the parameters of a bucket that this rank owns, with memory for the update of each.

    Args:
        device: device of the update, if that is not the host.
    """
    on = torch.device("cpu") if bucket.updates_on_host else device
    for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
        if slot.numel and bucket.owners[slot.index] == bucket.groups.states.rank:
            shape, strides = unpartitioned_shape(parameter), bucket.strides[slot.index]
            memory = torch.empty_strided(shape, strides, dtype=bucket.update_dtype, device=on)
            yield Fragment(slot, slot.numel, 0, slot.start, 0), memory


def fill_whole_parameters(buffer: ParameterBuffer) -> None:
    """Give the whole parameters of all buckets the masters' values, which an optimizer's constructor may read."""
    for bucket in buffer.buckets:
        parts = {fragment.slot.index: _part(bucket.master, fragment) for fragment in bucket.fragments}
        values = _exchange_between([bucket], buffer).to_owners(parts, bucket.update_dtype)
        for shard in bucket.shards:
            tensor = shard.tensor
            tensor.copy_(values[shard.index].as_strided(tensor.shape, tensor.stride()))


class WholeUpdate(TorchUpdate):
    """See the module. Each call of ``update`` exchanges, so all ranks call it for the same buckets."""

    # In a call with few elements of its own a rank would often own nothing, and wait for the others.
    least_numel = 1 << 26

    def __init__(self, inner: Optimizer, buffer: ParameterBuffer) -> None:
        self._exchanges: dict[tuple[int, ...], OwnerExchange] = {}  # by the indices of the buckets
        super().__init__(inner, buffer)
        self.can_skip_on_device = False

    def add_buckets(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            _release(bucket)

    def leave_out(self, sub_group: Sequence[SpanTensors]) -> None:
        exchange, dtype = self._exchange_of(sub_group), _common_dtype(sub_group)
        parts = {f.slot.index: _part(t.master, f) for t in sub_group for f in t.span.bucket.fragments}
        exchange.to_owners({}, dtype)
        # The masters are sent: what other ranks own is whole there, and of what this one owns they get theirs back.
        exchange.to_parts(exchange.to_owners(parts, dtype), dtype)

    def _update(self, sub_group: Sequence[SpanTensors], inputs: UpdateInputs) -> None:
        exchange, dtype, used = self._exchange_of(sub_group), _common_dtype(sub_group), inputs.used
        fragments = [(tensors, f) for tensors in sub_group for f in tensors.span.bucket.fragments]
        gradients = exchange.to_owners({f.slot.index: _part(t.gradient, f) for t, f in fragments}, dtype)
        masters = exchange.to_owners({f.slot.index: _part(t.master, f) for t, f in fragments}, dtype)
        shards = [s for tensors in sub_group for s in tensors.span.bucket.shards if used is None or s.index in used]
        chosen: dict[int, list[torch.Tensor]] = {}
        for shard in shards:
            shape, strides = unpartitioned_shape(shard.parameter), shard.bucket.strides[shard.index]
            gradient, master = (
                values[shard.index].to(self._device_of(shard), shard.bucket.update_dtype).as_strided(shape, strides)
                for values in (gradients, masters)
            )
            shard.tensor.data, shard.tensor.grad = master, gradient.mul_(inputs.factor)
            chosen.setdefault(shard.group, []).append(shard.tensor)
        if self._counts_in_groups:
            self._restore_counts()
            self._add_stand_ins(chosen, used, sub_group[0].master)
        try:
            self._step_inner(sub_group, shards, chosen, inputs)
            for shard in shards:
                masters[shard.index] = flattened(shard.tensor.data, shard.bucket.strides[shard.index])
        finally:
            for tensors in sub_group:
                _release(tensors.span.bucket)
        self._tag_states(shards)
        self._note_states(shards)
        updated = exchange.to_parts(masters, dtype)
        for tensors, fragment in fragments:
            if used is None or fragment.slot.index in used:
                _part(tensors.master, fragment).copy_(updated[fragment.slot.index])
        for tensors in sub_group:
            if tensors.out is not None:
                tensors.out.copy_(tensors.master)

    def _exchange_of(self, sub_group: Sequence[SpanTensors]) -> OwnerExchange:
        buckets = [tensors.span.bucket for tensors in sub_group]
        key = tuple(bucket.index for bucket in buckets)
        if key not in self._exchanges:
            self._exchanges[key] = _exchange_between(buckets, self._buffer)
        return self._exchanges[key]


def _exchange_between(buckets: Sequence[Bucket], buffer: ParameterBuffer) -> OwnerExchange:
    """Return the exchange of the parameters of some buckets."""
    pairs = [(slot, bucket.owners[slot.index]) for bucket in buckets for slot in bucket.layout.slots if slot.numel]
    comm, device = buffer.gradient_memory.groups.states, buffer.placements.device
    return OwnerExchange(buffer.layout, [slot for slot, _ in pairs], [owner for _, owner in pairs], comm, device)


def _common_dtype(sub_group: Sequence[SpanTensors]) -> torch.dtype:
    """Return the dtype in which masters and gradients travel: that of the updates, which all ranks know."""
    return functools.reduce(torch.promote_types, [tensors.span.bucket.update_dtype for tensors in sub_group])


def _part(flat: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    return flat.narrow(0, fragment.shard_start, fragment.numel)


def _release(bucket: Bucket) -> None:
    """Release the memory of whole parameters and of their gradients."""
    for shard in bucket.shards:
        shard.tensor.grad = None
        shard.tensor.data = shard.tensor.new_empty(0)
