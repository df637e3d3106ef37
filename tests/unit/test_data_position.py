"""Passes over loaders that are continued from a saved position, on as many ranks as before and on others."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

from tests.toolkit.loaders import loaders_of
from zerolite.data.dataloader import RepeatingLoader


class Ranks:
    """The loaders of all ranks of a job, in one process."""

    def __init__(self, world_size, size, batch_size=3, route="train", drop_last=False, users=None):
        """users: makes a DataLoader of a data set and this rank's sampler options."""
        self.loaders = [loaders_of(rank, world_size, batch_size, drop_last) for rank in range(world_size)]
        data = list(range(size))
        self.each = [
            one.prepare(users(data, num_replicas=world_size, rank=rank)) if users else one.make(data, route=route)
            for rank, one in enumerate(self.loaders)
        ]

    def passing(self):
        """The batches of all ranks, batch by batch: rows by rank, and the samples in their order, without repetitions.
        While one is in hand, the pass is under way on all ranks."""
        passes = [iter(loader) for loader in self.each]
        lengths = {len(loader) for loader in self.each}
        count = 0
        while batches := [batch for part in passes if (batch := next(part, None)) is not None]:
            assert len(batches) == len(passes), "ranks have unequally many batches"
            count += 1
            lengths |= {len(loader) for loader in self.each}
            (rows,) = {loaders.rows() for loaders in self.loaders}
            parts = [batch.tolist() for batch in batches]
            assert {len(part) for part in parts} == {rows.per_rank}
            yield parts, [sample for turn in zip(*parts, strict=True) for sample in turn][: rows.samples]
        assert lengths == {count}

    def whole_pass(self):
        return [parts for parts, _ in self.passing()]

    def save(self):
        """Return what all ranks would save, through JSON."""
        first, *others = [loaders.state_dict() for loaders in self.loaders]
        assert all(other == first for other in others)
        return json.loads(json.dumps(first))

    def load(self, state):
        for loaders in self.loaders:
            loaders.load_state_dict(state)
        return self

    def set_epoch(self, epoch):
        for loader in self.each:
            loader.sampler.set_epoch(epoch)


def run(ranks, count):
    """`count` batches of a pass, which is then under way."""
    passing = ranks.passing()
    taken = [next(passing) for _ in range(count)]
    return passing, [parts for parts, _ in taken], [sample for _, samples in taken for sample in samples]


def users_loader(shuffle=True, seed=5, drop_last=False, batch_size=3, **more):
    def make(data, **options):
        sampler = DistributedSampler(data, shuffle=shuffle, seed=seed, drop_last=drop_last, **options)
        return DataLoader(data, batch_size=batch_size, sampler=sampler, **more)

    return make


# -------------------------------------------------------------------- the same ranks: the same batches


@pytest.mark.parametrize("users", [None, users_loader(), users_loader(shuffle=False), users_loader(drop_last=True)])
@pytest.mark.parametrize(("world_size", "size"), [(1, 7), (2, 12), (3, 37)])
def test_on_as_many_ranks_the_batches_are_those_of_the_uninterrupted_run(world_size, size, users):
    whole = Ranks(world_size, size, users=users)
    expected = [whole.whole_pass() for _ in range(3)]
    for count in range(1, len(expected[1]) + 1):
        saved = Ranks(world_size, size, users=users)
        saved.whole_pass()
        passing, begun, _ = run(saved, count)
        state = saved.save()
        resumed = Ranks(world_size, size, users=users).load(state)
        assert resumed.save() == state, "a position that was loaded is saved as it was"
        assert begun + resumed.whole_pass() == expected[1]
        assert resumed.whole_pass() == expected[2]
        del passing


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 4), (2, 2)), ((2, 3), (3, 3)), ((2, 3), (1, 5)), ((3, 2), (4, 4)), ((4, 1), (2, 2)), ((4, 1), (3, 3))],
)
@pytest.mark.parametrize("size", [1, 7, 37])
def test_on_other_ranks_no_sample_comes_twice_and_none_is_left_out(before, after, size):
    for route in ("train", "eval"):
        order = [sample for _, samples in Ranks(1, size, route=route).passing() for sample in samples]
        saved = Ranks(*before[:1], size, before[1], route)
        passing, _, samples = run(saved, min(2, len(saved.each[0])))
        resumed = Ranks(*after[:1], size, after[1], route).load(saved.save())
        rest = [sample for _, more in resumed.passing() for sample in more]
        assert samples + rest == order, route
        assert sorted(sample for _, more in resumed.passing() for sample in more) == list(range(size))
        del passing


