"""Autograd functions between replicated and sharded activations.

Shoeybi et al., "Megatron-LM" (2019), section 3, names the first pair f and g; Korthikanti et al., "Reducing activation
recomputation" (2022), the pairs along the sequence. The forward of each is the backward of its partner:

                     forward             backward            use
    copy             unchanged           sum over ranks      before a column-parallel layer
    reduce           sum over ranks      unchanged           after a row-parallel layer
    gather           all parts           this rank's part    the computation after it is the same on all ranks
    scatter          this rank's part    all parts           the computation before it is the same on all ranks
    all_gather       all parts           sum, this part      the computation after it differs between ranks
    reduce_scatter   sum, this part      all parts           the computation before it differs between ranks

Each takes and returns a floating tensor of any shape and dtype. The function and its backward are called on all ranks
of the communicator with equal shapes, in the same order. On one rank the tensor itself is returned. For fake tensors
(torch.FakeTensorMode) a collective runs only over a communicator that sends nothing: see
:func:`zerolite.comm.dry_communicator`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from zerolite.comm import Communicator
from zerolite.utils.accelerator import is_fake

Made = TypeVar("Made")

TAG = "tensor"
"""Tag of every collective of tensor parallelism in :func:`zerolite.comm.record`."""


def copy(x: Tensor, comm: Communicator) -> Tensor:
    """Return ``x``, which is the same on all ranks; its gradient is the sum of the ranks' gradients."""
    return _applied("copy", x, comm)


def reduce(x: Tensor, comm: Communicator, in_place: bool = False) -> Tensor:
    """Return the sum over ranks.

    Args:
        in_place: write the result into the memory of ``x``, which no other code uses.
    """
    return _applied("reduce", x, comm, in_place=in_place)


