"""Frozen parameters that are quantized: dtype, bits, class and attributes stay, at every stage."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

import zerolite
from tests.toolkit.configs import ADAMW, at
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raises
from zerolite.checkpoint.huggingface import torchao_descriptions
from zerolite.zero.inner_tensors import separate, weights_of


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


class Scaled(Tensor):
    """int8 values and their scale in one tensor that has no memory of its own, as in torchao."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype, device=qdata.device)
        made.qdata, made.scale = qdata, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, shape: Any, strides: Any) -> Scaled:
        return Scaled(**inner)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale)
        return function(*tree_map_only(Scaled, lambda one: one.qdata * one.scale, args), **(kwargs or {}))


class Quantized(nn.Module):
    """Frozen weights in fp8, int8, packed bytes and a class of their own, each with its scale, and an adapter that is
    trained."""

    def __init__(self, packed: type[Packed] = PackedWithFunctions) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.weight = nn.Parameter(torch.randn(8, 8).to(torch.float8_e4m3fn), False)
        self.block.scale = nn.Parameter(torch.rand(8, 1), False)
        self.block.bias = nn.Parameter(torch.rand(8), False)
        self.whole = nn.Parameter(torch.randint(-100, 100, (8, 8), dtype=torch.int8), False)
        self.whole.SCB = torch.rand(8, 1)
        self.packed = packed(torch.randint(0, 255, (32, 1), dtype=torch.uint8), {"absmax": torch.rand(8, 1)})
        self.wrapped = nn.Parameter(Scaled(torch.randint(-100, 100, (8, 8), dtype=torch.int8), torch.rand(8, 1)), False)
        self.wrapped.note = "kept"
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        block, packed = self.block, self.packed
        x = F.linear(x, (block.weight.float() * block.scale).to(x.dtype), block.bias)
        x = F.linear(x, (self.whole * self.whole.SCB / 100).to(x.dtype))
        x = F.linear(x, self.wrapped.to(x.dtype) / 100)
        values = torch.stack([packed & 15, packed >> 4], -1).reshape(8, 8) * packed.quant_state["absmax"] / 16
        return self.adapter(F.linear(x, values.to(x.dtype))).float().square().mean()


def assert_quantized(found: Mapping[str, Tensor], half: torch.dtype, classes: bool = True) -> None:
    torch.manual_seed(1)
    for name, wanted in Quantized().named_parameters():
        if "adapter" in name:
            continue
        value = found[name]
        if name == "wrapped":
            assert type(value) is Scaled and torch.equal(value.qdata, wanted.qdata), name
            assert torch.equal(value.scale, wanted.scale) and value.note == "kept", name
            continue
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
    with zerolite.zero.GatheredParameters([model.block.weight, model.wrapped], modifier_rank=0):
        model.block.weight.data.copy_(torch.zeros(8, 8).to(torch.float8_e4m3fn))
        model.wrapped.qdata.data.zero_()
    assert not model.block.weight.float().any() and not model.wrapped.float().any()
    engine.load_checkpoint(str(tmp_path))
    with zerolite.zero.GatheredParameters(model):
        assert_quantized(dict(model.named_parameters()) | {"wrapped": model.wrapped}, half)
    state, copied = engine.full_state_dict(dtype=half), copy.deepcopy(model)
    assert_quantized(state, half, classes=False)
    assert_quantized(engine.module.state_dict(), half, classes=False)
    assert_quantized(dict(copied.named_parameters()) | {"wrapped": copied.wrapped}, half, classes=stage == 3)
    copied.wrapped.qdata.data.zero_()
    with raises(RuntimeError, "load_state_dict", "assign=True", "engine.load_full_state_dict"):
        copy.deepcopy(model).load_state_dict(state, assign=True)
    for load in (copied.load_state_dict, engine.load_full_state_dict, engine.module.load_state_dict):
        load(state)
    assert_quantized(copied.state_dict(), half, classes=False)
    assert_quantized(engine.module.state_dict(), half, classes=False)
    weight, scale = torch.full((8, 8), 7, dtype=torch.int8), torch.full((8, 1), 0.5)
    model.wrapped = nn.Parameter(Scaled(weight, scale), False)  # as a merge of adapters does
    state = engine.full_state_dict()
    assert torch.equal(state["wrapped"].qdata, weight) and torch.equal(state["wrapped"].scale, scale)
    model.wrapped = nn.Parameter(Scaled(weight.to(torch.float8_e4m3fn), scale), False)
    with raises(ValueError, "'wrapped'", "torch.int8", "torch.float8_e4m3fn"):
        engine.full_state_dict()


