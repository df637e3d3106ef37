"""Column-parallel layers: the bits of plain ones, and collectives beside the products of a backward."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.toolkit.ranks import on_ranks
from tests.toolkit.tensor_parallel import communicator, relative
from tests.toolkit.transports import late, transport
from zerolite.comm import Communicator
from zerolite.tensor_parallel import ColumnParallelLinear, functions
from zerolite.tensor_parallel.layers import shard_column


class Products(TorchDispatchMode):
    """Writes down products, launches of collectives, and waits for them."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm, self.log = comm, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.log.append("product")
        return function(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def written(self) -> Iterator[list[str]]:
        with contextlib.ExitStack() as stack:
            for name in ("all_reduce", "all_gather", "reduce_scatter"):
                launch = functools.partial(self._launch, name, getattr(self.comm, name))
                stack.enter_context(mock.patch.object(self.comm, name, launch))
            stack.enter_context(self)
            yield self.log

    def _launch(self, name: str, launch: Any, *args: Any) -> Any:
        self.log.append(name)
        pending = launch(*args)
        wait = pending.wait

        def logged() -> Tensor:
            self.log.append(f"wait for {name}")
            return wait()

        pending.wait = logged
        return pending


@on_ranks(2)
@pytest.mark.parametrize("dim", [None, 0])
def test_what_a_backward_sends_runs_beside_its_products(dim: int | None) -> None:
    """The sum of the input's gradient beside the last product; with a sharded sequence the gather beside the first."""
    with transport("native"):  # over shared memory a launch may wait for the one before
        comm = communicator()
    layers = [ColumnParallelLinear(8, 2 * size, comm=comm) for size in (2, 3, 4)]
    for layer in layers:
        layer.sequence_dim = dim
    source = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    total = "all_reduce" if dim is None else "reduce_scatter"
    gather, gathered = ([], []) if dim is None else (["all_gather"], ["wait for all_gather"])
    last = ["product", total, "product", f"wait for {total}"]
    for count, frozen, expected in (
        (1, False, [*gather, "product", total, *gathered, "product", f"wait for {total}"]),
        (3, False, [*gather, "product", *gathered, "product", "product", "product", *last]),
        (3, True, ["product", *gather, "product", *gathered, "product", *last]),  # the first one's weight
        (1, True, [*gather, "product", total, *gathered, "product", f"wait for {total}"]),
    ):
        layers[2].requires_grad_(not frozen)
        x = source * 1
        loss = sum(layer(x).square().sum() for layer in layers[:count])
        with Products(comm).written() as log:
            loss.backward()
        assert log == expected, (count, frozen, log)


@pytest.mark.slow
@on_ranks(2)
def test_a_graph_keeps_this_ranks_part_of_a_sequence_alone() -> None:
    comm = communicator()
    layers = [ColumnParallelLinear(8, 4, comm=comm) for _ in range(3)]
    for layer in layers:
        layer.sequence_dim = 1
    layers[1].requires_grad_(False)
    made: list[weakref.ref[Tensor]] = []
    launch = functions.launch_all_gather

    def noted(*args: Any) -> Any:
        wait = launch(*args)

        def finish() -> Tensor:
            full = wait()
            made.append(weakref.ref(full))
            return full

        return finish

    gc.disable()
    try:
        with mock.patch.object(functions, "launch_all_gather", noted):
            x = torch.randn(2, 3, 8, requires_grad=True) * 1
            loss = sum(layer(x).square().sum() for layer in layers)
            assert made[0]() is not None  # the next layer that reads x uses it
            del x
            assert made[0]() is None
            loss.backward(retain_graph=True)
            assert [full() for full in made] == [None, None]
            loss.backward()
            assert [full() for full in made] == [None, None, None]
    finally:
        gc.enable()


class Conv1D(nn.Module):
    """The part of Hugging Face's that a column-parallel layer uses: the weight is [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))


def _plain(layer: ColumnParallelLinear, x: Tensor, comm: Communicator) -> Tensor:
    """Compute a layer's output by F.linear, with the sum over ranks where autograd comes to it."""
    dim = layer.sequence_dim
    full = functions.shared_copy(x, comm) if dim is None else functions.shared_all_gather(x, comm, dim)
    return F.linear(full, layer.weight.t() if layer.transposed else layer.weight, layer.bias)


def _own(layer: ColumnParallelLinear, x: Tensor, comm: Communicator) -> Tensor:
    return layer(x)


def _gradients(run: Any, how: str, layers: Sequence[ColumnParallelLinear], source: Tensor, comm: Any) -> list[Any]:
    """Gradients of ``source``, weights and biases. how: what is done with the layers."""
    wanted = [source, *(p for layer in layers for p in (layer.weight, layer.bias) if p is not None)]
    x = source * 1
    if how == "strided":
        x = x.transpose(0, 1)

    def call(x: Tensor) -> Tensor:
        outs = [run(layer, x, comm) for layer in layers]
        used = outs[:-1] if how == "unused" else outs
        return torch.cat([out.flatten(0, -2) for out in used], 1)

    if how.startswith("checkpoint"):
        out = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=how.endswith("reentrant"))
    else:
        out = call(x)
    loss = out.float().sin().sum()
    if how == "weights":
        return list(torch.autograd.grad(loss, wanted[1:]))
    if how == "input":
        return list(torch.autograd.grad(loss, wanted[:1]))
    if how == "second":
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        loss = sum(gradient.float().square().sum() for gradient in first)
    if how == "twice":
        loss.backward(retain_graph=True)
    loss.backward()
    found = [tensor.grad for tensor in wanted]
    for tensor in wanted:
        tensor.grad = None
    return found


HOWS = ("plain", "strided", "unused", "checkpoint", "checkpoint reentrant", "weights", "input", "second", "twice")


@pytest.mark.fast("True-late-2")
@on_ranks(2)
@pytest.mark.parametrize("delivers", ["at once", "late"])
@pytest.mark.parametrize("sharded", [False, True])
def test_column_parallel_layers_have_the_bits_of_plain_ones(sharded: bool, delivers: str) -> None:
    """``sharded``: each rank has a part of the sequence. ``late``: results are NaN until they are waited for."""
    with late() if delivers == "late" else contextlib.nullcontext():
        comm = communicator()
    for number, how in enumerate(HOWS):
        for dtype in (torch.float32, torch.bfloat16):
            for bias, transposed, shape in (
                (True, False, (3, 17, 48)),
                (False, False, (51, 48)),
                (True, True, (3, 7, 48)),
            ):
                torch.manual_seed(number)
                layers = []
                for size in (64, 32, 32):
                    layer: Any = Conv1D(size, 48) if transposed else nn.Linear(48, size, bias)
                    shard_column(layer, comm)
                    layer.sequence_dim = len(shape) - 2 if sharded else None
                    layers.append(layer.to(dtype))
                if how == "strided" and len(shape) == 2:
                    continue
                if sharded:
                    torch.manual_seed(100 * number + comm.rank)
                source = torch.randn(shape).to(dtype).requires_grad_()
                found = _gradients(_own, how, layers, source, comm)
                expected = _gradients(_plain, how, layers, source, comm)
                for own, other in zip(found, expected, strict=True):
                    assert (own is None) == (other is None)
                    if how == "second":  # added in another order
                        assert relative(own, other) < (1e-5 if dtype == torch.float32 else 0.05)
                    else:
                        assert own is None or torch.equal(own, other), (how, dtype, bias, transposed)
