"""FLOPs by module, against sums by hand, and what is left behind: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.unit.conftest import Device
from zerolite.config import load_config
from zerolite.monitor.flop_count import count_flops
from zerolite.monitor.flops_profiler import FlopsProfiler

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


class Engine:
    """The part of an engine that counting needs."""

    def __init__(self, module: nn.Module) -> None:
        self.call_module: Callable[..., Any] = module

    def replace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        before, self.call_module = self.call_module, function
        return before

    def __call__(self, *args: Any) -> Any:
        return self.call_module(*args)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Two blocks, each checkpointed as ``how`` says, and a product of its own. ``x [B, width]``."""

    def __init__(self, how: str = "", width: int = 8) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant") if self.how else block(x)
        return (x @ self.weight).square().mean()


BATCH = 5
LINEAR = 2 * BATCH * 8 * 32  # one of a block's two
FORWARD = 4 * LINEAR + 2 * BATCH * 8 * 8


def flops_of(module: nn.Module, *inputs: Any) -> dict[str, tuple[int, int, int]]:
    """(forward, backward, recomputed) by module that has some."""
    engine, stack = Engine(module), torch._C._len_torch_dispatch_stack()
    with count_flops(engine, module) as count:
        engine(*inputs).sum().backward()
    assert engine.call_module is module and torch._C._len_torch_dispatch_stack() == stack
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    return {m.name: (m.forward, m.backward, m.recomputed) for m in count.modules() if m.model}


def batch(width: int = 8, rows: int = BATCH) -> Tensor:
    return torch.randn(rows, width, requires_grad=True)


# Without early stopping a reentrant checkpoint runs the whole block again; the other kind stops at the last tensor it
# needs, which is the input of the last layer.
@pytest.mark.parametrize(("how", "again"), [("", 0), ("plain", 1), ("reentrant", 2)])
def test_recomputation_is_told_from_what_the_model_needs(how: str, again: int) -> None:
    flops = flops_of(Net(how), batch())
    assert flops[""] == (FORWARD, 2 * FORWARD, 2 * again * LINEAR)
    assert flops["blocks.0"] == flops["blocks.1"] == (2 * LINEAR, 4 * LINEAR, again * LINEAR)
    assert flops["blocks.0.up"] == (LINEAR, 2 * LINEAR, LINEAR if again else 0)
    assert flops["blocks.1.down"] == (LINEAR, 2 * LINEAR, LINEAR if again == 2 else 0)
    assert "blocks.0.norm" not in flops


def test_compiled_regions_run_as_compiled() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    compiled = torch.compile(lambda x: torch.sin(x @ weight) * 2, backend="aot_eager")

    module, x, product = nn.Module(), batch(), 2 * BATCH * 8 * 8
    module.weight, module.forward = weight, compiled
    engine = Engine(module)
    plain = engine(x)
    with count_flops(engine, module) as count:
        counted = engine(x)
        counted.sum().backward()
    assert torch.equal(plain, counted)
    assert (count.total.forward, count.total.backward) == (product, 2 * product)
    if hasattr(TorchDispatchMode, "ignore_compile_internals"):
        assert type(plain.grad_fn).__name__ == type(counted.grad_fn).__name__ == "CompiledFunctionBackward"


class Told:
    """A profiler over a Net, and what it has said."""

    def __init__(self, every: int = 5, **block: Any) -> None:
        self.module = Net("plain")
        self.engine = Engine(self.module)
        self.said: list[str] = []
        self.written: list[tuple[int, dict[str, float]]] = []
        config = load_config({"flops_profiler": {"enabled": True, **block}}).flops_profiler
        self.profiler = FlopsProfiler(config, self.engine, self.module, CPU, every, self.said.append, self.write)

    def write(self, step: int, values: Any) -> None:
        self.written.append((step, dict(values)))

    def steps(self, first: int, last: int, device: Device | None = None, ms: float = 0.0) -> None:
        for step in range(first, last + 1):
            self.engine(batch()).backward()
            if device is not None:
                device.now += ms
            self.profiler.end_step(step)


@pytest.mark.parametrize("profile_step", [0, 1, 3])
def test_one_step_is_counted(profile_step: int) -> None:
    told = Told(profile_step=profile_step)
    told.steps(1, profile_step)
    assert (told.engine.call_module is told.module) == (told.said != []) is False
    told.steps(profile_step + 1, profile_step + 4)
    assert told.engine.call_module is told.module and len(told.said) >= 1
    assert told.said[0].startswith(f"step {profile_step + 1}: FLOPs of matrix products")
    expected = {"forward": FORWARD, "backward": 2 * FORWARD, "recomputed": 2 * LINEAR, "model": 3 * FORWARD}
    tflops = {f"{name}_tflop_per_step": flops / 1e12 for name, flops in expected.items()}
    assert told.written[0] == (profile_step + 1, tflops)


def test_the_profile_is_as_deep_and_as_long_as_asked() -> None:
    told = Told(profile_step=0, module_depth=2, top_modules=2)
    told.steps(1, 1)
    text = told.said[0]
    assert "  1: blocks (ModuleList) 30.7 kFLOP (94.1%)\n" in text and "blocks.1 (Block) 15.4 kFLOP (47.1%)\n" in text
    assert "Linear" not in text and "\n  3:" not in text
    told = Told(profile_step=0, detailed=False)
    told.steps(1, 1)
    assert "by module" not in told.said[0] and "\n  3: blocks.0.up (Linear) 7.68 kFLOP (23.5%)" in told.said[0]
