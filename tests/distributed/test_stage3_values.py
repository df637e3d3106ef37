"""Values and attributes of partitioned parameters without an engine and with one: tensors taken from them, state dicts,
``ds_*``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import config
from tests.toolkit.partitioned import build_in_init, stage3, whole
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import run_steps
from zerolite import zero
from zerolite.zero.layout import shard_numel


class Aliased(nn.Module):
    """It takes tensors from parameters and uses them after other parameters have been gathered. Some outlive it."""

    def __init__(self) -> None:
        super().__init__()
        a, b, c, d, e, f = self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        b.weight.data.copy_(a.weight.data)
        b.weight.data.add_(c.weight.data)
        rows = c.weight.data
        rows[:2] = a.weight.data[:2]
        torch._foreach_mul_([d.weight.data, e.weight.data], 2.0)  # both are written
        e.weight.data, f.weight.data = f.weight.data, e.weight.data
        f.weight.data = f.weight.data + torch.cat([a.weight.data[:3], b.weight.data[3:]])
        f.bias = nn.Parameter(e.bias.data)
        early = a.bias.data
        b.bias.data.mul_(2)
        late = a.bias.data
        c.bias.data.mul_(2)
        early.add_(1)  # the other one sees it, and so does the parameter
        b.bias.data.mul_(late)
        with zero.GatheredParameters(a.bias, modifier_rank=0):
            a.bias.data.add_(1)
        d.bias.data.mul_(early)
        spectral_norm(d)  # leaves d.weight, a tensor in the memory of d.weight_orig
        source = torch.ones(2, 6, requires_grad=True)
        (self.gradient,) = torch.autograd.grad(c(b(a(source))).sum(), source)
        self.kept = [a.weight.data, b.weight.detach()[1], early, d.weight]
        self.output = c(b(a(source))).sum()


@pytest.mark.fast("2")
@on_ranks(1, 2, 3)
def test_tensors_taken_from_parameters() -> None:
    """They have the values of plain construction inside the context and after it, as the saved ones of autograd do.
    Reading freed memory would end the process."""
    model, wanted = build_in_init(Aliased, 5)
    assert all(torch.equal(one, other) for one, other in zip(model.kept, wanted.kept, strict=True))
    assert torch.equal(model.gradient, wanted.gradient)
    engine = zerolite.initialize(model, config(3))  # it releases once more
    assert all(torch.equal(one, other) for one, other in zip(model.kept, wanted.kept, strict=True))
    assert torch.equal(model.output, wanted.output) and engine.module is model


@on_ranks(2)
def test_resized_embedding() -> None:
    """Resize an embedding like transformers: old rows gathered, copied into a new plain embedding. Values that are
    changed before initialize are the engine's."""
    with zero.Init():
        model = models.OddModel()
    fresh = nn.Embedding(models.VOCABULARY + 4, 5)
    nn.init.zeros_(fresh.weight)
    with zero.GatheredParameters(model.embed.weight, modifier_rank=None):
        fresh.weight.data[: models.VOCABULARY] = model.embed.weight.data
        old = model.embed.weight.data.clone()
    model.embed = fresh
    with zero.GatheredParameters(model.up.weight, modifier_rank=0):
        if dist.get_rank() == 0:
            model.up.weight.data[0] = 5.0
    engine = zerolite.initialize(model, stage3())
    assert torch.equal(whole(engine.module)["embed.weight"][: models.VOCABULARY], old)
    assert model.embed.weight.ds_shape == (models.VOCABULARY + 4, 5)
    assert whole(engine.module)["up.weight"][0].eq(5).all()
    run_steps(engine, model="OddModel")


@pytest.mark.fast("moving-2")
@on_ranks(1, 2)
@pytest.mark.parametrize("settings", ["moving", "defaults"])
def test_attributes_of_a_parameter(settings: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    model = models.build(models.OddModel)
    values = whole(model)
    for parameter in model.parameters():
        parameter.label = "mine"
    before = list(model.parameters())
    engine = zerolite.initialize(model, stage3(settings))
    for parameter, (name, value) in zip(before, values.items(), strict=True):
        part = shard_numel(value.numel(), world)
        persistent = settings == "defaults" or not value.numel()
        assert (parameter.ds_shape, parameter.ds_numel) == (value.shape, value.numel()), name
        assert parameter.ds_tensor.shape == (part,) and parameter.partition_numel() == part, name
        padded = F.pad(value.reshape(-1), (0, part * world - value.numel()))
        assert torch.equal(parameter.ds_tensor, padded[rank * part : (rank + 1) * part]), name
        assert parameter.ds_tensor.data_ptr() % 16 == 0, name
        status = zero.ZeroParamStatus.AVAILABLE if persistent else zero.ZeroParamStatus.NOT_AVAILABLE
        assert parameter.ds_status is status, name
        assert parameter.shape == value.shape and models.has_no_values(parameter) is not persistent, name
        assert parameter.label == "mine"
        parameter.all_gather()
        assert parameter.ds_status is zero.ZeroParamStatus.AVAILABLE and torch.equal(parameter.data, value), name
        parameter.partition()
    assert all(p is q for p, q in zip(before, engine.module.parameters(), strict=True))
    assert len({parameter.ds_id for parameter in before}) == len(before)
    assert model.head.weight is model.embed.weight
