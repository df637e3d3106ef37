"""Loaders that give each rank its part of the data."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from tests.toolkit.loaders import loaders_of
from zerolite.data.dataloader import EpochSampler, Rows


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


LengthOnly = type("LengthOnly", (), {"__len__": lambda self: 3})
NoLength = type("NoLength", (Dataset,), {"__getitem__": lambda self, index: index})


def samples(loader):
    return [int(x) for batch in loader for x in batch]


def test_each_pass_is_shuffled_anew_and_alike_on_all_ranks():
    data = list(range(40))
    loaders = [loaders_of(rank, 2, 4).make(data) for rank in range(2)]
    passes = [[samples(loader) for loader in loaders] for _ in range(3)]
    for epoch, parts in enumerate(passes):
        assert sorted(parts[0] + parts[1]) == data, "the ranks' parts do not overlap"
        reference = DistributedSampler(data, 2, 0)
        reference.set_epoch(epoch)
        assert parts[0] == list(reference)
    assert passes[0] != passes[1] != passes[2] != passes[0]


class Noise(Dataset):
    """Random numbers of the worker that loads the sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return random.getrandbits(60), int(torch.randint(2**60, ())), get_worker_info().seed


def drawn(rank, make):
    """Return the numbers that a rank's workers draw for their first samples. The script seeds all ranks alike."""
    torch.manual_seed(0)
    return [list(sample) for sample in zip(*[[int(x) for x in part] for part in next(iter(make(rank)))], strict=True)]


@pytest.mark.parametrize("kind", ["own", pytest.param("users", marks=pytest.mark.slow)])
def test_workers_of_ranks_that_are_seeded_alike_draw_other_numbers(kind):
    def users(rank):
        return DataLoader(Noise(), 2, sampler=DistributedSampler(Noise(), 2, rank), num_workers=1)

    def own(rank):
        return loaders_of(rank, 2, 2).make(Noise(), num_workers=1)

    make = own if kind == "own" else lambda rank: loaders_of(rank, 2, 2).prepare(users(rank))
    first, second = drawn(0, make), drawn(1, make)
    assert first == drawn(0, users), "rank 0 draws what it draws in plain PyTorch"
    assert second == drawn(1, make) and all(
        a != b for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )
    fixed = users(1)
    fixed.worker_init_fn = random.seed
    assert loaders_of(1, 2, 2).prepare(fixed).worker_init_fn is random.seed


def test_a_wrong_batch_size_or_no_data_is_refused():
    for size in (0, 2.0, True):
        with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
            loaders_of(0, 1, 1).make([1], size)
    with pytest.raises(ValueError, match="list.*empty"):
        loaders_of(0, 1, 2).make([])


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
        loaders_of(0, 1, 2).make(data)


@pytest.mark.parametrize(("world_size", "size"), [(1, 13), (2, 17), (3, 12)])
def test_drop_last_leaves_full_batches_and_repeats_nothing(world_size, size):
    loaders = [loaders_of(rank, world_size, 4, drop_last=True).make(list(range(size))) for rank in range(world_size)]
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert {len(part) for part in batches} == {size // (4 * world_size)}
    assert all(len(batch) == 4 for part in batches for batch in part)
    seen = [x for part in batches for batch in part for x in batch]
    assert len(set(seen)) == len(seen)
    with pytest.raises(ValueError, match="7 samples, too few for a batch on every rank, which takes 8.*_drop_last"):
        loaders_of(0, 2, 4, drop_last=True).make(list(range(7)))


def test_an_iterable_dataset_passes_through_and_is_said_once(caplog):
    with caplog.at_level("WARNING", "zerolite"):
        for rank in range(2):
            loader = loaders_of(rank, 2, 2).make(Stream())
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    (said,) = [entry.getMessage() for entry in caplog.records]
    assert "IterableDataset (Stream)" in said and "different part on each rank" in said


def in_hand(loaders, batch):
    """The batch and what is said of it."""
    rows = loaders.rows()
    return batch.tolist(), rows.per_rank, rows.samples


@pytest.mark.parametrize(("world_size", "size"), [(1, 13), (2, 1), (2, 22), (3, 7), (4, 1), (4, 13)])
@pytest.mark.parametrize("route", ["train", "eval"])
def test_the_rows_of_all_ranks_in_turn_are_the_data_in_order(world_size, size, route):
    ranks = []
    for rank in range(world_size):
        loaders = loaders_of(rank, world_size, 4)
        loader = loaders.make(list(range(size)), route=route)
        ranks.append([in_hand(loaders, batch) for batch in loader])
        assert loaders.rows() is None
    result = []
    for together in zip(*ranks, strict=True):
        rows, per_rank, distinct = zip(*together, strict=True)
        assert {len(part) for part in rows} == set(per_rank) and len(set(distinct)) == 1
        result += [sample for turn in zip(*rows, strict=True) for sample in turn][: distinct[0]]
    order = list(EpochSampler(list(range(size)), 1, 0)) if route == "train" else list(range(size))
    assert result == order


def test_a_users_loader_is_recognised_by_its_sampler():
    data = list(range(11))
    loaders = loaders_of(1, 2, 4)
    plain = DataLoader(data, batch_size=3, sampler=DistributedSampler(data, 2, 1, shuffle=False))
    loader = loaders.prepare(plain)
    assert [in_hand(loaders, batch) for batch in loader] == [([1, 3, 5], 3, 6), ([7, 9, 0], 3, 5)]
    assert len(loader) == 2 and loader.batch_size == 3 and loader.sampler is plain.sampler and loader.dataset is data
    assert loaders.prepare(loader) is loader
    short = DistributedSampler(data, 2, 1, shuffle=False, drop_last=True)
    loader = loaders.prepare(DataLoader(data, batch_sampler=BatchSampler(short, 3, False)))
    assert [in_hand(loaders, batch) for batch in loader] == [([1, 3, 5], 3, 6), ([7, 9], 2, 4)]
    assert loaders_of(0, 1, 4).prepare(DataLoader(data, batch_size=3, shuffle=True)).share.all_rows() == Rows(11, 11)


Reversed = type("Reversed", (DistributedSampler,), {"__iter__": lambda self: reversed(range(2))})


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([1, 2], "got list"),
        (DataLoader([1, 2]), "it has a SequentialSampler"),
        (DataLoader(Stream()), "it loads the IterableDataset Stream"),
        (DataLoader([1, 2], batch_sampler=[[0], [1]]), "its batches come from list"),
        (DataLoader([1, 2], batch_size=None, sampler=DistributedSampler([1, 2], 2, 1)), "come from NoneType"),
        (DataLoader([1, 2], sampler=Reversed([1, 2], 2, 1)), "Reversed draws its indices in a way of its own"),
        (DataLoader([1, 2], sampler=DistributedSampler([1, 2], 3, 1)), "rank 1 of 3, and this is rank 1 of 2"),
        (DataLoader([1, 2], sampler=DistributedSampler([1, 2], 2, 0)), "rank 0 of 2, and this is rank 1 of 2"),
    ],
)
def test_loaders_of_which_the_samples_are_not_known(loader, words):
    with pytest.raises(ValueError, match=f"prepare_loader: expected a torch DataLoader.*{words}"):
        loaders_of(1, 2, 4).prepare(loader)
