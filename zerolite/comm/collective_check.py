"""``check_collectives``: ranks compare the collective they are about to launch before it starts."""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerolite.comm import recorder
from zerolite.comm.communicator import Communicator, Pending
from zerolite.comm.flight_recorder import BRANCH_ADVICE, WAIT, Mismatch, Raw, is_debug_run, wait_for
from zerolite.comm.process_group import second_group
from zerolite.comm.ranks import list_of, name_ranks, ranks_by_value
from zerolite.comm.transport import Work

TAG = "check"

NamesOf = Callable[[bool, int], Sequence[str]]
"""Function that returns the names of the parameters of a key: of a gathered parameter (True) or of a bucket (False)."""

_PATIENCE_S = 1.0  # how long to wait for the announcements of the other ranks
_PAUSE_S = 0.0001
_TEXT = 64  # bytes for op, tag and dtype
_WIDTH = 5 + _TEXT // 8

# Checks made over each group so far, the same number on all its ranks.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def check_is_enabled(config_value: bool) -> bool:
    """Return True if the config or the environment enables the check."""
    return config_value or is_debug_run()


class _Launched(NamedTuple):
    """One rank's collective, as it is announced.

    Attributes:
        serial: number of the communicator's check.
        numel: elements of the full tensors on one rank.
        tensors: tensors in one launch; 0 if the collective takes a single one.
        layout: hash of their lengths and dtypes.
        key: number of a parameter or bucket from 1, or 0.
        text: op, tag and dtype.
    """

    serial: int
    numel: int
    tensors: int
    layout: int
    key: int
    text: str

    def row(self) -> list[int]:
        encoded = self.text.encode()[:_TEXT].ljust(_TEXT, b"\0")
        words = [int.from_bytes(encoded[i : i + 8], "little", signed=True) for i in range(0, _TEXT, 8)]
        return [self.serial, self.numel, self.tensors, self.layout, self.key, *words]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> _Launched:
        text = b"".join(word.to_bytes(8, "little", signed=True) for word in row[5:])
        serial, numel, tensors, layout, key = row[:5]
        return cls(serial, numel, tensors, layout, key, text.rstrip(b"\0").decode(errors="replace"))


class CollectiveCheck:
    """Check of one communicator's collectives, over a gloo group of its own. Made on all ranks of ``comm``, in the same
    order.

    Every rank announces the collective that it is about to launch, and launches it when all have announced the same.
    After a second without the other announcements it launches anyway, and compares when it waits for the collective.
    Otherwise ranks that launch collectives of two communicators in different orders would wait for each other for ever.
    If the ranks differ, :class:`Mismatch` is raised on all that have come so far.
    """

    def __init__(self, comm: Communicator, label: str, names_of: NamesOf = lambda gathered, key: ()) -> None:
        """
        Args:
            comm: the communicator.
            label: purpose of the communicator, for messages.
            names_of: see :data:`NamesOf`.
        """
        assert comm.group is not None
        self._group = second_group(comm.group, "gloo", TAG)
        self._world_size = comm.world_size
        self._dimension = comm.dimension
        self._label, self._names_of = label, names_of
        self._serial = _made[comm.group] = _made.get(comm.group, 0) + 1
        self._count = 0  # collectives announced

    def launch(self, entry: Raw, start: Callable[[], Pending], at_once: bool) -> Pending:
        """Launch ``entry`` by ``start()``. If the caller waits ``at_once``, it is launched only when all ranks have
        announced it."""
        announced = self._announce(entry)
        if at_once or announced.all_announce_soon():
            announced.compare()
            return start()
        return _ComparedLater(start(), announced)

    def _announce(self, entry: Raw) -> _Announced:
        op, tag, what, dtype, key = entry
        if isinstance(what, int):
            numel, tensors, layout = what, 0, 0
        else:
            numel, tensors = sum(shard.numel() for shard in what) * self._world_size, len(what)
            dtype = what[0].dtype if what else None
            layout = zlib.crc32(repr([(shard.numel(), shard.dtype) for shard in what]).encode())
        self._count += 1
        launched = _Launched(self._serial, numel, tensors, layout, key, f"{op}|{tag}|{dtype}")
        with torch.inference_mode(False):
            own = torch.tensor(launched.row(), dtype=torch.int64, device="cpu")
            rows = torch.empty(self._world_size, _WIDTH, dtype=torch.int64, device="cpu")
        if recorder.active:
            recorder.note("all_gather", rows, TAG, self._dimension, self._world_size)
        work = dist.all_gather(list(rows), own, group=self._group, async_op=True)
        return _Announced(self, self._count, entry, own, rows, work)

    def mismatch(self, number: int, ranks: Sequence[_Launched]) -> Mismatch:
        described = "; ".join(f"{name_ranks(who)}: {self._describe(one)}" for one, who in ranks_by_value(ranks).items())
        return Mismatch(
            "check_collectives: the ranks are about to launch different collectives in the same place (number "
            f"{number} of the {self._label}): {described}. Do branches that depend on the rank use different modules "
            f"({BRANCH_ADVICE}), or do only some ranks make a call that all must make?"
        )

    def _describe(self, launched: _Launched) -> str:
        op, tag, dtype = launched.text.split("|")
        names = list(self._names_of(launched.tensors > 0, launched.key)) if launched.key else []
        hidden = max(len(names), launched.tensors) - 1
        of = list_of([f"'{names[0]}'", *([f"{hidden} more"] if hidden > 0 else [])]) if names else f"key {launched.key}"
        which = f", of {of}" if launched.key else ""
        return f"{op} for '{tag}', {launched.numel} elements of {dtype}{which}"


class _Announced:
    """Announcements of all ranks about one collective, in flight."""

    def __init__(
        self, check: CollectiveCheck, number: int, entry: Raw, own: torch.Tensor, rows: torch.Tensor, work: Work
    ) -> None:
        self._check, self._number, self._entry = check, number, entry
        self._own, self._rows, self._work = own, rows, work

    def all_announce_soon(self) -> bool:
        """Return True if all ranks announce the collective within a second."""
        until = time.monotonic() + _PATIENCE_S
        while not self._work.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_S)
        return True

    def compare(self) -> None:
        """Wait for the announcements. Raises Mismatch if the ranks differ."""
        wait_for((self._work,), self._entry)
        if bool((self._rows == self._own).all()):
            return
        error = self._check.mismatch(self._number, [_Launched.of_row(row) for row in self._rows.tolist()])
        raise WAIT.explain(error) or error


class _ComparedLater(Pending):
    """A collective that was launched before all ranks had announced theirs."""

    def __init__(self, inner: Pending, announced: _Announced) -> None:
        super().__init__((), (), self._conclude)
        self._inner, self._announced = inner, announced

    def arrived(self) -> bool:
        return self._inner.arrived()

    def memory(self) -> Sequence[torch.Tensor]:
        return self._inner.memory()

    def _conclude(self) -> torch.Tensor:
        self._announced.compare()
        return self._inner.wait()
