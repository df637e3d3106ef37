"""Metrics over all ranks: values reduced to one, or concatenated for the whole data set.

Every call is two small all-gathers. The first one describes what each rank brings. If the descriptions differ, or a
rank has a value that cannot be sent, all ranks raise the same error. None waits for the second collective. The second
one carries the values as bytes, so that one collective serves all dtypes.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from zerolite.comm import Communicator, HostGroup, collective
from zerolite.data.dataloader import Loaders, Rows
from zerolite.utils.accelerator import HostRead

OPS = ("mean", "sum", "max", "min")
_LINE = 16  # bytes to which values in one message are aligned
_SHOWN = 4  # ranks and lines that an error quotes at most


@dataclass(frozen=True)
class _Leaf:
    """One value of a nested structure, on this rank."""

    path: str
    kind: str  # what must be the same on all ranks
    sent: torch.Tensor | None  # [rows, ...]; ranks may have different rows, the other sizes are equal. None for None
    finish: Callable[[list[torch.Tensor]], Any]  # makes the result from every rank's `sent`


class _Unfit(ValueError):
    """This rank's value cannot be sent."""


@collective
@torch.no_grad()
def reduce(value: object, op: str, comm: Communicator, device: torch.device) -> Any:
    """See :meth:`zerolite.engine.engine.Engine.reduce`."""

    def leaf(path: str, item: object) -> _Leaf:
        if op not in OPS:
            raise _Unfit(f"expected op to be one of {', '.join(OPS)}, got {op!r}")
        if isinstance(item, torch.Tensor):
            return _reduced_tensor(path, item, op, device)
        if isinstance(item, numbers.Real):
            encoded = torch.tensor([_encode(path, item)], dtype=torch.int64, device=device)
            return _Leaf(path, "a number", encoded, lambda parts: _reduce_numbers(_decode(parts), op))
        raise _Unfit(
            f"expected numbers and tensors, got {type(item).__name__} at {path}; make it a tensor or leave it out"
        )

    return _together(f"engine.reduce, op={op}", value, leaf, comm, device)


@collective
@torch.no_grad()
def gather(
    value: object, comm: Communicator, device: torch.device, loaders: Loaders | None = None, loader: object = None
) -> Any:
    """See :meth:`zerolite.engine.engine.Engine.gather`; with ``loaders``, ``gather_for_metrics`` there."""
    problem, rows = "", None
    repeats = loaders is not None and loader is None and loaders.repeats
    if loaders is not None:
        try:
            rows = loaders.rows(loader)
        except ValueError as error:
            problem = str(error)

    def leaf(path: str, item: object) -> _Leaf:
        if problem:
            raise _Unfit(problem)
        return _gathered(path, item, rows, comm.world_size, device, repeats)

    name = "engine.gather" if loaders is None else "engine.gather_for_metrics"
    part = f", {rows.per_rank} samples on each rank and {rows.samples} in all" if rows is not None else ""
    return _together(name + part, value, leaf, comm, device)


# -------------------------------------------------------------------- leaves


def _gathered(
    path: str, item: object, rows: Rows | None, world_size: int, device: torch.device, repeats: bool
) -> _Leaf:
    """Describe an item of :func:`gather`. repeats: it is of a batch that this rank repeats, so it has no rows."""
    if isinstance(item, numbers.Real):
        item = _number_tensor(path, item)
    if not isinstance(item, torch.Tensor):
        raise _Unfit(f"expected tensors, got {type(item).__name__} at {path}; make it a tensor or leave it out")
    target = item.device
    sent = _sendable(path, item.reshape(1) if item.dim() == 0 else item, device)
    trailing = "".join(f", {size}" for size in sent.shape[1:])
    kind = f"{item.dtype} [*{trailing}]"
    if rows is None:
        sent = sent[:0] if repeats else sent
        return _Leaf(path, kind, sent, lambda parts: torch.cat(parts).to(target))
    if item.dim() == 0 and rows.per_rank != 1:
        return _Leaf(path, f"{item.dtype}, one for each rank", sent, lambda parts: torch.cat(parts).to(target))
    if sent.shape[0] != rows.per_rank:
        raise _Unfit(
            f"expected a row for each of the {rows.per_rank} samples that the loader gave this rank, got "
            f"{sent.shape[0]} rows at {path}; for values that are not one for each sample call engine.gather"
        )

    def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts, 1).flatten(0, 1)[: rows.samples].to(target)

    return _Leaf(path, kind, sent, in_order)


