"""Stage 3 with the parameters' shards on the host or on disk: the bits and the collectives are those of the device."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests.toolkit import models
from tests.toolkit.compare import assert_same_bits
from tests.toolkit.configs import ADAMW, PARTITIONED, config
from tests.toolkit.growth import Frozen
from tests.toolkit.pool import Pools
from tests.toolkit.training import KINDS, snapshot
from zerolite.comm import Communicator
from zerolite.engine import build
from zerolite.offload.from_config import placements_of
from zerolite.offload.placements import Transfer
from zerolite.offload.shard_reader import Arrival, ShardReader
from zerolite.offload.swap_file import SwapFile
from zerolite.utils.memory_tags import COMPUTE, GATHERED, HOST, STAGING, listeners
from zerolite.zero import GatheredParameters, ZeroParamStatus, register_external_parameter
from zerolite.zero.layout import part_numel
from zerolite.zero.stage3.partitioned_param_coordinator import PartitionedParameterCoordinator
from zerolite.zero.stage3.partitioned_parameter import handle_of


class External(nn.Module):
    """A weight that another module uses in its forward, registered as external."""

    class User(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(13))
            self.outside = [weight]
            register_external_parameter(self, weight)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.outside[0].t() + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.user = self.User(self.first.weight)
        self.last = nn.Linear(26, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(torch.cat([self.first(x), self.user(x)], dim=1)))


MODELS: dict[str, Any] = {
    "OddModel": models.OddModel,
    "Frozen": Frozen,
    "External": External,
    "SharedCheckpointed": models.SharedCheckpointed,
    "PrimeMlp": models.PrimeMlp,
}


class Boom(Exception):
    pass


def compare(
    model: str, configs: dict[str, dict[str, Any]], steps: int = 4, apart: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the results of several configs, by name. apart: of those, device and host are taken for different
    memories, as where the device is a GPU."""
    results = {}
    for name, settings in configs.items():
        with _apart() if name in apart else contextlib.nullcontext():
            results[name] = train_model(model, settings, steps)
    return results


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    def placements(config: Any, device: torch.device, kind: str, rank: int) -> Any:
        return placements_of(config, device, "cuda", rank)

    with mock.patch.object(build, "placements_of", placements):
        yield


