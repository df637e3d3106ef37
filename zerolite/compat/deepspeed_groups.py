"""Master weights and optimizer states in DeepSpeed's files: flat groups of parameters, one partition per rank.

DeepSpeed flattens the trained parameters of a group and gives each rank a part; optimizer states have the same layout.
At stages 1 and 2 it concatenates the parameters and divides the result into equal parts, also within a parameter:

    | a        | b              | c  |pad|
    | rank 0      | rank 1      | rank 2 |        the padding at the end is not saved

At stage 3 it divides each parameter into equal parts, the last one padded, and each rank concatenates its parts:

    rank 0 | a[0:k] | b[0:m] |    rank 1 | a[k:] pad | b[m:] |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.compat.deepspeed_files import Files, LoadedFile
from zerolite.compat.safe_unpickle import StubObject


class PartitionSlice(NamedTuple):
    """Elements ``start`` to ``start + length`` of the partition of ``rank``."""

    rank: int
    start: int
    length: int


Slices = tuple[PartitionSlice, ...]


@dataclass(frozen=True)
class Group:
    """Parameters whose elements are in the same flat partitions: a parameter group, or a part of one at stage 3.

    Attributes:
        where: description of the group, for messages.
        number: number of the parameter group.
        shapes: shapes by name, in order.
        slices: slices of the partitions that contain each parameter.
        masters: master weights of each rank.
        states: optimizer states of each rank.
    """

    where: str
    number: int
    shapes: Mapping[str, tuple[int, ...]]
    slices: Mapping[str, Slices]
    masters: Sequence[torch.Tensor]
    states: Sequence[Mapping[str, Any]]


def read_groups(files: Files) -> tuple[list[Group], Sequence[Mapping[str, Any]] | None]:
    """Return the groups, and the settings of the parameter groups; None if they were not saved."""
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    base = "optimizer_state_dict" if files.stage == 3 else "base_optimizer_state"
    masters = [_flat_groups(file, key) for file in files.optimizer]
    states = [file.get(object, "optimizer_state_dict", base) for file in files.optimizer]
    shapes = [_shapes(files.model[0], entry) for entry in files.model[0].get(list, "param_shapes")]
    for file, flat in zip(files.optimizer, masters, strict=True):
        if len(flat) != len(shapes):
            raise CheckpointError(
                f"'{file.path}': expected {len(shapes)} groups of master weights, one for each group of "
                f"'{files.model[0].path.name}', got {len(flat)}"
            )
    settings = states[0]["param_groups"] if isinstance(states[0], dict) else None
    numbers = _numbers(files.optimizer[0], settings, len(shapes))
    of_ranks = [_states(state, len(shapes)) for state in states]
    groups = []
    for i, (of_group, number) in enumerate(zip(shapes, numbers, strict=True)):
        where = f"'{files.directory}', group {i} of its parameters"
        flats = [flat[i] for flat in masters]
        lengths = [flat.numel() for flat in flats]
        numels = {name: math.prod(shape) for name, shape in of_group.items()}
        if files.stage == 3:
            slices = sliced_parameters(numels, lengths, where)
        else:
            slices = equal_partitions(numels, _gaps(files.optimizer[0], i, len(numels)), lengths, where)
        groups.append(Group(where, number, of_group, slices, flats, [state[i] for state in of_ranks]))
    return groups, settings


def _flat_groups(file: LoadedFile, key: str) -> list[torch.Tensor]:
    groups = file.get(list, "optimizer_state_dict", key)
    for flat in groups:
        if not isinstance(flat, torch.Tensor) or flat.dim() != 1 or not flat.is_contiguous():
            raise CheckpointError(f"'{file.path}': expected flat tensors in '{key}', got {described(flat)}")
    return [flat.detach() for flat in groups]


def _shapes(file: LoadedFile, entry: Any) -> dict[str, tuple[int, ...]]:
    shapes = {str(name): tuple(shape) for name, shape in entry.items()}
    if not all(type(size) is int and size >= 0 for shape in shapes.values() for size in shape):
        raise CheckpointError(f"'{file.path}': expected shapes in 'param_shapes', got {shapes}")
    return shapes


def _gaps(file: LoadedFile, group: int, count: int) -> list[int]:
    """Return the padding after each parameter of a group, in elements. DeepSpeed before 0.19 has none."""
    saved = file.content["optimizer_state_dict"].get("param_alignment_paddings")
    return [0] * count if saved is None else list(saved[group])


def _numbers(file: LoadedFile, settings: Any, count: int) -> list[int]:
    """Return the number of the parameter group to which each flat group belongs."""
    if settings is None:
        return list(range(count))
    # DeepSpeed's optimizer has one flat tensor for each group, at stage 3 for each subgroup.
    numbers = [number for number, group in enumerate(settings) for _ in group["params"]]
    order = [index for group in settings for index in group["params"]]
    if order != list(range(count)):
        raise CheckpointError(
            f"'{file.path}': expected an optimizer of {count} flat parameters, in order, got {order} in its groups"
        )
    return numbers


def _states(saved: Any, count: int) -> list[Mapping[str, object]]:
    """Return the states of each flat group; {} before the first step.

    In an elastic checkpoint they are a list, otherwise a dict by the index of the parameter, as torch saves it.
    """
    if isinstance(saved, list):
        return saved
    return [saved["state"].get(i, {}) for i in range(count)]


def flat_states(group: Group, state: str, of_ranks: Sequence[Any]) -> list[torch.Tensor]:
    """Return the state's partitions, which may be longer than the master weights by the padding."""
    for rank, (value, master) in enumerate(zip(of_ranks, group.masters, strict=True)):
        fits = isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() >= master.numel()
        if not fits or value.dtype != of_ranks[0].dtype:
            raise CheckpointError(
                f"{group.where}: expected optimizer state '{state}' of rank {rank} to be {of_ranks[0].dtype} values of "
                f"{master.numel()} elements, got {described(value)}; are all files from the same save?"
            )
    return list(of_ranks)


