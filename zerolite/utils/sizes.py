"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re

_POWERS = {letter: power for power, letter in enumerate("KMGTP", start=1)}
_PATTERN = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([KMGTP])(I?))?B?", re.IGNORECASE | re.ASCII)


def parse_size(text: str | int) -> int:
    """Return the bytes of "5GB" or "5G" (10**9 each), "500MB", "2GiB" (2**30 each), or a number. Raises ValueError."""
    found = _PATTERN.fullmatch(str(text).strip())
    nbytes = 0
    if found is not None:
        base = 1024 if found[3] else 1000
        nbytes = int(float(found[1]) * base ** _POWERS.get((found[2] or "").upper(), 0))
    if nbytes < 1:
        raise ValueError(f"expected a size such as '5GB', '500MB' or '2GiB', 1 byte or more, got {text!r}")
    return nbytes


def format_size(nbytes: int) -> str:
    """Format a size for people: "5.00 GB", of 10**9 bytes each."""
    for letter, power in reversed(_POWERS.items()):
        rounded_up = 0.005 * 1000 ** (power - 1)  # or it would be 1000.00 of the unit below
        if abs(nbytes) >= 1000**power - rounded_up:
            return f"{nbytes / 1000**power:.2f} {letter}B"
    return f"{nbytes} B"
