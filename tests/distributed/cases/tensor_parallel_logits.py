"""Operations on sharded logits, beside the same on whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.cases.tensor_parallel import communicator, head_of, relative, tokens
from zerolite.comm import record

VOCABULARY = 11
Y = tokens(3, 4, VOCABULARY)


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


V = VOCABULARY
PARALLEL: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: F.cross_entropy(x.float().view(-1, V), Y.view(-1)),
    "view of a size": lambda x: F.cross_entropy(x.view(torch.Size([12, V])), Y.view(-1)),
    "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), Y.flatten()),
    "torch.flatten": lambda x: F.cross_entropy(torch.flatten(x, end_dim=1), Y.flatten()),
    "reshape": lambda x: F.cross_entropy(x.contiguous().reshape(12, -1), Y.flatten()),
    "shift": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, V), Y[:, 1:].flatten()),
    "shift in the middle": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), Y[:, 1:].flatten()),
    "one row": lambda x: F.cross_entropy(x[1], Y[1]),
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
    "log softmax": lambda x: F.log_softmax(x, dim=-1).pow(2).mean(),
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


def operations() -> dict[str, float]:
    """The relative differences of losses and gradients; whether logits were gathered is checked here."""
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
    return found


def refusals() -> list[str]:
    """Messages of what would give other numbers than whole logits."""
    comm, found = communicator(), []
    made, _ = head_of(torch.randn(3, 4, VOCABULARY, generator=torch.Generator().manual_seed(1)), comm)
    flat = made.flatten(0, 1)
    for wrong in (
        lambda: flat.mul_(2.0),
        lambda: made.__setitem__((0, 0), 1.0),
        lambda: F.cross_entropy(flat, torch.full((12,), VOCABULARY)),
        lambda: F.cross_entropy(flat, torch.full((12,), -1)),
    ):
        try:
            wrong()
        except (RuntimeError, IndexError) as error:
            found.append(str(error))
    return found
