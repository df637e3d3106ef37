"""Models whose constructors change, replace or parametrise parameters, built inside zero.Init and outside."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import zerolite
from tests.toolkit.compare import assert_same
from tests.toolkit.configs import ADAMW, at, config
from tests.toolkit.partitioned import assert_partitioned, values_of, whole
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import raises
from zerolite import zero


class Filled(nn.Module):
    """Its last act is to change parameters without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        with torch.no_grad():
            self.norm.weight.fill_(2.0)
            self.norm.bias.fill_(0.25)


class Grown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Filled(), nn.Linear(6, 3)


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)
        with torch.no_grad():
            self.a.weight.mul_(3)
        self.b.weight = self.a.weight
        self.a.bias = nn.Parameter(self.a.bias.detach().clone() * 2)
        with torch.no_grad():
            self.b.weight.add_(1)
        self.c = nn.Linear(5, 5)
        self.c.weight = nn.Parameter(self.a.weight[:, :5].clone())
        del self.c.bias
        self.c.bias = nn.Parameter(torch.ones(5))
        with torch.no_grad():
            self.c.bias.mul_(5)
            self.c.weight.set_(torch.full((5, 5), 0.5))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch_norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        with torch.no_grad():
            self.linear.weight.fill_(0.5)
            self.batch_norm.running_mean.fill_(3)
            self.batch_norm.weight.fill_(4)
        self.register_buffer("twice", self.linear.weight.detach() * 2)
        self.register_buffer("copied", self.linear.weight.detach().clone())


class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = weight_norm(nn.Linear(4, 3))
        self.b = parametrizations.weight_norm(nn.Linear(4, 3))
        self.c = parametrizations.orthogonal(nn.Linear(4, 4))
        self.d, self.e = spectral_norm(nn.Linear(4, 3)), parametrizations.spectral_norm(nn.Linear(4, 3))
        with torch.no_grad():
            self.b.bias.fill_(3)
            self.a.weight_g.mul_(2)
            self.b.weight = torch.ones(3, 4)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.rand(3)) for _ in range(2)])
        with torch.no_grad():
            for parameter in self.list:
                parameter.mul_(2)
            self.list.append(nn.Parameter(torch.ones(2)))
            self.list[-1].fill_(4)
        self.q = nn.Parameter(torch.zeros(3))
        self.same = self.q
        nn.init.trunc_normal_(self.same)


CONSTRUCTORS = (Grown, Replaced, Buffers, Parametrised, Lists)


@pytest.mark.fast("1")
@on_ranks(1, 2)
def test_constructors_give_the_values_of_plain_construction() -> None:
    """Built inside zero.Init, and given to an engine there: bit for bit what plain construction gives."""
    warnings.simplefilter("ignore")
    for cls in CONSTRUCTORS:
        torch.manual_seed(3)
        plain = cls()
        torch.manual_seed(3)
        with zero.Init():
            model = cls()
        assert_partitioned(model)
        assert_same(whole(model), values_of(plain))
        assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert parameter.ds_shape == wanted.shape
    torch.manual_seed(4)
    plain = Grown()
    torch.manual_seed(4)
    with zero.Init():
        engine = zerolite.initialize(Grown(), config(3, optimizer=ADAMW))
    assert_same(engine.full_state_dict(), values_of(plain))
    with raises(RuntimeError, "weight", "(3, 6)", "set .data"), zero.Init():
        head = nn.Linear(6, 3)
        head.weight = nn.Parameter(torch.ones(3, 6))
        last = nn.Sequential(head)
        last[0].weight.data = torch.empty(0)


class Asks(nn.Module):
    """Asks its layers' parameters for their dtypes, as T5 does, and never for their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
        self.live: Callable[[], int] = lambda: 0
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if isinstance(layer.weight, torch.Tensor) and layer.weight.dtype != torch.int8:
                x = torch.tanh(layer(x.to(layer.weight.device)))
                self.most = max(self.most, self.live())
        return x


@on_ranks(2)
def test_asked_parameters_are_not_kept() -> None:
    limit = 64
    limits = {"stage3_max_live_parameters": limit, "stage3_prefetch_bucket_size": 0}
    engine = zerolite.initialize(Asks(), at(3, zero=limits))
    handles = engine.coordinator.handles
    engine.module.live = lambda: sum(h.numel for h in handles if h.status is not zero.ZeroParamStatus.NOT_AVAILABLE)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        assert engine.coordinator.schedule.groups[0] == (), "the root has taken parameters that it only asked"
    assert engine.module.most <= limit
    assert engine.coordinator.schedule.following
