"""Compressed collectives between ranks: what arrives, equal bits on all of them, and the bytes that travel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.toolkit.ranks import on_ranks
from tests.toolkit.transports import CPU, late, transport
from zerolite.comm import create_communicator
from zerolite.ops.call import QUANT_BLOCK
from zerolite.ops.quantization import dequantize, quantize, row_bytes
from zerolite.zero.compression import GRADIENT_BITS, VALUE_BITS, Compression, ErrorFeedback

KINDS = ("shared memory", "messages", "little memory", "native")


def values_of(rank: int, numel: int, salt: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * salt + rank)).to(dtype)


def packed_and_back(values: Tensor, bits: int) -> Tensor:
    """Return one row as it arrives."""
    packed = torch.zeros(1, row_bytes(values.numel(), bits), dtype=torch.uint8)
    arrived = torch.empty_like(values)
    quantize(values, packed, bits)
    dequantize(packed, arrived, bits)
    return arrived


def sum_of(rows: list[Tensor], bits: int) -> Tensor:
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + packed_and_back(row, bits)
    return total


def all_reduced(everyone: list[Tensor], divisor: float = 1.0) -> Tensor:
    """The sum of all ranks, in parts of whole blocks."""
    numel, world = everyone[0].numel(), len(everyone)
    rows = [F.pad(one, (0, -numel % (world * QUANT_BLOCK))).chunk(world) for one in everyone]
    sums = [sum_of([row[part] for row in rows], GRADIENT_BITS) / divisor for part in range(world)]
    return torch.cat([packed_and_back(part, VALUE_BITS) for part in sums])[:numel]


def on_all_ranks(tensor: Tensor) -> list[Tensor]:
    found: list[Tensor] = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


@pytest.mark.fast("2-native", "3-messages", "4-shared memory")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3, 4)
def test_what_arrives_is_what_was_packed(kind: str) -> None:
    """Gathers, sums in the order of ranks, and both together; several in flight, which end in their order."""
    with transport(kind):
        comm = create_communicator(CPU)
        compression, world = Compression(comm), comm.world_size
        for numel in (1, 300, 4099):  # of a part
            everyone = [values_of(rank, world * numel, salt=1) for rank in range(world)]
            full = torch.zeros(world * numel, dtype=torch.bfloat16)
            comm.shard(full).copy_(everyone[comm.rank][:numel])
            gathered = compression.all_gather(full, "parameters")
            reduced = compression.reduce_scatter(everyone[comm.rank].clone(), "gradients", divisor=3.0)
            summed = compression.all_reduce(everyone[comm.rank].clone(), "gradients", divisor=3.0)
            uneven = compression.all_reduce(everyone[comm.rank][1:].clone(), "gradients")
            assert gathered.wait() is full
            parts = [packed_and_back(one[:numel].bfloat16(), VALUE_BITS) for one in everyone]
            assert torch.equal(full, torch.cat(parts)), "every part is what its rank sent, this rank's own too"
            sums = [sum_of([comm.shard(one, part) for one in everyone], GRADIENT_BITS) / 3.0 for part in range(world)]
            assert torch.equal(reduced.wait(), sums[comm.rank])
            assert torch.equal(summed.wait(), all_reduced(everyone, 3.0))
            total = uneven.wait()
            assert total.numel() == world * numel - 1
            assert all(torch.equal(total, other) for other in on_all_ranks(total))


@on_ranks(2, 3)
def test_nothing_is_read_before_it_has_arrived() -> None:
    with late():
        comm = create_communicator(CPU)
        compression, world = Compression(comm), comm.world_size
        everyone = [values_of(rank, 600 * world, salt=2) for rank in range(world)]
        mine = everyone[comm.rank].clone()
        summed, reduced = compression.all_reduce(mine, "gradients"), compression.reduce_scatter(mine, "gradients")
        rows = [sum_of([comm.shard(one, part) for one in everyone], GRADIENT_BITS) for part in range(world)]
        assert torch.equal(summed.wait(), all_reduced(everyone))
        assert torch.equal(reduced.wait(), rows[comm.rank])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@on_ranks(3)
def test_a_number_that_is_not_finite_arrives_on_all_ranks(bad: float) -> None:
    """And leaves no error behind, from which later sums would not recover."""
    comm = create_communicator(CPU)
    compression = Compression(comm, ErrorFeedback())
    values = values_of(comm.rank, 3 * 512, salt=3)
    if comm.rank == 1:
        values[700] = bad  # in the second part
    total = compression.all_reduce(values.clone(), "gradients", key=4).wait()
    assert total.isnan().nonzero().flatten().tolist() == list(range(512, 768))
    assert all(bool(error.isfinite().all()) for error in compression.memory())
    values[700] = 0.0
    assert bool(compression.all_reduce(values, "gradients", key=4).wait().isfinite().all())
    full = torch.zeros(3 * 256, dtype=torch.float16)
    comm.shard(full).fill_(bad if comm.rank == 2 else 1.0)
    assert compression.all_gather(full, "parameters").wait().isnan().sum() == 256


@on_ranks(2)
def test_errors_are_fed_back_by_bucket_and_forgotten_in_time() -> None:
    comm = create_communicator(CPU)
    compression, plain = Compression(comm, ErrorFeedback(0.5, reset_T=3)), Compression(comm)
    values = values_of(comm.rank, 2 * 1000, salt=4)
    once = plain.reduce_scatter(values.clone(), "gradients", key=1).wait()
    exact = sum(comm.shard(values_of(rank, 2 * 1000, salt=4)) for rank in range(2))
    results = {key: [] for key in (1, 2)}
    for _ in range(4):
        for key, found in results.items():
            found.append(compression.reduce_scatter(values.clone(), "gradients", key=key).wait())
    for found in results.values():
        assert torch.equal(found[0], once) and torch.equal(found[3], once), "no error at first, and after three sums"
        assert not torch.equal(found[1], once) and not torch.equal(found[2], once)
        mean = torch.stack(found[:3]).mean(0)
        assert float((mean - exact).norm()) < 0.8 * float((once - exact).norm())
    assert all(torch.equal(one, other) for one, other in zip(*results.values(), strict=True))
    assert [error.dtype for error in compression.memory()] == [torch.bfloat16] * 2


@pytest.mark.fast("2-native", "3-messages", "4-shared memory")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3, 4)
def test_an_exchange_brings_every_rank_its_part_of_all(kind: str) -> None:
    with transport(kind):
        comm = create_communicator(CPU)
        for numel in (1, 17, 30000):
            sent = [values_of(rank, numel * comm.world_size, salt=5) for rank in range(comm.world_size)]
            received = comm.all_to_all(sent[comm.rank].clone(), "tokens").wait()
            assert torch.equal(received, torch.cat([comm.shard(one) for one in sent]))


@pytest.mark.fast("2-native", "3-messages", "4-shared memory")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3, 4)
def test_a_permutation_brings_every_rank_what_its_source_sends(kind: str) -> None:
    with transport(kind):
        comm = create_communicator(CPU)
        rank, size = comm.rank, comm.world_size
        for numel in (0, 1, 17, 30000):
            sent = [values_of(peer, numel, salt=5) for peer in range(size)]
            for target, source in (((rank + 1) % size, (rank - 1) % size), (size - 1 - rank, size - 1 - rank)):
                received = comm.permute(sent[rank].clone(), target, source, "tokens").wait()
                assert torch.equal(received, sent[source])