def test_before_between_and_after_passes():
    expected = Ranks(2, 12)
    passes = [expected.whole_pass() for _ in range(3)]
    saved = Ranks(2, 12)
    assert Ranks(2, 12).load(saved.save()).whole_pass() == passes[0]
    passing, *_ = run(saved, 2)
    resumed = Ranks(2, 12).load(saved.save())
    assert len(resumed.each[0]) == 0, "after the last batch nothing is left"
    assert [resumed.whole_pass() for _ in range(2)] == [[], passes[1]]
    assert list(passing) == []
    resumed = Ranks(2, 12).load(saved.save())
    assert [resumed.whole_pass() for _ in range(2)] == passes[1:]


@pytest.mark.parametrize("users", [None, users_loader()])
def test_a_pass_that_was_left_is_continued_if_it_is_shuffled(users):
    expected = Ranks(2, 24, users=users).whole_pass()
    saved = Ranks(2, 24, users=users)
    for _ in zip(range(2), saved.passing(), strict=False):
        pass
    assert Ranks(2, 24, users=users).load(saved.save()).whole_pass() == expected[2:]
    saved.set_epoch(7)
    later = Ranks(2, 24, users=users)
    later.set_epoch(7)
    assert Ranks(2, 24, users=users).load(saved.save()).whole_pass() == later.whole_pass()


@pytest.mark.parametrize("users", [None, users_loader()])
def test_set_epoch_before_the_pass(users):
    """The same epoch: the pass goes on. Another one: a new pass."""
    expected = Ranks(2, 24, users=users)
    expected.set_epoch(3)
    passes = expected.whole_pass()
    saved = Ranks(2, 24, users=users)
    saved.set_epoch(3)
    passing, *_ = run(saved, 1)
    resumed, other = (Ranks(2, 24, users=users).load(saved.save()) for _ in range(2))
    resumed.set_epoch(3)
    assert (len(resumed.each[0]), resumed.whole_pass()) == (3, passes[1:])
    other.set_epoch(4)
    expected.set_epoch(4)
    assert (len(other.each[0]), other.whole_pass()) == (4, expected.whole_pass())
    del passing


def test_a_pass_under_way_goes_on_from_the_position():
    ranks = Ranks(2, 24)
    passing, _, _ = run(ranks, 1)
    state = ranks.save()
    expected = [parts for parts, _ in passing]
    passing, *_ = run(ranks, 2)
    ranks.load(state)
    assert [len(loader) for loader in ranks.each] == [3, 3]
    passes = [iter(loader) for loader in ranks.each]
    assert [[batch.tolist() for batch in batches] for batches in zip(*passes, strict=True)] == expected
    ranks = Ranks(1, 12)
    batches = iter(ranks.each[0])
    seen = [next(batches).tolist() for _ in range(2)]
    state = ranks.save()
    seen += [batch.tolist() for batch in batches]
    ranks, taken = Ranks(1, 12), []
    for batch in ranks.each[0]:
        taken.append(batch.tolist())
        if len(taken) == 1:
            ranks.load(state)
    assert taken == [seen[0], *seen[2:]], "the one under way goes on"


@pytest.mark.parametrize("users", [None, users_loader()])
@pytest.mark.parametrize(("count", "made_before"), [(1, True), (4, False), (5, True), (11, False)])
def test_a_repeating_loader_goes_on(users, count, made_before):
    expected = RepeatingLoader(Ranks(1, 12, users=users).each[0])
    batches = [next(expected).tolist() for _ in range(24)]
    saved = Ranks(1, 12, users=users)
    repeating = RepeatingLoader(saved.each[0])
    for _ in range(count):
        next(repeating)
    resumed = Ranks(1, 12, users=users)
    before = RepeatingLoader(resumed.each[0])
    resumed.load(saved.save())
    repeating = before if made_before else RepeatingLoader(resumed.each[0])
    assert [next(repeating).tolist() for _ in range(12)] == batches[count : count + 12]


