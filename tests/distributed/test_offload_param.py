"""Stage 3 with the parameters' shards on the host or on disk: the bits and the collectives are those of the device."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.distributed.test_stage3_gathered import Lends
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.memory import tagged, two_memories
from tests.toolkit.partitioned import whole
from tests.toolkit.ranks import on_ranks
from tests.toolkit.training import KINDS, raises, run_steps, snapshot
from zerolite.offload.placement import Transfer
from zerolite.offload.swap_file import SwapFile
from zerolite.utils.memory_tags import COMPUTE, GATHERED, HOST, STAGING
from zerolite.zero import GatheredParameters, ZeroParamStatus
from zerolite.zero.layout import shard_numel
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

PREFETCH = "stage3_prefetch_bucket_size"
ELEMENTS, LAYERS = 1024, 6  # of a layer of the chain; of the chain
EVERY = ("device", "host", "disk", "host apart", "disk apart")


def placements(
    path: Path, setting: str, zero: dict[str, Any] | None = None, disk: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A config for each placement. zero: further keys of its section; disk: of offload_param for the disk."""
    blocks: dict[str, dict[str, Any]] = {
        "device": {"device": "none"},
        "host": {"device": "cpu"},
        "disk": {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0, **(disk or {})},
    }
    sections = {name: {**PARTITIONED[setting], **(zero or {}), "offload_param": blocks[name]} for name in blocks}
    return {name: config(3, clip=0.5, optimizer=ADAMW, zero=section, **more) for name, section in sections.items()}


def chain(config: dict[str, Any]) -> Any:
    return zerolite.initialize(models.build(models.Chain, depth=LAYERS, width=32), config)


