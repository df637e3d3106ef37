"""Training at stage 3 with shards at every tier, and what is where meanwhile."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolite
from tests import models
from tests.distributed.cases.growth import Frozen
from tests.distributed.cases.training import KINDS, snapshot
from zerolite.comm import Communicator
from zerolite.engine import build
from zerolite.offload.from_config import tiers_of
from zerolite.offload.shard_reader import Arrival, ShardReader
from zerolite.offload.swap_file import SwapFile
from zerolite.utils.memory_items import COMPUTE, GATHERED, HOST, STAGING, listeners
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
    for name, config in configs.items():
        with _apart() if name in apart else contextlib.nullcontext():
            results[name] = run(model, config, steps)
    return results


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    def tiers(config: Any, device: torch.device, kind: str, rank: int) -> Any:
        return tiers_of(config, device, "cuda", rank)

    with mock.patch.object(build, "tiers_of", tiers):
        yield


def run(model: str, config: dict[str, Any], steps: int) -> dict[str, Any]:
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
    result["places"] = sorted({handle.tier.place for handle in engine.coordinator.handles})
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
    for name, config in configs.items():
        with zerolite.zero.Init(config_dict_or_path=config, remote_device=remote_device):
            model = models.build(models.PrimeMlp)
            with torch.no_grad():
                model.get_parameter("first.weight").mul_(2)  # gathered, changed, and cut again
            copied = copy.deepcopy(model)
        handles = [handle_of(p) for p in model.parameters()]
        result: dict[str, Any] = {"places": sorted({h.tier.place for h in handles if h.numel})}
        with GatheredParameters([*model.parameters(), *copied.parameters()]):
            result["values"] = {key: p.detach().clone() for key, p in model.named_parameters()}
            result["copied"] = {key: p.detach().clone() for key, p in copied.named_parameters()}
        del copied
        for turn in range(2):
            engine = zerolite.initialize(model, config)
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

        def read(file: Any, resting: torch.Tensor, into: torch.Tensor) -> Any:
            if next(reads) == fail_at:  # noqa: B023 (called in this turn of the loop)
                return _Failed()
            return SwapFile_read(file, resting, into)

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


class _Failed:
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

    def own(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
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
        on_host = [index for index, handle in enumerate(engine.coordinator.handles) if handle.tier.place == HOST]
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
