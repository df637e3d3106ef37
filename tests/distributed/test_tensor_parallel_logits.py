"""Operations on sharded logits, and cross entropy above all, beside the same on whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.toolkit.ranks import on_ranks
from tests.toolkit.tensor_parallel import LOSS, communicator, relative, tokens
from tests.toolkit.training import raises
from zerolite.comm import Communicator, record
from zerolite.tensor_parallel import VocabParallelLogits
from zerolite.tensor_parallel.shard_spec import ShardSpec

VOCABULARY = V = 11
Y = tokens(3, 4, VOCABULARY)


def head_of(full: Tensor, comm: Communicator) -> tuple[VocabParallelLogits, Tensor]:
    """Logits as if a head had given this rank's of ``full``; and the leaf behind them."""
    vocabulary = full.shape[-1]
    local = ShardSpec.of_rows((vocabulary,), 0, comm)
    part = ShardSpec((*full.shape,), full.dim() - 1, local.ranges, local.length, local.rank, local.size).of(full)
    leaf = part.requires_grad_()
    return VocabParallelLogits.of(leaf * 1, comm, vocabulary), leaf


CROSS_ENTROPIES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": -100},
    {"ignore_index": 2, "reduction": "sum"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.3, "ignore_index": -1, "reduction": "none"},
]


@pytest.mark.fast("2")
@on_ranks(1, 2, 4)
def test_cross_entropy() -> None:
    """All options, dtypes, and vocabularies of which some ranks have nothing."""
    comm, found = communicator(), {}
    generator = torch.Generator().manual_seed(7)
    for vocabulary in (3, 5, 8, 41):
        logits = 4 * torch.randn(6, vocabulary, generator=generator)
        target = torch.randint(0, vocabulary, (6,), generator=generator)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for options in CROSS_ENTROPIES:
                y = target.clone()
                if "ignore_index" in options:
                    y[::2] = options["ignore_index"]
                full = logits.to(dtype, copy=True).requires_grad_()
                wide = full.double() if dtype == torch.bfloat16 else full
                expected = F.cross_entropy(wide, y, **options)
                made, leaf = head_of(full.detach(), comm)
                with record() as calls:
                    loss = F.cross_entropy(made, y, **options)
                assert loss.dtype == dtype
                weights = torch.arange(1.0, 7.0) if loss.dim() else torch.tensor(1.0)
                (loss * weights).sum().backward()
                (expected * weights).sum().backward()
                expected_part = torch.zeros_like(leaf)
                start, rows = comm.rank * leaf.shape[1], leaf.shape[1]
                own = full.grad[:, start : start + rows]
                expected_part[:, : own.shape[1]] = own
                name = f"{vocabulary} {dtype} {options}"
                found[name] = max(relative(loss, expected.to(dtype)), relative(leaf.grad, expected_part))
                assert calls.numel() <= (1 + 3) * 6 and calls.count("all_gather") == 0, calls.summary()
    assert {name: off for name, off in found.items() if off > LOSS} == {}


