"""Exchange of tokens between ranks that have different experts: dropless, with three collectives in a forward.

    rank 0                              rank 1                       4 tokens, 4 experts (0 1 | 2 3), 2 of them a token
    token a -> experts 0 3              token c -> experts 0 1
    token b -> experts 2 3              token d -> experts 1 2

    counts       every rank learns who sends how many rows to whom               the host waits for these numbers, once
    rows         rank 0 has  a (expert 0), c (0 1), d (1)                        a token travels once to a rank, with
                 rank 1 has  a (expert 3), b (2 3), d (2)                        the weights of all its experts there
    pairs        rank 0 sorts   a0 c0 | c1 d1        and calls its experts       sorted once, by the expert
    results      a row for each row that came, the weighted sum of its experts here; a token adds what comes back

The backward takes the same way with the gradients, in two all-to-alls. Every rank takes part in every one of them,
whatever experts its tokens have, and whatever tokens its experts have: nothing that one rank alone knows decides on a
launch. So the outputs have a graph on all ranks if they have one on any. All sums have one order: by the rank, and
there by the expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zerolite.comm import Communicator, collective
from zerolite.moe.copies import Copies, copy_rows, histogram, sum_copies
from zerolite.moe.loads import equal_rows, read_numbers

TAG = "experts"
"""Tag of every collective of expert parallelism in :func:`zerolite.comm.record`."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class Traffic(NamedTuple):
    """Rows that travel in one direction.

    Attributes:
        sent: rows for each rank.
        received: rows from each rank.
        largest: most rows that any rank sends to one.
    """

    sent: Sequence[int]
    received: Sequence[int]
    largest: int

    @property
    def back(self) -> Traffic:
        return Traffic(self.received, self.sent, self.largest)


class Route(NamedTuple):
    """Way of one call's tokens to the ranks of their experts.

    Attributes:
        traffic: rows of the way there.
        rows: the tokens that are sent, by rank and then by token.
        experts: the token's experts in the numbers of the rank that it is sent to [rows, k], and their number there
            for experts of other ranks, int32.
        pairs: pairs of a row and an expert that this rank has to compute.
    """

    traffic: Traffic
    rows: Copies
    experts: Tensor
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
    rows = copy_rows(hidden, route.rows), copy_rows(weights, route.rows)
    received = _Exchange.apply(comm, route.traffic, 3, *rows, route.experts)
    results = _own_experts(forward, route.pairs, *received)
    # These tie the results to their graphs on a rank without tokens too, whose experts have computed nothing.
    anchor = torch.zeros((), device=hidden.device, requires_grad=trains and torch.is_grad_enabled())
    (returned,) = _Exchange.apply(comm, route.traffic.back, 1, results, anchor, *received[:2])
    # The sum saves tensors. So a checkpoint that recomputes this layer ends behind the last all-to-all on every rank,
    # also on one that had nothing to save before.
    return sum_copies(returned, route.rows)


@collective
def with_capacity(comm: Communicator, share: int, capacity: int, forward: Forward, tokens: Sequence[Tensor]) -> Tensor:
    """Compute a layer of experts as :func:`over_ranks` does, where an expert takes ``capacity`` tokens of a rank.

    Every rank sends so many rows for each expert, of which some may be empty. So no rank waits for numbers. Tokens
    beyond that, the last ones, are dropped: this expert adds nothing to them.
    """
    hidden, index, weights = tokens
    size, (count, chosen) = comm.world_size, index.shape
    taken = _within_capacity(index, share * size, capacity)
    # Empty places have a row of zeros behind the tokens, and the weight 0.
    copies = Copies.of(taken // max(chosen, 1), count + 1)
    rows = copy_rows(F.pad(hidden, (0, 0, 0, 1)), copies)
    own_weights = F.pad(weights.reshape(-1), (0, 1)).index_select(0, taken)[:, None]
    equal = [share * capacity] * size
    traffic = Traffic(equal, equal, share * capacity)
    received = _Exchange.apply(comm, traffic, 2, rows, own_weights)
    by_expert = [one.unflatten(0, (size, share, capacity)).transpose(0, 1).flatten(0, 2) for one in received]
    experts = torch.arange(share, device=index.device).repeat_interleave(size * capacity)[:, None]
    found = forward(by_expert[0], experts, by_expert[1]).to(hidden.dtype)
    by_rank = found.unflatten(0, (share, size, capacity)).transpose(0, 1).flatten(0, 2)
    (returned,) = _Exchange.apply(comm, traffic, 1, by_rank)
    return sum_copies(returned, copies)[:count]


def _within_capacity(index: Tensor, experts: int, capacity: int) -> Tensor:
    """Return the pairs of a token and an expert that are taken, ``capacity`` for each expert: number in ``index``, and
    its length for an empty place."""
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)  # by the expert, and there by the token
    counts, chosen = histogram(flat, experts + 1), flat[order]
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[chosen]
    slot = torch.where((place < capacity) & (chosen < experts), chosen * capacity + place, experts * capacity)
    return torch.full((experts * capacity + 1,), len(flat), device=flat.device).scatter_(0, slot, order)[:-1]


