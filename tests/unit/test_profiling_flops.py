"""FLOPs of a step, against sums by hand, and what is left behind: nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zerolite.config import load_config
from zerolite.monitor.flops import FlopCount, FlopsProfiler
from zerolite.zero.engine_parts import ModuleCall

pytestmark = pytest.mark.usefixtures("one_thread")


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


def flops_of(module: nn.Module, *inputs: Any) -> tuple[int, int, int]:
    """(forward, backward, recomputed) of a call and its backward."""
    call, stack = ModuleCall(module), torch._C._len_torch_dispatch_stack()
    count = FlopCount(call, module)
    count.start()
    call.call_module(*inputs).sum().backward()
    module.eval()
    call.call_module(*inputs)
    count.stop()
    module.train()
    call.call_module(*inputs).sum().backward()
    assert call.call_module is module and torch._C._len_torch_dispatch_stack() == stack
    return count.flops.forward, count.flops.backward, count.flops.recomputed


def batch(width: int = 8, rows: int = BATCH) -> Tensor:
    return torch.randn(rows, width, requires_grad=True)


# Without early stopping a reentrant checkpoint runs the whole block again; the other kind stops at the last tensor it
# needs, which is the input of the last layer.
@pytest.mark.parametrize(("how", "again"), [("", 0), ("plain", 1), ("reentrant", 2)])
def test_recomputation_is_told_from_what_the_model_needs(how: str, again: int) -> None:
    assert flops_of(Net(how), batch()) == (FORWARD, 2 * FORWARD, 2 * again * LINEAR)


class Attention(nn.Module):
    """Attention of 2 heads, 6 positions and 8 features on tokens ``[5, 6, 16]``, and a recurrent layer of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(5, 6, 2, 8).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.rnn(mixed.transpose(1, 2).reshape(5, 6, 16))[0]  # type: ignore[no-any-return]


def test_attention_and_recurrent_layers() -> None:
    """Attention is two products, and five in backward. Each of an LSTM's positions has two products of 4 gates."""
    attention = 2 * 5 * 2 * 6 * 6 * 8
    recurrent = 2 * 5 * 6 * 16 * (16 + 4)
    forward, backward, recomputed = flops_of(Attention(), torch.randn(5, 6, 16, requires_grad=True))
    assert (forward, recomputed) == (2 * attention + recurrent, 0)
    assert backward == 5 * attention + 2 * recurrent


def test_compiled_regions_run_as_compiled() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    compiled = torch.compile(lambda x: torch.sin(x @ weight) * 2, backend="aot_eager")

    module, x, product = nn.Module(), batch(), 2 * BATCH * 8 * 8
    module.weight, module.forward = weight, compiled
    call = ModuleCall(module)
    plain = call.call_module(x)
    count = FlopCount(call, module)
    count.start()
    counted = call.call_module(x)
    counted.sum().backward()
    count.stop()
    assert torch.equal(plain, counted)
    assert (count.flops.forward, count.flops.backward) == (product, 2 * product)
    if hasattr(TorchDispatchMode, "ignore_compile_internals"):
        assert type(plain.grad_fn).__name__ == type(counted.grad_fn).__name__ == "CompiledFunctionBackward"


@pytest.mark.parametrize("profile_step", [0, 1, 3])
def test_one_step_is_counted(profile_step: int, capsys: pytest.CaptureFixture[str]) -> None:
    module, written = Net("plain"), []
    config = load_config({"flops_profiler": {"enabled": True, "profile_step": profile_step}}).flops_profiler
    call = ModuleCall(module)
    profiler = FlopsProfiler(config, FlopCount(call, module), torch.device("cpu"), 5, lambda *v: written.append(v))

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            call.call_module(batch()).backward()
            profiler.end_step(step)

    train(1, profile_step)
    assert call.call_module is not module and written == []
    train(profile_step + 1, profile_step + 4)
    assert call.call_module is module
    line = f"step {profile_step + 1}: matrix products, convolutions and attention on rank 0: forward 10.9 kFLOP, "
    assert capsys.readouterr().out.startswith(line)
    expected = {"forward": FORWARD, "backward": 2 * FORWARD, "recomputed": 2 * LINEAR, "model": 3 * FORWARD}
    tflops = {f"{name}_tflop_per_step": flops / 1e12 for name, flops in expected.items()}
    assert written[0] == (profile_step + 1, tflops)
