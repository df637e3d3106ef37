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
from zerolite.moe.copies import Copies, added, copy_rows, histogram, sum_copies
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
def over_ranks(
    comm: Communicator, share: int, forward: Forward, trained: Sequence[Tensor], tokens: Sequence[Tensor]
) -> Tensor:
    """Compute a layer of experts, of which each rank of ``comm`` has ``share``, and return its output [n, width].

    Args:
        forward: the module's own forward with this rank's experts: rows [m, width], their expert and its weight
            [m, 1].
        trained: this rank's parameters that require gradients, the same ones on every rank. If its experts get no
            token, their gradients are zeros.
        tokens: hidden states [n, width], the experts of each token [n, k], and their weights [n, k].
    """
    hidden, index, weights = tokens
    journey = Journey(comm, _route(comm, share, index))
    pairs, pair_weights = _ToExperts.apply(journey, hidden, weights)
    # The anchor ties the result to a graph on every rank, also to that of experts that have computed nothing.
    anchor = torch.zeros((), device=hidden.device, requires_grad=bool(trained) and torch.is_grad_enabled())
    if len(pairs):
        found = forward(pairs, journey.experts, pair_weights)
    else:
        found, anchor = pairs, torch.stack([anchor, *(p.flatten()[:0].sum(dtype=anchor.dtype) for p in trained)]).sum()
    output: Tensor = _FromExperts.apply(journey, found, hidden.dtype, anchor)
    return output


