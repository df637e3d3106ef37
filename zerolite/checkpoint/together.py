"""Error propagation for collective calls: if one rank fails, all ranks raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from torch.distributed.checkpoint import CheckpointException

from zerolite.checkpoint.errors import CheckpointError
from zerolite.comm import HostGroup

Result = TypeVar("Result")


def meet(host: HostGroup, timeout_s: float, what: str) -> None:
    """Wait until all ranks are here. Raises CheckpointError after ``timeout_s`` seconds, naming who is missing."""
    try:
        host.meet(timeout_s, what)
    except RuntimeError as error:
        raise CheckpointError(str(error)) from error


def one_request(what: str, requests: Mapping[int, Any]) -> Any:
    """What the ranks were called with, dataclasses by rank. Raises CheckpointError, on all of them, if they differ."""
    first = min(requests)
    for rank, request in requests.items():
        for name, value in asdict(requests[first]).items():
            if getattr(request, name) != value:
                raise CheckpointError(
                    f"{what}: expected the same arguments on all ranks, got {name}={value!r} on rank {first} and "
                    f"{name}={getattr(request, name)!r} on rank {rank}"
                )
    return requests[first]


def on_all_ranks(host: HostGroup, what: str, action: Callable[[], Result]) -> list[Result]:
    """Every rank's result of ``action``. If it raises on any rank: there what it raised,
    elsewhere the same CheckpointError, or one that quotes any other error. Called on all ranks."""
    own, error = _attempt(action)
    rows = host.gather((own, _told(what, host.rank, error)))
    _raise_first(error, [told for _, told in rows])
    return [result for result, _ in rows]


def on_this_rank(host: HostGroup, what: str, action: Callable[[], Result]) -> Result:
    """The same, but the result stays here."""
    own, error = _attempt(action)
    _raise_first(error, host.gather(_told(what, host.rank, error)))
    return own  # type: ignore[return-value]


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # raised again when all ranks know
        return None, error


def _told(what: str, rank: int, error: Exception | None) -> CheckpointError | None:
    """What the other ranks raise."""
    if error is None or isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{what}: rank {rank} stopped with {type(error).__name__}: {error}")


def _raise_first(own: Exception | None, told: list[CheckpointError | None]) -> None:
    if own is not None:
        raise own
    for error in told:
        if error is not None:
            raise error


@contextlib.contextmanager
def storage_errors(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Around torch.distributed.checkpoint: what went wrong on some rank, raised on all, as a CheckpointError. remedy:
    what else there is."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        said = f"'{error.filename}': {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        if not isinstance(error, (CheckpointError, OSError)):
            said = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{what}: rank {rank}: {said.rstrip('. ')}. {remedy()}") from error
    except CheckpointError:
        raise
    except RuntimeError as error:  # of a collective
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{what}: a rank has ended, or cannot be reached ({first}). {remedy()}") from error
