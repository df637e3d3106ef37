"""Frozen parameters that are quantized: dtype, bits, class and attributes stay, at every stage."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import zerolite
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raises


class Packed(nn.Parameter):
    """Two values in a byte, with an attribute that says how to read them, as in bitsandbytes."""

    quant_state: dict[str, Tensor]

    @staticmethod
    def __new__(cls, data: Tensor, quant_state: dict[str, Tensor]) -> Packed:
        made = Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made


class PackedWithFunctions(Packed):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class Quantized(nn.Module):
    """Frozen weights in fp8, int8 and packed bytes, each with its scale, and an adapter that is trained."""

    def __init__(self, packed: type[Packed] = PackedWithFunctions) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.weight = nn.Parameter(torch.randn(8, 8).to(torch.float8_e4m3fn), False)
        self.block.scale = nn.Parameter(torch.rand(8, 1), False)
        self.block.bias = nn.Parameter(torch.rand(8), False)
        self.whole = nn.Parameter(torch.randint(-100, 100, (8, 8), dtype=torch.int8), False)
        self.whole.SCB = torch.rand(8, 1)
        self.packed = packed(torch.randint(0, 255, (32, 1), dtype=torch.uint8), {"absmax": torch.rand(8, 1)})
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        block, packed = self.block, self.packed
        x = F.linear(x, (block.weight.float() * block.scale).to(x.dtype), block.bias)
        x = F.linear(x, (self.whole * self.whole.SCB / 100).to(x.dtype))
        values = torch.stack([packed & 15, packed >> 4], -1).reshape(8, 8) * packed.quant_state["absmax"] / 16
        return self.adapter(F.linear(x, values.to(x.dtype))).float().square().mean()


def assert_quantized(found: Mapping[str, Tensor], half: torch.dtype, classes: bool = True) -> None:
    torch.manual_seed(1)
    for name, wanted in Quantized().named_parameters():
        if "adapter" in name:
            continue
        value = found[name]
        assert value.dtype == (half if name == "block.bias" else wanted.dtype), name
        assert torch.equal(value.float(), wanted.to(value.dtype).float()), name
        if classes:
            assert type(value) is type(wanted), name
    if classes:
        torch.manual_seed(1)
        wanted_model = Quantized()
        assert torch.equal(found["packed"].quant_state["absmax"], wanted_model.packed.quant_state["absmax"])


@pytest.mark.fast("bf16-3-True-2")
@on_ranks(2)
@pytest.mark.parametrize(
    ("precision", "stage", "init"), [("bf16", 0, False), ("fp16", 2, False), ("bf16", 3, False), ("bf16", 3, True)]
)
def test_quantized_parameters_keep_their_bits(precision: str, stage: int, init: bool, tmp_path: Path) -> None:
    """dtype, bits, class and attributes, of their scales too; a bias is not quantized."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with zerolite.zero.Init(enabled=init, dtype=half):
        torch.manual_seed(1)
        model = Quantized()
    engine = zerolite.initialize(model, at(stage, precision, optimizer=ADAMW))
    plain = engine.module.adapter.weight.clone()
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    assert not torch.equal(engine.module.adapter.weight.clone(), plain)
    engine.save_checkpoint(str(tmp_path))
    with zerolite.zero.GatheredParameters(model.block.weight, modifier_rank=0):
        model.block.weight.data.copy_(torch.zeros(8, 8).to(torch.float8_e4m3fn))
    assert not model.block.weight.float().any()
    engine.load_checkpoint(str(tmp_path))
    with zerolite.zero.GatheredParameters(model):
        assert_quantized(dict(model.named_parameters()), half)
    assert_quantized(engine.full_state_dict(), half, classes=False)
    assert_quantized(engine.module.state_dict(), half, classes=False)
    assert_quantized(dict(copy.deepcopy(model).named_parameters()), half, classes=stage == 3)


@on_ranks(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_consists_of_other_tensors(stage: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)), False)
    for start in (
        lambda: zerolite.initialize(model, at(stage, "bf16", optimizer=ADAMW)),
        lambda: zerolite.zero.Init(module=model),
    ):
        with raises(ValueError, "'1.weight'", "TwoTensor", "consists of other tensors"):
            start()
