"""Gathers of several tensors in one launch, a second order of collectives, and what happens where ranks disagree."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.cases.collectives import UNITS
from tests.pool import Pool, Pools
from zerolite.comm import NullCommunicator, record, second_communicator

CASES = "tests.distributed.cases.collectives"
KINDS = {
    "shared memory": "SharedMemoryCommunicator",
    "messages": "GlooCommunicator",
    "little memory": "SharedMemoryCommunicator",
    "native": "NativeCommunicator",
}


@pytest.mark.fast("2-shared memory", "2-native", "3-little memory", "4-messages")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_full_is_the_concatenation_of_the_shards(pools: Pools, world: int, kind: str) -> None:
    calls = []
    for unit in UNITS.values():
        if any(numel for numel, _ in unit):  # a gather of nothing is no collective
            numel = sum(numel for numel, _ in unit) * world
            nbytes = sum(numel * dtype.itemsize for numel, dtype in unit) * world
            calls.append(("all_gather", "parameters", numel, nbytes, str(unit[0][1]), len(unit)))
    for result in pools(world).run(f"{CASES}:gathers", {"kind": kind}):
        assert result["kinds"] == [KINDS[kind]] * 2
        assert result["calls"] == calls


def test_one_process_copies_only_what_is_not_there(pools: Pools) -> None:
    assert pools(1).run(f"{CASES}:one_process") == [[[1.0] * 5, 0]]


@pytest.mark.fast("2-shared memory", "3-shared memory", "4-shared memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_two_communicators_may_mix_in_any_order(pools: Pools, world: int, kind: str) -> None:
    pools(world).run(f"{CASES}:different_orders", {"kind": kind})


@pytest.mark.parametrize(
    "what,words",
    [
        ("length", [r"all_gather of 512 bytes for 'parameters'", r"all_gather of 4288 bytes for 'parameters'"]),
        ("memory that grows on one rank", [r"all_gather of 173504 bytes", r"all_gather of 4288 bytes"]),
        ("key", [r"all_gather of 512 bytes"] * 2),
        ("tag", [r"all_gather of 512 bytes for 'parameters'", r"all_gather of 512 bytes for 'masters'"]),
        ("operation", [r"reduce_scatter of \d+ bytes for 'gradients'", r"all_gather of \d+ bytes for 'x'"]),
        ("statistics", [r"all_reduce of 80 bytes for 'stats'", r"reduce_scatter of \d+ bytes for 'gradients'"]),
        ("statistics of another length", [r"all_reduce of 80 bytes", r"all_reduce of 12 bytes"]),
        ("broadcast", [r"broadcast of 80 bytes", r"all_reduce_max of 12 bytes"]),
        ("lengths of the same sum", [r"all_gather of 192 bytes"] * 2),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_launch_different_collectives_all_raise(
    pools: Pools, world: int, what: str, words: list[str]
) -> None:
    messages = pools(world).run(f"{CASES}:mismatch", {"what": what})
    lengths = {re.search(r"of (\d+) bytes", message)[1] for message in messages}  # type: ignore[index]
    shortest, longest = min(lengths, key=int), max(lengths, key=int)
    for rank, message in enumerate(messages):
        assert f"rank {rank}: the ranks launched different collectives" in message
        assert re.search(words[min(rank, 1)], message), message
        assert f"{shortest} to {longest} bytes" in message


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_collective_may_be_in_inference_mode(pools: Pools, kind: str) -> None:
    pools(3).run(f"{CASES}:first_in_inference_mode", {"kind": kind})
    for gradient in pools(3).run(f"{CASES}:weights_in_training", {"kind": kind}):
        assert gradient == [4.0] * 18


def test_the_second_group_is_made_once_and_outlives_its_communicators(pools: Pools) -> None:
    for result in pools(2).run(f"{CASES}:groups"):
        assert result["known"] == [True, True]
        assert result["closed"] == (None, None)
        assert result["ranks"] == [0, 1]
        assert result["description"] == "zerolite second group"


def test_some_ranks_may_have_a_second_group(pools: Pools) -> None:
    pools(3).run(f"{CASES}:subgroup")


def test_destroy_ends_the_second_group_too() -> None:
    with Pool(1, init_group=False) as pool:
        assert pool.run(f"{CASES}:lifetime") == [[(77.0, True, 0), (88.0, True, 0)]]


def test_a_communicator_can_be_injected(pools: Pools) -> None:
    for rank, answer in enumerate(pools(2).run(f"{CASES}:injected")):
        assert answer == ["NullCommunicator", rank + 3, 64, 2, "SharedMemoryCommunicator"]


def test_the_null_communicator_is_one_rank_of_many_that_hears_nothing() -> None:
    comm = NullCommunicator(2, 4)
    assert (comm.rank, comm.world_size, second_communicator(comm, torch.device("cpu"))) == (2, 4, comm)
    assert comm.staging(8, torch.float32, 0) is None
    with record() as recorder:
        fulls = [torch.full((8,), torch.nan), torch.zeros(0), torch.full((4,), 7).bfloat16()]
        comm.gather_shards(fulls, [torch.tensor([1.0, 2.0]), torch.zeros(0), torch.ones(1).bfloat16()], "parameters")
        assert fulls[0].tolist() == [1.0, 2.0] * 4 and fulls[2].tolist() == [1.0] * 4
        full = torch.arange(8.0)
        out = comm.reduce_scatter(full, "gradients", divisor=2.0, dtype=torch.bfloat16).wait()
        assert (out.tolist(), out.dtype) == ([8.0, 10.0], torch.bfloat16), "the sum of four copies, divided by 2"
        same = comm.reduce_scatter(full, "gradients").wait()
        assert same.untyped_storage().data_ptr() != full.untyped_storage().data_ptr(), "a result of its own"
        assert comm.all_reduce(full, "stats").wait() is full
        assert comm.all_gather(full, "parameters").wait() is full
        comm.all_reduce_max(full, "check")
        comm.broadcast(full, "buffers")
    assert [(call.op, call.numel, call.tensors) for call in recorder.calls] == [
        ("all_gather", 12, 3),
        ("reduce_scatter", 8, 1),
        ("reduce_scatter", 8, 1),
        ("all_reduce", 8, 1),
        ("all_gather", 8, 1),
        ("all_reduce", 8, 1),
        ("broadcast", 8, 1),
    ]
    comm.close()
