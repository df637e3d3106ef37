"""Operations of all ranks, announced to ranks that have run out of data, so that these match every collective."""

from __future__ import annotations

import contextlib
import enum
import struct
from typing import Any, Protocol


class Command(enum.IntEnum):
    """Operation that a rank is about to run. The comments name the numbers that are sent with it."""

    FORWARD = 1  # buffers are broadcast
    BACKWARD = 2  # the engine scaled the loss, it has a weight, gradients are reduced, they are divided
    GROUP_END = 3  # stage 3: the parameter group whose backward has ended
    BACKWARD_END = 4  # stage 3: this backward launches nothing more
    GATHER = 5  # stage 3: the parameters
    EXTERNAL = 6  # stage 3: a parameter group, and the parameter that is added to it
    ENGINE_STEP = 7  # flush, and the boundary that the user has set
    STEP = 8
    UPDATE = 9  # updated parameters are all-gathered in it
    ALL_GATHER_PARAMS = 10
    ZERO_GRAD = 11
    REDUCE = 12
    STATS = 13
    CLIP = 14  # the bits of max_norm
    METRIC = 15
    SAVE = 16
    OTHER = 17  # a collective in which ranks that have finished cannot take part


class Announce(Protocol):
    """Announce a command to the other ranks. Returns a context around the operation."""

    def __call__(self, command: Command, *numbers: int) -> contextlib.AbstractContextManager[Any]: ...


NULL_CONTEXT = contextlib.nullcontext()


class Announcer:
    """Announcer of operations of all ranks: ``with announce(Command.STEP): ...``. An engine has one.

    Outside ``engine.join()`` it announces nothing, because every rank has data and runs the same operations.
    """

    def __init__(self) -> None:
        self._announce: Announce | None = None

    def __call__(self, command: Command, *numbers: int) -> contextlib.AbstractContextManager[Any]:
        return NULL_CONTEXT if self._announce is None else self._announce(command, *numbers)

    @property
    def in_use(self) -> bool:
        """True inside ``engine.join()``."""
        return self._announce is not None

    def use(self, announce: Announce | None) -> None:
        """Announce commands with ``announce`` from now on, or stop announcing if it is None."""
        self._announce = announce


def float_to_bits(number: float) -> int:
    """Return the bits of a float as a 64-bit integer, to be sent with other integers."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def float_from_bits(bits: int) -> float:
    """Return the float of these bits; inverse of :func:`float_to_bits`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