class Noisy(Dataset):
    """Each sample and a number from torch's generator."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, torch.rand(())


def numbers(batches):
    return [[part.tolist() for part in batch] for batch in batches]


def test_random_numbers_are_those_of_the_uninterrupted_run():
    """The order of the pass under way, of later ones, and what else is drawn: dropout, noise."""

    def seeded(seed):
        torch.manual_seed(seed)
        loaders = loaders_of(0, 1, 3)
        return loaders, loaders.prepare(DataLoader(Noisy(), 3, sampler=DistributedSampler(Noisy(), 1, 0)))

    _, loader = seeded(1)
    expected = numbers([*loader, *loader])
    loaders, loader = seeded(1)
    batches = iter(loader)
    begun = numbers([next(batches), next(batches)])
    state, random_state = json.loads(json.dumps(loaders.state_dict())), torch.get_rng_state()
    loaders, resumed = seeded(2)
    loaders.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert begun + numbers([*resumed, *resumed]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_workers_load_ahead_do_not_count_as_given(persistent):
    users = users_loader(num_workers=2, persistent_workers=persistent)
    plain = Ranks(1, 30, users=users_loader())
    expected = [plain.whole_pass() for _ in range(3)]
    saved = Ranks(1, 30, users=users)
    passing, begun, _ = run(saved, 3)
    resumed = Ranks(1, 30, users=users).load(saved.save())
    assert begun + resumed.whole_pass() == expected[0]
    resumed.set_epoch(1)
    plain.set_epoch(1)
    assert resumed.whole_pass() == plain.whole_pass()
    del passing
    passing, *_ = run(resumed, 2)
    state = resumed.save()
    rest = [parts for parts, _ in passing]
    assert resumed.load(state).whole_pass() == rest, "in the process that saved"


# -------------------------------------------------------------------- several loaders, and what does not fit


def two():
    loaders = loaders_of(0, 1, 3)
    return loaders, loaders.make(list(range(24))), loaders.make(list(range(10)), route="eval")


def test_positions_wait_for_loaders_that_are_made_later(caplog):
    loaders, training, evaluation = two()
    later = loaders.make(list(range(100, 112)))
    batches = iter(later)
    next(batches), next(batches)
    state = loaders.state_dict()
    expected = [batch.tolist() for batch in batches]
    loaders, training, evaluation = two()
    loaders.load_state_dict(state)
    assert [batch.tolist() for batch in loaders.make(list(range(100, 112)))] == expected
    fresh = loaders.make(list(range(100, 112)))
    assert len(list(fresh)) == 4 and not caplog.records
    loaders, training, evaluation = two()
    loaders.load_state_dict(state)
    assert sorted(sample for batch in loaders.make(list(range(7))) for sample in batch.tolist()) == list(range(7))
    assert "Loader 2 of this engine had given 6 of 12 samples" in caplog.text and "it has 7 samples now" in caplog.text


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"samples": 11}, "expected 11 samples in loader 1 .*got 10; give it the same data"),
        ({"consumed": 11}, "consumed from 0 to samples, got {.*11"),
        ({"epoch": "0"}, "expected the position of a loader"),
        (None, "expected the position of a loader, samples, order"),
    ],
)
def test_positions_of_other_loaders_are_refused_and_nothing_changes(entry, words):
    saved, training, _ = two()
    batches = iter(training)
    next(batches)
    first, second = saved.state_dict()
    state = [first, {**second, **entry} if entry else {"samples": 10}]
    loaders, training, _ = two()
    before = loaders.state_dict()
    with pytest.raises(ValueError, match=words):
        loaders.load_state_dict(state)
    assert loaders.state_dict() == before
    assert sorted(sample for batch in training for sample in batch.tolist()) == list(range(24))


def drawn(data, **_):
    return DataLoader(data, 3, shuffle=True)


def reversed_loader(data, **_):
    backwards = {"__iter__": lambda self: reversed(range(len(self.data_source)))}
    return DataLoader(data, 3, sampler=type("Reversed", (SequentialSampler,), backwards)(data))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (users_loader(seed=1), users_loader(seed=2), "were shuffled with seed 1 and are now shuffled with seed 2"),
        (users_loader(), users_loader(shuffle=False), "were shuffled with seed 5 and are now in sequence"),
        (drawn, None, "were drawn by RandomSampler and are now shuffled"),
        (reversed_loader, reversed_loader, "Reversed draws its indices in a way of its own"),
        (drawn, drawn, "RandomSampler draws its indices in a way of its own; use a DistributedSampler"),
    ],
)
def test_a_pass_that_cannot_be_continued_begins_anew(before, after, words, caplog):
    saved = Ranks(1, 12, users=before)
    passing, *_ = run(saved, 2)
    state = saved.save()
    resumed = Ranks(1 if after else 2, 12, users=after)
    with caplog.at_level("WARNING", "zerolite"):
        resumed.load(state)
    (said,) = [entry.getMessage() for entry in caplog.records]
    assert "Loader 0 of this engine had given 6 of 12 samples" in said and words in said and "begins anew" in said
    assert sorted(sample for _, samples in resumed.passing() for sample in samples) == list(range(12))
    del passing
