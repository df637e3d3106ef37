"""Initial values of a model: in buckets, on the device, in their dtypes, and equal to rank 0's."""

from __future__ import annotations

import torch

from zerolite.comm import Communicator
from zerolite.comm.initial_sync import broadcast_into, differing, synchronize_tensors
from zerolite.precision.dtypes import Precision
from zerolite.zero.buffer import ParameterBuffer, PartitionedParameterBuffer
from zerolite.zero.layout import BucketLayout
from zerolite.zero.stage3.partitioned_parameter import handle_of


def fill_buckets(buffer: ParameterBuffer, precision: Precision, comm: Communicator, device: torch.device) -> None:
    """Fill new buckets, with whole parameters that have rank 0's values, or with shards."""
    if isinstance(buffer, PartitionedParameterBuffer):
        buffer.fill_from_shards(precision.compute_dtype, precision.master_dtype)
        return
    indices = [slot.index for bucket in buffer.unfilled for slot in bucket.slots]
    different = dict(zip(indices, differing([buffer.parameters[i] for i in indices], comm, device), strict=True))

    def synchronize(bucket: BucketLayout, flat: torch.Tensor) -> None:
        if any(different[slot.index] for slot in bucket.slots):
            broadcast_into(flat, comm, device, "initial_sync")

    buffer.fill(device, precision.compute_dtype, precision.master_dtype, synchronize)


def synchronize_untrained(
    model: torch.nn.Module,
    trained: list[torch.nn.Parameter],
    precision: Precision,
    comm: Communicator,
    device: torch.device,
) -> None:
    """Move buffers and frozen parameters to the device, with rank 0's values and the dtypes of ``precision``. Frozen
    parameters that stage 3 shards are left out."""
    in_layout = {id(p) for p in trained}
    others = [p for p in model.parameters() if id(p) not in in_layout and handle_of(p) is None]
    rest: list[torch.Tensor] = [p.data for p in others]
    for buffer in model.buffers():
        if buffer.dtype != precision.buffer_dtype(buffer):
            buffer.data = buffer.data.to(precision.buffer_dtype(buffer))
    _move_buffers(model, device)
    rest += list(model.buffers())
    synchronize_tensors(rest, comm, device, "initial_sync")
    for parameter in others:
        parameter.data = parameter.data.to(device, precision.compute_dtype(parameter))


def _move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move buffers to ``device``, and all tensors that a user's module moves in its own ``_apply``. A shared buffer is
    moved once. Parameters stay where they are."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the original, which is kept alive

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter) or tensor.device == device:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = (tensor, tensor.to(device))
        return moved[id(tensor)][1]

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = move(buffer)
        # torch's own overrides (nn.LSTM) would copy the parameters into new memory, out of their buckets.
        own = not type(module)._apply.__module__.startswith("torch.")
        if own and device.type != "cpu" and all(handle_of(p) is None and p.grad is None for p in module.parameters()):
            module._apply(move)
