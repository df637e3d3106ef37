"""engine.offload_states() and reload_states(); states that go out while a reduction is under way; shards on
disk that are damaged."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, config
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import backward, make_engine, raised, run_steps, snapshot
from zerolite.comm import create
from zerolite.engine import state_offload
from zerolite.offload import swap_file
from zerolite.offload.swap_file import SwapFile
from zerolite.ops.async_io import AsyncIO


def settings(stage: int, precision: str, accumulation: int = 2) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 50} if stage == 3 else {"overlap_comm": False}  # copies are counted
    return config(stage, precision, accumulation, optimizer=ADAMW, zero=zero)


def mixed_engine(settings: dict[str, Any]) -> Any:
    return zerolite.initialize(models.build(models.Mixed), settings)


class Copies(TorchDispatchMode):
    """Counts copies, of one tensor or of several."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_):
            self.count += len(args[0]) if isinstance(args[0], list) else 1
        return function(*args, **(kwargs or {}))


def calls_while_out(engine: Any) -> dict[str, Callable[[], Any]]:
    first: nn.Parameter = list(engine.module.parameters())[0]
    return {
        "forward": lambda: torch.no_grad()(engine)(models.float_batch(0, 0, engine.rank)[0]),
        "step": engine.optimizer.step,
        "reduce": engine.reduce_gradients,
        "set gradient": lambda: zerolite.set_full_grad(first, None),
        "read": lambda: first.data.sum(),
        "save": lambda: engine.save_checkpoint(tempfile.gettempdir()),
        "gradient": lambda: zerolite.get_full_grad(first),
        "state": lambda: zerolite.get_full_optimizer_state(first, "exp_avg"),
        "again": engine.offload_states,
    }


STATES = ("compute_parameters", "persistent_parameters", "gradients", "master_weights", "optimizer_states")


def four_windows(settings: dict[str, Any], offload: dict[str, Any] | None) -> dict[str, Any]:
    """offload: arguments; states go out in the middle of the third window, after its first backward, and come back."""
    engine = mixed_engine(settings)
    losses = []
    for window in range(4):
        for micro in range(2):
            losses.append(backward(engine, window, micro))
            if (window, micro) == (2, 0):
                with torch.no_grad():
                    engine.module.frozen.bias.mul_(0.75)
            if offload is not None and (window, micro) == (2, 0):
                out_and_back(engine, offload)
            with Copies() as copies:
                engine.step()
    moment = zerolite.get_full_optimizer_state(next(engine.module.parameters()), "exp_avg_sq")
    return {"losses": losses, "copies": copies.count, "values": {**engine.full_state_dict(), "moment": moment}}


def out_and_back(engine: Any, offload: dict[str, Any]) -> None:
    before = engine.memory_report().items
    engine.offload_states(**offload)
    during = engine.memory_report()
    said = {name: raised(call) for name, call in calls_while_out(engine).items()}
    if offload:  # weights stay
        assert not during.items["optimizer_states"] and during.items["compute_parameters"]
        assert [name for name, words in said.items() if not words] == ["forward", "read"]
    else:
        assert [item for item in STATES if during.items[item]] == []
        assert all(during.host[item] == before[item] for item in ("master_weights", "optimizer_states"))
        assert all(text.startswith("RuntimeError") for text in said.values()), said
    engine.reload_states()
    engine.reload_states()
    after = engine.memory_report().items
    for item in ("gradients", "communication_buckets"):  # a reduction that was under way has ended meanwhile
        after[item] = before[item]
    assert after == before


@pytest.mark.fast("2-3-bf16")
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (3, "fp32")])
@on_ranks(1, 2)
def test_states_go_and_come_back(stage: int, precision: str) -> None:
    given = settings(stage, precision)
    plain = four_windows(given, None)
    for offload in ({}, {"include": ["optim_states", "hp_params"], "non_blocking": True}):
        found = four_windows(given, offload)
        assert (found["losses"], found["copies"]) == (plain["losses"], plain["copies"])
        assert_same_bits(plain["values"], found["values"], str(offload))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1)