class _Double(torch.autograd.Function):
    """A function in C++ or Triton would do so: nothing of Python is asked on the way in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def _written(x: Tensor) -> Tensor:
    z = x.clone()
    z[..., 1] = 0.5
    z.mul_(2.0)
    return z.softmax(-1)[..., :3].sum() + F.cross_entropy(z.flatten(0, 1), Y.flatten())


def _hooked(x: Tensor) -> Tensor:
    x = x.view_as(x)
    x.register_hook(lambda gradient: 3 * gradient)
    return F.cross_entropy(x.float().flatten(0, 1), Y.flatten())


def _mixed(x: Tensor) -> Tensor:
    best = x.argmax(-1)
    return F.cross_entropy(x.view(-1, VOCABULARY), best.view(-1)) + x.logsumexp(-1).mean()


PARALLEL: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: F.cross_entropy(x.float().view(-1, V), Y.view(-1)),
    "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), Y.flatten()),
    "reshape": lambda x: F.cross_entropy(x.contiguous().reshape(12, -1), Y.flatten()),
    "shift": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, V), Y[:, 1:].flatten()),
    "shift in the middle": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), Y[:, 1:].flatten()),
    "one token": lambda x: F.cross_entropy(x[1, 2], Y[1, 2]),
    "numbers": lambda x: F.cross_entropy((2 * (x * 0.5 / 3)).flatten(0, 1), Y.flatten()),
    "soft cap": lambda x: F.cross_entropy(((x / 5.0).tanh() * 5.0).flatten(0, 1), Y.flatten()),
    "module": lambda x: nn.CrossEntropyLoss(reduction="none")(x.flatten(0, 1), Y.flatten()).sum(),
    "to": lambda x: F.cross_entropy(x.to(torch.float64).to("cpu").flatten(0, 1), Y.flatten()),
    "hook": _hooked,
}

GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), Y),
    "class weights": lambda x: F.cross_entropy(x.flatten(0, 1), Y.flatten(), weight=torch.arange(1.0, V + 1)),
    "soft targets": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((12, V), 1 / V)),
    "softmax": lambda x: x.softmax(-1)[..., 2].sum(),
    "product": lambda x: (x @ torch.arange(float(V))).sum(),
    "cat": lambda x: torch.cat([x, 2 * x], 1).pow(2).sum(),
    "some classes": lambda x: x[..., 1:5].exp().sum(),
    "other views": lambda x: x.view(3, 4 * V).std(1).sum() + x.reshape(-1).pow(3).mean() + x.flatten().norm(),
    "by a tensor": lambda x: (x * torch.arange(float(V))).pow(2).mean(),
    "autograd function": lambda x: _Double.apply(x).sum(),
    "best and loss": _mixed,
    "writes": _written,
    "grad": lambda x: torch.autograd.grad(x.pow(2).sum(), x, create_graph=True)[0].pow(2).sum(),
}


@pytest.mark.fast("2")
@on_ranks(1, 2, 4)
def test_what_is_done_with_logits() -> None:
    """Losses and gradients; and logits are gathered where an operation needs all of them."""
    comm, found = communicator(), {}
    logits = 2 * torch.randn(3, 4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    for name, function in (PARALLEL | GATHERED).items():
        full = logits.clone().requires_grad_()
        expected = function(full * 1)
        expected.backward()
        made, leaf = head_of(logits, comm)
        assert made.shape == full.shape and made.requires_grad and made.dtype == full.dtype and made.grad_fn is not None
        with record() as calls:
            loss = function(made)
            loss.backward()
        if comm.world_size > 1:
            gathers = calls.count("all_gather")
            assert (gathers > 0) == (name in GATHERED), (name, calls.summary())
        own = leaf.shape[-1]
        start = min(comm.rank * own, VOCABULARY)
        rows = min(own, VOCABULARY - start)
        found[name] = max(
            relative(loss, expected), relative(leaf.grad[..., :rows], full.grad[..., start : start + rows])
        )
        assert not leaf.grad[..., rows:].any(), name
    assert {name: off for name, off in found.items() if off > LOSS} == {}


@pytest.mark.slow
@on_ranks(2)
def test_writes_to_logits_that_would_be_lost() -> None:
    comm = communicator()
    made, _ = head_of(torch.randn(3, 4, VOCABULARY, generator=torch.Generator().manual_seed(1)), comm)
    flat = made.flatten(0, 1)
    with raises(RuntimeError, "expected no mul_ on "):
        flat.mul_(2.0)
    with raises(RuntimeError, "expected no __setitem__ on "):
        made[0, 0] = 1.0
    for target in (VOCABULARY, -1):
        with raises(IndexError, f"Target {target} is out of bounds"):
            F.cross_entropy(flat, torch.full((12,), target))
