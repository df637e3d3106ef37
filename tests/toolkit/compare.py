"""Comparisons of what ranks and runs give."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CLIP = 0.4  # below the norm of most steps, above that of some

# fp32: regrouping a batch changes sums by a few units in the last place (6e-8). Adam divides by |g|: an element whose
# contributions nearly cancel moves by a share of lr; regrouping alone moves it by up to 0.008 lr.
FP32_RELATIVE = FP32_SGD = 1e-6

# 16 bits, same rounding points on both sides, so only the order of fp32 sums differs. Where that flips the rounding
# of one value, it moves by one unit in the last place: 2^-8 relative in bf16, 2^-11 in fp16. The flip enters the next
# forward. HALF_RELATIVE bounds the sum of a few such flips in a loss or norm; parameters may be one such unit apart,
# two for an element at a power of two (EPSILON is the distance from 1 to the next number, the largest relative unit).
EPSILON = {"bf16": 2.0**-7, "fp16": 2.0**-10}
HALF_RELATIVE = {"bf16": 2.0**-9, "fp16": 2.0**-12}


def mean_losses(results: list[dict[str, Any]], accumulation: int) -> list[float]:
    """Per step, over ranks and micro-batches."""
    per_micro = torch.tensor([result["losses"] for result in results], dtype=torch.float64).mean(0)
    return per_micro.reshape(-1, accumulation).mean(1).tolist()


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert list(one) == list(other)
    assert not different, f"{what}: {different} differ"


def from_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks, in rank order. Called on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def states_of_all(engine: Any) -> dict[str, Any]:
    """Return the states by the parameter's name: flat parts put together, others from the first rank that has them."""
    shapes = {name: p.shape for name, p in engine.module.named_parameters()}
    own = {name: dict(engine.optimizer.state.get(p, {})) for name, p in engine.module.named_parameters()}
    rows, states = from_all_ranks(own), {}
    for name, shape in shapes.items():
        of_ranks = [row[name] for row in rows if row[name]]
        states[name] = dict(of_ranks[0]) if of_ranks else {}
        for key, value in states[name].items():
            parts = [state[key] for state in of_ranks] if torch.is_tensor(value) and value.shape != shape else []
            if parts and sum(part.numel() for part in parts) == shape.numel():
                states[name][key] = torch.cat([part.flatten() for part in parts]).view(shape)
    return states


def assert_same_on_ranks(values: dict[str, Any], what: str = "") -> None:
    """Compare tensors, numbers and texts by name between all ranks, to the bit. Called on all ranks."""
    rows = from_all_ranks({name: _bits(value) for name, value in values.items()})
    for rank, row in enumerate(rows):
        different = [name for name in rows[0] | row if row.get(name) != rows[0].get(name)]
        assert not different, f"{what}: {different} of rank {rank} are not those of rank 0"


def _bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    flat = value.detach().cpu().contiguous().view(-1)
    return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(one: Any, other: Any, what: str = "") -> None:
    """Two nested results are equal: tensors by their bits, floats (norms are sums of doubles in any order) in 14
    digits."""
    found = _differences(one, other)
    assert not found, f"{what}: {found[:5]} and {max(0, len(found) - 5)} more differ"


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, Tensor):
        return [] if one.shape == other.shape and torch.equal(one, other) else [path]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{path}: other keys"]
        return [line for key in one for line in _differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: other length"]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for i, pair in pairs for line in _differences(*pair, f"{path}[{i}]")]
    same = math.isclose(one, other, rel_tol=1e-14) if isinstance(one, float) else one == other
    return [] if same else [f"{path}: {one!r}, {other!r}"]
