"""Division of shards into sub-groups: everything once, in order, as full as they may be."""

from __future__ import annotations

import itertools

import pytest

from zerolite.zero.spans import sub_groups

NUMELS = [n for length in range(5) for n in itertools.product((0, 1, 4, 7, 8, 23), repeat=length)]


@pytest.mark.parametrize("limit", [1, 3, 4, 9, 1000])
def test_sub_groups_keep_to_their_limit(limit: int) -> None:
    for numels, alignment in itertools.product(NUMELS, (0, 1, 4)):
        groups = sub_groups(list(enumerate(numels)), limit, alignment)
        spans = [span for group in groups for span in group]
        assert [span.bucket for span in spans] == sorted(span.bucket for span in spans)
        for bucket, numel in enumerate(numels):
            its = [span for span in spans if span.bucket == bucket]
            assert its[0].low == 0 and its[-1].high == numel
            assert [span.last for span in its] == [False] * (len(its) - 1) + [True]
            assert all(one.high == other.low for one, other in itertools.pairwise(its))
        sizes = [sum(span.high - span.low for span in group) for group in groups]
        for group, size in zip(groups, sizes, strict=True):
            if alignment:
                assert size <= max(limit, alignment)
                assert all(span.low % alignment == 0 for span in group)
            else:
                assert size <= limit or [s for s in group if s.high] == group[:1], "what is too large is alone"
        for size, following in itertools.pairwise(range(len(groups))):
            first = groups[following][0]
            needed = min(first.high - first.low, alignment) if alignment else first.high - first.low
            assert sizes[size] + needed > (max(limit, alignment) if alignment else limit), "there was room"
