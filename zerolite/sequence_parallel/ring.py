"""Ring attention: keys and values go round the ranks, and each rank's queries see one block of them after another.

    step      0     1     2     3                 four ranks; block j of keys and values begins at rank j
    rank 0    0     3     2     1                 forward:   keys and values move on while a block is computed
    rank 1    1     0     3     2                 backward:  their gradients move on behind them, and home at the end
    rank 2    2     1     0     3
    rank 3    3     2     1     0

Blocks are merged by their log-sum-exp, and the backward computes each block again from that of all (Liu et al., "Ring
Attention", 2023; Li et al., "LightSeq", 2023). With N tokens of width h over P ranks, the keys and values of a layer
are 2 N h / P elements, which a forward sends P - 1 times.

Under a causal mask the last rank would compute twice the mean. So before it each rank gives the second half of its
tokens to its mirror image, P - 1 - rank, and takes that one's second half::

    halves    0 1    2 3    4 5    6 7
    rank      0      1      2      3
    swapped   0 7    2 5    3 4    1 6            with any other block: two of four pairs of halves are computed,
                                                  all queries with the first half, or the second with all keys

A causal window needs no balance. Its keys and values go only as far as some query sees them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zerolite.comm import Communicator, Pending
from zerolite.sequence_parallel.blocks import Block, Output, Plain, exact_dtype, kernel_of
from zerolite.sequence_parallel.exchange import TAG, swap
from zerolite.sequence_parallel.visibility import Sight, Visibility

_MASK_NUMEL = 1 << 24
"""Elements of a mask, or of scores, that are made at once."""
_TOKENS = 2  # dimension of query, key and value


@dataclass(frozen=True)
class Run:
    """Tokens that follow each other.

    Attributes:
        start: of the first one, among those of a rank.
        places: in the whole sequence.
    """

    start: int
    places: range

    def local(self, places: range) -> range:
        """Return where among the tokens of a rank the ones at these places in the whole sequence are."""
        first = self.start + places.start - self.places.start
        return range(first, first + len(places))


@dataclass(frozen=True)
class Ring:
    """One call of attention over a ring.

    Attributes:
        comm: the ranks of the ring.
        visible: what queries see.
        part: tokens of each rank.
        scale: factor of the products.
        dropout: probability.
        seed: of its random numbers.
    """

    comm: Communicator
    visible: Visibility
    part: int
    scale: float
    dropout: float
    seed: int

    @property
    def swaps(self) -> bool:
        """True if halves are swapped."""
        return self.visible.causal and self.visible.window is None

    @property
    def moves(self) -> int:
        """Times that keys and values move on."""
        every, window = self.comm.world_size - 1, self.visible.window
        return every if window is None else min(every, -(-(window - 1) // self.part))

    def runs(self, rank: int) -> list[Run]:
        """Return the tokens that rank ``rank`` has, in their order there."""
        start, part = rank * self.part, self.part
        if not self.swaps:
            return [Run(0, range(start, start + part))]
        return [run for run in self.halves(rank) if run.places]

    def halves(self, rank: int) -> tuple[Run, Run]:
        """Return the two runs that rank ``rank`` has after the swap, the earlier one first."""
        part, mirror = self.part, self.comm.world_size - 1 - rank
        kept = range(rank * part, rank * part + part - part // 2)
        received = range(mirror * part + part - part // 2, (mirror + 1) * part)
        first, second = (kept, received) if rank <= mirror else (received, kept)
        return Run(0, first), Run(len(first), second)

    def blocks(self, source: int, query: Tensor, value: Tensor) -> Iterator[tuple[range, range, Block, type[Plain]]]:
        """Yield the blocks of this rank's queries and the keys that began at rank ``source``.

        Yields:
            The queries and the keys, both among the tokens of a rank, the block, and its kernel.
        """
        rank, tokens, scale = self.comm.rank, range(self.part), self.scale
        kernel = kernel_of(query, value, False, self.dropout)
        if self.swaps and not self.visible.masked and kernel is not Plain:
            # Halves that see the same, or are seen by the same, are one block.
            (first, second), (first_of_keys, _) = self.halves(rank), self.halves(source)
            rows, columns = tokens, tokens
            if source != rank and first_of_keys.places.start < first.places.start:
                columns = first_of_keys.local(first_of_keys.places)
            elif source != rank:
                rows = second.local(second.places)
            if rows and columns:
                yield rows, columns, Block(source == rank, None, scale), kernel
            return
        for own, others in itertools.product(self.runs(rank), self.runs(source)):
            sight = self.visible.sight(own.places, others.places)
            if sight is Sight.NOTHING:
                continue
            keys = others.local(others.places)
            kernel = kernel_of(query, value, sight is Sight.SOME, self.dropout)
            if kernel is not Plain and sight is not Sight.SOME:
                yield own.local(own.places), keys, Block(sight is Sight.BEFORE, None, scale), kernel
                continue
            heads = query.shape[1] if kernel is Plain else 1
            step = max(1, _MASK_NUMEL // (len(keys) * query.shape[0] * heads))
            for start in range(own.places.start, own.places.stop, step):
                tile = range(start, min(start + step, own.places.stop))
                mask = None if sight is Sight.ALL else self.visible.mask(tile, others.places, query.device)
                seed = (self.seed + start * 1_000_003 + others.places.start) % (1 << 62)
                yield own.local(tile), keys, Block(False, mask, scale, self.dropout, seed), kernel

    def pass_on(self, tensor: Tensor, moves: int = 1) -> Pending:
        """Send a flat tensor ``moves`` ranks on, and receive the one from as many ranks before."""
        rank, size = self.comm.rank, self.comm.world_size
        return self.comm.permute(tensor, (rank + moves) % size, (rank - moves) % size, TAG)


def attend_over_ring(ring: Ring, states: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks.

    Called on all ranks of the ring, with tensors of equal shapes. Heads of key and value may be fewer.

    Args:
        states: query, key and value of this rank's tokens, [batch, heads, tokens, width].
    """
    if not ring.swaps:
        alone: Tensor = _RingAttention.apply(ring, *states)
        return alone
    out: Tensor = _RingAttention.apply(ring, *(swap(state, ring.comm, _TOKENS) for state in states))
    return swap(out, ring.comm, _TOKENS, back=True)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = query.detach().contiguous()
        shared = _Shared(torch.cat([key.detach().reshape(-1), value.detach().reshape(-1)]), key.shape, value.shape)
        with torch.autocast(query.device.type, enabled=False):
            out, lse, state = _forward(ring, query, shared)
        ctx.ring, ctx.shapes = ring, (key.shape, value.shape)
        ctx.save_for_backward(query, shared.packed, out, lse, *state)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, packed, out, lse, *state = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            output = Output(out, lse, tuple(state))
            of_query, of_shared = _backward(
                ctx.ring, gradient.contiguous(), query, _Shared(packed, *ctx.shapes), output
            )
        return None, *(of.to(query.dtype) for of in (of_query, of_shared.key, of_shared.value))


