"""Stage 3: parameters that code between steps reads, writes, averages, penalises and saves; and what is taken from them
before there is an engine, and their attributes."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import at, config
from tests.toolkit.partitioned import build_in_init, stage3, whole
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import make_engine, raised, raises, run_steps
from zerolite import zero
from zerolite.zero.layout import shard_numel


class Side:
    """An engine, and what its program has seen."""

    def __init__(self, stage: int, precision: str = "fp32", setting: str = "moving", more: Any = None) -> None:
        settings = at(f"{stage} {setting}", precision, optimizer=("SGD", {"lr": 0.0625}), zero=more)
        self.engine = make_engine(settings | {"train_micro_batch_size_per_gpu": 4}, "Mlp")
        self.module = self.engine.module
        self.seen: list[Tensor] = []

    def see(self, *tensors: Tensor) -> None:
        self.seen += [tensor.detach().clone() for tensor in tensors]

    def train(self, step: int) -> None:
        run_steps(self.engine, 1, step)

    def weights(self) -> list[Tensor]:
        return list(self.module.parameters())


def aliases(side: Side) -> None:
    """Hold references over steps: they show the values of today, and writing to them reaches the parameter."""
    weight, bias = side.module.first.weight, side.module.first.bias
    data, row, flat = weight.data, weight.detach()[2], bias.data.view(-1)
    loss = models.square_loss(side.engine, models.float_batch(0, 0, dist.get_rank()))
    between = side.module.second.weight.detach()  # stays gathered for the backward at some settings
    side.see(between)
    side.engine.backward(loss)
    side.see(data, between)
    side.engine.step()
    side.see(data, row, flat, between)
    data.mul_(0.5)
    flat[1:].fill_(0.25)
    side.see(row, weight.data, bias)
    side.train(1)
    with torch.no_grad():
        weight.data.clamp_(-0.1, 0.1)
        torch._foreach_mul_([weight.data, flat], 0.5)
        torch._foreach_add_(side.weights(), 0.125)
        weight[3] = 0.5
        row.zero_()
    side.see(data, row, flat, *map(zerolite.get_full_master, side.weights()))
    side.train(2)
    side.see(data, row, flat, *map(zerolite.get_full_master, side.weights()))


def _whole(side: Side) -> list[Tensor]:
    state = side.engine.full_state_dict()
    return [state[name] for name, _ in side.module.named_parameters()]


def assert_program(program: Callable[[Side], None], settings: Sequence[str], precision: str) -> None:
    """The same values and weights, bit by bit, as at stage 1."""
    wanted = Side(1, precision)
    program(wanted)
    wanted.see(*wanted.weights())
    for setting in settings:
        side = Side(3, precision, setting)
        program(side)
        side.see(*(value.to(p.device) for p, value in zip(side.weights(), _whole(side), strict=True)))
        different = [i for i, pair in enumerate(zip(side.seen, wanted.seen, strict=True)) if not torch.equal(*pair)]
        assert not different, f"{setting}: {different} of {len(wanted.seen)}"


@pytest.mark.fast("fp32-2")
@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_programs_give_the_bits_of_stage_1(precision: str) -> None:
    assert_program(aliases, ("moving", "kept", "one unit"), precision)


@pytest.mark.slow
@on_ranks(2)
def test_parameters_that_rest_elsewhere(tmp_path: Path) -> None:
    """They are read and written alike."""
    for place in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}):
        wanted, side = Side(3), Side(3, more={"offload_param": place})
        for one in (wanted, side):
            aliases(one)
        assert all(map(torch.equal, wanted.seen, side.seen))
        assert all(map(torch.equal, _whole(wanted), _whole(side)))


@pytest.mark.fast("2")
@on_ranks(2, 3)
def test_refused() -> None:
    """Refuse gathers that could not be told to all ranks, and writes that would be lost."""
    side = Side(3)
    weight = side.module.first.weight
    side.train(0)
    for function in (Tensor.data_ptr, Tensor.untyped_storage, Tensor.share_memory_):
        for tensor in (weight, weight.data):
            with raises(RuntimeError, "'first.weight'", "memory", "GatheredParameters"):
                function(tensor)
    with raises(RuntimeError, "'first.weight'", "torch.distributed", "clone"):
        dist.broadcast(weight.data, 0)
    for values in (torch.zeros(7, 13), weight.data * 0.5, side.module.second.weight.data, weight.data[:2]):
        with raises(RuntimeError, "'first.weight'", "p.copy_(values)"):
            weight.data = values
    with raises(RuntimeError, "'first.weight'", "requires a gradient"):
        weight.mul_(2)
    with raises(ValueError, "read-only"):
        weight.detach().numpy()[0] = 1.0

    for question in (torch.numel, Tensor.storage_offset, Tensor.is_inference, Tensor.retain_grad, torch.zeros_like):
        with zerolite.comm.record() as record:
            question(weight)
            question(input=weight) if question is torch.zeros_like else None
        assert not record.calls, question
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(raised(weight.norm)))
    thread.start()
    thread.join()
    assert errors[0].startswith("RuntimeError") and "this thread is not the one that trains" in errors[0]
    saved = weight.square().sum()
    with torch.no_grad():
        weight.mul_(2)
    with raises(RuntimeError, "'first.weight'", "has changed"):
        saved.backward()
    side.engine.zero_grad()
    side.train(2)


@pytest.mark.slow
@on_ranks(2, 3)
def test_one_rank_alone() -> None:
    """Run code on one rank that needs no values, or has them: it waits for no other rank."""
    side = Side(3)
    side.train(0)
    data, state = side.module.first.weight.data, side.module.state_dict()
    if dist.get_rank() == 0:
        print(side.module.first.weight, side.module)
        assert data.shape == (13, 7) and data.dtype is torch.float32 and data[2].is_contiguous()
        assert "first.weight" in f"{data}" and "current values are not here" in repr(data)
        torch.save(state, io.BytesIO())
        assert float(state["first.weight"].norm()) > 0 and sum(p.numel() for p in side.weights()) == 146
    side.train(1)


class Named(nn.Parameter):
    """A class of the user's."""


@pytest.mark.slow
@on_ranks(2, 3)
def test_classes_of_the_user() -> None:
    """Parameters of other classes than torch's, and ages that outlive the engine on one rank alone."""
    module = nn.Linear(5, 3)
    module.weight = Named(module.weight.detach().clone())
    wanted = module.weight.detach().clone()
    engine = zerolite.initialize(module, at(3))
    weight = engine.module.weight
    assert isinstance(weight, Named) and models.has_no_values(weight) and weight.shape == (3, 5)
    assert torch.equal(weight.detach(), wanted) and torch.equal(engine.module.state_dict()["weight"], wanted)
    with torch.no_grad():
        weight.mul_(2)
    engine.backward(engine(torch.ones(2, 5)).sum())
    engine.step()
    data, coordinator = weight.data, engine._parts.coordinator if dist.get_rank() else None
    del engine
    gc.collect()
    assert data.norm() > wanted.norm() and (coordinator is not None) is (dist.get_rank() > 0)
    with zerolite.zero.GatheredParameters(weight):
        assert type(weight) is Named and torch.equal(weight, data)


# -------------------------------------------------------------------- before there is an engine


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