@collective
def with_capacity(comm: Communicator, share: int, capacity: int, forward: Forward, tokens: Sequence[Tensor]) -> Tensor:
    """Compute a layer of experts as :func:`over_ranks` does, where an expert takes ``capacity`` tokens of a rank.

    Every rank sends so many rows for each expert, of which some may be empty. So no rank waits for numbers. Tokens
    beyond that, the last ones, are dropped: this expert adds nothing to them.
    """
    hidden, index, weights = tokens
    size, (count, chosen) = comm.world_size, index.shape
    taken = _within_capacity(index, share * size, capacity)
    # Empty places have rows of zeros behind the tokens, and the weight 0. They share as many rows as there are tokens:
    # CUDA adds the copies of one row one after another, and one for all would take long.
    spare = max(count, 1)
    places = torch.arange(len(taken), device=taken.device)
    source = torch.where(taken < index.numel(), taken // max(chosen, 1), count + places % spare)
    copies = Copies.of(source, count + spare)
    rows = copy_rows(F.pad(hidden, (0, 0, 0, spare)), copies)
    own_weights = F.pad(weights.reshape(-1), (0, 1)).index_select(0, taken)[:, None]
    equal = [share * capacity] * size
    traffic = Traffic(equal, equal, share * capacity)
    received = _Exchange.apply(comm, traffic, rows, own_weights)
    by_expert = [one.unflatten(0, (size, share, capacity)).transpose(0, 1).flatten(0, 2) for one in received]
    experts = torch.arange(share, device=index.device).repeat_interleave(size * capacity)[:, None]
    found = forward(by_expert[0], experts, by_expert[1]).to(hidden.dtype)
    by_rank = found.unflatten(0, (share, size, capacity)).transpose(0, 1).flatten(0, 2)
    (returned,) = _Exchange.apply(comm, traffic, by_rank)
    return sum_copies(returned, copies)[:count]


@collective
def in_parts(comm: Communicator, compute: Callable[[Sequence[Tensor]], Tensor], tokens: Sequence[Tensor]) -> Tensor:
    """Compute a layer of experts for tokens that all ranks of ``comm`` have: each rank those of a part of them.

    The outputs are gathered, and in the backward the gradients of the hidden states and of the weights: so all ranks
    have equal gradients of what comes before, as if each had computed all tokens.

    Args:
        compute: function of a part of ``tokens`` that returns its output.
        tokens: as of :func:`over_ranks`, equal on all ranks.
    """
    hidden, index, weights = tokens
    own_hidden, own_weights = _OwnRows.apply(comm, hidden, weights)
    output = compute((own_hidden, _own_rows(comm, index), own_weights))
    gathered: Tensor = _AllRows.apply(comm, len(index), output)
    return gathered


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


class Journey:
    """One call's tokens on their way to the experts and back.

    Attributes:
        experts: this rank's expert of each pair, sorted [pairs, 1]; known when the tokens have arrived.
        pairs: the pairs as copies of the rows that have come; likewise.
    """

    experts: Tensor
    pairs: Copies

    def __init__(self, comm: Communicator, route: Route) -> None:
        self.comm, self.route = comm, route

    def arrive(self, experts: Tensor) -> Tensor:
        """Sort the pairs of the rows that have come by ``experts`` [rows, k]. Return their places in it."""
        flat = experts.reshape(-1)
        order = flat.argsort(stable=True)[: self.route.pairs]  # those of other ranks have the largest number
        self.experts = flat[order].long()[:, None]
        self.pairs = Copies.of(order // experts.shape[1], len(experts))
        return order


# Two functions for a layer, and not one for each step of the way: calls of autograd's functions cost the host more than
# the small operations in them.


class _ToExperts(torch.autograd.Function):
    """Tokens and weights to the ranks of their experts: pairs [pairs, width] and their weights [pairs, 1]."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        route = journey.route
        own = [tensor.detach().index_select(0, route.rows.source) for tensor in (hidden, weights)]
        rows, row_weights, experts = _exchanged(journey.comm, route.traffic, (*own, route.experts))
        order = journey.arrive(experts)
        ctx.comm, ctx.traffic, ctx.chosen = journey.comm, route.traffic, weights.shape[1]
        ctx.save_for_backward(*route.rows, *journey.pairs, order)
        return rows.index_select(0, journey.pairs.source), row_weights.reshape(-1).index_select(0, order)[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_weights: Tensor) -> object:
        *places, order = ctx.saved_tensors
        rows, pairs = Copies(*places[:3]), Copies(*places[3:])
        back = of_weights.new_zeros(len(pairs.starts) * ctx.chosen).index_copy_(0, order, of_weights.reshape(-1))
        parts = added(gradient, pairs), back.view(-1, ctx.chosen)
        returned = _exchanged(ctx.comm, ctx.traffic.back, parts)
        return None, *(added(part, rows) for part in returned)


class _FromExperts(torch.autograd.Function):
    """Results of the pairs back to the ranks of their tokens, and added there [n, width]."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, found: Tensor, dtype: torch.dtype, anchor: Tensor) -> Tensor:
        # A checkpoint that computes this layer again ends behind the last tensor that is saved: on every rank, also on
        # one without tokens, behind the last all-to-all.
        rows, ctx.comm, ctx.traffic = journey.route.rows, journey.comm, journey.route.traffic
        ctx.dtype, ctx.anchor = found.dtype, None if anchor.is_leaf else anchor.new_zeros(())
        ctx.save_for_backward(*rows, journey.pairs.source)
        (returned,) = _exchanged(ctx.comm, ctx.traffic.back, (added(found.detach(), journey.pairs).to(dtype),))
        return added(returned, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> object:
        source, _, _, pairs = ctx.saved_tensors
        (arrived,) = _exchanged(ctx.comm, ctx.traffic, (gradient.index_select(0, source),))
        return None, arrived.index_select(0, pairs).to(ctx.dtype), None, ctx.anchor


class _Exchange(torch.autograd.Function):
    """One all-to-all of several tensors with a row for each token."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, traffic: Traffic, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.traffic = comm, traffic
        return _exchanged(comm, traffic, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> object:
        return None, None, *_exchanged(ctx.comm, ctx.traffic.back, gradients)


class _OwnRows(torch.autograd.Function):
    """This rank's rows of tensors that all ranks have. Their gradients are those of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.count = comm, len(tensors[0])
        return tuple(_own_rows(comm, tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> object:
        return None, *_all_rows(ctx.comm, ctx.count, gradients)


class _AllRows(torch.autograd.Function):
    """The rows of all ranks, ``count`` together, of which each has those of :func:`_own_rows`."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, count: int, rows: Tensor) -> Tensor:
        ctx.comm = comm
        return _all_rows(comm, count, (rows,))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> object:
        return None, None, _own_rows(ctx.comm, gradient)


def _own_rows(comm: Communicator, tensor: Tensor) -> Tensor:
    """Return a copy of this rank's rows. The last ranks have fewer, or none, if the ranks cannot have equally many."""
    length = -(-len(tensor) // comm.world_size)
    return tensor.detach()[comm.rank * length : (comm.rank + 1) * length].clone(memory_format=torch.contiguous_format)


def _all_rows(comm: Communicator, count: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gather the rows of several tensors, of which each rank has those of :func:`_own_rows`, as one message."""
    rows = _as_bytes(tensors)
    full = rows.new_empty((comm.world_size, -(-count // comm.world_size), rows.shape[1]))
    full[comm.rank, : len(rows)] = rows
    if count:  # the same number on all ranks
        comm.all_gather(full.view(-1), TAG).wait()
    return _from_bytes(full.flatten(0, 1)[:count], tensors)


def _exchanged(comm: Communicator, traffic: Traffic, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Send rows of several tensors [rows, columns] as one message of bytes to each rank."""
    rows = _as_bytes(tensors)
    arrived = comm.all_to_all_rows(rows, traffic.sent, traffic.received, traffic.largest, TAG).wait()
    return _from_bytes(arrived, tensors)


def _as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the rows of several tensors [rows, columns] one beside the other."""
    parts = [_dense(tensor.detach()).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _from_bytes(rows: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors that :func:`_as_bytes` has put into ``rows``, with the columns and dtypes of ``like``."""
    columns = rows.split([tensor.shape[1] * tensor.element_size() for tensor in like], 1)
    return tuple(_dense(part).view(tensor.dtype) for part, tensor in zip(columns, like, strict=True))


def _dense(rows: Tensor) -> Tensor:
    """Return ``rows`` in memory of their own strides. A single row is contiguous for torch whatever its stride."""
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