def _reduced_tensor(path: str, item: torch.Tensor, op: str, device: torch.device) -> _Leaf:
    if item.is_complex() and op in ("max", "min"):
        raise _Unfit(f"expected real numbers for {op}, got {item.dtype} at {path}")
    if item.dtype == torch.uint64:
        raise _Unfit(f"expected a dtype that int64 contains, got torch.uint64 at {path}; cast it to torch.int64")
    target = item.device
    sent = _sendable(path, item.unsqueeze(0), device)
    kind = f"{item.dtype} {list(item.shape)}"
    return _Leaf(path, kind, sent, lambda parts: _reduce_tensors([part[0] for part in parts], op).to(target))


def _sendable(path: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        what = f"device {tensor.device}" if tensor.device.type == "meta" else f"{tensor.layout}, {tensor.dtype}"
        raise _Unfit(f"expected a dense tensor with values, got one with {what} at {path}; make it dense")
    return tensor.detach().to(device)


def _number_tensor(path: str, number: Any) -> torch.Tensor:
    if isinstance(number, bool):
        return torch.tensor(number, device="cpu")
    if isinstance(number, numbers.Integral):
        return torch.tensor(_int64(path, number), dtype=torch.int64, device="cpu")
    return torch.tensor(float(number), dtype=torch.float64, device="cpu")


def _int64(path: str, number: Any) -> int:
    if not -(2**63) <= int(number) < 2**63:
        raise _Unfit(f"expected integers of at most 64 bits, got {int(number)} at {path}; pass it as a float")
    return int(number)


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


_BOOL, _INT, _FLOAT = range(3)


def _encode(path: str, number: Any) -> tuple[int, int]:
    """Return a number's type and its 64 bits. As integers, so that int64 values keep all their digits."""
    if isinstance(number, bool):
        return _BOOL, int(number)
    if isinstance(number, numbers.Integral):
        return _INT, _int64(path, number)
    return _FLOAT, struct.unpack("<q", struct.pack("<d", float(number)))[0]


def _decode(parts: list[torch.Tensor]) -> list[object]:
    decoded: list[Any] = []
    for kind, bits in HostRead(torch.cat(parts)).get().tolist():
        decoded.append(struct.unpack("<d", struct.pack("<q", bits))[0] if kind == _FLOAT else bits)
        if kind == _BOOL:
            decoded[-1] = bool(bits)
    return decoded


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
        call: name and arguments of the user's call, which must be equal on all ranks.
        leaf: describes one item, given its path.
    """
    items, structure = tree_flatten_with_path(value)
    leaves: list[_Leaf] = []
    problem = ""
    try:
        for key, item in items:
            path = keystr(key) or "the value"
            leaves.append(_Leaf(path, "None", None, lambda parts: None) if item is None else leaf(path, item))
    except _Unfit as error:
        problem = str(error)
    except Exception as error:  # the other ranks are about to wait for this one, so they must be told
        problem = f"{type(error).__name__}: {error}"
    # By path, because dicts with the same keys may have them in another order on another rank.
    order = sorted(range(len(leaves)), key=lambda index: leaves[index].path)
    lines = [call, *(f"{leaves[index].path}: {leaves[index].kind}" for index in order)]
    sent = [tensor for index in order if (tensor := leaves[index].sent) is not None]
    nbytes = _agree(lines, problem, 0 if problem else _packed_bytes(sent), comm, device)
    arrived = iter(_exchange(sent, nbytes, comm, device))
    results: dict[int, Any] = {}
    for index in order:
        results[index] = None if leaves[index].sent is None else leaves[index].finish(next(arrived))
    return tree_unflatten([results[index] for index in range(len(leaves))], structure)


def _agree(lines: list[str], problem: str, nbytes: int, comm: Communicator, device: torch.device) -> int:
    """Compare this call over the ranks. Return the largest ``nbytes`` of all ranks.

    Args:
        lines: description of this rank's values, which must be equal on all ranks.
        problem: sentence about a value of this rank that cannot be sent, or "".
        nbytes: length of this rank's packed values.

    Raises:
        ValueError: on all ranks, if one of them has a problem.
        RuntimeError: on all ranks, if their lines differ.
    """
    text = problem or "\n".join(lines)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    # Only a hash of the text is exchanged. The texts themselves follow if there is something to report.
    header = torch.tensor([digest, nbytes, bool(problem)], dtype=torch.int64, device=device)
    headers = HostRead(_all_gather(header, comm)).get().tolist()
    if len({digest for digest, *_ in headers}) == 1 and not any(has_problem for *_, has_problem in headers):
        return max(nbytes for _, nbytes, _ in headers)
    texts = HostGroup(comm, "metrics").gather(text)
    name = lines[0].partition(",")[0]
    said = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if headers[rank][2]]
    if said:
        raise ValueError(f"{name}: {_some(said, '; ')}.")
    raise RuntimeError(_difference(name, texts))


def _difference(name: str, texts: Sequence[str]) -> str:
    told = {rank: text.split("\n") for rank, text in enumerate(texts)}
    common = set.intersection(*(set(lines) for lines in told.values()))
    said: dict[str, int] = {}
    for rank, lines in told.items():
        said.setdefault(_some([line for line in lines if line not in common], "; ") or "nothing more", rank)
    has = _some([f"rank {rank} has {text}" for text, rank in said.items()], " | ")
    return (
        f"{name}: the ranks did not call it alike. Expected the same structure, dtypes and shapes (beyond the rows "
        f"that are gathered) on all ranks; {has}. A rank with nothing to add passes zeros, or for a gather a tensor "
        "of the same dtype with 0 rows."
    )


def _some(parts: list[str], separator: str) -> str:
    left = len(parts) - _SHOWN
    return separator.join(parts[:_SHOWN]) + (f"{separator}and {left} more" if left > 0 else "")


def _exchange(
    sent: Sequence[torch.Tensor], nbytes: int, comm: Communicator, device: torch.device
) -> list[list[torch.Tensor]]:
    """Return, for each tensor of ``sent``, the tensors of all ranks. All ranks send ``nbytes`` bytes, the length of the
    longest rank."""
    packed = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    counts = torch.tensor([tensor.shape[0] for tensor in sent], dtype=torch.int64, device=device)
    start = 0
    for tensor in [counts, *sent]:
        size = tensor.numel() * tensor.element_size()
        packed[start : start + size].view(tensor.dtype).copy_(tensor.reshape(-1))
        start += _aligned(size)
    everything = _all_gather(packed, comm)
    start = counts.numel() * counts.element_size()
    rows = HostRead(everything[:, :start].reshape(-1).view(torch.int64)).get().view(comm.world_size, len(sent)).tolist()
    starts = [_aligned(start)] * comm.world_size
    result = []
    for index, tensor in enumerate(sent):
        parts = []
        for rank in range(comm.world_size):
            shape = (rows[rank][index], *tensor.shape[1:])
            size = math.prod(shape) * tensor.element_size()
            parts.append(everything[rank, starts[rank] : starts[rank] + size].clone().view(tensor.dtype).view(shape))
            starts[rank] += _aligned(size)
        result.append(parts)
    return result


def _packed_bytes(sent: Sequence[torch.Tensor]) -> int:
    sizes = [8 * len(sent), *(tensor.numel() * tensor.element_size() for tensor in sent)]
    return sum(_aligned(size) for size in sizes)


def _aligned(nbytes: int) -> int:
    return (nbytes + _LINE - 1) // _LINE * _LINE


def _all_gather(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Gather every rank's ``tensor`` [numel] into one of shape [world_size, numel]."""
    full = torch.empty(comm.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    comm.gather_shards([full], [tensor], tag="metrics").wait()
    return full.view(comm.world_size, tensor.numel())
