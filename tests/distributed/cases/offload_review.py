"""Offloaded tensors that are written, or emptied, behind the back of code that reads them ahead."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from torch import nn

import zerolite
from zerolite.comm import create
from zerolite.utils import memory_items
from zerolite.zero.stage3.partitioned_parameter import handle_of


def build(width: int = 131) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(70, width), nn.GELU(), nn.Linear(width, 70), nn.Linear(70, 9))


def loss_of(engine: Any, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(10 * step + engine.rank)
    x, y = torch.randn(4, 70, generator=made), torch.randn(4, 9, generator=made)
    return nn.functional.mse_loss(engine(x).float(), y)


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        engine.backward(loss_of(engine, step))
        engine.step()


def config(stage: int, aio: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 9000, **zero},
        **({"aio": aio} if aio else {}),
    }


def read_ahead(directory: str | None) -> dict[str, Any]:
    """A forward that no backward follows has read shards ahead; then masters are set. directory: of the shards; None:
    they are not on disk."""
    zero: dict[str, Any] = {"stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 0}
    zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 100}
    if directory is not None:
        zero["offload_param"] = {"device": "nvme", "nvme_path": directory, "max_in_cpu": 0}
    model: Any = build()
    engine: Any = zerolite.initialize(model, config(3, **zero))
    train(engine, 4)
    loss_of(engine, 5)
    reader = engine.coordinator.group.reader
    ahead = 0 if reader is None else len(reader._ahead)
    for parameter in model.parameters():
        zerolite.set_full_master(parameter, torch.full(tuple(parameter.ds_shape), 0.01))
    with torch.no_grad():
        return {"ahead": ahead, "loss": float(loss_of(engine, 6))}


def damaged(directory: str, position: float) -> str:
    """Return the error of a forward after one byte of a shard on disk has changed, so far in it."""
    on_disk = {"device": "nvme", "nvme_path": directory, "max_in_cpu": 0}
    model = build()
    zero = {"offload_param": on_disk, "stage3_param_persistence_threshold": 100}
    engine = zerolite.initialize(model, config(3, {"checksums": True}, **zero))
    train(engine, 2)
    handle = handle_of(list(model.parameters())[2])
    assert handle is not None
    file: Any = handle.tier.file  # type: ignore[attr-defined]
    start, _ = file._offsets[handle.shard.untyped_storage().data_ptr()]
    at = start + 4 * (int(handle.shard.storage_offset()) + int(position * (handle.shard.numel() - 1)))
    os.pwrite(file._fd, bytes([os.pread(file._fd, 1, at)[0] ^ 1]), at)
    try:
        with torch.no_grad():
            loss_of(engine, 9)
    except OSError as error:
        return str(error)
    return ""


def under_way(offloads: bool) -> float:
    """States go out right after a backward, whose last reduction is in flight between processes."""
    with mock.patch.object(create, "same_host", lambda group: False):
        engine = zerolite.initialize(build(2000), config(1))
    for step in range(3):
        engine.backward(loss_of(engine, step))
        if offloads:
            engine.offload_states()
            engine.reload_states()
        engine.step()
    return float(loss_of(engine, 3))


class _Ear:
    """Listens, as what measures memory does, so that parts of the engine say what they hold."""

    def own(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
        return

    def resized(self, storage: torch.UntypedStorage) -> None:
        return


def places(directories: dict[str, str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the placement of the states of torch's own optimizer, as the report tells, by the device they are
    offloaded to."""
    found = {}
    for device, directory in directories.items():
        given = config(2, offload_optimizer={"device": device, "nvme_path": directory})
        given["optimizer"] = {"type": "NAdam", "params": {"lr": 1e-2}}
        engine = zerolite.initialize(build(), given)
        memory_items.listeners.append(ear := _Ear())
        try:
            train(engine, 2)
        finally:
            memory_items.listeners.remove(ear)
        report = engine.memory_report()
        found[device] = {"device": report.items, "host": report.host, "disk": report.disk}
    return found
