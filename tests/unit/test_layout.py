import random

import pytest
import torch

from zerolite.zero.layout import ParameterSpec, PartitionLayout, auto_bucket_numel
from zerolite.zero.local_sum import SMALL_SLOT, gaps_to_clear


def build(sizes, world_size, bucket_numel=500, alignment=32, kinds=None):
    kinds = kinds or ["a"] * len(sizes)
    specs = [ParameterSpec(f"p{i}", n, k) for i, (n, k) in enumerate(zip(sizes, kinds, strict=True))]
    return PartitionLayout.build(specs, world_size, bucket_numel, alignment)


def random_cases(count=60):
    rng = random.Random(0)
    for _ in range(count):
        sizes = [
            rng.choice([0, 1, 2, rng.randrange(1, 50), rng.randrange(1, 3000)]) for _ in range(rng.randrange(1, 30))
        ]
        kinds = [rng.choice(["a", "b"]) for _ in sizes]
        yield sizes, rng.randrange(1, 9), rng.choice([1, 100, 1000, 10**9]), rng.choice([1, 8, 32]), kinds


def test_every_element_has_exactly_one_owner():
    for case in random_cases():
        check_owners(*case)


def check_owners(sizes, world, bucket_numel, alignment, kinds):
    layout = build(sizes, world, bucket_numel, alignment, kinds)
    owned = {i: set() for i in range(len(sizes))}
    for rank in range(world):
        for f in layout.fragments(rank):
            elements = set(range(f.param_start, f.param_start + f.numel))
            assert f.numel > 0 and not owned[f.slot.index] & elements
            owned[f.slot.index] |= elements
            low, _ = layout.shard_range(layout.buckets[f.slot.bucket], rank)
            assert f.bucket_start == f.slot.start + f.param_start == low + f.shard_start
            assert f.shard_start + f.numel <= layout.buckets[f.slot.bucket].numel // world
    assert {i: len(e) for i, e in owned.items()} == dict(enumerate(sizes))


def test_buckets_are_uniform_aligned_and_disjoint():
    for case in random_cases():
        check_buckets(*case)


def check_buckets(sizes, world, bucket_numel, alignment, kinds):
    layout = build(sizes, world, bucket_numel, alignment, kinds)
    end = 0
    for bucket in layout.buckets:
        assert bucket.numel % (world * alignment) == 0 and bucket.numel > 0
        end += bucket.numel
        assert {kinds[slot.index] for slot in bucket.slots} == {bucket.bucket_kind}
        assert len(bucket.slots) == 1 or bucket.slots[-1].end <= bucket_numel
        position = 0
        for slot in bucket.slots:
            assert slot.start % alignment == 0 and slot.start >= position
            position = slot.end
        covered = sum(gap.numel for gap in bucket.gaps) + sum(slot.numel for slot in bucket.slots)
        assert covered == bucket.numel
    assert end == layout.numel and layout.numel % world == 0
    assert [slot.index for slot in layout.slots] == list(range(len(sizes)))


def test_what_is_cleared_of_a_flat_bucket_is_its_padding_and_small_slots_between():
    for sizes, world, bucket_numel, alignment, kinds in random_cases():
        specs = [ParameterSpec(f"p{i}", numel, kind) for i, (numel, kind) in enumerate(zip(sizes, kinds, strict=True))]
        for bucket in PartitionLayout.build(specs, world, bucket_numel, alignment).buckets:
            flat = torch.ones(bucket.numel)
            for gap in gaps_to_clear(bucket):
                flat[gap.start : gap.start + gap.width] = 0.0
            for gap in bucket.gaps:
                assert not flat[gap.start : gap.start + gap.width].any()
            for slot in bucket.slots:
                assert slot.numel <= SMALL_SLOT or flat[slot.start : slot.end].all()


def test_buckets_run_in_reverse_registration_order():
    layout = build([100] * 10, world_size=2, bucket_numel=256)
    order = [slot.index for bucket in layout.buckets for slot in bucket.slots]
    assert order == list(reversed(range(10)))
    assert [len(b.slots) for b in layout.buckets] == [2, 2, 2, 2, 2]


def llama_2_7b():
    block = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
    return [32000 * 4096, *block * 32, 4096, 32000 * 4096]


@pytest.mark.parametrize(
    "world, numel, buckets",
    [(8, 40_000_000, 163), (64, 64_000_000, 130), (1024, 842_301_952, 9), (4096, 842_301_952, 9)],
)
def test_buckets_grow_with_the_world_up_to_an_eighth_of_the_model(world, numel, buckets):
    sizes = llama_2_7b()
    assert auto_bucket_numel(sum(sizes), world) == numel
    assert len(build(sizes, world, numel).buckets) == buckets
