from zerolite.comm.ranks import name_ranks


def test_ranks_are_named_as_people_do() -> None:
    assert name_ranks([7]) == "rank 7"
    assert name_ranks([2, 0]) == "ranks 0 and 2"
    assert name_ranks([0, 1]) == "ranks 0 and 1"
    assert name_ranks([0, 1, 2]) == "ranks 0-2"
    assert name_ranks([0, 1, 2, 3, 5, 8, 9, 10]) == "ranks 0-3, 5 and 8-10"
