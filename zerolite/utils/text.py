"""Sizes, numbers, dtypes, lists of ranks and command lines, as people write and read them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

_POWERS = {letter: power for power, letter in enumerate("KMGTP", start=1)}
_PATTERN = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([KMGTP])(I?))?B?", re.IGNORECASE | re.ASCII)
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def parse_size(text: str | int) -> int:
    """Return the bytes of "5GB" or "5G" (10**9 each), "500MB", "2GiB" (2**30 each), or a number. Raises ValueError."""
    match = _PATTERN.fullmatch(str(text).strip())
    nbytes = 0
    if match is not None:
        base = 1024 if match[3] else 1000
        nbytes = int(float(match[1]) * base ** _POWERS.get((match[2] or "").upper(), 0))
    if nbytes < 1:
        raise ValueError(f"expected a size such as '5GB', '500MB' or '2GiB', 1 byte or more, got {text!r}")
    return nbytes


def size_argument(text: str) -> int:
    """Return the bytes that an option of a command names, as :func:`parse_size` does. argparse prints the error."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_size(nbytes: int) -> str:
    """Format a size for people: "5.00 GB", of 10**9 bytes each."""
    for letter, power in reversed(_POWERS.items()):
        rounded_up = 0.005 * 1000 ** (power - 1)  # or it would be 1000.00 of the unit below
        if abs(nbytes) >= 1000**power - rounded_up:
            return f"{nbytes / 1000**power:.2f} {letter}B"
    return f"{nbytes} B"


def with_unit(value: float, unit: str) -> str:
    """Return ``value`` with a decimal prefix: 25_200_000 and "FLOP" give "25.2 MFLOP"; three digits are kept."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000.0, power + 1
    text = f"{value:.3g}" if power or value != int(value) else str(int(value))
    return f"{text} {_PREFIXES[power]}{unit}".rstrip()


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 7``, ``ranks 0 and 2`` or ``ranks 0-6, 9 and 11``: in order, three or more in a row as a range."""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    for _, pairs in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    plural = "s" if len(numbers) > 1 else ""
    return f"rank{plural} {list_of(parts)}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Return a count with its noun: "1 rank", "1,024 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def list_of(parts: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def command_parser(prog: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return a parser that shows its texts as they are written and knows whole names of options alone."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
    )


DTYPE_NAMES = {"fp32": ("float32", "float"), "bf16": ("bfloat16",), "fp16": ("float16", "half")}
"""By the config's name, torch's names, the first of which is what torch prints."""
