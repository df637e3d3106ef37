"""Collective errors: if one rank fails, all ranks raise.

Otherwise the other ranks would go on to a collective for which the failed one does not come. The failing rank catches
its exception and takes part in the exchange. Then it raises its own exception, and every other rank raises one that
quotes the first rank that has failed:

    engine.save_checkpoint: rank 2 stopped with OSError: No space left on device (and 1 more rank)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from zerolite.comm.communicator import Communicator
from zerolite.comm.flight_recorder import collective
from zerolite.comm.host_group import HostGroup, largest

Result = TypeVar("Result")


@dataclass(frozen=True)
class RaiseTogether:
    """Calls that fail on all ranks if they fail on one.

    Every method is one exchange on the host, and is called on all ranks of ``host``, in the same order.

    Attributes:
        host: the ranks.
        call: The function that the user has called; the message begins with it.
        kind: Type of the exception on ranks that have none of their own. An error of this type is quoted without verb
            and type, unless it is RuntimeError, which any library raises.
        failed: The verb of the message.
        same: Errors of these types are raised unchanged on all ranks; if several ranks have one, that of the first.
    """

    host: HostGroup
    call: str
    kind: type[Exception] = RuntimeError
    failed: str = "stopped with"
    same: type[Exception] | tuple[()] = ()

    def run(self, action: Callable[[], Result]) -> Result:
        """Return the result of ``action()`` on this rank, if it raises on no rank."""
        result, error = _attempt(action)
        self.exchange(error)
        return result  # type: ignore[return-value]

    def gather(self, action: Callable[[], Result]) -> list[Result]:
        """Return the results of ``action()`` in rank order, if it raises on no rank."""
        result, error = _attempt(action)
        return self.exchange(error, result)

    def exchange(self, error: BaseException | None, value: object = None) -> list[Any]:
        """Return every rank's ``value``, in rank order, if no rank has an ``error``."""
        # The failing rank takes part too: without it the others would wait in this exchange.
        rows = self.host.gather([self._to_raise(error), value])
        messages = [message for message, _ in rows if message is not None]
        is_first = all(message is None for message, _ in rows[: self.host.rank])
        if error is not None and (is_first or not isinstance(error, self.same)):
            raise error
        if not messages:
            return [value for _, value in rows]
        if isinstance(messages[0], Exception):
            raise messages[0]
        more = f" (and {len(messages) - 1} more rank{'s' if len(messages) > 2 else ''})" if len(messages) > 1 else ""
        raise self.kind(messages[0] + more)

    def _to_raise(self, error: BaseException | None) -> object:
        """Return the exception, or the message of one, that the other ranks raise."""
        if error is None or isinstance(error, self.same):
            return error
        speaks = self.kind is not RuntimeError and isinstance(error, self.kind)
        verb = "" if speaks else f" {self.failed} {type(error).__name__}"
        text = str(error).removeprefix(f"{self.call}: ")
        return f"{self.call}: rank {self.host.global_rank}{verb}: {text}"


@collective
def raise_together(
    comm: Communicator,
    device: torch.device,
    tag: str,
    error: Exception | None,
    call: str,
    kind: type[Exception] = RuntimeError,
    failed: str = "stopped with",
) -> None:
    """Raise on all ranks if one of them has an ``error``; it costs one small all-reduce while none has.

    Only after a failure are the texts exchanged, as by :class:`RaiseTogether`.
    """
    if largest([int(error is not None)], comm, device, tag)[0]:
        RaiseTogether(HostGroup(comm, "errors"), call, kind, failed).exchange(error)


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:  # raised again when all ranks know of it: Ctrl-C and SystemExit too
        return None, error