def test_an_engine_that_goes_gives_back_what_is_the_models(stage: int) -> None:
    engine = mixed_engine(settings(stage, "fp32"))
    model, before = engine.module, engine.full_state_dict()
    engine.offload_states()
    del engine
    gc.collect()
    with zerolite.zero.GatheredParameters(model):
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_host_without_memory_changes_nothing(stage: int) -> None:
    """It has none for the third storage; the next call works."""
    engine = mixed_engine(settings(stage, "bf16", 1))
    run_steps(engine, 1)
    real, left = state_offload.host_memory, iter(range(2))

    def fails(nbytes: int, pin: bool) -> torch.Tensor:
        if next(left, None) is None:
            raise MemoryError("no room")
        return real(nbytes, pin)

    with mock.patch.object(state_offload, "host_memory", fails), pytest.raises(MemoryError, match="no room"):
        engine.offload_states()
    run_steps(engine, 1)
    trained = engine.full_state_dict()
    engine.offload_states(["optim_states"])
    engine.reload_states()
    assert_same_bits(trained, engine.full_state_dict(), "out and back")


# -------------------------------------------------------------------- tensors in use


@on_ranks(2)
def test_states_go_out_while_a_reduction_is_under_way() -> None:
    """Right after a backward, whose last reduction is in flight between processes."""
    losses = []
    for offloads in (False, True):
        with mock.patch.object(create, "same_host", lambda group: False):
            engine = make_engine(config(1, optimizer=ADAMW), "Chain", {"depth": 3, "width": 400})
        for step in range(3):
            engine.backward(engine(torch.full((2, 400), 0.1 * (step + 1))).square().mean())
            if offloads:
                engine.offload_states()
                engine.reload_states()
            engine.step()
        losses.append(float(engine(torch.ones(2, 400)).square().mean()))
    assert losses[0] == losses[1]


def on_disk(directory: Path | None, **zero: Any) -> dict[str, Any]:
    offload = {"offload_param": {"device": "nvme", "nvme_path": str(directory), "max_in_cpu": 0}} if directory else {}
    zero = {"stage3_param_persistence_threshold": 10, **zero, **offload}
    return config(3, optimizer=ADAMW, zero=zero)


@pytest.mark.slow
@on_ranks(2)
def test_masters_that_are_set_are_not_hidden_by_shards_read_ahead(tmp_path: Path) -> None:
    """A forward that no backward follows has read shards ahead; then masters are set."""
    losses = []
    for directory in (None, tmp_path):
        more = {"stage3_max_live_parameters": 100, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
        engine = make_engine(on_disk(directory, **more), "PrimeMlp")
        run_steps(engine, 4)
        models.square_loss(engine, models.float_batch(5, 0, engine.rank))
        assert directory is None or engine._parts.coordinator.context.reader._ahead
        for parameter in engine.module.parameters():
            zerolite.set_full_master(parameter, torch.full(tuple(parameter.ds_shape), 0.01))
        with torch.no_grad():
            losses.append(float(models.square_loss(engine, models.float_batch(6, 0, engine.rank))))
    assert losses[0] == losses[1]


@pytest.mark.slow
@on_ranks(2)
def test_states_that_are_replaced_are_not_taken_for_lost_ones(tmp_path: Path) -> None:
    found = []
    for zero in ({}, {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}):
        engine = make_engine(config(2, optimizer=ADAMW, zero=zero), "PrimeMlp")
        run_steps(engine, 2)
        for state in engine.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone() * 0.5
        run_steps(engine, 1, 2)
        found.append(snapshot(engine))
    assert_same_bits(found[1], found[0], "on disk and in memory")


def test_room_at_the_end_of_a_file_without_holes_is_zero_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncIO() as io:
        file = SwapFile(tmp_path, io, 0, "key")
        monkeypatch.setattr(swap_file._libc(), "fallocate", lambda *args: -1)
        first = file.zeros(8192).fill_(7)
        del first
        assert not file.zeros(8192).any()