def test_a_torchao_without_the_names_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names have changed before; a checkpoint is saved all the same."""
    names = "torchao.prototype.safetensors.safetensors_utils".split(".")
    for count in range(1, 5):
        name = ".".join(names[:count])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    model = Quantized()
    separate([model])
    assert [name for name, _ in weights_of(model)] == ["wrapped"]
    assert torchao_descriptions(model) == {}


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


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def losses(model: Any, steps: int, step: Any, width: int = 64) -> list[float]:
    """step: function of a loss."""
    found = []
    for number in range(steps):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(number))
        loss = model(x.bfloat16()).float().square().mean()
        step(loss)
        found.append(loss.item())
    return found


def train_engine(model: nn.Module, stage: int, width: int = 64) -> tuple[Any, list[float]]:
    engine: Any = zerolite.initialize(model, at(stage, "bf16", optimizer=("SGD", {"lr": 0.5})))

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine, losses(engine, 3, step, width)


@installed("torchao")
@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_linear_layers_of_torchao_in_fp8() -> None:
    """Every stage has the bits of plain PyTorch with fp32 master weights."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    def converted() -> Any:
        return convert_to_float8_training(mlp(), config=Float8LinearConfig(emulate=True))

    masters, model = converted(), converted().bfloat16()
    pairs = list(zip(masters.parameters(), model.parameters(), strict=True))
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.5)

    def step(loss: Tensor) -> None:
        loss.backward()
        for master, parameter in pairs:
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for master, parameter in pairs:
            parameter.data.copy_(master.data)

    wanted = losses(model, 3, step)
    for stage in (0, 1, 2, 3):
        engine, found = train_engine(converted(), stage)
        assert type(engine.module[0]).__name__ == "Float8Linear"
        assert found == wanted, f"stage {stage}: {found}, and plain PyTorch {wanted}"
    plain = mlp().bfloat16()
    assert losses(plain, 3, lambda loss: None)[0] != wanted[0]


@installed("bitsandbytes")
@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_a_frozen_layer_of_bitsandbytes_in_4_bits(tmp_path: Path) -> None:
    import bitsandbytes  # type: ignore[import-not-found]

    def packed() -> Any:
        model = mlp().bfloat16()
        layer = bitsandbytes.nn.Linear4bit(64, 256, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer.load_state_dict(model[0].state_dict())
        model[0] = layer.to("cpu").requires_grad_(False)
        return model

    start = packed()[0].weight.detach().clone()
    wanted = None
    for stage in (0, 2, 3):
        engine, found = train_engine(packed(), stage)
        wanted = wanted or found
        evaluated = []
        for mode in (True, False, False):  # on CPUs with AVX512-BF16 bitsandbytes packs anew in evaluation
            with torch.no_grad():
                evaluated.append(engine.module.train(mode)(torch.ones(2, 64, dtype=torch.bfloat16)))
        assert torch.equal(evaluated[0], evaluated[1]) and torch.equal(evaluated[1], evaluated[2])
        assert found == wanted and found[0] != found[-1]
        engine.save_checkpoint(str(tmp_path), tag=str(stage))
        engine.load_checkpoint(str(tmp_path), tag=str(stage))
        weight = engine.module[0].weight
        with zerolite.zero.GatheredParameters(weight):
            assert type(weight) is bitsandbytes.nn.Params4bit and torch.equal(weight.data, start)
            assert weight.quant_state.quant_type == "nf4"
