"""Exit messages: how processes have ended, and the error of a rank that has lost another one."""

from __future__ import annotations

import contextlib
import json
import time

from zerolite.comm import SharedStore
from zerolite.comm.flight_recorder import CollectiveFailed
from zerolite.utils.text import name_ranks

EXITED = "exited with status 0"
_QUOTED = 300  # characters of an exception
_READ = 64  # messages that are read, in the order in which ranks ended: later ones are consequences of the first
_PATIENCE_S = 1.5  # how long a rank that has lost another waits for its exit message


class PeerLost(CollectiveFailed):
    """A collective has failed because another process has gone."""


class ExitMessages:
    """Messages that ending ranks leave in the store. For ranks that leave none, the launcher may know how they
    ended."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store

    def leave(self, how: str) -> None:
        """Leave a message for the ranks that still wait.

        Args:
            how: such as "ended normally after step 3".
        """
        # The counter gives every message its own key, so two ranks may end at once.
        self._store.set(f"endings/{self._store.add('endings', 1)}", json.dumps([self._store.rank, how]))

    def ended_ranks(self) -> dict[int, str]:
        """Return how the first ranks have ended, by rank, as far as it is known now."""
        store = self._store
        keys = [f"endings/{number}" for number in range(1, min(store.add("endings", 0), _READ) + 1)]
        return {
            **dict.fromkeys(store.exited(), EXITED),
            **dict(json.loads(store.get(key)) for key in keys if store.has(key)),
        }

    def await_ended_ranks(self) -> dict[int, str]:
        """Wait shortly for a message after a connection has broken. Returns what :meth:`ended_ranks` returns.

        The connection breaks before the rank, or its launcher, can have written the message.
        """
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(RuntimeError):  # the process that hosts the store may be the one that has gone
            while not (ended := self.ended_ranks()) and time.monotonic() < deadline:
                time.sleep(0.05)
            return ended
        return {}


def describe_end(error: BaseException | None) -> str:
    """Describe how a process ends, from the exception that ends it, or None."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "normally"
    if isinstance(error, PeerLost):
        return "because it had lost another rank"
    first = str(error).partition("\n")[0][:_QUOTED]
    return f"with {type(error).__name__}: {first}"


def lost_peer(error: RuntimeError, rank: int, location: str, ended: dict[int, str]) -> PeerLost:
    """Return the error of a collective whose connection broke, with how other ranks have ended.

    Args:
        error: the error of the collective.
        rank: this rank.
        location: engine call and line of this rank, as ``StackReport.summary`` says it.
        ended: how other ranks have ended, by rank.
    """
    who = name_ranks(list(ended))
    advice = "its process died: see its output, and the last lines of the launcher"
    if not ended:
        advice += (
            "; if it was aborted by gloo for the size of a message, the ranks launched different collectives here, "
            "and TORCH_DISTRIBUTED_DEBUG=DETAIL names them"
        )
    elif all("normally" in how for how in ended.values()):
        advice = (
            f"uneven batches? {who} left while this rank still had work; give all ranks as many batches "
            "(docs/uneven-data.md). (It may also have called sys.exit: see its output)"
        )
    elif all(how.startswith(EXITED) for how in ended.values()):
        advice = (
            f"the others still needed {who}, which left without Python's clean-up: it has called os._exit, or a "
            "library has. See its output, and let all ranks end their loops alike"
        )
    endings = "; ".join(f"{name_ranks([one])} {how}" for one, how in ended.items())
    return PeerLost(
        f"rank {rank} has lost another rank, in {location}: {endings or 'it said nothing before it went'}. "
        f"{advice[0].upper()}{advice[1:]}. ({error})"
    )