def train_chain(engine: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = engine(torch.full((2, 32), float(step + 1))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -------------------------------------------------------------------- numbers and collectives


class Boom(Exception):
    pass


def train_model(model: str, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train with everything between the steps that users do: evaluations, an exception in a forward, a write into
    parameters."""
    loss_of, batch_of = KINDS.get(model, (models.square_loss, models.float_batch))
    build = partial(Lends, register="function") if model == "Lends" else getattr(models, model)
    engine = zerolite.initialize(models.build(build), config)
    result: dict[str, Any] = {"losses": [], "norms": [], "evaluated": []}
    with zerolite.comm.record() as calls:
        for step in range(steps):
            if step == 1:
                _fail_in_forward(engine, loss_of, batch_of)
            if step == 2:
                _write(engine)
            for micro in range(engine.gradient_accumulation_steps):
                loss = loss_of(engine, batch_of(step, micro, dist.get_rank()))
                engine.backward(loss)
                engine.step()
                result["losses"].append(loss.item())
            result["norms"].append(engine.get_global_grad_norm())
            with torch.inference_mode() if step % 2 else torch.no_grad():
                result["evaluated"].append(loss_of(engine, batch_of(step, 7, dist.get_rank())).item())
            assert_nothing_is_whole(engine)
    # Without those that tell that a disk has failed.
    result["calls"] = [(call.op, call.tag, call.numel) for call in calls.calls if call.tag != "update"]
    result["followed"] = engine._parts.coordinator.schedule.following
    result["places"] = sorted({handle.placement.location for handle in engine._parts.coordinator.sharded_params})
    result["parameters"] = snapshot(engine)
    return result


def _fail_in_forward(engine: Any, loss_of: Any, batch_of: Any) -> None:
    def raise_it(module: nn.Module, args: Any, outputs: Any) -> None:
        raise Boom

    leaf = [module for module in engine.module.modules() if isinstance(module, nn.Linear)][1]
    hook = leaf.register_forward_hook(raise_it)
    with raises(Boom):
        loss_of(engine, batch_of(0, 0, dist.get_rank()))
    hook.remove()


def _write(engine: Any) -> None:
    parameters = [p for _, p in sorted(engine.module.named_parameters())][:3]
    with GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            for parameter in parameters:
                parameter.mul_(1.25)


def assert_nothing_is_whole(engine: Any) -> None:
    reader = engine._parts.coordinator.context.reader
    ahead = (
        [] if reader is None else [h.name for h in engine._parts.coordinator.sharded_params if reader.is_read_ahead(h)]
    )
    assert not ahead, "read, and not dropped"
    for handle in engine._parts.coordinator.sharded_params:
        assert handle.shard.numel() == shard_numel(handle.numel, dist.get_world_size())
        if not handle.persistent:
            assert handle.status is ZeroParamStatus.NOT_AVAILABLE, handle.name
            assert handle.storage is None or handle.full.untyped_storage().nbytes() == 0, handle.name


def gathers_as_one(calls: list[tuple[str, str, int]]) -> tuple[list[tuple[str, str, int]], int]:
    """All calls but the gathers of parameters, in order; and the elements that these have gathered."""
    gathers = [numel for op, _, numel in calls if op == "all_gather"]
    return [call for call in calls if call[0] != "all_gather"], sum(gathers)


def assert_alike(path: Path, model: str, setting: str, names: tuple[str, ...] = EVERY, **more: Any) -> None:
    """names: of placements; "apart" where device and host are taken for different memories, as with a GPU."""
    configs, results = placements(path, setting, **more), {}
    for name in names:
        with two_memories() if "apart" in name else contextlib.nullcontext():
            results[name] = train_model(model, configs[name.split()[0]], 4)
    expected = results["device"]
    assert expected["places"] == ["device"]
    for name, found in results.items():
        assert_same_bits(expected["parameters"], found["parameters"], f"{model}, {name}")
        for key in ("losses", "norms", "evaluated", "followed"):
            assert found[key] == expected[key], f"{model}, {name}: {key}"
        calls = gathers_as_one if "disk" in name else list  # these may begin later, and in smaller groups
        assert calls(found["calls"]) == calls(expected["calls"]), f"{model}, {name}"
        assert name == "device" or "device" not in found["places"]


@pytest.mark.fast("2")
@on_ranks(1, 2, timeout=240)
def test_every_tier_gives_the_bits_and_collectives_of_the_device(tmp_path: Path) -> None:
    assert_alike(tmp_path, "OddModel", "moving", ("device", "host apart", "disk"))
    assert_alike(tmp_path, "OddModel", "tight", ("device", "host", "disk apart"), precision="bf16", accumulation=2)


KINDS_OF_MODELS = [("OddModel", "kept"), ("Frozen", "tight"), ("Lends", "moving"), ("SharedCheckpointed", "tight")]
KINDS_OF_MODELS += [("PrimeMlp", "one unit"), ("PrimeMlp", "defaults")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setting"), KINDS_OF_MODELS)
@on_ranks(2, 3, timeout=240)
def test_every_kind_of_model_is_the_same_at_every_tier(model: str, setting: str, tmp_path: Path) -> None:
    assert_alike(tmp_path, model, setting, disk={"buffer_size": 300, "buffer_count": 1})
    if model in ("Frozen", "OddModel"):
        assert_alike(tmp_path, model, setting, precision="bf16", accumulation=2)


@pytest.mark.slow
@on_ranks(1, 2)
def test_a_model_built_partitioned_rests_at_its_tier_from_the_start(tmp_path: Path) -> None:
    """Its values, those of a copy, and what an engine and then a second one make of it; remote_device comes first."""
    expected: dict[str, Any] = {}
    for name, settings in [*placements(tmp_path, "moving").items(), ("remote", placements(tmp_path, "moving")["disk"])]:
        remote = {"remote_device": "cpu"} if name == "remote" else {}
        with zerolite.zero.Init(config_dict_or_path=settings, **remote):
            model = models.build(models.PrimeMlp)
            with torch.no_grad():
                model.get_parameter("first.weight").mul_(2)  # gathered, changed, and cut again
            copied = copy.deepcopy(model)
        handles = [sharded_param_of(p) for p in model.parameters()]
        assert {h.placement.location for h in handles if h.numel} == {"host" if name == "remote" else name}
        found: dict[str, Any] = {"values": whole(model), "copied": whole(copied)}
        assert_same_bits(found["values"], found["copied"], name)
        for turn in range(2):
            engine = zerolite.initialize(model, settings)
            found[f"losses {turn}"] = run_steps(engine, 3)
            del engine
            found[f"parameters {turn}"] = whole(model)
        expected = expected or found
        for key, value in found.items():
            if "losses" in key:
                assert value == expected[key], f"{name}: {key}"
            else:
                assert_same_bits(expected[key], value, f"{name}: {key}")
        del model, copied, handles


class Failed(Transfer):
    def wait(self) -> None:
        raise OSError(5, "read 17 bytes of the swap file")


@pytest.mark.slow
@on_ranks(2)
def test_a_disk_that_cannot_be_read_is_an_error_after_which_training_goes_on(tmp_path: Path) -> None:
    """Reads fail for a while, on all ranks, in a forward: in gathers on demand, and in those read ahead."""
    settings = placements(tmp_path, "moving", disk={"buffer_size": ELEMENTS, "buffer_count": 4})["disk"]
    engine, losses, reads_disk = chain(settings), [], SwapFile.read
    for fail_at in (0, 3):
        losses += train_chain(engine, 3 if fail_at else 1)
        reads = itertools.count()

        def read(file: Any, offloaded: Tensor, into: Tensor, at: int = fail_at, count: Any = reads) -> Any:
            return Failed() if next(count) == at else reads_disk(file, offloaded, into)

        with mock.patch.object(SwapFile, "read", read), pytest.raises(OSError, match="17 bytes"):
            train_chain(engine, 1)
        assert_nothing_is_whole(engine)
    del engine
    undisturbed = chain(settings)
    assert losses == train_chain(undisturbed, 1) + train_chain(undisturbed, 3)


# -------------------------------------------------------------------- what is where


def memory(config: dict[str, Any]) -> dict[str, Any]:
    """Return, for a chain of equal layers, half of them frozen: the bytes of parameters that rest between steps, and
    the most that were whole, and staged, after any layer's forward; and the layers whose shards are on the host."""
    seen: dict[str, list[int]] = {GATHERED: [0], STAGING: [0]}
    with tagged() as named:

        def look(*_: Any) -> None:
            for item, nbytes in seen.items():
                nbytes.append(sum(named.alive(item).values()))

        model = models.build(models.Chain, depth=LAYERS, width=32)
        for number, layer in enumerate(model.layers):
            layer.requires_grad_(number > 2).register_forward_hook(look)
        engine = zerolite.initialize(model, config)
        train_chain(engine, 3)
        rests = named.alive(COMPUTE, GATHERED)
    on_host = [
        i for i, handle in enumerate(engine._parts.coordinator.sharded_params) if handle.placement.location == HOST
    ]
    return {"rests": rests, "whole": max(seen[GATHERED]), "staged": max(seen[STAGING]), "on host": on_host}


@pytest.mark.fast("2")
@on_ranks(2, 3)
def test_shards_rest_at_their_tier_and_nothing_is_whole_between_uses(tmp_path: Path) -> None:
    world = dist.get_world_size()
    part = 4 * shard_numel(ELEMENTS, world)  # bytes of a layer, frozen or trained
    for name, settings in placements(tmp_path, "moving", {PREFETCH: 1}).items():
        found = memory(settings)
        assert found["rests"] == {(COMPUTE, name): LAYERS * part}
        if name != "device":
            assert 0 < found["whole"] <= 2 * world * part
            assert (found["staged"] > 0) == (name == "disk")


@on_ranks(2)
def test_what_stays_in_the_hosts_memory_with_a_disk(tmp_path: Path) -> None:
    """Trained parameters fill max_in_cpu before frozen ones, and of each kind those that a forward uses first; whole
    parameters are on the device anyway."""
    rows = {"max_in_cpu": 4 * math.ceil(ELEMENTS / 2)}
    assert memory(placements(tmp_path, "moving", disk=rows)["disk"])["on host"] == [0, 3, 4, 5]
    assert memory(placements(tmp_path, "defaults")["disk"])["on host"] == [*range(LAYERS)]
