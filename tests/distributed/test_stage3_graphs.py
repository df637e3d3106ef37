"""Stage 3 gives the bits of stage 2 for graphs that are not those of a plain forward and backward: frozen and unused
parameters, checkpointing, in-place operations, functions of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from tests.toolkit.ranks import on_ranks
from tests.toolkit.stage3_cases import HIDDEN, LENGTH, WIDTH, Block, Case, Cases, Parts

CASES = Cases()


plain_checkpoint = partial(checkpointing.checkpoint, use_reentrant=False)
reentrant_checkpoint = partial(checkpointing.checkpoint, use_reentrant=True)


def checkpoint_to_the_end(call: Callable[..., Any], *args: Any) -> Any:
    with checkpointing.set_checkpoint_early_stop(False):
        return plain_checkpoint(call, *args)


def checkpoint_selectively(call: Callable[..., Any], *args: Any) -> Any:
    """Matrix products are saved, the rest is recomputed."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        saved = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        choice = checkpointing.CheckpointPolicy
        return choice.MUST_SAVE if saved else choice.PREFER_RECOMPUTE

    contexts = partial(checkpointing.create_selective_checkpoint_contexts, policy)
    return plain_checkpoint(call, *args, context_fn=contexts)


def directly(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


class Stack(Case):
    """Four blocks behind a linear layer, whose output needs a gradient; ``call`` calls a block."""

    def __init__(self, call: Callable[..., Any] = directly) -> None:
        super().__init__(call=call, first=nn.Linear(WIDTH, WIDTH), blocks=nn.ModuleList(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


# -------------------------------------------------------------------- frozen and unused


@CASES.variants(middle=("blocks.1.", "blocks.2."), first=("first.", "blocks.0."), biases=("bias", "gain"))
class Frozen(Stack):
    """Some parameters are frozen from the start: whole units, or parts of units."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in parts))


# -------------------------------------------------------------------- checkpointing


@CASES.variants(plain=plain_checkpoint, reentrant=reentrant_checkpoint, selectively=checkpoint_selectively)
@CASES.variants(to_the_end=checkpoint_to_the_end)
class Checkpointed(Stack):
    """Every block."""


@CASES.variants(plain=plain_checkpoint, reentrant=reentrant_checkpoint)
class CheckpointedInPart(Checkpointed):
    """Every other block; one of the blocks is frozen, another one in part; the last two are one segment."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(call)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.call(self.blocks[0], self.first(x)))
        return self.call(lambda y: self.blocks[3](self.blocks[2](y) * self.first.bias), x)


@CASES.add
class CheckpointedInside(Stack):
    """A module whose own parameters surround a checkpoint, whose function closes over one of them, several times."""

    zero = {"reduce_bucket_size": 1}  # a bucket for each unit

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks[:2]:
            x = x + plain_checkpoint(lambda y, b=block: torch.tanh(b(y) * self.scale) @ self.first.weight, x)
        return plain_checkpoint(self.blocks[0], x) * self.scale


# -------------------------------------------------------------------- handed on, changed in place


class BiasBlock(Parts):
    """The first one makes a bias from a parameter of its own, and all hand it on, as T5's blocks do."""

    def __init__(self, first: bool) -> None:
        super().__init__(bias=nn.Parameter(torch.ones(LENGTH, HIDDEN)) if first else None)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        inside = self.up(x * self.scale)
        if bias is None:
            bias = self.bias * 0.5
        return x + self.down(torch.tanh(inside + bias)), bias


@CASES.variants(plain=directly, reentrant=reentrant_checkpoint)
class SharedBias(Case):
    """Each block is one unit. The gradient of the bias is complete in the middle of the first block's backward, when
    the blocks after it have been repeated."""

    zero = {"leaf_modules": ["*BiasBlock"]}

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(call=call, blocks=nn.ModuleList(BiasBlock(first=index == 0) for index in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x, bias = x.requires_grad_(), None
        for block in self.blocks:
            x, bias = self.call(block, x, bias)
        return x


@CASES.variants(slice=lambda y: y[..., :WIDTH], flat=lambda y: y.view(-1, WIDTH))
class ViewChangedInPlace(Case):
    """A module that returns a view of what it computed; its caller changes that in place."""

    class Viewed(Parts):
        def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
            super().__init__(linear=nn.Linear(WIDTH, WIDTH), view=view, scale=nn.Parameter(torch.randn(WIDTH, WIDTH)))

        def forward(self, x: Tensor) -> Tensor:
            return self.view(self.linear(x) @ self.scale)

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__(first=nn.Linear(WIDTH, WIDTH), one=self.Viewed(view), two=self.Viewed(view))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.one(x)
        y.mul_(0.5).add_(1)
        z = self.two(y)
        z[..., 0] *= 2
        return z


# -------------------------------------------------------------------- functions of their own


@CASES.variants(value=False, graph=True)
class GradientInForward(Case):
    """A forward that differentiates one of its modules by an input; ``graph``: that is differentiated again, so that
    weights stay to the end of the step."""

    stable = False

    def __init__(self, graph: bool) -> None:
        super().__init__(first=nn.Linear(WIDTH, WIDTH), last=Block(), graph=graph)
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        place = x if self.graph else x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(place).sum(), place, create_graph=self.graph)
        return self.last(x + force) + self.energy(x)


class Recomputed(torch.autograd.Function):
    """A call of a module whose backward computes it again and touches its parameters, like the adjoint of an ODE."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        x = x.detach().requires_grad_()
        for _ in range(2):
            with torch.enable_grad():
                assert all(torch.as_strided(parameter, (), ()).shape == () for parameter in parameters)
                found = torch.autograd.grad(ctx.module(x), (x, *parameters), gradient / 2)
            totals = [total + part for total, part in zip(totals, found[1:], strict=True)]
        return None, found[0] * 2, *totals


class Solver(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(self.block, x, *self.block.parameters())


class Normalised(nn.Linear):
    """A layer that writes its weight in its own forward, as EDM2 does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight))
            self.bias.clamp_(min=-0.01)
        return super().forward(x)


@CASES.variants(plainly=directly, recomputed=plain_checkpoint)
class WritesInForward(Case):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(
            call=call, first=nn.Linear(WIDTH, WIDTH), frozen=Normalised(WIDTH, WIDTH).requires_grad_(False)
        )
        self.layers = nn.ModuleList(Normalised(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x))
        for layer in self.layers:
            x = self.call(layer, x).tanh()
        return x


@CASES.variants(leaf=True, alone=False)
class Adjoint(Case):
    """A function of autograd that is given a module and its parameters, which are released then where the module that
    calls it is no leaf."""

    def __init__(self, leaf: bool) -> None:
        super().__init__(first=nn.Linear(WIDTH, WIDTH), solver=Solver(block=Block()), last=nn.Linear(WIDTH, WIDTH))
        self.zero = {"leaf_modules": ["*Solver"]} if leaf else {}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.solver(self.first(x)))


@pytest.mark.fast("Frozen-middle-2")
@on_ranks(2, timeout=90)
@pytest.mark.parametrize("name", list(CASES))
def test_stage_3_gives_the_bits_of_stage_2(name: str) -> None:
    found = CASES.compare(name)
    assert len(found["one unit"]["units"]) == 1 < len(found["moving"]["units"])
    assert found["moving"]["gathers"][-1] > found["one unit"]["gathers"][-1]