def gather(x: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """Concatenate the ranks' ``x`` along ``dim``."""
    return _applied("gather", x, comm, dim)


def scatter(x: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """Return this rank's part of ``x`` along ``dim``, contiguous. Raises ValueError if it cannot be divided equally."""
    return _applied("scatter", x, comm, dim)


def all_gather(x: Tensor, comm: Communicator, dim: int = 1) -> Tensor:
    """Concatenate the ranks' ``x`` along ``dim``; the gradient is summed over ranks."""
    return _applied("all_gather", x, comm, dim)


def reduce_scatter(x: Tensor, comm: Communicator, dim: int = 1, in_place: bool = False) -> Tensor:
    """Return this rank's part along ``dim`` of the sum over ranks.

    Args:
        in_place: overwrite the memory of ``x``, which no other code uses.

    Raises:
        ValueError: ``x`` cannot be divided equally.
    """
    return _applied("reduce_scatter", x, comm, dim, in_place)


def shared_copy(x: Tensor, comm: Communicator) -> Tensor:
    """Return :func:`copy` of ``x``, one for all layers that read the tensor.

    Their gradients are summed on this rank first, so query, key and value need one all-reduce instead of three. The
    copy lives as long as ``x`` and shares its memory. It is ``x`` itself if no gradient of that is needed.
    """
    if comm.world_size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return once(x, comm, "copy", lambda: _applied("copy", x, comm, in_place=True))


def shared_all_gather(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Return :func:`all_gather` of ``x``, done once for all layers that read the tensor."""
    return x if comm.world_size == 1 else once(x, comm, dim, lambda: all_gather(x, comm, dim))


def once(x: Tensor, comm: Communicator, purpose: object, make: Callable[[], Made]) -> Made:
    """Return ``make()``, or the result of the last call if ``x`` has the same state.

    The result is an attribute of ``x``: it lives as long as the Python object.
    """
    # Inference tensors have no version counter, and cannot be saved for backward anyway.
    version = None if x.is_inference() else x._version
    # The version changes when ``x`` is written in place: then the cached result is not valid any more.
    state = (id(comm), purpose, version, torch.is_grad_enabled(), x.requires_grad)
    cached_state, result = getattr(x, _CACHE, (None, None))
    if cached_state != state:
        result = make()
        setattr(x, _CACHE, (state, result))
    return cast(Made, result)


_CACHE = "_zerolite_entered"


def _applied(exchange: str, x: Tensor, comm: Communicator, dim: int = 0, in_place: bool = False) -> Tensor:
    if comm.world_size == 1:
        return x
    dim = dim % x.dim() if x.dim() else dim
    if exchange.endswith("scatter") and x.shape[dim] % comm.world_size:
        raise ValueError(
            f"expected a length along dimension {dim} that {comm.world_size} tensor-parallel ranks can share equally, "
            f"got {x.shape[dim]} in a tensor of shape {list(x.shape)}; pad the input to a multiple of "
            f"{comm.world_size}"
        )
    result: Tensor = _Exchange.apply(x, comm, exchange, dim, in_place)
    return result


def sends(x: Tensor, comm: Communicator) -> bool:
    """Return True if a collective of ``x`` must be called: it has elements, and is real or belongs to a dry run."""
    return x.numel() > 0 and (comm.is_dry or not is_fake(x))


def launch_all_reduce(x: Tensor, comm: Communicator) -> Callable[[], Tensor]:
    """Begin the sum over ranks of ``x``, contiguous, in place. The returned function waits and returns ``x``."""
    pending = comm.all_reduce(x.view(-1), TAG) if sends(x, comm) else None

    def wait() -> Tensor:
        if pending is not None:
            pending.wait()
        return x

    return wait


def launch_all_gather(x: Tensor, comm: Communicator, dim: int) -> Callable[[], Tensor]:
    """Begin to gather the ranks' ``x``. The returned function waits, and returns their concatenation along ``dim``."""
    size, part = comm.world_size, x.detach()
    full = part.new_empty((size, *part.shape))
    full[comm.rank].copy_(part)
    pending = comm.all_gather(full.view(-1), TAG) if sends(full, comm) else None

    def wait() -> Tensor:
        if pending is not None:
            pending.wait()
        return full.movedim(0, dim).reshape(*part.shape[:dim], size * part.shape[dim], *part.shape[dim + 1 :])

    return wait


def launch_reduce_scatter(x: Tensor, comm: Communicator, dim: int, in_place: bool) -> Callable[[], Tensor]:
    """Begin the sum over ranks of ``x``. The returned function waits, and returns this rank's part along ``dim``.

    Args:
        in_place: overwrite the memory of ``x``, which no other code uses.
    """
    size = comm.world_size
    length = x.shape[dim] // size
    rows = x.detach().unflatten(dim, (size, length)).movedim(dim, 0)
    ours = in_place or not rows.is_contiguous()
    rows = rows.contiguous() if ours else rows.clone(memory_format=torch.contiguous_format)
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    pending = comm.reduce_scatter(rows.view(-1), TAG) if sends(rows, comm) else None

    def wait() -> Tensor:
        if pending is None:
            return rows.new_empty(shape)
        # Autograd refuses in-place writes into a view that a function returns. detach() makes it an ordinary tensor.
        return pending.wait().view(shape).detach()

    return wait


def _all_reduced(x: Tensor, comm: Communicator, in_place: bool) -> Tensor:
    alone = in_place and x.is_contiguous()
    return launch_all_reduce(x.detach() if alone else x.clone(memory_format=torch.contiguous_format), comm)()


def _local_shard(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    length = x.shape[dim] // comm.world_size
    return x.detach().narrow(dim, comm.rank * length, length).clone(memory_format=torch.contiguous_format)


# Outputs share memory with inputs by detach(), which autograd does not treat as a view. A view would keep a reference
# to its base: with shared_copy(), where the input refers to the output, the two would keep each other alive.
_FORWARD: dict[str, Callable[[Tensor, Communicator, int, bool], Tensor]] = {
    "copy": lambda x, comm, dim, in_place: x.detach(),
    "reduce": lambda x, comm, dim, in_place: _all_reduced(x, comm, in_place),
    "gather": lambda x, comm, dim, in_place: launch_all_gather(x, comm, dim)(),
    "scatter": lambda x, comm, dim, in_place: _local_shard(x, comm, dim),
    "all_gather": lambda x, comm, dim, in_place: launch_all_gather(x, comm, dim)(),
    "reduce_scatter": lambda x, comm, dim, in_place: launch_reduce_scatter(x, comm, dim, in_place)(),
}
# The backward of each function is its partner, as in Megatron-LM: the gradient of a copy is a sum, and so on.
_PAIRS = (("copy", "reduce"), ("gather", "scatter"), ("all_gather", "reduce_scatter"))
_BACKWARD_OF = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


class _Exchange(torch.autograd.Function):
    """Autograd function behind all functions above.

    With ``in_place`` the result is written into the memory of the input, or for a copy into the memory of its gradient.
    Without it the sum gets its own memory, because other branches of the graph may use the same gradient tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, exchange: str, dim: int, in_place: bool) -> Tensor:
        ctx.comm, ctx.exchange, ctx.dim, ctx.in_place = comm, exchange, dim, in_place
        return _FORWARD[exchange](x, comm, dim, in_place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:
        if ctx.exchange == "reduce" and not torch.is_grad_enabled():
            return gradient, None, None, None, None  # "copy" changes nothing, unless a second backward will follow
        in_place = ctx.exchange == "copy" and ctx.in_place
        exchange = _BACKWARD_OF[ctx.exchange]
        return _Exchange.apply(gradient, ctx.comm, exchange, ctx.dim, in_place), None, None, None, None
