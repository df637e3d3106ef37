"""Exchange of tokens between ranks that have different experts: dropless, with three all-to-alls in a forward.

    rank 0                              rank 1                       4 tokens, 4 experts (0 1 | 2 3), 2 of them a token
    token a -> experts 0 3              token c -> experts 0 1
    token b -> experts 2 3              token d -> experts 1 2

    counts       rank 0 sends rank 1 two rows, rank 1 sends rank 0 two          the host waits for these numbers, once
    rows         rank 0 has  a (expert 0), c (0 1), d (1)                        a token travels once to a rank, with
                 rank 1 has  a (expert 3), b (2 3), d (2)                        the weights of all its experts there
    pairs        rank 0 sorts   a0 c0 | c1 d1        and calls its experts       sorted once, by the expert
    results      a row for each row that came, the weighted sum of its experts here; a token adds what comes back

The backward takes the same way with the gradients, in two all-to-alls. Every rank takes part in every one of them,
whatever experts its tokens have, and whatever tokens its experts have: nothing that one rank alone knows decides on a
launch. So the outputs have a graph on all ranks if they have one on any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zerolite.comm import Communicator, collective
from zerolite.utils.accelerator import host_values
from zerolite.utils.dtypes import HALF

TAG = "experts"
"""Tag of every collective of expert parallelism in :func:`zerolite.comm.record`."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class Route(NamedTuple):
    """Way of one call's tokens to the ranks of their experts.

    Attributes:
        tokens: token of each row that is sent, by rank and then by token [rows].
        experts: the token's experts in the numbers of the rank that it is sent to [rows, k], and their number there
            for experts of other ranks, int32.
        sent: rows for each rank.
        received: rows from each rank.
        pairs: pairs of a row and an expert that this rank has to compute.
    """

    tokens: Tensor
    experts: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    pairs: int


@collective
def over_ranks(comm: Communicator, share: int, forward: Forward, trains: bool, tokens: Sequence[Tensor]) -> Tensor:
    """Compute a layer of experts, of which each rank of ``comm`` has ``share``, and return its output [n, width].

    Args:
        forward: the module's own forward with this rank's experts: rows [m, width], their expert and its weight
            [m, 1].
        trains: the experts require gradients on every rank.
        tokens: hidden states [n, width], the experts of each token [n, k], and their weights [n, k].
    """
    hidden, index, weights = tokens
    route = _route(comm, share, index)
    received = _Exchange.apply(
        comm, route.sent, route.received, 3, hidden[route.tokens], weights[route.tokens], route.experts
    )
    rows = _own_experts(forward, share, route.pairs, *received)
    # These tie the results to their graphs on a rank without tokens too, whose experts have computed nothing.
    anchor = torch.zeros((), device=hidden.device, requires_grad=trains and torch.is_grad_enabled())
    (returned,) = _Exchange.apply(comm, route.received, route.sent, 1, rows, anchor, *received[:2])
    exact = _exact(hidden.dtype)
    # index_add saves the places. So a checkpoint that recomputes this layer ends behind the last all-to-all on every
    # rank, also on one that had nothing to save before.
    output = torch.zeros(hidden.shape, dtype=exact, device=hidden.device)
    return output.index_add(0, route.tokens, returned.to(exact)).to(hidden.dtype)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


@torch.no_grad()
def _route(comm: Communicator, share: int, index: Tensor) -> Route:
    """Find the ranks of the experts ``index`` [n, k], and tell them what comes. The host waits for the answer."""
    size, count = comm.world_size, len(index)
    owner = index // share  # ``size`` for the number behind the last expert, with which a model leaves a place empty
    goes = torch.zeros((count, size + 1), dtype=torch.bool, device=index.device).scatter_(1, owner, True)[:, :size]
    pairs = torch.bincount(owner.reshape(-1), minlength=size + 1)[:size]
    counts = torch.stack([goes.sum(0), pairs], 1).reshape(-1)
    arriving = comm.all_to_all(counts, TAG).wait()
    numbers = [int(number) for number in host_values(torch.cat([counts, arriving]))]
    sent, received = numbers[: 2 * size : 2], numbers[2 * size :: 2]
    by_rank = goes.t().reshape(-1).to(torch.uint8).argsort(descending=True, stable=True)[: sum(sent)]
    tokens, rank = by_rank % max(count, 1), by_rank // max(count, 1)
    chosen = index[tokens]
    here = torch.where(owner[tokens] == rank[:, None], chosen - share * rank[:, None], share)
    return Route(tokens, here.to(torch.int32), sent, received, sum(numbers[2 * size + 1 :: 2]))


def _own_experts(forward: Forward, share: int, pairs: int, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return the weighted sum of this rank's experts for each of ``rows``."""
    exact = _exact(rows.dtype)
    result = torch.zeros(rows.shape, dtype=exact, device=rows.device)
    if not pairs:  # no collective is in the experts' own forward
        return result.to(rows.dtype)
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)[:pairs]  # those of other ranks have the largest number
    place = order // experts.shape[1]
    found = forward(rows[place], flat[order].long()[:, None], weights.reshape(-1)[order][:, None])
    return result.index_add(0, place, found.to(exact)).to(rows.dtype)


class _Exchange(torch.autograd.Function):
    """One all-to-all of several tensors with a row for each token. Others tie the results to their graphs."""

    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, sent: Sequence[int], received: Sequence[int], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """count: number of tensors that travel, the first ones."""
        ctx.comm, ctx.sent, ctx.received, ctx.others = comm, sent, received, len(tensors) - count
        results = _exchanged(comm, sent, received, tensors[:count])
        ctx.travels = [result.is_floating_point() for result in results]
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> object:
        travel = [gradient for gradient, travels in zip(gradients, ctx.travels, strict=True) if travels]
        back = iter(_exchanged(ctx.comm, ctx.received, ctx.sent, travel))
        returned = [next(back) if travels else None for travels in ctx.travels]
        return None, None, None, None, *returned, *[None] * ctx.others


def _exchanged(
    comm: Communicator, sent: Sequence[int], received: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Send rows of several tensors [rows, columns] as one message of bytes to each rank."""
    parts = [_dense(tensor.detach()).view(torch.uint8) for tensor in tensors]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    arrived = comm.all_to_all_rows(rows, sent, received, TAG).wait()
    columns = arrived.split([part.shape[1] for part in parts], 1)
    return tuple(_dense(part).view(tensor.dtype) for part, tensor in zip(columns, tensors, strict=True))


def _dense(rows: Tensor) -> Tensor:
    """Return ``rows`` in memory of their own strides. A single row is contiguous for torch whatever its stride."""
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