class _Shared(NamedTuple):
    """Keys and values, or their gradients, as they go round: one flat tensor."""

    packed: Tensor
    key_shape: torch.Size
    value_shape: torch.Size

    @property
    def key(self) -> Tensor:
        return self.packed[: self.key_shape.numel()].view(self.key_shape)

    @property
    def value(self) -> Tensor:
        return self.packed[self.key_shape.numel() :].view(self.value_shape)


def _of(tensor: Tensor, tokens: range) -> Tensor:
    return tensor.narrow(_TOKENS, tokens.start, len(tokens))


def _forward(ring: Ring, query: Tensor, shared: _Shared) -> Output:
    """Return the output, and the log-sum-exp, which is 0 where a query sees nothing."""
    exact, size = exact_dtype(query.dtype), ring.comm.world_size
    out = query.new_zeros(*query.shape[:-1], shared.value_shape[-1], dtype=exact)
    lse = query.new_full(query.shape[:-1], -math.inf, dtype=exact)
    state: tuple[Tensor, ...] = ()
    for move in range(ring.moves + 1):
        pending = ring.pass_on(shared.packed) if move < ring.moves else None
        for rows, columns, block, kernel in ring.blocks((ring.comm.rank - move) % size, query, shared.value):
            key, value = _of(shared.key, columns), _of(shared.value, columns)
            output = kernel.forward(_of(query, rows), key, value, block)
            _merge(_of(out, rows), _of(lse, rows), output)
            state = output.state or state
        if pending is not None:
            shared = shared._replace(packed=pending.wait())
    return Output(out.to(query.dtype), lse.masked_fill_(lse == -math.inf, 0.0), state)


def _merge(out: Tensor, lse: Tensor, output: Output) -> None:
    """Merge the output of a block into ``out`` and ``lse``."""
    joint = torch.logaddexp(lse, output.lse)
    finite = joint.masked_fill(joint == -math.inf, 0.0)
    out.mul_((lse - finite).exp_().unsqueeze(-1)).add_(output.out * (output.lse - finite).exp_().unsqueeze(-1))
    lse.copy_(joint)


def _backward(ring: Ring, gradient: Tensor, query: Tensor, shared: _Shared, output: Output) -> tuple[Tensor, _Shared]:
    """Return the gradients of query, and of key and value, in the dtype in which blocks are added."""
    exact, size = exact_dtype(query.dtype), ring.comm.world_size
    of_query = torch.zeros_like(query, dtype=exact)
    arriving: Pending | None = None
    for move in range(ring.moves + 1):
        pending = ring.pass_on(shared.packed) if move < ring.moves else None
        added = shared._replace(packed=torch.zeros_like(shared.packed, dtype=exact))
        for rows, columns, block, kernel in ring.blocks((ring.comm.rank - move) % size, query, shared.value):
            own = Output(_of(output.out, rows), _of(output.lse, rows), output.state)
            key, value = _of(shared.key, columns), _of(shared.value, columns)
            parts = kernel.backward(_of(gradient, rows), _of(query, rows), key, value, own, block)
            totals = _of(of_query, rows), _of(added.key, columns), _of(added.value, columns)
            for total, part in zip(totals, parts, strict=True):
                total.add_(part)
        if arriving is not None:
            added.packed.add_(arriving.wait())
        if pending is not None:
            arriving = ring.pass_on(added.packed)
            shared = shared._replace(packed=pending.wait())
    if ring.moves:
        added = added._replace(packed=ring.pass_on(added.packed, -ring.moves).wait())
    return of_query, added
