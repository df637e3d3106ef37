"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from zerolite.utils.text import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2GiB", 2**31), ("2gi", 2**31), ("7", 7), (7, 7), ("1TB", 10**12)],
)
def test_sizes_have_units(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "0.1B", "5 G B", "5XB", "1e9", "nan", "1iB", "5GBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as '5GB'"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(999, "999 B"), (1000, "1.00 KB"), (999_994, "999.99 KB"), (999_995, "1.00 MB"), (-5 * 10**9, "-5.00 GB")],
)
def test_sizes_are_shown_with_two_decimals_of_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
