"""Activation checkpointing in one process: the numbers are torch's, and inputs rest where they should."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from tests.toolkit.memory import tagged
from zerolite import checkpointing
from zerolite.activation_checkpointing import attach, current
from zerolite.config import ActivationCheckpointingConfig, ConfigError
from zerolite.utils.memory_tags import ACTIVATIONS, HOST

ROWS, WIDTH = 24, 64  # inputs of 6144 bytes
over_host = pytest.mark.parametrize("host", [False, True], ids=["plain", "host"])
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    checkpointing.reset()


class Block(nn.Module):
    """``x [ROWS, WIDTH]`` -> the same; dropout, and whatever else is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, more: Any = None) -> Any:
        hidden = F.dropout(F.gelu(self.up(x)), 0.3, self.training) * scale
        if mask is not None:
            hidden = hidden * mask
        if more is not None:
            hidden = hidden + more["pair"][0] * more["pair"][1]
        return x + self.down(hidden)


def stack(depth: int = 3) -> nn.ModuleList:
    torch.manual_seed(5)
    return nn.ModuleList(Block() for _ in range(depth))


Call = Callable[..., Any]


def of_torch(function: Call, *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def numbers(call: Call, forward: Call, autocast: bool = False) -> list[Tensor]:
    """Loss, gradients and the random state afterwards of ``forward(call, blocks, x)``."""
    blocks = stack()
    torch.manual_seed(9)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = forward(call, blocks, x).float().square().mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in blocks.parameters() if p.grad is not None), torch.get_rng_state()]


