"""Values of all ranks, reduced to one or with their rows joined: `engine.reduce`, `gather` and `gather_for_metrics`.

Every call sends one message from each rank to all: what it calls, what its values look like, and the values. So ranks
that do not call alike, or a value that cannot be sent, give the same error on all ranks. Tensors travel, and are
reduced, on the engine's device; the host reads only what describes them. Metrics themselves, and their
state over a data set, are torchmetrics' business.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from zerolite.comm import Communicator, collective
from zerolite.data.dataloader import Loaders, Rows
from zerolite.utils.accelerator import HostRead

OPS = ("mean", "sum", "max", "min")
_SHOWN = 4  # ranks and lines that an error quotes at most


class _Leaf(NamedTuple):
    """One value of a nested structure, ready to be sent."""

    shape: str  # what must be the same on all ranks, in words
    sent: Any  # a number, a tensor on the engine's device, or None
    finish: Callable[[list[Any]], Any]  # makes the result from every rank's `sent`


class _Message(NamedTuple):
    call: str  # name and arguments of the user's call, which must be equal on all ranks
    problem: str  # sentence about a value that cannot be sent, or ""
    shapes: dict[str, str]  # by path, because dicts with the same keys may be in another order on another rank
    values: dict[str, Any]


class _Unfit(ValueError):
    """This rank's value cannot be sent."""


@collective
@torch.no_grad()
def reduce(value: object, op: str, comm: Communicator, device: torch.device) -> Any:
    """See :meth:`zerolite.engine.engine.Engine.reduce`."""

    def leaf(path: str, value: object) -> _Leaf:
        if op not in OPS:
            raise _Unfit(f"expected op to be one of {', '.join(OPS)}, got {op!r}")
        if isinstance(value, numbers.Real):
            return _Leaf("a number", _plain_number(value), lambda parts: _reduce_numbers(parts, op))
        tensor = _on_device(path, value, "numbers and tensors", device)
        if tensor.is_complex() and op in ("max", "min"):
            raise _Unfit(f"expected real numbers for {op}, got {tensor.dtype} at {path}")
        if tensor.dtype == torch.uint64:
            raise _Unfit(f"expected a dtype that int64 contains, got torch.uint64 at {path}; cast it to torch.int64")
        target = value.device  # type: ignore[attr-defined]
        return _Leaf(
            f"{tensor.dtype} {list(tensor.shape)}", tensor, lambda parts: _reduce_tensors(parts, op).to(target)
        )

    return _together(f"engine.reduce, op={op}", value, leaf, comm, device)


@collective
@torch.no_grad()
def gather(
    value: object, comm: Communicator, device: torch.device, loaders: Loaders | None = None, loader: object = None
) -> Any:
    """See :meth:`zerolite.engine.engine.Engine.gather`; with ``loaders`` see ``gather_for_metrics`` of that class."""
    problem, rows = "", None
    repeats = loaders is not None and loader is None and loaders.repeats
    if loaders is not None:
        try:
            rows = loaders.rows(loader)
        except ValueError as error:
            problem = str(error)

    def leaf(path: str, value: object) -> _Leaf:
        if problem:
            raise _Unfit(problem)
        if isinstance(value, numbers.Real):
            value = torch.tensor(_plain_number(value), device="cpu", dtype=_dtype_of(value))
        tensor = _on_device(path, value, "tensors", device)
        return _gathered(path, tensor, value.device, rows, repeats)  # type: ignore[attr-defined]

    name = "engine.gather" if loaders is None else "engine.gather_for_metrics"
    samples = f", {rows.per_rank} samples on each rank and {rows.samples} in all" if rows is not None else ""
    return _together(name + samples, value, leaf, comm, device)


