"""Product of a column-parallel layer, whose backward communicates beside its own products.

Layers that read one tensor (query, key and value) share its entry into the tensor group: a copy of it, or with sequence
parallelism the gathered sequence. Their gradients of it are added on this rank, and the last of them launches the one
sum over ranks before it computes the gradient of its weight (Shoeybi et al., "Megatron-LM", 2019, overlap the same
two). The backward of the entry waits for the sum:

    backward of value    input gradient, weight gradient
    backward of key      input gradient, weight gradient
    backward of query    input gradient, launch the sum, weight gradient
    backward of entry                                                   wait for the sum

With sequence parallelism the sum is a reduce-scatter. The graph keeps only this rank's part of the sequence, and the
first of these layers gathers it again for the gradients of the weights (as Korthikanti et al., 2022, do):

    backward of value    launch the gather, input gradient, wait for the gather, weight gradient

All ranks launch at the same places, because they compute the same graph. All bits are those of ``F.linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolite.comm import Communicator
from zerolite.tensor_parallel import functions
from zerolite.utils.torch_private import current_backward, will_run


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator, dim: int | None = None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``; the gradient of ``x`` is summed over ranks.

    Args:
        x: [..., in_features], the same on all ranks. With ``dim`` each rank passes its part along that
            dimension, and the product is of the full input.
        weight: this rank's rows, [out_features / ranks, in_features].
        bias: [out_features / ranks].
    """
    # Autocast would cast inside of the function, where autograd does not see it, and torch.compile cannot trace it.
    traced = torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling()
    one_rank = comm.world_size == 1
    if one_rank or traced or x.dim() < 2 or not (x.requires_grad and torch.is_grad_enabled()):
        full = functions.shared_copy(x, comm) if dim is None else functions.shared_all_gather(x, comm, dim)
        return F.linear(full, weight, bias)
    entry = functions.once(x, comm, ("entry", dim), lambda: SharedInput(x, comm, dim))
    entry.readers.register()
    result: Tensor = _Linear.apply(entry.local, weight, bias, entry.full, entry.readers)
    return result


class SharedInput:
    """Input of column-parallel layers, which enters the tensor group once for all of them.

    It lives as long as the tensor.

    Attributes:
        readers: these layers, as their backwards see them.
        local: the tensor, in the same memory. Graphs keep this one, which does not keep ``full`` alive.
        full: the gathered tensor, which is in no graph; None if all ranks have the tensor.
    """

    def __init__(self, x: Tensor, comm: Communicator, dim: int | None) -> None:
        self.readers = Readers(comm, dim)
        self.local: Tensor = _Enter.apply(x, self.readers)
        self.full = None if dim is None else functions.launch_all_gather(x, comm, dim)()


