"""Stage 3 over the life of an engine, against stage 2, to the bit: disturbances between steps, steps of other shapes,
state dicts, users' hooks; and the memory and objects of engines that go on and that are deleted."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerolite
from tests.toolkit.compare import assert_same
from tests.toolkit.memory import live_tensors, tensor_bytes
from tests.toolkit.ranks import on_ranks
from tests.toolkit.stage3_cases import left_gathered
from tests.toolkit.stage3_net import WIDTH, batch, build, loss_of, make_engine, no_grad, one_loss, settings, train
from tests.toolkit.training import raises
from zerolite.engine.engine import Engine
from zerolite.zero import ZeroParamStatus
from zerolite.zero.stage3.module_hooks import ModuleExecution
from zerolite.zero.stage3.param_group import AllGather, ParamGroup
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.stage3.partitioned_parameter import PartitionedParameter

SETTINGS = ("moving", "kept", "tight")


class Boom(Exception):
    """Error that the failing parts raise."""


# ---------------------------------------------------------------- disturbances


def evaluations(engine: Any, step: int) -> Any:
    """Through the engine and past it, in every mode."""
    found = [no_grad(engine, step)]
    with torch.inference_mode():
        found += [engine(batch(step, micro)).clone() for micro in (7, 8)]
    engine.eval()
    with torch.no_grad():
        found += [engine.module(batch(step, 7)), engine.module.blocks[1](torch.ones(2, WIDTH))]
    engine.train()
    return found


def forward_only(engine: Any, step: int) -> Any:
    """Under grad, and the graphs are kept while the next forward runs."""
    outputs = [engine(batch(step, micro)) for micro in (7, 8, 9)]
    return [*outputs, engine.module(batch(step, 7)), engine.module.blocks[1](torch.ones(2, WIDTH))]


def input_gradient(engine: Any, step: int) -> Any:
    """Only the inputs' gradient is asked for: none of the parameters gets one."""
    x = batch(step, 7).requires_grad_()
    result = torch.autograd.grad(engine(x).square().sum(), x)
    engine.zero_grad()
    return result


def dropped_backward(engine: Any, step: int) -> Any:
    engine.backward(loss_of(engine, step, 7))
    engine.zero_grad()


def clone_and_state(engine: Any, step: int) -> Any:
    """Reading values in the middle of training."""
    with zerolite.zero.GatheredParameters(engine.module):
        inside = {name: value.clone() for name, value in engine.module.state_dict().items()}
    return [inside, engine.full_state_dict()]


def _raise(error: type[BaseException], x: Tensor) -> Tensor:
    raise error("on purpose")


def _raise_in_backward(error: type[BaseException], x: Tensor) -> Tensor:
    x = x.view_as(x)  # the module's output itself may carry other hooks
    x.register_hook(lambda gradient: _raise(error, gradient))
    return x


@contextlib.contextmanager
def acting(engine: Any, place: str, action: Callable[[Tensor], Tensor]) -> Iterator[None]:
    actions = engine.module.actions
    actions[place] = action
    try:
        yield
    finally:
        del actions[place]


def failing_forward(place: str, error: type[BaseException], engine: Any, step: int) -> Any:
    with acting(engine, place, functools.partial(_raise, error)):
        with raises(error, "on purpose"):
            engine(batch(step, 7))
    if error is Boom:
        assert not left_gathered(engine), left_gathered(engine)


def failing_evaluation(engine: Any, step: int) -> Any:
    with torch.no_grad():
        failing_forward("inside the block", Boom, engine, step)


def failing_backward(place: str, plain: bool, engine: Any, step: int) -> Any:
    """The gradients that did come are dropped as in any PyTorch loop: by zero_grad."""
    with acting(engine, place, functools.partial(_raise_in_backward, Boom)):
        loss = loss_of(engine, step, 7)
    with raises(Boom):
        loss.backward() if plain else engine.backward(loss)
    engine.zero_grad()
    if not (plain and place == "model ends"):  # raised before any hook of the engine could see that a backward began
        assert not left_gathered(engine), left_gathered(engine)


