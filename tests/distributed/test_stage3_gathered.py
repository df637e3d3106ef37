"""zero.GatheredParameters and external parameters, on one, two and three ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same, assert_same_bits
from tests.toolkit.configs import ADAMW, at, config
from tests.toolkit.partitioned import assert_partitioned, stage3, whole
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import loss_of, raises, run_steps
from zerolite import zero
from zerolite.zero.stage3 import gathered_parameters


def odd_model(settings: str | None, precision: str = "fp32") -> tuple[Any, nn.Module]:
    """A partitioned OddModel, and its engine, or None where ``settings`` is None."""
    model = models.build(models.OddModel)
    if settings is None:
        zero.Init(module=model)
        return None, model
    return zerolite.initialize(model, stage3(settings, precision)), model


@on_ranks(2)
def test_what_may_be_gathered() -> None:
    with zero.Init():
        model = models.OddModel()
    parameters = list(model.parameters())
    for given, expected in (
        (model.up.weight, [model.up.weight]),
        ([model.up.weight, model.up.weight, model.gain], [model.up.weight, model.gain]),
        ((p for p in parameters[:3]), parameters[:3]),
        (dict(model.up.named_parameters()), list(model.up.parameters())),
        ([model.up, [model.gain]], [*model.up.parameters(), model.gain]),
        (model, parameters),
        (None, []),
        ([], []),
        (nn.Linear(2, 2), []),
    ):
        with zero.GatheredParameters(given):
            available = [p for p in parameters if p.ds_status is zero.ZeroParamStatus.AVAILABLE]
            assert {id(p) for p in available} == {id(p) for p in expected}
            assert all(p.shape == p.ds_shape for p in available)
        assert_partitioned(model)
    with zero.GatheredParameters(model, enabled=False):
        assert_partitioned(model)
    for bad in (5, "weight", [model.up.weight, "weight"]):
        with raises(ValueError, "zero.GatheredParameters", "expected a parameter"):
            zero.GatheredParameters(bad)
    for rank in (-1, dist.get_world_size(), True, "0", 0.5):
        with raises(ValueError, "modifier_rank", repr(rank)):
            zero.GatheredParameters(model, modifier_rank=rank)  # type: ignore[arg-type]


@pytest.mark.fast("moving-fp32-2")
@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("settings", "precision"), [("moving", "fp32"), ("defaults", "fp32"), (None, "fp32"), ("kept", "bf16")]
)
def test_changes_of_the_modifier_reach_all(settings: str | None, precision: str) -> None:
    """Every rank's change reaches all, in every way of making it; what others write is dropped."""
    engine, model = odd_model(settings, precision)
    for source in range(dist.get_world_size()):
        here = dist.get_rank() == source
        for turn, name in enumerate(("up.weight", "gain", "frozen.bias", "empty", "embed.weight")):
            parameter = model.get_parameter(name)
            wanted = torch.full(parameter.ds_shape, 1.0 + source + turn)
            with zero.GatheredParameters(parameter, modifier_rank=source), torch.no_grad():
                if turn % 2:
                    parameter.data = wanted.clone() if here else wanted - 7
                else:
                    parameter.copy_(wanted if here else wanted - 7)
            assert torch.equal(whole(model)[name].float(), wanted), name
            assert models.has_no_values(parameter) is (settings is None or settings != "defaults" and name != "empty")
    if settings is not None:
        before = whole(model)
        run_steps(engine, model="OddModel")
        for name, value in whole(model).items():  # Adam's first step is at most lr, from the new value
            step = (value.float() - before[name].float()).abs()
            assert step.numel() == 0 or step.max() <= 1e-3 * (1 + 0.1 * before[name].float().abs().max()) + 2e-2, name