@torch.no_grad()
def _route(comm: Communicator, share: int, index: Tensor) -> Route:
    """Find the ranks of the experts ``index`` [n, k], and tell all ranks what travels."""
    size, count = comm.world_size, len(index)
    owner = index // share  # ``size`` for the number behind the last expert, with which a model leaves a place empty
    goes = torch.zeros((count, size + 1), dtype=torch.bool, device=index.device).scatter_(1, owner, True)[:, :size]
    in_plan = equal_rows(count, index.shape[1], share, size), index.numel()
    traffic, pairs = _agree(comm, goes.sum(0), histogram(owner, size + 1)[:size], in_plan)
    by_rank = goes.t().reshape(-1).to(torch.uint8).argsort(descending=True, stable=True)[: sum(traffic.sent)]
    tokens, rank = by_rank % max(count, 1), by_rank // max(count, 1)
    chosen = index[tokens] - share * rank[:, None]
    here = torch.where((chosen >= 0) & (chosen < share), chosen, share)
    return Route(traffic, Copies.of(tokens, count), here.to(torch.int32), pairs)


def _agree(comm: Communicator, rows: Tensor, pairs: Tensor, in_plan: tuple[int, int]) -> tuple[Traffic, int]:
    """Tell all ranks the rows and pairs for each [ranks]. Return the traffic of this rank, and the pairs that it gets.

    The host waits for these numbers.

    Args:
        in_plan: in a plan, the rows for each rank, and the pairs that this rank gets.
    """
    rank, size = comm.rank, comm.world_size
    table = torch.zeros((size, 2, size), dtype=torch.int64, device=rows.device)
    table[rank, 0], table[rank, 1] = rows, pairs
    table = comm.all_gather(table.view(-1), TAG).wait().view(size, 2, size)
    totals = torch.stack([table[:, 0].max(), table[:, 1, rank].sum()])
    of_rank = torch.cat([table[rank, 0], table[:, 0, rank], totals])
    numbers = read_numbers(of_rank, in_plan=[*[in_plan[0]] * (2 * size + 1), in_plan[1]])
    return Traffic(numbers[:size], numbers[size : 2 * size], numbers[-2]), numbers[-1]


def _own_experts(forward: Forward, pairs: int, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return the weighted sum of this rank's experts for each of ``rows``."""
    if not pairs:  # no collective is in the experts' own forward
        return torch.zeros_like(rows, requires_grad=False)
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)[:pairs]  # those of other ranks have the largest number
    copies = Copies.of(order // experts.shape[1], len(rows))
    own_weights = weights.reshape(-1).index_select(0, order)[:, None]
    found = forward(copy_rows(rows, copies), flat[order].long()[:, None], own_weights)
    return sum_copies(found, copies).to(rows.dtype)


class _Exchange(torch.autograd.Function):
    """One all-to-all of several tensors with a row for each token. Others tie the results to their graphs."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, traffic: Traffic, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """count: number of tensors that travel, the first ones."""
        ctx.comm, ctx.traffic, ctx.others = comm, traffic, len(tensors) - count
        results = _exchanged(comm, traffic, tensors[:count])
        ctx.travels = [result.is_floating_point() for result in results]
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> object:
        travel = [gradient for gradient, travels in zip(gradients, ctx.travels, strict=True) if travels]
        back = iter(_exchanged(ctx.comm, ctx.traffic.back, travel))
        returned = [next(back) if travels else None for travels in ctx.travels]
        return None, None, None, *returned, *[None] * ctx.others


def _exchanged(comm: Communicator, traffic: Traffic, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Send rows of several tensors [rows, columns] as one message of bytes to each rank."""
    parts = [_dense(tensor.detach()).view(torch.uint8) for tensor in tensors]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    arrived = comm.all_to_all_rows(rows, traffic.sent, traffic.received, traffic.largest, TAG).wait()
    columns = arrived.split([part.shape[1] for part in parts], 1)
    return tuple(_dense(part).view(tensor.dtype) for part, tensor in zip(columns, tensors, strict=True))


def _dense(rows: Tensor) -> Tensor:
    """Return ``rows`` in memory of their own strides. A single row is contiguous for torch whatever its stride."""
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
