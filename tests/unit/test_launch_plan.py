"""When stage 3 launches a bucket: at the end of its group's backward, or later where that was learned."""

from __future__ import annotations

from zerolite.zero.stage3.launch_plan import LaunchPlan


class Passes:
    """Runs passes: ``(group, buckets whose gradients come before the group's backward ends)`` each."""

    def __init__(self, groups: list[list[int]]) -> None:
        self.number, self.length = 0, 0
        self.ends = 0
        self.plan = LaunchPlan(groups, lambda: (self.number, self.ends == self.length))

    def run(self, events: list[tuple[int, list[int]]], number: int = 0, length: int = 0) -> list[list[int]]:
        """Return what is launched at each end. number, length: of the schedule's plan that the events follow."""
        self.number, self.length, self.ends = number, length, 0
        self.plan.begin_backward()
        launched = []
        for group, buckets in events:
            for bucket in buckets:
                self.plan.on_gradient(bucket)
            self.ends += 1
            launched.append(list(self.plan.on_group_end(group)))
        if not self.plan.is_learned:
            self.plan.learn(list(self.plan.last_gradients))
        return launched


# Unit 0 is used twice, and its bucket gets its last gradient in the second use.
TWICE = [(0, [0]), (1, [1]), (0, [0])]


def test_a_bucket_is_launched_when_its_group_ends_for_the_first_time() -> None:
    passes = Passes([[0], [1], []])
    assert passes.run(TWICE) == [[0], [1], []]
    assert passes.run(TWICE) == [[0], [1], []]  # nothing is learned without a plan
    assert not passes.plan.is_learned


def test_a_plan_teaches_which_end_is_late_enough() -> None:
    passes = Passes([[0], [1], []])
    passes.run(TWICE, number=1, length=3)
    assert passes.run(TWICE, number=1, length=3) == [[], [1], [0]]
    assert passes.plan.is_learned


def test_a_pass_that_stops_on_its_way_through_a_plan_teaches_nothing() -> None:
    """A GAN's discriminator: the generator's loss goes through it once, its own twice; the short pass looks like the
    beginning of the long one."""
    passes = Passes([[0], [1], []])
    passes.run(TWICE[:2], number=1, length=3)
    assert not passes.plan.is_learned
    assert passes.run(TWICE, number=1, length=3) == [[0], [1], []]
    assert passes.run(TWICE, number=1, length=3) == [[], [1], [0]]


def test_an_unused_bucket_stays_with_its_group() -> None:
    passes = Passes([[0], [1], []])
    passes.run([(0, []), (1, [1])], number=1, length=2)
    assert passes.run([(0, [0]), (1, [1])], number=1, length=2) == [[0], [1]]


def test_a_bucket_of_several_groups_waits_for_the_last_of_them() -> None:
    passes = Passes([[0, 1], [2]])
    events = [(2, [1]), (1, [0]), (0, [])]  # group 0 is frozen, or unused
    assert passes.run(events) == [[1], [], [0]]
    passes.run(events, number=1, length=3)
    assert passes.run(events, number=1, length=3) == [[1], [], [0]]
    assert passes.plan.is_learned
    assert passes.run([(2, [1]), (0, [0])]) == [[1], []], "group 1 never ends: with the pass"
    passes.run([(2, [1]), (1, [0])], number=2, length=2)
    assert passes.run([(2, [1]), (1, [0])], number=2, length=2) == [[1], []]
