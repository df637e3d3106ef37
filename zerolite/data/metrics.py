"""Values of all ranks, reduced to one or with their rows joined: `engine.reduce`, `gather` and `gather_for_metrics`.

A call is two all-gathers on the engine's device: what the values look like, then their bytes. So ranks that do not call
alike raise the same error. Metrics themselves, and their state over a data set, are torchmetrics' business.
"""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from zerolite.comm import Communicator, HostGroup, RaiseTogether, collective
from zerolite.data.dataloader import Loaders
from zerolite.utils.accelerator import HostRead

OPS: dict[str, Callable[..., torch.Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


@collective
@torch.no_grad()
def reduce(value: object, op: str, comm: Communicator, device: torch.device) -> Any:
    """See :meth:`zerolite.engine.engine.Engine.reduce`."""

    def row(path: str, item: object) -> torch.Tensor:
        if op not in OPS:
            raise ValueError(f"expected op to be one of {', '.join(OPS)}, got {op!r}")
        tensor = _tensor(path, item)
        if tensor.is_complex():
            raise ValueError(f"expected real numbers, got {tensor.dtype} at {path}; use torch.view_as_real")
        if tensor.dtype == torch.uint64:
            raise ValueError(f"expected numbers that fit in int64, got torch.uint64 at {path}; convert it")
        # A second row says that a number is no integer here: then the result is none on any rank.
        is_float = isinstance(item, numbers.Real) and not isinstance(item, numbers.Integral)
        return tensor.expand(2) if is_float else tensor.unsqueeze(0)

    def combined(item: Any, rows: list[torch.Tensor]) -> object:
        dtype = rows[0].dtype
        wide = torch.cat([row[:1] for row in rows]).to(
            torch.float64 if dtype.is_floating_point or op == "mean" else torch.int64
        )
        result = OPS[op](wide, 0)
        if not isinstance(item, torch.Tensor):
            number = float(result)
            is_integer = op != "mean" and number.is_integer() and all(len(row) == 1 for row in rows)
            return int(number) if is_integer else number
        return result.to(dtype if dtype.itemsize > 2 else torch.float32) if dtype.is_floating_point else result

    return _over_ranks(f"engine.reduce, op={op}", value, row, combined, comm, device)


@collective
@torch.no_grad()
def gather(
    value: object, comm: Communicator, device: torch.device, loaders: Loaders | None = None, loader: object = None
) -> Any:
    """See :meth:`zerolite.engine.engine.Engine.gather`; with ``loaders`` see ``gather_for_metrics`` of that class."""
    samples, problem = None, None
    try:
        samples = None if loaders is None else loaders.rows(loader)
    except ValueError as error:
        problem = error

    def rows(path: str, item: object) -> torch.Tensor:
        if problem is not None:
            raise problem
        tensor = _tensor(path, item)
        if tensor.dim() and samples is not None and tensor.shape[0] != samples.per_rank:
            raise ValueError(
                f"expected a row for each of the {samples.per_rank} samples that the loader gave this rank, got "
                f"{tensor.shape[0]} rows at {path}; for values that are not one for each sample call engine.gather"
            )
        return tensor if tensor.dim() else tensor.reshape(1)

    def joined(item: Any, parts: list[torch.Tensor]) -> torch.Tensor:
        rows = {len(part) for part in parts}  # all ranks decide by the same numbers
        if samples is None or rows == {1} != {samples.per_rank}:
            return torch.cat(parts)
        if rows != {samples.per_rank}:
            raise RuntimeError(
                f"engine.gather_for_metrics: expected on all ranks either a row for each of the {samples.per_rank} "
                f"samples of a rank, or one value, got {' and '.join(map(str, sorted(rows)))} rows"
            )
        return torch.stack(parts, 1).flatten(0, 1)[: samples.samples]

    name = "engine.gather" if loaders is None else "engine.gather_for_metrics"
    return _over_ranks(f"{name}, {samples}" if samples else name, value, rows, joined, comm, device)


def _tensor(path: str, item: Any) -> torch.Tensor:
    if isinstance(item, numbers.Real):
        return torch.tensor(float(item), dtype=torch.float64, device="cpu")
    if not isinstance(item, torch.Tensor):
        raise ValueError(f"expected numbers and tensors, got {type(item).__name__} at {path}; leave it out")
    if item.layout != torch.strided or item.is_quantized or item.device.type == "meta":
        raise ValueError(
            f"expected a dense tensor with values, got one with {item.layout} on {item.device} at {path}; make it dense"
        )
    return item.detach()


def _over_ranks(
    call: str,
    value: object,
    prepare: Callable[[str, object], torch.Tensor],
    finish: Callable[[Any, list[torch.Tensor]], object],
    comm: Communicator,
    device: torch.device,
) -> object:
    """Return ``value`` with each item replaced by its result over all ranks; None stays None.

    Args:
        call: name and arguments of the user's call.
        prepare: returns an item as a tensor [rows, ...], given its path. Ranks may have different numbers of rows.
        finish: makes the result of the item here and every rank's rows of it.

    Raises:
        ValueError: on all ranks, if one of them has a value that cannot be sent.
        RuntimeError: on all ranks, if their calls differ.
    """
    leaves, structure = tree_flatten_with_path(value)
    places = sorted(range(len(leaves)), key=lambda place: keystr(leaves[place][0]))  # keys of a dict in any order
    looks, sent, error = [call], [], None
    try:
        for key, item in map(leaves.__getitem__, places):
            path = keystr(key) or "the value"
            tensor = None if item is None else prepare(path, item)
            looks.append(f"{path}: {None if tensor is None else f'{tensor.dtype} [rows, {list(tensor.shape[1:])}]'}")
            if tensor is not None:
                sent.append(torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor))
    except Exception as failure:  # the other ranks are about to wait for this one, so they must be told
        error = failure
    counts = torch.tensor([len(tensor) for tensor in sent], dtype=torch.int64, device=device)
    packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in (counts, *sent)])
    head = [int(error is not None), zlib.crc32("\n".join(looks).encode()), packed.numel()]
    heads = HostRead(_all_gather(torch.tensor(head, dtype=torch.int64, device=device), comm)).get().tolist()
    if any(failed or crc != heads[0][1] for failed, crc, _ in heads):
        _raise_difference(comm, looks, error)
    words = -(-max(nbytes for _, _, nbytes in heads) // 8)
    padded = packed.new_zeros(max(words, 1) * 8)  # the rows are read as int64, also where nothing is sent
    padded[: packed.numel()] = packed
    ranks = _all_gather(padded, comm)
    rows = HostRead(ranks[:, : 8 * len(sent)].view(torch.int64)).get().tolist()
    parts = [_unpacked(memory[8 * len(sent) :], sent, numbers) for memory, numbers in zip(ranks, rows, strict=True)]
    of_item = zip(*parts, strict=True)
    results: list[object] = [None] * len(leaves)
    for place in places:
        item = leaves[place][1]
        if item is not None:
            results[place] = _back(finish(item, list(next(of_item))), item)
    return tree_unflatten(results, structure)


def _unpacked(memory: torch.Tensor, like: list[torch.Tensor], rows: list[int]) -> list[torch.Tensor]:
    """Return the tensors in the bytes of one rank, which have ``rows`` rows each."""
    tensors, start = [], 0
    for tensor, count in zip(like, rows, strict=True):
        shape = (count, *tensor.shape[1:])
        end = start + torch.Size(shape).numel() * tensor.element_size()
        tensors.append(memory[start:end].clone().view(tensor.dtype).view(shape))  # a clone is aligned
        start = end
    return tensors


def _back(result: Any, item: object) -> object:
    return result.to(item.device) if isinstance(result, torch.Tensor) and isinstance(item, torch.Tensor) else result


def _raise_difference(comm: Communicator, looks: list[str], error: Exception | None) -> None:
    """Raise the error of a rank on all of them, or say where their calls part."""
    name = looks[0].partition(",")[0]
    ranks = RaiseTogether(HostGroup(comm, "errors"), name, ValueError).exchange(error, looks)
    at = next(i for i in range(max(map(len, ranks))) if len({tuple(lines[i : i + 1]) for lines in ranks}) > 1)
    here = [lines[at] if at < len(lines) else "nothing more" for lines in ranks]
    other = next(rank for rank, line in enumerate(here) if line != here[0])
    raise RuntimeError(
        f"{name}: the ranks did not call it alike. Expected the same structure, dtypes and shapes (beyond the rows "
        f"that are gathered) on all ranks; rank 0 has {here[0]}, rank {other} has {here[other]}. A rank with nothing "
        "to add passes zeros, or for a gather a tensor of the same dtype with 0 rows."
    )


def _all_gather(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Gather every rank's ``tensor`` [numel] into one of shape [world_size, numel]."""
    full = torch.empty(comm.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    comm.gather_shards([full], [tensor], tag="metrics").wait()
    return full.view(comm.world_size, tensor.numel())