@pytest.mark.fast("moving-2")
@on_ranks(1, 2)
@pytest.mark.parametrize("settings", ["moving", "defaults", None])
def test_changes_under_a_read_only_gather_are_refused(settings: str | None) -> None:
    """Changes under a read-only gather: an error on all ranks, and nothing has changed."""
    engine, model = odd_model(settings)
    weight = model.up.weight
    before = whole(model)
    guilty = dist.get_rank() == dist.get_world_size() - 1  # only one rank edits
    name = "up.weight"

    @torch.no_grad()
    def edit(how: str) -> None:
        if not guilty:
            return
        if how == "in place":
            weight[0, 0] += 1
        elif how == "data":
            weight.data.add_(1)
        else:
            weight.data = weight.data + 1 if how == "replaced" else torch.zeros(3)

    for how in ("in place", "data", "replaced", "shape"):
        with raises(RuntimeError, "read-only", name, "modifier_rank=0"):
            with zero.GatheredParameters(model):
                edit(how)
        assert_same(whole(model), before)
    with zero.GatheredParameters(model), raises(RuntimeError, name):
        with zero.GatheredParameters([weight, model.gain]):
            edit("data")
    assert_same(whole(model), before)
    with zero.GatheredParameters(model, modifier_rank=0), raises(RuntimeError, name):
        with zero.GatheredParameters(weight):
            edit("in place")
    assert_same(whole(model), before)
    with zero.GatheredParameters(model):  # the same values in other memory are no change
        weight.data = weight.data.clone()
    assert_same(whole(model), before)
    if settings is None:
        assert_partitioned(model)
    else:
        run_steps(engine, model="OddModel")


@pytest.mark.slow
@on_ranks(1, 2)
@pytest.mark.parametrize("settings", ["moving", "defaults"])
def test_gathers_inside_each_other(settings: str) -> None:
    engine = zerolite.initialize(models.build(models.Mlp), stage3(settings))
    weight, bias = engine.module.first.weight, engine.module.first.bias
    with zero.GatheredParameters(engine.module):
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                weight.fill_(2.0)
        assert weight.eq(2).all()
        with zero.GatheredParameters([weight, bias]):
            with zero.GatheredParameters(weight):
                pass
            assert weight.shape == (13, 7)
        assert weight.shape == (13, 7)
    assert whole(engine.module)["first.weight"].eq(2).all()
    last = dist.get_world_size() - 1
    with zero.GatheredParameters(engine.module, modifier_rank=last), torch.no_grad():
        if dist.get_rank() == last:
            weight.fill_(4.0)
        with zero.GatheredParameters(weight):  # what has been changed before is no change
            pass
        if dist.get_rank() == last:
            bias.fill_(5.0)
    values = whole(engine.module)
    assert values["first.weight"].eq(4).all() and values["first.bias"].eq(5).all()
    run_steps(engine, 2)