def failing_then_forward(engine: Any, step: int) -> Any:
    """A failed plain backward, then straight on with an evaluation, its graph still alive."""
    with acting(engine, "inside the block", functools.partial(_raise_in_backward, Boom)):
        loss = loss_of(engine, step, 7)
    with contextlib.suppress(Boom):
        loss.backward()
    result = no_grad(engine, step)
    engine.zero_grad()
    return result


FORWARD_PLACES = ["model begins", "after the first", "inside the block", "model ends"]
BACKWARD_PLACES = FORWARD_PLACES[1:]
READING = [evaluations, forward_only, input_gradient, dropped_backward, clone_and_state]
READING.append(functools.partial(failing_forward, "inside the block", KeyboardInterrupt))
GROUPS: dict[str, list[Callable[[Any, int], Any]]] = {
    "reading": READING,
    "failed evaluation": [failing_evaluation, failing_then_forward],
    "forward raises": [functools.partial(failing_forward, place, Boom) for place in FORWARD_PLACES],
    "backward raises": [functools.partial(failing_backward, place, False) for place in BACKWARD_PLACES],
    "plain backward raises": [functools.partial(failing_backward, place, True) for place in BACKWARD_PLACES],
}


def undisturbed(groups: list[str], settings: tuple[str, ...]) -> None:
    """A disturbance computes stage 2's values, and training ends in the bits of a run without it."""
    alone = train(make_engine(2))
    for disturb in (disturb for group in groups for disturb in GROUPS[group]):
        wanted = train(make_engine(2), disturb=disturb)
        for setting in settings:
            found = train(make_engine(3, setting), disturb=disturb)
            for key in ("seen", "disturbed", "norms", "state"):
                assert_same(found[key], wanted[key], f"{disturb}, {setting}: {key}, stage 2")
                if key != "disturbed":
                    assert_same(found[key], alone[key], f"{disturb}, {setting}: {key}, undisturbed")


@pytest.mark.slow
@on_ranks(2, timeout=180)
@pytest.mark.parametrize("group", GROUPS)
def test_disturbances(group: str) -> None:
    """Disturb the first step, the recording of the trace, and steps that follow a plan."""
    undisturbed([group], SETTINGS if "evaluation" in group or group == "reading" else ("moving", "tight"))


# ---------------------------------------------------------------- other steps


def interleaved(engine: Any, step: int) -> Any:
    first = loss_of(engine, step, 0)
    second = loss_of(engine, step, 1)
    engine.backward(first)
    third = loss_of(engine, step, 2)
    third.backward()
    second.backward()
    return [first, second, third]


@pytest.mark.slow
@on_ranks(1, 2, timeout=180)
def test_forwards_and_backwards_in_any_order() -> None:
    """A plan is followed in the end."""
    for loop in (one_loss, interleaved):
        wanted = train(make_engine(2), loop=loop)
        for setting in SETTINGS:
            found = train(make_engine(3, setting), loop=loop)
            for key in ("seen", "norms", "state"):
                assert_same(found[key], wanted[key], f"{loop}, {setting}: {key}")
            assert all(found["followed"][3:]), f"{loop}, {setting}"


@on_ranks(2)
def test_what_a_user_has_made_whole_follows_updates() -> None:
    """A parameter has the values of its master after each step: also where ``p.all_gather()`` has made it whole before
    the update, until the next forward releases it."""
    engine = make_engine(3)
    weight: Any = max(engine.module.parameters(), key=lambda parameter: parameter.ds_numel)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        if step == 1:
            weight.all_gather()
        engine.step()
        assert (weight.ds_status is ZeroParamStatus.AVAILABLE) is (step == 1), step
        assert torch.equal(weight.detach(), zerolite.get_full_master(weight)), step


# ---------------------------------------------------------------- state dicts


