from zerolite.comm.ranks import list_of, name_ranks, ranks_by_value


def test_ranks_are_named_as_people_do() -> None:
    assert name_ranks([7]) == "rank 7"
    assert name_ranks([2, 0]) == "ranks 0 and 2"
    assert name_ranks([0, 1]) == "ranks 0 and 1"
    assert name_ranks([0, 1, 2]) == "ranks 0-2"
    assert name_ranks([0, 1, 2, 3, 5, 8, 9, 10]) == "ranks 0-3, 5 and 8-10"


def test_lists() -> None:
    assert [list_of(["a", "b", "c"][:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_ranks_by_value() -> None:
    assert ranks_by_value(["x", "y", "x"]) == {"x": [0, 2], "y": [1]}