@pytest.mark.fast("moving-2")
@on_ranks(1, 2)
@pytest.mark.parametrize("settings", ["moving", "defaults"])
def test_an_exception_inside_leaves_nothing(settings: str) -> None:
    engine = zerolite.initialize(models.build(models.Mlp), stage3(settings))
    weight = engine.module.first.weight
    before = whole(engine.module)
    for source in (None, 0):
        with raises(KeyError, "boom"), zero.GatheredParameters(engine.module, modifier_rank=source):
            weight.data.fill_(3.0)
            engine.module.first.bias.data = torch.ones(13)
            raise KeyError("boom")
        assert_same(whole(engine.module), before)
        with zero.GatheredParameters(engine.module):
            with raises(KeyError, "boom"), zero.GatheredParameters(weight, modifier_rank=source):
                weight.data.fill_(3.0)
                raise KeyError("boom")
            assert torch.equal(weight.data, before["first.weight"])
        assert_same(whole(engine.module), before)
    with raises(RuntimeError, "shape", "first.weight (13, 7)"), zero.GatheredParameters(weight, modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data = torch.zeros(3)
    assert_same(whole(engine.module), before)
    if settings != "defaults":
        assert_partitioned(engine.module)
    run_steps(engine, 2)


@on_ranks(2)
def test_an_exception_inside_on_one_rank_leaves_the_ranks_in_step() -> None:
    """The rank catches it and goes on. What its block was to change is an error where the others wait for it."""
    engine = zerolite.initialize(models.build(models.Mlp), stage3("moving"))
    before = whole(engine.module)
    for source, bad in ((None, 1), (0, 1), (0, 0)):
        said = ""
        try:
            with zero.GatheredParameters(engine.module, modifier_rank=source):
                if dist.get_rank() == source:
                    engine.module.first.weight.data.fill_(3.0)
                if dist.get_rank() == bad:
                    raise KeyError("boom")
        except (KeyError, RuntimeError) as error:
            said = str(error)
        raised = "raised an exception on rank 0, the modifier_rank. Nothing is changed" if source == bad else ""
        assert ("boom" if dist.get_rank() == bad else raised) in said and (said or not raised), (source, bad, said)
        if source == 0 and bad == 1:  # its values have reached all ranks
            before["first.weight"] = torch.full((13, 7), 3.0)
        assert_same(whole(engine.module), before)
    run_steps(engine, 2)


@pytest.mark.fast("2-other parameters")
@pytest.mark.parametrize("on_the_other", ["nothing", "other parameters", "more uses"])
@on_ranks(2)
def test_a_graph_of_one_rank_alone_outlives_the_gather(on_the_other: str) -> None:
    """Its backward needs values for which no other rank would gather."""
    found = []
    for settings in (at(2, optimizer=ADAMW), stage3("moving"), stage3("moving")):
        engine = zerolite.initialize(models.build(models.Mlp), settings)
        for step in range(3):
            first, last = engine.module.first.weight, engine.module.second.weight
            loss = loss_of(engine, step, model="Mlp")
            with zero.GatheredParameters(engine.module, check=len(found) < 2):
                if dist.get_rank() == 0 or on_the_other == "more uses":
                    loss = loss + first.square().sum()
                if dist.get_rank() == 1 and on_the_other != "nothing":
                    loss = loss + last.pow(3).sum()
            engine.backward(loss)
            engine.step()
        found.append(whole(engine.module))
    assert_same_bits(found[1], found[0], "stages 3 and 2")
    assert_same_bits(found[2], found[0], "stages 3 and 2, without a check")


@on_ranks(2)
def test_initialize_inside_a_gather() -> None:
    """An engine that took over what a context has gathered would lose it at the end of the context."""
    for stage in (1, 3):
        with zero.Init():
            model = models.build(models.Mlp)
        before = whole(model)
        with zero.GatheredParameters(model), raises(RuntimeError, "inside a zero.GatheredParameters context"):
            zerolite.initialize(model, config(stage))
        assert_same(whole(model), before)
        run_steps(zerolite.initialize(model, config(stage)), 2)


@pytest.mark.slow
@on_ranks(2)
def test_a_gather_that_cannot_begin() -> None:
    """There is no memory for what compares values: nothing stays gathered."""
    engine = zerolite.initialize(models.build(models.Mlp), stage3("moving"))
    run_steps(engine, 2)
    no_memory = mock.patch.object(gathered_parameters, "content_hash", side_effect=MemoryError("full"))
    with no_memory, raises(MemoryError, "full"), zero.GatheredParameters(engine.module):
        raise AssertionError("the context has begun")
    assert_partitioned(engine.module)
    run_steps(engine, 2)
    assert engine._parts.coordinator.schedule.following


# -------------------------------------------------------------------- external parameters


class Borrower(nn.Module):
    """Uses a parameter it does not own, and knows it by a list, which no hook can see."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(13, 13)
        self.borrowed = [owner.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) @ self.borrowed[0]


class Lends(nn.Module):
    def __init__(self, register: str) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.borrower = Borrower(self.first)
        self.second = nn.Linear(7, 3)
        if register == "function":
            zero.register_external_parameter(self.borrower, self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.borrower(torch.tanh(self.first(x))))


@pytest.mark.fast("function-moving-2")
@on_ranks(2)
@pytest.mark.parametrize(
    ("register", "settings"), [("function", "moving"), ("later", "kept"), ("fwd_module", "moving")]
)
def test_registered_external_parameters_train(register: str, settings: str) -> None:
    plain = zerolite.initialize(models.build(Lends, register=""), config(2, optimizer=ADAMW))
    model = models.build(Lends, register=register)
    engine = zerolite.initialize(model, stage3(settings))
    if register == "later":
        zero.register_external_parameter(model.borrower, model.first.weight)
    if register == "fwd_module":
        with zero.GatheredParameters(model.first.weight, fwd_module=model.borrower):
            pass
    assert run_steps(plain, 6) == run_steps(engine, 6)
    assert_same(whole(plain.module), whole(engine.module))
    zero.unregister_external_parameter(model.borrower, model.first.weight)
    with raises(ValueError, "(13, 7)", "not registered", "Borrower"):
        zero.unregister_external_parameter(model.borrower, model.first.weight)
    with raises(ValueError, "expected a module and a parameter", "int"):
        zero.register_external_parameter(model.borrower, 3)  # type: ignore[arg-type]
