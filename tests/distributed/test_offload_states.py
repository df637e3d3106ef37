"""engine.offload_states() and reload_states(): memory goes, numbers stay."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerolite
from tests.toolkit import models
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.mixed import Mixed
from tests.toolkit.pool import Pools


def refused(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """By name, the first words of what each call raises; empty for what goes through."""
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)
    return said


class Copies(TorchDispatchMode):
    """Counts copies, of one tensor or of several."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_):
            self.count += len(args[0]) if isinstance(args[0], list) else 1
        return function(*args, **(kwargs or {}))


def run(config: dict[str, Any], out: list[str] | None, offloads: bool, non_blocking: bool = False) -> dict[str, Any]:
    """Four windows. offloads: states go out in the middle of the third (after its first backward), and come back."""
    model = models.build(Mixed)
    engine = zerolite.initialize(model, config)
    losses, found = [], {}
    for window in range(4):
        for micro in range(engine.gradient_accumulation_steps):
            loss = models.square_loss(engine, models.float_batch(window, micro, engine.rank))
            engine.backward(loss)
            losses.append(float(loss))
            if offloads and window == 2 and micro == 0:
                before = engine.memory_report().items
                engine.offload_states(out, non_blocking=non_blocking)
                report = engine.memory_report()
                found["before"], found["during"], found["host"] = before, report.items, report.host
                found["refused"] = refused(calls_of(engine))
                engine.reload_states()
                engine.reload_states()
                found["after"] = engine.memory_report().items
            with Copies() as copies:
                engine.step()
    found["copies"] = copies.count  # of the last step
    state = engine.full_state_dict()
    first = list(model.parameters())[0]
    moment = zerolite.get_full_optimizer_state(first, "exp_avg_sq")
    return {"losses": losses, "state": state, "moment": moment, **found}


def calls_of(engine: Any) -> dict[str, Callable[[], Any]]:
    first: nn.Parameter = list(engine.module.parameters())[0]

    def forward() -> None:
        with torch.no_grad():
            engine(models.float_batch(0, 0, engine.rank)[0])

    return {
        "forward": forward,
        "step": engine.optimizer.step,
        "reduce": engine.reduce_gradients,
        "set gradient": lambda: zerolite.set_full_grad(first, None),
        "join": lambda: contextlib.ExitStack().enter_context(engine.join()),
        "read": lambda: first.data.sum(),
        "save": lambda: engine.save_checkpoint(tempfile.gettempdir()),
        "gradient": lambda: zerolite.get_full_grad(first),
        "state": lambda: zerolite.get_full_optimizer_state(first, "exp_avg"),
        "again": engine.offload_states,
    }


def several(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: run(**arguments) for name, arguments in runs.items()}


def wrong_arguments(config: dict[str, Any]) -> dict[str, str]:
    engine = zerolite.initialize(models.build(Mixed), config)
    said = {}
    for name, arguments in {"include": {"include": ["moments"]}, "device": {"device": "nvme"}}.items():
        try:
            engine.offload_states(**arguments)
        except ValueError as error:
            said[name] = str(error)
    return said


def engine_goes(config: dict[str, Any]) -> bool:
    """True if a model has its values back when its engine goes while they are out."""
    model = models.build(Mixed)
    engine = zerolite.initialize(model, config)
    before = engine.full_state_dict()
    engine.offload_states()
    del engine
    gc.collect()
    with zerolite.zero.GatheredParameters(model):
        return all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)


def no_memory(config: dict[str, Any]) -> dict[str, Any]:
    """The host has no memory for the third storage: nothing has changed, and the next call works."""
    from unittest import mock

    from zerolite.engine import state_offload

    engine = zerolite.initialize(models.build(Mixed), config)
    engine.backward(models.square_loss(engine, models.float_batch(0, 0, engine.rank)))
    engine.step()
    real, left = state_offload.host_memory, [2]

    def fails(nbytes: int, pin: bool) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no room")
        return real(nbytes, pin)

    said = ""
    with mock.patch.object(state_offload, "host_memory", fails):
        try:
            engine.offload_states()
        except MemoryError as error:
            said = str(error)
    engine.backward(models.square_loss(engine, models.float_batch(1, 0, engine.rank)))
    engine.step()
    trained = engine.full_state_dict()
    engine.offload_states(["optim_states"])
    engine.reload_states()
    state = engine.full_state_dict()
    return {"said": said, "kept": all(torch.equal(value, trained[name]) for name, value in state.items())}


# -------------------------------------------------------------------- the tests


STAGE_3 = {"stage3_param_persistence_threshold": 50}


def settings(stage: int, precision: str) -> dict[str, Any]:
    return config(stage, precision, accumulation=2, optimizer=ADAMW, zero=STAGE_3 if stage == 3 else None)


def check(pools: Pools, world: int, stages: tuple[int, ...], precision: str) -> None:
    runs: dict[str, dict[str, Any]] = {}
    for stage in stages:
        given = {"config": settings(stage, precision)}
        runs[f"{stage} plain"] = {**given, "out": None, "offloads": False}
        runs[f"{stage} all"] = {**given, "out": None, "offloads": True}
        runs[f"{stage} some"] = {**given, "out": ["optim_states", "hp_params"], "offloads": True, "non_blocking": True}
    for ranks in pools(world).run(several, {"runs": runs}):
        for stage in stages:
            plain = ranks[f"{stage} plain"]
            for kind in ("all", "some"):
                found = ranks[f"{stage} {kind}"]
                assert found["losses"] == plain["losses"]
                assert all(torch.equal(value, plain["state"][name]) for name, value in found["state"].items())
                assert torch.equal(found["moment"], plain["moment"])
                assert found["copies"] == plain["copies"], (stage, kind)
                moved = ("gradients", "communication_buckets")  # a reduction that was under way has ended meanwhile
                before, after = ({k: n for k, n in found[m].items() if k not in moved} for m in ("before", "after"))
                assert after == before, (stage, kind)
            during = ranks[f"{stage} all"]["during"]
            states = ("compute_parameters", "persistent_parameters", "gradients", "master_weights", "optimizer_states")
            assert [item for item in states if during[item]] == []
            whole = ("master_weights", "optimizer_states")
            assert {item: ranks[f"{stage} all"]["host"][item] for item in whole} == {i: before[i] for i in whole}
            said = ranks[f"{stage} all"]["refused"]
            assert all(said.values()), said
            some = ranks[f"{stage} some"]
            assert not some["during"]["optimizer_states"] and some["during"]["compute_parameters"]
            assert [name for name, words in some["refused"].items() if not words] == ["forward", "read"]


def test_states_go_and_come_back(pools: Pools) -> None:
    check(pools, 2, (2, 3), "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage(pools: Pools, world: int, precision: str) -> None:
    check(pools, world, (0, 1, 2, 3), precision)


def test_wrong_arguments(pools: Pools) -> None:
    said = pools(1).run(wrong_arguments, {"config": settings(0, "fp32")})[0]
    assert "expected include to be some of" in said["include"] and "'moments'" in said["include"]
    assert 'expected device to be "cpu"' in said["device"]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_goes_gives_back_what_is_the_models(pools: Pools, stage: int) -> None:
    assert pools(1).run(engine_goes, {"config": settings(stage, "fp32")}) == [True]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_host_without_memory_changes_nothing(pools: Pools, stage: int) -> None:
    given = config(stage, "bf16", optimizer=ADAMW, zero=STAGE_3 if stage == 3 else None)
    for found in pools(2).run(no_memory, {"config": given}):
        assert found == {"said": "no room", "kept": True}
