"""Offload while tensors that are in use are written, freed or damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pools
from zerolite.offload import swap_file
from zerolite.offload.swap_file import SwapFile
from zerolite.offload.transfers import Transfer, _TwoHops
from zerolite.ops.async_io import AsyncIO

CASES = "tests.distributed.cases.offload_review"


def test_masters_that_are_set_are_not_hidden_by_shards_read_ahead(pools: Pools, tmp_path: Path) -> None:
    plain = pools(2).run(f"{CASES}:read_ahead", {"directory": None})
    found = pools(2).run(f"{CASES}:read_ahead", {"directory": str(tmp_path)})
    assert found[0]["ahead"] and [rank["loss"] for rank in found] == [rank["loss"] for rank in plain]


@pytest.mark.parametrize("position", [0.0, 1.0])
def test_damaged_shards_are_found(pools: Pools, tmp_path: Path, position: float) -> None:
    for said in pools(2).run(f"{CASES}:damaged", {"directory": str(tmp_path), "position": position}):
        assert "not those that were written" in said


def test_states_go_out_while_a_reduction_is_under_way(pools: Pools) -> None:
    plain = pools(2).run(f"{CASES}:under_way", {"offloads": False})
    assert pools(2).run(f"{CASES}:under_way", {"offloads": True}) == plain


def test_states_of_torchs_optimizers_are_told_at_their_tier(pools: Pools, tmp_path: Path) -> None:
    directories = {"cpu": str(tmp_path), "nvme": str(tmp_path)}
    told = pools(1).run(f"{CASES}:places", {"directories": directories})[0]
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
