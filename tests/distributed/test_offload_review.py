"""Offload while tensors that are in use are written, freed or damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerolite
from tests.toolkit.pool import Pools
from zerolite.comm import create
from zerolite.offload import swap_file
from zerolite.offload.swap_file import SwapFile
from zerolite.offload.transfers import Transfer, _TwoHops
from zerolite.ops.async_io import AsyncIO
from zerolite.utils import memory_tags
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
    file: Any = handle.placement.file  # type: ignore[attr-defined]
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

    def tag_memory(self, storage: torch.UntypedStorage, item: str, place: str) -> None:
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
        memory_tags.listeners.append(ear := _Ear())
        try:
            train(engine, 2)
        finally:
            memory_tags.listeners.remove(ear)
        report = engine.memory_report()
        found[device] = {"device": report.items, "host": report.host, "disk": report.disk}
    return found


# -------------------------------------------------------------------- the tests


def test_masters_that_are_set_are_not_hidden_by_shards_read_ahead(pools: Pools, tmp_path: Path) -> None:
    plain = pools(2).run(read_ahead, {"directory": None})
    found = pools(2).run(read_ahead, {"directory": str(tmp_path)})
    assert found[0]["ahead"] and [rank["loss"] for rank in found] == [rank["loss"] for rank in plain]


@pytest.mark.parametrize("position", [0.0, 1.0])
def test_damaged_shards_are_found(pools: Pools, tmp_path: Path, position: float) -> None:
    for said in pools(2).run(damaged, {"directory": str(tmp_path), "position": position}):
        assert "not those that were written" in said


def test_states_go_out_while_a_reduction_is_under_way(pools: Pools) -> None:
    plain = pools(2).run(under_way, {"offloads": False})
    assert pools(2).run(under_way, {"offloads": True}) == plain


def test_states_of_torchs_optimizers_are_told_at_their_tier(pools: Pools, tmp_path: Path) -> None:
    directories = {"cpu": str(tmp_path), "nvme": str(tmp_path)}
    told = pools(1).run(places, {"directories": directories})[0]
    for device, place in (("cpu", "host"), ("nvme", "disk")):
        found = told[device]
        there = found[place]["optimizer_states"]
        assert there and found["device"]["optimizer_states"] < there / 100, device  # counts of steps
        assert not found["device"]["offload_buffers"], device


class _Without:
    """libc on a file system whose files cannot have holes."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc

    def fallocate(self, *args: Any) -> int:
        return -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._libc, name)


def test_room_at_the_end_of_a_file_without_holes_is_zero_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncIO() as io:
        file = SwapFile(tmp_path, io, 0, "key")
        libc = _Without(swap_file._libc())
        monkeypatch.setattr(swap_file, "_libc", lambda: libc)
        first = file.zeros(8192).fill_(7)
        del first
        assert not file.zeros(8192).any()


def test_an_error_of_the_second_step_of_a_copy_is_raised_by_whoever_waits() -> None:
    def fails() -> Transfer:
        raise OSError("no memory for the request")

    class Copy:
        def finish(self) -> None:
            return

        wait = advance = finish

    copy = _TwoHops(Copy(), fails)
    for call in (copy.advance, copy.wait, copy.finish):
        with pytest.raises(OSError, match="no memory"):
            call()