@on_ranks(1, 2)
def test_plain_state_dicts_are_whole() -> None:
    """So are those of parts, and loading one reaches shards and masters."""
    engine = make_engine(3)
    train(engine, steps=1)
    whole = engine.full_state_dict()
    for state in (engine.module.state_dict(), engine.state_dict()):
        assert_same({name: state[name] for name in whole}, whole)
        assert state.keys() == whole.keys()
    part = engine.module.blocks[1].up.state_dict(prefix="blocks.1.up.")
    assert len(part) == 2 and all(torch.equal(value, whole[name]) for name, value in part.items())
    wanted = dict(build(seed=11).state_dict())
    engine.module.load_state_dict(wanted)
    assert not left_gathered(engine)
    assert_same(engine.full_state_dict(), wanted)
    head = {name: whole[f"head.{name}"] for name in ("weight", "bias")}
    engine.module.head.load_state_dict(head)
    assert_same(dict(engine.module.head.state_dict()), head)
    train(engine, steps=2)


# ---------------------------------------------------------------- memory and objects


_OURS = (Engine, PartitionedParameterCoordinator, PartitionedParameter, ParamGroup, ModuleExecution, AllGather)


def census() -> dict[str, int]:
    """Live objects of our classes and tensors, and the tensors' bytes."""
    counts = {cls.__name__: 0 for cls in (*_OURS, Tensor, nn.Parameter)}
    ours = [item for item in gc.get_objects() if type(item) in _OURS]
    for item in [*ours, *live_tensors()]:
        counts[type(item).__name__] += 1
    return {**counts, "bytes": tensor_bytes()}


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_100_steps_grow_nothing() -> None:
    """Without any collection of cycles between."""
    for stage, setting in ((2, ""), (3, "moving"), (3, "tight")):
        engine = make_engine(stage, setting)
        train(engine, steps=2)
        gc.collect()
        gc.disable()
        try:
            counts: dict[int, list[dict[str, int]]] = {20: [], 100: []}
            for step in range(1, 101):
                engine.backward(loss_of(engine, step))
                engine.step()
                if step % 7 == 0:
                    no_grad(engine, step)
                for end, kept in counts.items():
                    if end - 10 < step <= end:
                        kept.append(census())
        finally:
            gc.enable()
        early, late = ({key: max(entry[key] for entry in kept) for key in kept[0]} for kept in counts.values())
        # Views of the communicator's regions come and go with the other ranks' timing: a few, not one a step.
        room = {"Tensor": 10}
        grown = {key: (early[key], late[key]) for key in early if late[key] > early[key] + room.get(key, 0)}
        assert not grown and (late["ModuleExecution"], late["AllGather"]) == (0, 0), (stage, setting, grown)


@pytest.mark.fast("2-*")
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1, 2)
def test_a_module_outlives_its_engine(stage: int) -> None:
    """At stage 3 it is still partitioned, and hooks are gone; GatheredParameters makes it usable."""
    engine = make_engine(stage)
    train(engine, steps=2)
    state, model = engine.full_state_dict(), engine.module
    with torch.no_grad():
        expected = engine(batch(9))
    gone = weakref.ref(engine)
    del engine
    assert gone() is None
    gc.collect()
    with zerolite.zero.GatheredParameters(model), torch.no_grad():
        assert torch.equal(model(batch(9)), expected)
        assert_same(dict(model.state_dict()), state)
    if stage == 2:
        model(batch(9)).sum().backward()
        assert all(p.grad is not None for p in model.head.parameters())


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_users_hooks_see_whole_weights(when: str, prepend: bool) -> None:
    """Hooks of forward and backward run in the order of stage 2."""

    def read_by_hooks(stage: int, setting: str = "") -> list[Any]:
        model, seen = build(), []

        def read(module: nn.Module, *_: Any) -> None:
            own = {name: getattr(module, name).detach() for name in list(module._parameters)}
            seen.append((type(module).__name__, [(name, p.shape, p.sum().item()) for name, p in own.items()]))

        def install() -> None:
            for module in (model.first, model.blocks[1], model.blocks[1].up, model.head, model):
                for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
                    getattr(module, f"register_{kind}_hook")(read, prepend=prepend)

        if when == "before":
            install()
        engine = zerolite.initialize(model, settings(stage, setting))
        if when == "after":
            install()
        train(engine, steps=4)
        return seen

    wanted = read_by_hooks(2)
    assert wanted
    for setting in SETTINGS:
        assert_same(read_by_hooks(3, setting), wanted, setting)
