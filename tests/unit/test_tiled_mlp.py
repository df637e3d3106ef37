"""MLPs over tiles of tokens: numbers beside plain PyTorch, memory, hooks, and which modules are MLPs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zerolite.nn.tiled_mlp import find_mlps, find_norms, tile_mlps

WIDTH, WIDE, TILE = 6, 17, 8


class Gated(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, WIDE, bias=bias)
        self.up_proj = nn.Linear(WIDTH, WIDE, bias=bias)
        self.down_proj = nn.Linear(WIDE, WIDTH, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down


class Plain(nn.Module):
    """As in nanoGPT."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.c_proj(F.gelu(self.c_fc(x))))
        return out


class Other(nn.Module):
    """The names, and a parameter that makes something else of them."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)


class GatedRMSNorm(nn.Module):
    """As in Hugging Face's Llama, with the name of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class ChannelsRMSNorm(nn.Module):
    """Norm over the second dimension, of one channel: its weight says nothing about tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


class Largest(TorchDispatchMode):
    """Largest result of an operation that has the wide dimension, or that squares, in elements."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        squares = func is torch.ops.aten.pow.Tensor_Scalar
        if isinstance(result, Tensor) and result.dim() > 1 and (result.shape[-1] == WIDE or squares):
            self.numel = max(self.numel, result.numel())
        return result


def tiled(model: nn.Module, setting: Any = TILE) -> nn.Module:
    tile_mlps(model, setting, lambda mlp: False)
    return model


def run(model: nn.Module, x: Tensor, recomputed: bool = False) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * torch.linspace(0, 1, WIDTH, dtype=x.dtype)).sum(), [x, *trained])]


@pytest.mark.parametrize("kind", [Gated, Plain, lambda: Gated(bias=False), GatedRMSNorm])
def test_numbers(kind: Any) -> None:
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        for shape in ((3, 7, WIDTH), (21, WIDTH), (1, 3, 7, WIDTH)):
            for recomputed in (False, True):
                model = kind().to(dtype)
                x = torch.randn(*shape, dtype=dtype)
                expected = run(model, x)
                with Largest() as largest:
                    made = run(tiled(model), x, recomputed)
                assert largest.numel == TILE * (WIDTH if kind is GatedRMSNorm else WIDE)
                for one, other in zip(made, expected, strict=True):
                    assert (one - other).norm() <= limit * other.norm()
                    assert one.shape == other.shape


def test_frozen_weights_and_no_gradients() -> None:
    model = Gated()
    model.up_proj.requires_grad_(False)
    x = torch.randn(9, WIDTH)
    expected = run(model, x)
    with torch.no_grad():
        plain = model(x)
    tiled(model)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(run(model, x), expected, strict=True))
    with torch.no_grad(), Largest() as largest:
        assert torch.allclose(model(x), plain, atol=1e-6) and largest.numel == TILE * WIDE
    (of_bias,) = torch.autograd.grad(model(x).sum(), [model.down_proj.bias])  # the input needs none
    assert torch.equal(of_bias, torch.full((WIDTH,), 9.0))


def test_16_bits_are_no_worse() -> None:
    torch.manual_seed(0)
    model, x = Gated().bfloat16(), torch.randn(500, WIDTH).bfloat16()
    truth = run(copy.deepcopy(model).double(), x.double())
    whole = [(a.double() - b).norm() for a, b in zip(run(model, x), truth, strict=True)]
    tiles = [(a.double() - b).norm() for a, b in zip(run(tiled(model), x), truth, strict=True)]
    assert all(a <= 1.2 * b for a, b in zip(tiles, whole, strict=True)), (tiles, whole)


def test_hooks_see_whole_tensors_once() -> None:
    model, seen = tiled(Gated()), []
    model.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    weight: Any = model.gate_proj.weight
    weight.register_hook(lambda gradient: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    x = torch.randn(9, WIDTH)
    model(x).sum().backward()
    assert seen == [(9, WIDTH), "gradient", "accumulated"]
    expected = copy.deepcopy(model)
    assert torch.allclose(expected(x), model(x), atol=1e-6)
    model.gate_proj.register_forward_hook(lambda module, args, out: 2 * out)  # it needs whole tensors
    with Largest() as largest:
        model(x)
    assert largest.numel == 9 * WIDE


def test_which_modules_are_tiled() -> None:
    model = nn.ModuleList([Gated(), Plain(), Other(), nn.Linear(WIDTH, WIDE)])
    assert list(find_mlps(model)) == [model[0], model[1]]
    assert len(tile_mlps(model, "auto", lambda mlp: isinstance(mlp, Plain))) == 1
    assert tile_mlps(model, False, lambda mlp: False) == []
    handles = tile_mlps(dropping := Plain(dropout=0.5), TILE, lambda mlp: False)
    x = torch.randn(9, WIDTH)
    with Largest() as largest:
        dropping(x)  # other random numbers than those of whole tensors
    assert largest.numel == 9 * WIDE
    with Largest() as largest:
        dropping.eval()(x)
    assert largest.numel == TILE * WIDE
    handles[0].remove()
    assert "_call_impl" not in vars(dropping)


def test_a_norm_over_another_dimension_is_whole() -> None:
    x = torch.randn(3, 7, WIDTH)
    expected = run(norm := ChannelsRMSNorm(), x)
    for one, other in zip(run(tiled(norm), x), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_models_of_transformers() -> None:
    pytest.importorskip("transformers")
    from tests.toolkit.models import hugging_face_gpt2, hugging_face_llama

    for build, norms in ((hugging_face_gpt2, 0), (hugging_face_llama, 5)):
        assert (len(list(find_mlps(build()))), len(list(find_norms(build())))) == (2, norms)


class DropsOut(Plain):
    """Calls dropout as a function, as Starcoder2's and Seed-OSS's MLPs do."""

    residual_dropout: float

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.residual_dropout, self.training)


def test_an_mlp_that_calls_dropout_is_whole_in_training() -> None:
    plain, model = DropsOut(), DropsOut()
    model.load_state_dict(plain.state_dict())
    gradients = []
    tile_mlps(nn.ModuleList([model]), TILE, is_divided=lambda mlp: False)
    for mlp in (plain, model):
        mlp.residual_dropout = 0.5
        torch.manual_seed(0)
        x = torch.ones(5 * TILE, WIDTH, requires_grad=True)
        mlp(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
