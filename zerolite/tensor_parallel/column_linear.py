"""Product of a column-parallel layer, whose backward sums the input's gradient over ranks beside the weight's gradient.

Layers that read one tensor (query, key and value) share a copy of it, so the sum begins when the last of them has its
part of the input's gradient. That layer then computes the gradient of its weight, and the copy's backward waits:

    backward of value    input gradient, weight gradient
    backward of key      input gradient, weight gradient
    backward of query    input gradient, launch the sum, weight gradient
    backward of the copy                                                wait for the sum

(Shoeybi et al., "Megatron-LM", 2019, overlap the same two.) All ranks launch it at the same place, because they compute
the same graph. All bits are those of ``F.linear``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerolite.comm import Communicator, Pending
from zerolite.tensor_parallel import functions
from zerolite.utils.torch_private import current_backward


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, comm: Communicator) -> Tensor:
    """Return ``F.linear(x, weight, bias)`` of an ``x`` that is the same on all ranks, whose gradient is summed over
    ranks.

    Args:
        x: [..., in_features].
        weight: this rank's rows, [out_features / ranks, in_features].
        bias: [out_features / ranks].
    """
    # Autocast would cast inside of the function, where autograd does not see it, and torch.compile cannot trace it.
    if torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling() or x.dim() < 2:
        return F.linear(functions.shared_copy(x, comm), weight, bias)
    shared = functions.shared_copy(x, comm, _copied)
    if shared is x:  # nothing is sent: there is one rank, or no gradient of x
        return F.linear(x, weight, bias)
    readers: Readers = shared._zerolite_readers  # type: ignore[attr-defined]
    readers.register()
    result: Tensor = _Linear.apply(shared, weight, bias, readers)
    return result


def _copied(x: Tensor, comm: Communicator) -> Tensor:
    readers = Readers(comm)
    copied: Tensor = _Copy.apply(x, readers)
    copied._zerolite_readers = readers  # type: ignore[attr-defined]
    return copied


class Readers:
    """Layers that read one shared copy, and the gradient of the copy while a backward computes it.

    Attributes:
        alone: nothing else reads the copy. False once a backward has made a graph (``create_graph``), which reads it
            too: then autograd adds everything first.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.alone = True
        self._made_in = current_backward()
        self._count = 0
        self._backward = -1  # the graph task to which the following belong
        self._seen = 0
        self._sum: Tensor | None = None
        self._pending: Pending | None = None

    def register(self) -> None:
        """Count a layer. One that a checkpoint recomputes from the same copy is not counted again, because no backward
        runs through its graph."""
        self._count += current_backward() == self._made_in

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add a layer's gradient of the copy, and launch the sum over ranks if it is the last one.

        Args:
            gradient: a tensor that no other code uses.

        Returns:
            the gradient that the layer returns to autograd: that of all layers, or None if others will follow.
        """
        if not self.alone:
            return gradient
        if self._backward != current_backward():  # also after a backward that has failed
            self._backward, self._seen, self._sum, self._pending = current_backward(), 0, None, None
        self._sum = gradient if self._sum is None else self._sum.add_(gradient)
        self._seen += 1
        if self._seen < self._count:
            return None
        total, self._sum, self._seen = self._sum, None, 0
        if functions.sends(total, self._comm):
            self._pending = self._comm.all_reduce(total.view(-1), functions.TAG)
        return total

    def finish(self, gradient: Tensor | None) -> Tensor | None:
        """Return the sum over ranks. ``gradient``: what the layers have returned; None for nothing."""
        if self._backward == current_backward():
            pending, rest = self._pending, self._sum
            self._pending, self._sum, self._seen = None, None, 0
            if pending is not None:
                pending.wait()
                return gradient
            if rest is not None:  # the output of another layer was not used
                gradient = rest
        return None if gradient is None else functions.reduce(gradient, self._comm, in_place=True)


class _Copy(torch.autograd.Function):
    """Copy of the input that several layers read. It shares its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, readers: Readers) -> Tensor:
        ctx.readers = readers
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> object:
        return ctx.readers.finish(gradient), None


class _Linear(torch.autograd.Function):
    """``F.linear``, of which the gradient of the input comes before those of weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, readers: Readers) -> Tensor:
        ctx.readers = readers
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = (_is_needed(ctx, index) for index in range(3))
        rows = gradient.flatten(0, -2)
        input_gradient = weight_gradient = None
        if of_x:
            input_gradient = rows.mm(weight).view(*gradient.shape[:-1], weight.shape[1])
            if torch.is_grad_enabled():
                ctx.readers.alone = False
            input_gradient = ctx.readers.add(input_gradient)
        if of_weight:
            inputs = x.flatten(0, -2)
            # As autograd does for F.linear: in the order of the weight's memory.
            transposed = weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]
            weight_gradient = inputs.t().mm(rows).t() if transposed else rows.t().mm(inputs)
        return input_gradient, weight_gradient, rows.sum(0) if of_bias else None, None


def _is_needed(ctx: Any, index: int) -> bool:
    """Return True if the backward in progress needs the gradient of this input.

    One that computes gradients of some tensors only (``torch.autograd.grad``, a schedule that splits the backward) may
    not need it, although it requires one.
    """
    if not ctx.needs_input_grad[index]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
    except RuntimeError:  # torch's answer for a leaf that torch.autograd.grad was asked for
        return True
