"""Loaders that give each rank its part of the data."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from zerolite.runtime.dataloader import RepeatingLoader, build_dataloader


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class LengthOnly:
    def __len__(self):
        return 3


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


def samples(loader):
    return [int(x) for batch in loader for x in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, 12])
def test_ranks_share_the_data_equally(world_size, size):
    data = list(range(size))
    loaders = [build_dataloader(data, 2, rank, world_size) for rank in range(world_size)]
    parts = [samples(loader) for loader in loaders]
    share = -(-size // world_size)
    assert [len(part) for part in parts] == [share] * world_size
    assert {len(loader) for loader in loaders} == {-(-share // 2)}
    assert set().union(*parts) == set(data)
    if size % world_size == 0:
        assert sorted(sum(parts, [])) == data


def test_each_pass_is_shuffled_anew_and_alike_on_all_ranks():
    data = list(range(40))
    loaders = [build_dataloader(data, 4, rank, 2, seed=5) for rank in range(2)]
    passes = [[samples(loader) for loader in loaders] for _ in range(3)]
    for epoch, parts in enumerate(passes):
        assert sorted(parts[0] + parts[1]) == data, "the ranks' parts do not overlap"
        reference = DistributedSampler(data, 2, 0, seed=5)
        reference.set_epoch(epoch)
        assert parts[0] == list(reference)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert samples(build_dataloader(data, 4, 0, 2, seed=6)) != passes[0][0]


def test_a_pass_that_is_left_early_still_counts_and_set_epoch_resumes():
    loader, resumed = (build_dataloader(list(range(16)), 4, 0, 1) for _ in range(2))
    first = next(iter(loader))
    second = samples(loader)
    assert first.tolist() != second[:4]
    resumed.sampler.set_epoch(1)
    assert samples(resumed) == second


def test_drop_last_and_collate_fn():
    data = [torch.tensor(float(i)) for i in range(7)]
    loader = build_dataloader(data, 2, 0, 1, collate_fn=sum, drop_last=True)
    batches = list(loader)
    assert len(loader) == len(batches) == 3
    assert all(batch.shape == () for batch in batches)
    assert [len(b) for b in build_dataloader(data, 2, 0, 1)] == [2, 2, 2, 1]


def test_tuples_of_tensors():
    loader = build_dataloader(TensorDataset(torch.arange(6), torch.arange(6) * 2), 3, 1, 2)
    for x, y in loader:
        assert x.shape == (3,) and torch.equal(y, 2 * x)


def test_memory_is_pinned_for_cuda_only():
    assert build_dataloader([1], 1, 0, 1, device_type="cuda").pin_memory is True
    assert build_dataloader([1], 1, 0, 1).pin_memory is False


def test_an_iterable_dataset_passes_through():
    loader = build_dataloader(Stream(), 2, 1, 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_wrong_batch_size(size):
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
        build_dataloader([1], size, 0, 1)


def test_missing_batch_size():
    with pytest.raises(ValueError, match="set train_micro_batch_size_per_gpu"):
        build_dataloader([1, 2], None, 0, 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataLoader([1, 2]), "DataLoader.*Pass its dataset"),
        (NoLength(), "NoLength has no __len__"),
        (LengthOnly(), "LengthOnly has no __getitem__"),
        ((i for i in range(3)), "generator has no __len__ and no __getitem__"),
    ],
)
def test_data_that_cannot_be_loaded(data, words):
    with pytest.raises(TypeError, match=words):
        build_dataloader(data, 2, 0, 1)


def test_empty_data():
    with pytest.raises(ValueError, match="list.*empty"):
        build_dataloader([], 2, 0, 1)


def test_repeating_loader_goes_on_with_new_passes():
    loader = build_dataloader(list(range(12)), 4, 0, 1)
    repeating = RepeatingLoader(loader)
    batches = [next(repeating).tolist() for _ in range(6)]
    assert sorted(sum(batches[:3], [])) == sorted(sum(batches[3:], [])) == list(range(12))
    assert batches[:3] != batches[3:]
    assert iter(repeating) is repeating


def test_repeating_loader_says_when_nothing_comes_anymore():
    once = RepeatingLoader(i for i in range(2))
    assert [next(once), next(once)] == [0, 1]
    with pytest.raises(ValueError, match="generator"):
        next(once)
    with pytest.raises(ValueError, match="nothing"):
        next(RepeatingLoader([]))