def _gathered(path: str, tensor: torch.Tensor, target: torch.device, rows: Rows | None, repeats: bool) -> _Leaf:
    """Describe an item of :func:`gather`, whose result will be on the device ``target``.

    Args:
        repeats: the item is of a batch that this rank repeats, so it has no rows.
    """
    is_scalar = tensor.dim() == 0
    tensor = tensor.reshape(1) if is_scalar else tensor
    trailing = "".join(f", {size}" for size in tensor.shape[1:])
    shape = f"{tensor.dtype} [*{trailing}]"
    if rows is None or (is_scalar and rows.per_rank != 1):
        tensor = tensor[:0].clone() if rows is None and repeats else tensor
        return _Leaf(
            shape if rows is None else f"{shape}, one for each rank", tensor, lambda parts: torch.cat(parts).to(target)
        )
    if tensor.shape[0] != rows.per_rank:
        raise _Unfit(
            f"expected a row for each of the {rows.per_rank} samples that the loader gave this rank, got "
            f"{tensor.shape[0]} rows at {path}; for values that are not one for each sample call engine.gather"
        )
    samples = rows.samples
    return _Leaf(shape, tensor, lambda parts: torch.stack(parts, 1).flatten(0, 1)[:samples].to(target))


def _on_device(path: str, value: object, expected: str, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise _Unfit(f"expected {expected}, got {type(value).__name__} at {path}; make it a tensor or leave it out")
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        what = f"device {value.device}" if value.device.type == "meta" else f"{value.layout}, {value.dtype}"
        raise _Unfit(f"expected a dense tensor with values, got one with {what} at {path}; make it dense")
    # A copy, because its bytes are sent as they lie in memory, and a view may have gaps there.
    return torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value.detach())


def _plain_number(number: Any) -> bool | int | float:
    if isinstance(number, bool):
        return number
    return int(number) if isinstance(number, numbers.Integral) else float(number)


def _dtype_of(number: object) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, numbers.Integral) else torch.float64


# -------------------------------------------------------------------- reductions


def _reduce_tensors(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """Combine in rank order, so that all ranks get the same bits: floats in float64, integers in int64."""
    dtype = parts[0].dtype
    inexact = dtype.is_floating_point or dtype.is_complex
    if inexact or op == "mean":
        wide = torch.complex128 if dtype.is_complex else torch.float64
    else:
        wide = torch.int64
    result = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        other = part.to(wide)
        if op in ("mean", "sum"):
            result += other
        else:
            result = torch.maximum(result, other) if op == "max" else torch.minimum(result, other)
    if op == "mean":
        result /= len(parts)
    if inexact:
        return result.to(torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32)
    return result.to(dtype) if op in ("max", "min") else result


def _reduce_numbers(values: list[Any], op: str) -> object:
    """Reduce numbers of Python. The result is a float if one of them is."""
    if op in ("mean", "sum"):
        total = sum(values)
        return total / len(values) if op == "mean" else total
    if any(isinstance(value, float) for value in values):
        values = [float(value) for value in values]
        if any(math.isnan(value) for value in values):  # max() and min() would depend on the order
            return math.nan
    elif any(type(value) is int for value in values):
        values = [int(value) for value in values]
    return max(values) if op == "max" else min(values)


# -------------------------------------------------------------------- the exchange


def _together(
    call: str, value: object, leaf: Callable[[str, object], _Leaf], comm: Communicator, device: torch.device
) -> object:
    """Return ``value`` with each item replaced by its result over all ranks; None stays None.

    Args:
        call: name and arguments of the user's call.
        leaf: describes one item, given its path.

    Raises:
        ValueError: on all ranks, if one of them has a value that cannot be sent.
        RuntimeError: on all ranks, if their calls differ.
    """
    items, structure = tree_flatten_with_path(value)
    leaves: dict[str, _Leaf] = {}
    problem = ""
    try:
        for key, item in items:
            path = keystr(key) or "the value"
            leaves[path] = _Leaf("None", None, lambda _: None) if item is None else leaf(path, item)
    except _Unfit as error:
        problem = str(error)
    except Exception as error:  # the other ranks are about to wait for this one, so they must be told
        problem = f"{type(error).__name__}: {error}"
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    values = {} if problem else {path: leaf.sent for path, leaf in leaves.items()}
    messages = _exchange(_Message(call, problem, shapes, values), comm, device)
    _check_alike(messages)
    return tree_unflatten(
        [leaf.finish([message.values[path] for message in messages]) for path, leaf in leaves.items()], structure
    )


def _exchange(message: _Message, comm: Communicator, device: torch.device) -> list[_Message]:
    """Return the messages of all ranks: their lengths first, then their bytes, padded to the longest."""
    text, *tensors = _pack(message)
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    packed = torch.cat([head, *(tensor.reshape(-1).view(torch.uint8) for tensor in tensors)])
    own_lengths = torch.tensor([head.numel(), packed.numel()], dtype=torch.int64, device=device)
    heads, lengths = HostRead(_all_gather(own_lengths, comm).T).get().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: packed.numel()] = packed
    rows = _all_gather(padded, comm)
    texts = HostRead(rows[:, : max(heads)]).get()
    return [_unpack(text[:end], row[end:]) for text, row, end in zip(texts, rows, heads, strict=True)]