def simple(call: Call, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = call(block, x * 1.0)
    return x


def with_everything(call: Call, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Keywords, nested structures, values that are no tensors, several outputs, shared, transposed and small inputs."""
    mask = (torch.rand(ROWS, WIDTH) > 0.2).float()
    for number, block in enumerate(blocks):
        pair = [x * 0.5, torch.rand(ROWS, WIDTH, requires_grad=True).tanh()]

        def several(x: Tensor, t: Tensor, small: Tensor, *, number: int, block: Any = block, **more: Any) -> Any:
            hidden = block(x, scale=0.5 + number, **more)
            return {"hidden": hidden + t.t() * small, "list": [hidden.sin(), number]}

        outputs = call(several, x * 1.0, (x * 2).t(), x[0, :1], mask=mask, number=number, more={"pair": pair})
        x = outputs["hidden"] + outputs["list"][0] * outputs["list"][1]
    return x


def nested(call: Call, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    def two(x: Tensor) -> Tensor:
        return call(blocks[1], call(blocks[0], x) * 2)

    return call(blocks[2], call(two, x * 1.0))


def grad_inside(call: Call, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    def function(x: Tensor) -> Tensor:
        inner = x.sin().cos()
        (gradient,) = torch.autograd.grad(inner.sum(), x, retain_graph=True)
        return blocks[0](x) * gradient + inner

    return call(function, x * 1.0)


@over_host
@pytest.mark.parametrize("forward", [simple, with_everything, nested, grad_inside])
def test_the_numbers_are_torchs(host: bool, forward: Call) -> None:
    checkpointing.configure(checkpoint_in_cpu=host)
    autocast = forward is with_everything
    wanted = numbers(of_torch, forward, autocast)
    for early in (True, False):
        with set_checkpoint_early_stop(early):
            found = numbers(checkpointing.checkpoint, forward, autocast)
        assert len(found) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# -------------------------------------------------------------------- where inputs are


@over_host
def test_inputs_leave_the_device(host: bool) -> None:
    checkpointing.configure(checkpoint_in_cpu=host)
    inputs = []

    def forward(x: Tensor) -> Tensor:
        for block in stack():
            x = x * 1.0
            inputs.append(weakref.ref(x))
            x = checkpointing.checkpoint(block, x)
        return x.sum()

    with tagged() as owned:
        loss = forward(torch.ones(ROWS, WIDTH, requires_grad=True))
    assert [ref() is None for ref in inputs] == [host] * 3
    assert owned.nbytes == ({(ACTIVATIONS, HOST): 3 * 8192} if host else {})
    assert len(current().memory()) == 0
    loss.backward()
    del loss
    assert len(current().memory()) == (3 if host else 0)  # to be used again


def test_backwards_in_another_order_than_forwards() -> None:
    """Inputs that are fetched with those of the last forward do not belong to the next backward."""
    checkpointing.configure(checkpoint_in_cpu=True)
    results = []
    for call in (of_torch, checkpointing.checkpoint):
        inputs = [torch.full((ROWS, WIDTH), 0.1 * n, requires_grad=True) for n in range(3)]
        torch.manual_seed(3)
        losses = [call(block, x * 1.0).sum() for block, x in zip(stack(), inputs, strict=True)]
        for number in (2, 0, 1):
            losses[number].backward()
        results.append([x.grad for x in inputs])
    assert all(map(torch.equal, *results))


@over_host
def test_an_exception_in_forward_leaves_nothing(host: bool) -> None:
    checkpointing.configure(checkpoint_in_cpu=host)
    x = torch.ones(ROWS, WIDTH, requires_grad=True)

    def fails(x: Tensor) -> Tensor:
        raise KeyError("midway")

    hidden = x * 1.0
    known = weakref.ref(hidden)
    with pytest.raises(KeyError, match="midway"):
        checkpointing.checkpoint(fails, hidden)
    del hidden
    gc.collect()
    assert known() is None
    assert all(map(torch.equal, numbers(checkpointing.checkpoint, nested), numbers(of_torch, nested)))


@over_host
@pytest.mark.parametrize("inside", [False, True])
def test_inputs_that_are_written_into(host: bool, inside: bool) -> None:
    checkpointing.configure(checkpoint_in_cpu=host)
    x = torch.ones(ROWS, WIDTH, requires_grad=True) * 1.0

    def function(x: Tensor) -> Tensor:
        result = x.sin() * 2
        if inside:
            x.add_(1)
        return result.cos()

    out = checkpointing.checkpoint(function, x)
    if not inside:
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_configure_and_reset() -> None:
    with pytest.raises(ValueError, match="expected use_reentrant=False"):
        checkpointing.checkpoint(stack()[0], torch.ones(ROWS, WIDTH), use_reentrant=True)
    assert not checkpointing.is_configured()
    block = {"cpu_checkpointing": True, "partition_activations": True}  # the second has no effect
    checkpointing.configure(None, {"activation_checkpointing": block}, partition_activations=False)
    assert checkpointing.is_configured()
    assert current().settings == ActivationCheckpointingConfig(cpu_checkpointing=True)
    checkpointing.reset()
    assert not checkpointing.is_configured() and current().settings == ActivationCheckpointingConfig()


# -------------------------------------------------------------------- modules that an engine checkpoints


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = stack()
        self.again = self.blocks[0]
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x))


def attached_to(model: nn.Module, *patterns: str, **settings: Any) -> Any:
    return attach(model, ActivationCheckpointingConfig(modules=patterns, **settings), torch.device("cpu"))


@pytest.mark.parametrize(
    ("patterns", "number", "host"),
    [(("blocks.*",), 3, True), (("Block",), 3, False), (("*.up",), 3, True), (("again", "blocks.1"), 2, False),
     (("*",), 5, True)],
)  # fmt: skip
def test_modules_are_checkpointed_by_name_and_class(patterns: tuple[str, ...], number: int, host: bool) -> None:
    results = []
    for attaches in (False, True):
        model = Model()
        if attaches:
            attached = attached_to(model, *patterns, cpu_checkpointing=host)
            assert sum(type(handle).__name__ == "CheckpointedCall" for handle in attached.handles) == number
        torch.manual_seed(2)
        loss = model(torch.ones(ROWS, WIDTH)).square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_copies_of_the_model_are_as_it_was() -> None:
    model = Model()
    attached = attached_to(model, "blocks.*", cpu_checkpointing=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
        calls: list[int] = []
        other.blocks[1].register_forward_pre_hook(lambda module, args, calls=calls: calls.append(id(module)))
        other(torch.ones(ROWS, WIDTH)).sum().backward()
        assert calls == [id(other.blocks[1])]
    assert attached.checkpointing is not None


def test_patterns_that_match_nothing() -> None:
    with pytest.raises(ConfigError, match='got "block.\\*", which matches none; the nearest name is "blocks.[0-2]"'):
        attached_to(Model(), "blocks.*", "block.*")
    with pytest.raises(ConfigError, match='the nearest name is "Block"'):
        attached_to(Model(), "Blocks")
    with pytest.raises(ConfigError, match="got 'inner', which is TorchScript"):
        attached_to(nn.ModuleDict({"inner": torch.jit.script(nn.Linear(2, 2))}), "inner")
