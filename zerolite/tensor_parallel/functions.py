"""Autograd functions between replicated and sharded activations.

Shoeybi et al., "Megatron-LM" (2019), section 3, names the first pair f and g; Korthikanti et al., "Reducing activation
recomputation" (2022), the pairs along the sequence. The forward of one is the backward of its partner:

    copy             as it is            sum over ranks      into a layer of which each rank has some outputs
    reduce           sum over ranks      as it is            out of a layer of which each rank has some inputs
    gather           all parts           this rank's part    what follows is the same on all ranks
    scatter          this rank's part    all parts           what went before is the same on all ranks
    all_gather       all parts           sum, this part      what follows differs between ranks
    reduce_scatter   sum, this part      all parts           what went before differs between ranks

All take and give floating tensors of any shape and dtype, and are called on all ranks of the communicator with equal
shapes, in the same order, as are their backwards. On one rank they give the tensor itself. For tensors without memory
(torch.FakeTensorMode) only a communicator that sends nothing is asked: see :func:`zerolite.comm.dry_communicator`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerolite.comm import Communicator
from zerolite.utils.accelerator import is_fake

TAG = "tensor"
"""Of every collective of tensor parallelism in :func:`zerolite.comm.record`."""


def copy(x: Tensor, comm: Communicator) -> Tensor:
    """``x``, which is the same on all ranks; its gradient is the sum of theirs."""
    return _applied("copy", x, comm)


def reduce(x: Tensor, comm: Communicator, in_place: bool = False) -> Tensor:
    """The sum over ranks. in_place: no other code uses ``x``, whose memory may hold the result."""
    return _applied("reduce", x, comm, in_place=in_place)


def gather(x: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """The ranks' ``x``, one behind the other along ``dim``."""
    return _applied("gather", x, comm, dim)


def scatter(x: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """This rank's part of ``x`` along ``dim``, contiguous. Raises ValueError if it cannot be cut in equal parts."""
    return _applied("scatter", x, comm, dim)


def all_gather(x: Tensor, comm: Communicator, dim: int = 1) -> Tensor:
    """The ranks' ``x``, one behind the other along ``dim``; the gradient is summed over ranks."""
    return _applied("all_gather", x, comm, dim)


def reduce_scatter(x: Tensor, comm: Communicator, dim: int = 1, in_place: bool = False) -> Tensor:
    """This rank's part along ``dim`` of the sum over ranks. in_place: no other code uses ``x``, whose memory may be
    clobbered. Raises ValueError if ``x`` cannot be cut in equal parts."""
    return _applied("reduce_scatter", x, comm, dim, in_place)


def shared_copy(x: Tensor, comm: Communicator) -> Tensor:
    """:func:`copy`, of which all layers that read the same tensor get one: their gradients are summed here before they
    are summed over ranks. It lives as long as ``x``, whose memory it shares."""
    if comm.world_size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _remembered(x, comm, "copy", lambda: _applied("copy", x, comm, in_place=True))


def shared_all_gather(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """:func:`all_gather`, once for all layers that read the same tensor, while it lives."""
    return x if comm.world_size == 1 else _remembered(x, comm, dim, lambda: all_gather(x, comm, dim))


_ATTRIBUTE = "_zerolite_entered"


def _remembered(x: Tensor, comm: Communicator, what: object, make: Callable[[], Tensor]) -> Tensor:
    version = None if x.is_inference() else x._version
    state = (id(comm), what, version, torch.is_grad_enabled(), x.requires_grad)
    known = getattr(x, _ATTRIBUTE, None)
    if known is not None and known[0] == state:
        made: Tensor = known[1]
        return made
    made = make()
    setattr(x, _ATTRIBUTE, (state, made))
    return made


def _applied(kind: str, x: Tensor, comm: Communicator, dim: int = 0, in_place: bool = False) -> Tensor:
    if comm.world_size == 1:
        return x
    dim = dim % x.dim() if x.dim() else dim
    if kind.endswith("scatter") and x.shape[dim] % comm.world_size:
        raise ValueError(
            f"expected a length along dimension {dim} that {comm.world_size} tensor-parallel ranks can share equally, "
            f"got {x.shape[dim]} in a tensor of shape {list(x.shape)}; pad the input to a multiple of "
            f"{comm.world_size}"
        )
    result: Tensor = _Exchange.apply(x, comm, kind, dim, in_place)
    return result


# Outputs share memory with inputs by detach(), which is no view for autograd: an output that is a view would hold the
# input, and shared_copy() would make a cycle of the two.


def sends(x: Tensor, comm: Communicator) -> bool:
    """True if ``x`` has anything to send, or if a recorder would note that it was sent."""
    return x.numel() > 0 and (comm.peers_agree or not is_fake(x))


def _sum(x: Tensor, comm: Communicator, in_place: bool) -> Tensor:
    summed = x.detach() if in_place and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    if sends(summed, comm):
        comm.all_reduce(summed.view(-1), TAG).wait()
    return summed


def _all_parts(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    size = comm.world_size
    part = x.detach()
    full = part.new_empty((size, *part.shape))
    full[comm.rank].copy_(part)
    if sends(full, comm):  # not gather_shards, whose tensors the record of what is in flight keeps
        comm.all_gather(full.view(-1), TAG).wait()
    return full.movedim(0, dim).reshape(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])


def _own_part(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    length = x.shape[dim] // comm.world_size
    return x.detach().narrow(dim, comm.rank * length, length).clone(memory_format=torch.contiguous_format)


def _summed_part(x: Tensor, comm: Communicator, dim: int, in_place: bool) -> Tensor:
    size = comm.world_size
    length = x.shape[dim] // size
    rows = x.detach().unflatten(dim, (size, length)).movedim(dim, 0)
    ours = in_place or not rows.is_contiguous()
    rows = rows.contiguous() if ours else rows.clone(memory_format=torch.contiguous_format)
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    if not sends(rows, comm):
        return rows.new_empty(shape)
    # Detached, it is no view any more for autograd, which refuses to write into a function's view in place.
    return comm.reduce_scatter(rows.view(-1), TAG).wait().view(shape).detach()


_FORWARD: dict[str, Callable[[Tensor, Communicator, int, bool], Tensor]] = {
    "copy": lambda x, comm, dim, in_place: x.detach(),
    "reduce": lambda x, comm, dim, in_place: _sum(x, comm, in_place),
    "gather": lambda x, comm, dim, in_place: _all_parts(x, comm, dim),
    "scatter": lambda x, comm, dim, in_place: _own_part(x, comm, dim),
    "all_gather": lambda x, comm, dim, in_place: _all_parts(x, comm, dim),
    "reduce_scatter": _summed_part,
}
_PAIRS = (("copy", "reduce"), ("gather", "scatter"), ("all_gather", "reduce_scatter"))
_PARTNER = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


class _Exchange(torch.autograd.Function):
    """in_place: the memory of the input, or of the gradient of a copy, may hold the result. A gradient may be shared
    with other branches of the graph; then it is summed in memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, kind: str, dim: int, in_place: bool) -> Tensor:
        ctx.comm, ctx.kind, ctx.dim, ctx.in_place = comm, kind, dim, in_place
        return _FORWARD[kind](x, comm, dim, in_place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:
        if ctx.kind == "reduce" and not torch.is_grad_enabled():
            return gradient, None, None, None, None
        own = ctx.kind == "copy" and ctx.in_place
        return _Exchange.apply(gradient, ctx.comm, _PARTNER[ctx.kind], ctx.dim, own), None, None, None, None