def gather(flat: Sequence[torch.Tensor], slices: Slices, shape: tuple[int, ...]) -> torch.Tensor:
    parts = [flat[rank].narrow(0, start, length) for rank, start, length in slices] or [flat[0][:0]]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)


def common_number(group: Group, state: str, of_ranks: Sequence[object]) -> Any:
    """Return a state that is one number for all elements, such as the step count.

    It is a tensor without dimensions or a Python number, as in torch's optimizers.
    """
    numbers = [value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value for value in of_ranks]
    if not isinstance(numbers[0], (int, float)):
        raise CheckpointError(
            f"{group.where}: expected optimizer state '{state}' to be a number, or to have one value for each of the "
            f"{group.masters[0].numel()} elements, got {described(of_ranks[0])}"
        )
    if any(number != numbers[0] for number in numbers):
        raise CheckpointError(
            f"{group.where}: expected one value of '{state}' on all ranks, got {numbers}; are all files from the same "
            "save?"
        )
    return of_ranks[0].reshape(()) if isinstance(of_ranks[0], torch.Tensor) else as_count(state, numbers[0])


def as_count(state: str, number: Any) -> Any:
    """Return a step count as a tensor, as in torch's optimizers; DeepSpeed's own have a Python number."""
    return torch.tensor(float(number), dtype=torch.float32, device="cpu") if state == "step" else number


def described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return value.name if isinstance(value, StubObject) else type(value).__name__


# -------------------------------------------------------------------- slices of the partitions


def equal_partitions(
    numels: Mapping[str, int], gaps: Sequence[int], lengths: Sequence[int], where: str
) -> dict[str, Slices]:
    """Return the slices of each parameter at stages 1 and 2, in the order of its elements.

    Args:
        numels: elements of the parameters, in order.
        gaps: unused elements after each parameter.
        lengths: length of each rank's saved partition.
        where: description of the group, for messages.

    Raises:
        CheckpointError: the numbers do not fit together.
    """
    needed, present, world_size = sum(numels.values()) + sum(gaps), sum(lengths), len(lengths)
    # DeepSpeed pads the flat buffer of a group to a multiple of 2 * world_size for NCCL, so there may be more elements.
    if not needed <= present < needed + max(1, 2 * world_size):
        raise CheckpointError(
            f"{where}: the parameters have {needed} elements together, but the partitions of {world_size} ranks "
            f"{present}; are all files from the same save?"
        )
    starts = [sum(lengths[:rank]) for rank in range(world_size)]
    filled = [length for start, length in zip(starts, lengths, strict=True) if start < needed]
    if any(length != filled[0] for length in filled[:-1]):
        raise CheckpointError(
            f"{where}: expected partitions of the same length on all ranks but the last, got {list(lengths)}; are all "
            f"files from the same save?"
        )
    slices, offset = {}, 0
    for (name, numel), gap in zip(numels.items(), gaps, strict=True):
        slices[name] = tuple(_slices_in(offset, offset + numel, starts, lengths))
        offset += numel + gap
    return slices


def _slices_in(start: int, stop: int, starts: Sequence[int], lengths: Sequence[int]) -> list[PartitionSlice]:
    slices = []
    for rank, (first, length) in enumerate(zip(starts, lengths, strict=True)):
        low, high = max(start, first), min(stop, first + length)
        if low < high:
            slices.append(PartitionSlice(rank, low - first, high - low))
    return slices


def sliced_parameters(numels: Mapping[str, int], lengths: Sequence[int], where: str) -> dict[str, Slices]:
    """Return the slices of each parameter at stage 3; arguments as for :func:`equal_partitions`."""
    world_size = len(lengths)
    needed = sum(-(-numel // world_size) for numel in numels.values())
    if any(length != needed for length in lengths):
        raise CheckpointError(
            f"{where}: the parts of the parameters have {needed} elements together on each of {world_size} ranks, but "
            f"the partitions {list(lengths)}; are all files from the same save?"
        )
    slices, offset = {}, 0
    for name, numel in numels.items():
        slices[name] = partition_slices(numel, world_size, offset)
        offset += -(-numel // world_size)
    return slices


def partition_slices(numel: int, world_size: int, offset: int = 0) -> Slices:
    """Return the slices of a parameter at stage 3, which begins at ``offset`` on each rank, without padding."""
    part = -(-numel // world_size)
    lengths = [min(part, max(0, numel - rank * part)) for rank in range(world_size)]
    return tuple(PartitionSlice(rank, offset, length) for rank, length in enumerate(lengths) if length)