def train_model(model: str, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train with everything between the steps that users do: evaluations, an exception in a forward, a write into
    parameters."""
    loss_of, batch_of = KINDS.get(model, (models.square_loss, models.float_batch))
    engine = zerolite.initialize(models.build(MODELS[model]), config)
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
            _nothing_is_whole(engine)
    result["calls"] = [(call.op, call.tag, call.numel) for call in calls.calls]
    result["followed"] = engine.coordinator.schedule.following
    result["places"] = sorted({handle.placement.place for handle in engine.coordinator.handles})
    result["parameters"] = snapshot(engine)
    return result


def _fail_in_forward(engine: Any, loss_of: Any, batch_of: Any) -> None:
    def raise_it(module: nn.Module, args: Any, outputs: Any) -> None:
        raise Boom

    leaf = [module for module in engine.module.modules() if isinstance(module, nn.Linear)][1]
    hook = leaf.register_forward_hook(raise_it)
    try:
        loss_of(engine, batch_of(0, 0, dist.get_rank()))
    except Boom:
        pass
    else:
        raise AssertionError("the forward went through")
    hook.remove()


def _write(engine: Any) -> None:
    parameters = [p for _, p in sorted(engine.module.named_parameters())][:3]
    with GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            for parameter in parameters:
                parameter.mul_(1.25)


def _nothing_is_whole(engine: Any) -> None:
    reader = engine.coordinator.group.reader
    ahead = [] if reader is None else [h.name for h in engine.coordinator.handles if reader.is_ahead(h)]
    assert not ahead, "read, and not dropped"
    for handle in engine.coordinator.handles:
        assert handle.shard.numel() == part_numel(handle.numel, dist.get_world_size())
        if not handle.persistent:
            assert handle.status is ZeroParamStatus.NOT_AVAILABLE, handle.name
            assert handle.storage is None or handle.full.untyped_storage().nbytes() == 0, handle.name


# -------------------------------------------------------------------- zero.Init


def built_partitioned(configs: dict[str, dict[str, Any]], remote_device: str | None = None) -> dict[str, Any]:
    """Return, for a model built inside zero.Init with each config: where its shards are, its values, those of a copy,
    and the losses of an engine that takes it over, and of a second one after the first has gone."""
    results = {}
    for name, settings in configs.items():
        with zerolite.zero.Init(config_dict_or_path=settings, remote_device=remote_device):
            model = models.build(models.PrimeMlp)
            with torch.no_grad():
                model.get_parameter("first.weight").mul_(2)  # gathered, changed, and cut again
            copied = copy.deepcopy(model)
        handles = [handle_of(p) for p in model.parameters()]
        result: dict[str, Any] = {"places": sorted({h.placement.place for h in handles if h.numel})}
        with GatheredParameters([*model.parameters(), *copied.parameters()]):
            result["values"] = {key: p.detach().clone() for key, p in model.named_parameters()}
            result["copied"] = {key: p.detach().clone() for key, p in copied.named_parameters()}
        del copied
        for turn in range(2):
            engine = zerolite.initialize(model, settings)
            result[f"losses {turn}"] = _losses(engine, 3)
            del engine
            with GatheredParameters(model):
                result[f"parameters {turn}"] = {key: p.detach().clone() for key, p in model.named_parameters()}
        results[name] = result
    return results


def _losses(engine: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = models.square_loss(engine, models.float_batch(step, 0, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -------------------------------------------------------------------- a disk that fails


def failing_disk(config: dict[str, Any]) -> dict[str, Any]:
    """A disk that cannot be read for a while, on all ranks, in a forward: in a gather on demand, and in one that is
    read ahead."""
    engine = zerolite.initialize(models.build(models.Chain, depth=6, width=32), config)
    losses = []
    caught = []
    for fail_at in (0, 3):
        losses += _chain(engine, 3 if fail_at else 1)
        reads = itertools.count()

        def read(file: Any, offloaded: torch.Tensor, into: torch.Tensor) -> Any:
            if next(reads) == fail_at:  # noqa: B023 (called in this turn of the loop)
                return _Failed()
            return SwapFile_read(file, offloaded, into)

        with mock.patch.object(SwapFile, "read", read):
            try:
                _chain(engine, 1)
            except OSError as error:
                caught.append(str(error))
        _nothing_is_whole(engine)
    del engine
    undisturbed = zerolite.initialize(models.build(models.Chain, depth=6, width=32), config)
    return {"caught": caught, "losses": losses, "expected": _chain(undisturbed, 1) + _chain(undisturbed, 3)}


SwapFile_read = SwapFile.read


class _Failed(Transfer):
    def wait(self) -> None:
        raise OSError(5, "read 17 bytes of the swap file")


def _chain(engine: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = engine(torch.full((2, 32), float(step + 1))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -------------------------------------------------------------------- what is where


class Census:
    """The bytes of what is alive, by item and place."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def tag_memory(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        self._known[storage._cdata] = (weakref.ref(storage), f"{item} on {place}")

    def resized(self, storage: torch.UntypedStorage) -> None:
        pass

    def bytes(self, *items: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for known, key in self._known.values():
            storage = known()
            if storage is not None and key.startswith(items):
                found[key] += storage.nbytes()
        return dict(+found)


def memory(config: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Return, for a chain of equal layers, half of them frozen: the bytes of parameters that rest between steps, and
    the most that were whole, and staged, after any layer's forward; and the layers whose shards are on the host."""
    census, whole, staged = Census(), [0], [0]

    def look(*_: Any) -> None:
        whole.append(sum(census.bytes(GATHERED).values()))
        staged.append(sum(census.bytes(STAGING).values()))

    listeners.append(census)
    try:
        model = models.build(models.Chain, depth=6, width=32)
        for layer in model.layers[:3]:
            layer.requires_grad_(False)
        for layer in model.layers:
            layer.register_forward_hook(look)
        engine = zerolite.initialize(model, config)
        for step in range(steps):
            engine.backward(engine(torch.full((2, 32), float(step + 1))).square().mean())
            engine.step()
        rests = census.bytes(COMPUTE, GATHERED)
        on_host = [index for index, handle in enumerate(engine.coordinator.handles) if handle.placement.place == HOST]
    finally:
        listeners.remove(census)
    return {"rests": rests, "whole": max(whole), "staged": max(staged), "on host": on_host}


# -------------------------------------------------------------------- reading ahead


def reads(config: dict[str, Any], steps: int = 4) -> list[list[tuple[str, tuple[int, ...]]]]:
    """By step, what was read and what was gathered of what rests on disk, in order: "read" or "gather" with numbers of
    parameters, "end" of a gather with as many numbers, and "use" where a module may begin to compute."""
    engine = zerolite.initialize(models.build(models.Chain, depth=6, width=32), config)
    found = []
    with _watched(engine) as events:
        for step in range(steps):
            events.clear()
            engine.backward(engine(torch.full((2, 32), float(step + 1))).square().mean())
            found.append(list(events))
            engine.step()
    return found


@contextlib.contextmanager
def _watched(engine: Any) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    events: list[tuple[str, tuple[int, ...]]] = []
    numbers = {id(handle): index for index, handle in enumerate(engine.coordinator.handles)}
    fulls = {id(handle.full): index for index, handle in enumerate(engine.coordinator.handles)}
    ahead, gather, end = ShardReader.ahead, Communicator.gather_shards, Arrival.end
    execute = PartitionedParameterCoordinator._execute

    def watched_ahead(self: ShardReader, members: Any) -> None:
        if members:
            events.append(("read", tuple(numbers[id(member)] for member in members)))
        ahead(self, members)

    def watched_gather(self: Communicator, members: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(("gather", tuple(fulls[id(full)] for full in members)))
        return gather(self, members, *args, **kwargs)

    def watched_end(self: Arrival) -> None:
        events.append(("end", tuple(range(len(self.shards)))))
        end(self)

    def watched_execute(self: PartitionedParameterCoordinator, fetch: Any) -> None:
        execute(self, fetch)
        events.append(("use", ()))

    with (
        mock.patch.object(PartitionedParameterCoordinator, "_execute", watched_execute),
        mock.patch.object(Arrival, "end", watched_end),
        mock.patch.object(ShardReader, "ahead", watched_ahead),
        mock.patch.object(Communicator, "gather_shards", watched_gather),
    ):
        yield events


def all_of_it(calls: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Several functions of this module in one call, by name."""
    return {name: globals()[function](**arguments) for name, (function, arguments) in calls.items()}


# -------------------------------------------------------------------- the tests


PREFETCH = "stage3_prefetch_bucket_size"
ELEMENTS = 1024  # of a layer of the chain
LAYERS = 6


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


def run(pools: Pools, world: int, calls: dict[str, tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return pools(world).run(all_of_it, {"calls": calls}, timeout=240)


EVERY = ("device", "host", "disk", "host apart", "disk apart")


def compared(
    path: Path, model: str, setting: str, names: tuple[str, ...] = EVERY, **more: Any
) -> tuple[str, dict[str, Any]]:
    """For :func:`run`. names: of placements, "apart" where device and host do not share their memory."""
    of_placement = placements(path, setting, **more)
    configs = {name: of_placement[name.split()[0]] for name in names}
    return "compare", {"model": model, "configs": configs, "apart": tuple(name for name in names if "apart" in name)}


def gathers_as_one(calls: list[tuple[str, str, int]]) -> tuple[list[tuple[str, str, int]], int]:
    """All calls but the gathers of parameters, in order; and the elements that these have gathered."""
    gathers = [numel for op, _, numel in calls if op == "all_gather"]
    return [call for call in calls if call[0] != "all_gather"], sum(gathers)


def assert_alike(ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        for what, runs in results.items():
            expected = runs["device"]
            assert expected["places"] == ["device"]
            for name, found in runs.items():
                where = f"rank {rank}, {what}, {name}"
                assert_same_bits(expected["parameters"], found["parameters"], where)
                for key in ("losses", "norms", "evaluated", "followed"):
                    assert found[key] == expected[key], f"{where}: {key}"
                calls = gathers_as_one if "disk" in name else list  # these may begin later, and in smaller groups
                assert calls(found["calls"]) == calls(expected["calls"]), where
                assert name == "device" or "device" not in found["places"], where


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_every_tier_gives_the_bits_and_collectives_of_the_device(pools: Pools, world: int, tmp_path: Path) -> None:
    some, others = ("device", "host apart", "disk"), ("device", "host", "disk apart")
    calls = {
        "tied, frozen, empty": compared(tmp_path, "OddModel", "moving", some),
        "bf16, accumulated": compared(tmp_path, "OddModel", "tight", others, precision="bf16", accumulation=2),
    }
    assert_alike(run(pools, world, calls))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("setting", list(PARTITIONED))
def test_every_kind_of_model_is_the_same_at_every_tier(pools: Pools, world: int, setting: str, tmp_path: Path) -> None:
    models = ("OddModel", "Frozen", "External", "SharedCheckpointed", "PrimeMlp")
    calls = {
        model: compared(tmp_path, model, setting, disk={"buffer_size": 300, "buffer_count": 1}) for model in models
    }
    for model in ("Frozen", "OddModel"):
        calls[f"{model}, bf16"] = compared(tmp_path, model, setting, precision="bf16", accumulation=2)
    assert_alike(run(pools, world, calls))


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_shards_rest_at_their_tier_and_nothing_is_whole_between_uses(pools: Pools, world: int, tmp_path: Path) -> None:
    configs = placements(tmp_path, "moving", {PREFETCH: 1})
    part = 4 * part_numel(ELEMENTS, world)  # bytes of a layer, frozen or trained
    ranks = run(pools, world, {name: ("memory", {"config": settings}) for name, settings in configs.items()})
    for results in ranks:
        for name, found in results.items():
            assert found["rests"] == {f"compute_parameters on {name}": LAYERS * part}, name
        whole = 2 * world * part
        for name in ("host", "disk"):
            assert 0 < results[name]["whole"] <= whole
        assert results["host"]["staged"] == 0
        assert 0 < results["disk"]["staged"]


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_what_stays_in_the_hosts_memory_with_a_disk(pools: Pools, world: int, tmp_path: Path) -> None:
    """Trained parameters fill max_in_cpu before frozen ones, and of each kind those that a forward uses first; whole
    parameters are on the device anyway."""
    rows = {"max_in_cpu": 4 * math.ceil(ELEMENTS / world)}
    calls = {
        "some": ("memory", {"config": placements(tmp_path, "moving", disk=rows)["disk"]}),
        "whole": ("memory", {"config": placements(tmp_path, "defaults")["disk"]}),
    }
    for results in run(pools, world, calls):
        assert results["some"]["on host"] == [0, 3, 4, 5]
        assert results["whole"]["on host"] == [*range(LAYERS)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_on_disk_is_read_ahead_of_its_gather_within_the_limit(pools: Pools, world: int, tmp_path: Path) -> None:
    rows = 4
    buffers = {"buffer_size": ELEMENTS // world, "buffer_count": rows}
    calls = {
        prefetch: ("reads", {"config": placements(tmp_path, "moving", {PREFETCH: prefetch}, buffers)["disk"]})
        for prefetch in (0, 10**6)
    }
    order = [*range(LAYERS), *reversed(range(LAYERS))]
    for results in run(pools, world, calls):
        for first, *_, last in results.values():
            assert _of(first, "read", "gather") == [
                (kind, (index,)) for index in order for kind in ("read", "gather")
            ], "on demand, without a plan"
            assert [index for _, indices in _of(last, "gather") for index in indices] == order
            assert [index for _, indices in _of(last, "read") for index in indices] == order
            assert min(_leads(last, rows)[1:]) > 0, last


def _of(events: list[tuple[str, tuple[int, ...]]], *kinds: str) -> list[tuple[str, tuple[int, ...]]]:
    return [event for event in events if event[0] in kinds]


def _leads(events: list[tuple[str, tuple[int, ...]]], limit: int) -> list[int]:
    """For each gather, how many uses began since the read for it. Never more than ``limit`` are in hand."""
    pending: list[tuple[int, int]] = []  # parameter, place in the events
    leads = []
    in_hand = 0
    for place, (kind, indices) in enumerate(events):
        if kind == "read":
            pending += [(index, place) for index in indices]
            in_hand += len(indices)
            assert in_hand <= limit
        elif kind == "end":
            in_hand -= len(indices)
        elif kind == "gather":
            for index in indices:
                expected, begun = pending.pop(0)
                assert index == expected
                leads.append(sum(kind == "use" for kind, _ in events[begun:place]))
    return leads


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_built_partitioned_rests_at_its_tier_from_the_start(pools: Pools, world: int, tmp_path: Path) -> None:
    configs = placements(tmp_path, "moving")
    for results in run(pools, world, {"": ("built_partitioned", {"configs": configs})}):
        expected = results[""]["device"]
        for name, found in results[""].items():
            assert found["places"] == [name]
            for key in ("values", "copied", "parameters 0", "parameters 1"):
                assert_same_bits(expected["values" if key == "copied" else key], found[key], f"{name}: {key}")
            for turn in range(2):
                assert found[f"losses {turn}"] == expected[f"losses {turn}"]


@pytest.mark.slow
def test_remote_device_overrides_the_config(pools: Pools, tmp_path: Path) -> None:
    configs = {"host": placements(tmp_path, "moving")["disk"]}
    for results in run(pools, 2, {"": ("built_partitioned", {"configs": configs, "remote_device": "cpu"})}):
        assert results[""]["host"]["places"] == ["host"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_cannot_be_read_is_an_error_after_which_training_goes_on(
    pools: Pools, world: int, tmp_path: Path
) -> None:
    disk = placements(tmp_path, "moving", disk={"buffer_size": ELEMENTS, "buffer_count": 4})["disk"]
    for results in run(pools, world, {"": ("failing_disk", {"config": disk})}):
        assert len(results[""]["caught"]) == 2 and all("17 bytes" in text for text in results[""]["caught"])
        assert results[""]["losses"] == results[""]["expected"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["config", "group"])
def test_parameters_that_are_trained_later_move_on_at_their_tier(
    pools: Pools, world: int, how: str, tmp_path: Path
) -> None:
    found = {
        name: pools(world).run("tests.distributed.test_growth:train", {"config": settings, "how": how, "steps": 7})
        for name, settings in placements(tmp_path, "tight", precision="bf16").items()
    }
    for name in ("host", "disk"):
        for expected, ours in zip(found["device"], found[name], strict=True):
            assert_same_bits(expected["parameters"], ours["parameters"], name)
            assert ours["losses"] == expected["losses"]