def _pack(message: _Message) -> tuple[Any, ...]:
    """Return ``message`` as JSON, in which tensors are their dtypes and shapes, and the tensors."""
    values, tensors = dict(message.values), []
    for path, value in message.values.items():
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            values[path] = [str(value.dtype).removeprefix("torch."), list(value.shape)]
    return json.dumps([message.call, message.problem, message.shapes, values]).encode(), *tensors


def _unpack(text: torch.Tensor, elements: torch.Tensor) -> _Message:
    """Return a message.

    Args:
        text: its JSON, on the host.
        elements: bytes of its tensors, one after the other.
    """
    call, problem, shapes, values = json.loads(bytes(text.tolist()))
    start = 0
    for path, value in values.items():
        if isinstance(value, list):
            dtype, shape = getattr(torch, value[0]), value[1]
            end = start + math.prod(shape) * dtype.itemsize
            values[path] = elements[start:end].clone().view(dtype).view(shape)  # a clone is aligned
            start = end
    return _Message(call, problem, shapes, values)


def _check_alike(messages: Sequence[_Message]) -> None:
    """Raise the same error on all ranks if a rank has a problem, or if their calls differ."""
    name = messages[0].call.partition(",")[0]
    problems = [f"rank {rank}: {message.problem}" for rank, message in enumerate(messages) if message.problem]
    if problems:
        raise ValueError(f"{name}: {_some(problems, '; ')}.")
    lines = [[m.call, *(f"{path}: {m.shapes[path]}" for path in sorted(m.shapes))] for m in messages]
    common = set(lines[0]).intersection(*lines)
    differences: dict[str, int] = {}
    for rank, own_lines in enumerate(lines):
        text = _some([line for line in own_lines if line not in common], "; ") or "nothing more"
        differences.setdefault(text, rank)
    if len(differences) > 1:
        has = _some([f"rank {rank} has {text}" for text, rank in differences.items()], " | ")
        raise RuntimeError(
            f"{name}: the ranks did not call it alike. Expected the same structure, dtypes and shapes (beyond the rows "
            f"that are gathered) on all ranks; {has}. A rank with nothing to add passes zeros, or for a gather a "
            "tensor of the same dtype with 0 rows."
        )


def _some(parts: list[str], separator: str) -> str:
    left = len(parts) - _SHOWN
    return separator.join(parts[:_SHOWN]) + (f"{separator}and {left} more" if left > 0 else "")


def _all_gather(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Gather every rank's ``tensor`` [numel] into one of shape [world_size, numel]."""
    full = torch.empty(comm.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    comm.gather_shards([full], [tensor], tag="metrics").wait()
    return full.view(comm.world_size, tensor.numel())
