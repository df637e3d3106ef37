"""Ring attention gives the attention of the whole sequence, and its gradients, whatever queries see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.toolkit.ranks import on_ranks
from zerolite.comm import create_communicator, record
from zerolite.sequence_parallel import blocks, ring
from zerolite.sequence_parallel.ring import Ring, attend_over_ring
from zerolite.sequence_parallel.visibility import Visibility

CPU = torch.device("cpu")
BATCH, HEADS, WIDTH = 2, 4, 8


def visible_of(kind: str, length: int) -> Visibility:
    generator = torch.Generator().manual_seed(length)
    keys = torch.rand(BATCH, length, generator=generator) < 0.7
    documents = (torch.arange(length) > length // 3).long()[None] + (torch.arange(length) > length - 4).long()
    bias = torch.randn(1, HEADS, length, length, generator=generator)
    return {
        "causal": Visibility(causal=True),
        "full": Visibility(),
        "window": Visibility(causal=True, window=5),
        "padding": Visibility(causal=True, keys=keys),
        "packed": Visibility(causal=True, documents=documents),
        "bias": Visibility(dense=bias),
        "keys": Visibility(dense=keys[:, None, None]),
    }[kind]


def whole(visible: Visibility, states: list[Tensor]) -> Tensor:
    """Attention of the whole sequence by torch, with 0 where a query sees nothing."""
    length = states[0].shape[2]
    mask = visible.mask(range(length), range(length), CPU)
    mask = mask if mask.dtype == torch.bool else mask.double()
    out = F.scaled_dot_product_attention(*states, attn_mask=mask, enable_gqa=True)
    seen = mask if mask.dtype == torch.bool else mask > -math.inf
    return torch.where(seen.any(-1, keepdim=True), out, 0.0)


def compare(visible: Visibility, part: int, kv_heads: int, dtype: torch.dtype, tolerance: float) -> Any:
    """Compare output and gradients of the ring with torch's. Returns what was sent."""
    comm = create_communicator(CPU)
    length, generator = part * comm.world_size, torch.Generator().manual_seed(7)
    shapes = [(BATCH, heads, length, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    *states, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    exact = [state.clone().requires_grad_() for state in states]
    wanted = whole(visible, exact)
    wanted.backward(gradient)
    own = slice(comm.rank * part, (comm.rank + 1) * part)
    mine = [state[:, :, own].to(dtype).requires_grad_() for state in states]
    with record() as calls:
        out = attend_over_ring(Ring(comm, visible, part, 1 / math.sqrt(WIDTH), 0.0, 0), tuple(mine))  # type: ignore[arg-type]
        forward = list(calls.calls)
        out.backward(gradient[:, :, own].to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted[:, :, own], rtol=tolerance, atol=tolerance)
    for found, state in zip(mine, exact, strict=True):
        assert found.grad is not None and state.grad is not None and found.grad.dtype == dtype
        torch.testing.assert_close(found.grad.double(), state.grad[:, :, own], rtol=tolerance, atol=tolerance)
    return forward, calls.calls[len(forward) :]


KINDS = ("causal", "full", "window", "padding", "packed", "bias", "keys")


@pytest.mark.fast("causal-2", "packed-3", "bias-4")
@on_ranks(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_merged_to_the_attention_of_the_whole(kind: str) -> None:
    size = create_communicator(CPU).world_size
    for part, kv_heads in ((6, 4), (7, 1), (1, 2)):
        compare(visible_of(kind, part * size), part, kv_heads, torch.float64, 1e-12)
    compare(visible_of(kind, 8 * size), 8, 2, torch.float32, 2e-6)
    compare(visible_of(kind, 8 * size), 8, 2, torch.bfloat16, 6e-2)


@pytest.mark.slow
@on_ranks(3)
def test_kernels_and_tiles_make_no_difference() -> None:
    """Products written out, as for dropout and for masks on CUDA, and masks that are made a few queries at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_MASK_NUMEL", 64)
        compare(visible_of("packed", 21), 7, 2, torch.float64, 1e-12)
        patch.setattr(blocks, "_OnCpu", blocks.Plain)
        for kind in KINDS:
            compare(visible_of(kind, 21), 7, 2, torch.float64, 1e-12)
        compare(visible_of("causal", 21), 7, 2, torch.bfloat16, 6e-2)


@on_ranks(2, 3, 4)
def test_traffic_is_that_of_the_papers() -> None:
    """Keys and values move on P - 1 times, or as far as a window reaches; their gradients with them, and home."""
    size, part, kv_heads = create_communicator(CPU).world_size, 6, 2
    of_heads = BATCH * part * WIDTH
    shared, half = 2 * kv_heads * of_heads, (HEADS + kv_heads) * of_heads
    for kind, moves, swapped in (("causal", size - 1, half), ("full", size - 1, 0), ("window", 1, 0)):
        forward, backward = compare(visible_of(kind, part * size), part, kv_heads, torch.float64, 1e-12)
        assert {call.op for call in (*forward, *backward)} == {"permute"}
        assert sum(call.numel for call in forward) == moves * shared + swapped
        assert sum(call.numel for call in backward) == (2 * moves + 1) * shared + swapped
        assert len(forward) == moves + 4 * bool(swapped) and len(backward) == 2 * moves + 1 + 4 * bool(swapped)


@on_ranks(2)
def test_dropout_draws_the_same_numbers_in_the_backward() -> None:
    comm, part = create_communicator(CPU), 6
    call = Ring(comm, Visibility(causal=True), part, 0.3, 0.4, 11 + comm.rank)
    generator = torch.Generator().manual_seed(comm.rank)
    shapes = [(BATCH, heads, part, WIDTH) for heads in (HEADS, 2, 2)]
    states, along = ([torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(2))
    gradient = torch.randn(shapes[0], generator=generator, dtype=torch.float64)

    def value(step: float) -> Tensor:
        query, key, value = (state + step * direction for state, direction in zip(states, along, strict=True))
        return (attend_over_ring(call, (query, key, value)) * gradient).sum()

    leaves = [state.clone().requires_grad_() for state in states]
    out = attend_over_ring(call, (leaves[0], leaves[1], leaves[2]))
    (out * gradient).sum().backward()
    slope = sum(
        (leaf.grad * direction).sum() for leaf, direction in zip(leaves, along, strict=True) if leaf.grad is not None
    )
    numbers = torch.stack([torch.as_tensor(slope), (value(1e-6) - value(-1e-6)) / 2e-6])
    slope, expected = comm.all_reduce(numbers, "stats").wait().tolist()
    assert slope == pytest.approx(expected, rel=1e-6)
    kept = attend_over_ring(call, (states[0], states[1], torch.ones_like(states[2])))
    assert not torch.allclose(kept, torch.ones_like(kept)) and float(kept.mean()) == pytest.approx(1.0, abs=0.2)