class Readers:
    """Layers that read one entry, and what their backwards share: the gradient of the entry and the gathered input."""

    def __init__(self, comm: Communicator, dim: int | None) -> None:
        self._comm, self._dim = comm, dim
        self._made_in = current_backward()
        self._count = 0
        self._start(-1)

    def _start(self, backward: int) -> None:
        """Begin without results of another backward, which may have failed."""
        self._backward = backward
        self._added = 0
        self._sum: Tensor | None = None
        self._reduced: Callable[[], Tensor] | None = None
        self._gathered: Callable[[], Tensor] | None = None
        self._full: Tensor | None = None

    def register(self) -> None:
        """Count a layer. One that a checkpoint recomputes from the same entry is not counted again, because no backward
        runs through its graph."""
        self._count += current_backward() == self._made_in

    def launch_gather(self, local: Tensor) -> None:
        """Begin to gather the input, if it is needed and no other layer has begun it in this backward."""
        if self._backward != current_backward():
            self._start(current_backward())
        if self._dim is not None and self._gathered is None and self._full is None:
            self._gathered = functions.launch_all_gather(local, self._comm, self._dim)

    def input(self, local: Tensor) -> Tensor:
        """Return the full input of the layers, after :meth:`launch_gather`. The entry's backward frees it."""
        if self._dim is None:
            return local
        if self._gathered is not None:
            self._full, self._gathered = self._gathered(), None
        assert self._full is not None
        return self._full

    def add(self, gradient: Tensor) -> None:
        """Add a layer's gradient of the full input, and launch the sum over ranks if it is the last one.

        Args:
            gradient: a tensor that no other code uses.
        """
        if self._backward != current_backward():
            self._start(current_backward())
        self._sum = gradient if self._sum is None else self._sum.add_(gradient)
        self._added += 1
        if self._added == self._count:
            self._reduce()

    def _reduce(self) -> None:
        if self._sum is not None:
            self._reduced = (
                functions.launch_all_reduce(self._sum, self._comm)
                if self._dim is None
                else functions.launch_reduce_scatter(self._sum, self._comm, self._dim, in_place=True)
            )
            self._sum = None

    def finish(self) -> Tensor | None:
        """Return the sum over ranks of what the layers have added in this backward; None if it is nothing."""
        if self._backward != current_backward():
            return None
        self._reduce()  # the output of another layer was not used
        total = None if self._reduced is None else self._reduced()
        self._start(-1)
        return total

    def enter(self, local: Tensor) -> Tensor:
        """Return the full input, for a backward that makes a graph."""
        if self._dim is None:
            return functions.copy(local, self._comm)
        return functions.all_gather(local, self._comm, self._dim)

    def leave(self, gradient: Tensor) -> Tensor:
        """Return the sum over ranks of one layer's gradient, for a backward that makes a graph."""
        if self._dim is None:
            return functions.reduce(gradient, self._comm)
        return functions.reduce_scatter(gradient, self._comm, self._dim)


class _Enter(torch.autograd.Function):
    """Alias of the input that several layers read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, readers: Readers) -> Tensor:
        ctx.readers = readers
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> object:
        """``gradient``: what a backward that made a graph has summed already; None without one."""
        total = ctx.readers.finish()
        if total is None or gradient is None:
            return gradient if total is None else total, None
        return gradient + total, None


class _Linear(torch.autograd.Function):
    """``F.linear``, of which the gradient of the input comes before those of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, weight: Tensor, bias: Tensor | None, full: Tensor | None, readers: Readers
    ) -> Tensor:
        ctx.readers = readers
        ctx.save_for_backward(local if weight.requires_grad else None, weight)
        return F.linear(local if full is None else full, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:
        local, weight = ctx.saved_tensors
        readers: Readers = ctx.readers
        of_input, of_weight, of_bias = (_is_needed(ctx, index) for index in range(3))
        makes_graph = torch.is_grad_enabled()  # create_graph: then it must consist of autograd's functions
        rows = gradient.flatten(0, -2)
        input_gradient = weight_gradient = None
        if of_weight and not makes_graph:
            readers.launch_gather(local)
        if of_input:
            input_gradient = rows.mm(weight).view(*gradient.shape[:-1], weight.shape[1])
            if makes_graph:
                input_gradient = readers.leave(input_gradient)
            else:
                readers.add(input_gradient)
                input_gradient = None  # the entry returns the sum to autograd
        if of_weight:
            inputs = (readers.enter(local) if makes_graph else readers.input(local)).flatten(0, -2)
            # As autograd does for F.linear: in the order of the weight's memory.
            transposed = weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]
            weight_gradient = inputs.t().mm(rows).t() if transposed else rows.t().mm(inputs)
        return input_gradient, weight_gradient, rows.sum(0) if of_bias else None, None, None


def _is_needed(ctx: Any, index: int) -> bool:
    """Return True if the backward in progress needs the gradient of this input.

    ``torch.autograd.grad`` and schedules that split the backward compute some gradients only. Such a backward may not
    need the gradient of an input that requires one.
    """
    if not ctx.needs_input_grad[index]:
        return False
    try:
        return will_run(ctx.next_functions[index][0])
    except RuntimeError:  # torch's answer for a leaf that torch.autograd.grad was asked for
        return True
