"""Common checks of checkpoint calls: barrier, equal requests on all ranks, storage errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from zerolite.checkpoint.errors import CheckpointError
from zerolite.comm import HostGroup, RaiseTogether


def meet(host: HostGroup, timeout_s: float, what: str) -> None:
    """Wait until all ranks are here. Raises CheckpointError after ``timeout_s`` seconds, naming who is missing."""
    try:
        host.meet(timeout_s, what)
    except RuntimeError as error:
        raise CheckpointError(str(error)) from error


def one_request(what: str, requests: Mapping[int, Any]) -> Any:
    """Return the request that the ranks were called with, dataclasses by rank. Raises CheckpointError, on all of them,
    if they differ."""
    first = min(requests)
    for rank, request in requests.items():
        for name, value in asdict(requests[first]).items():
            if getattr(request, name) != value:
                raise CheckpointError(
                    f"{what}: expected the same arguments on all ranks, got {name}={value!r} on rank {first} and "
                    f"{name}={getattr(request, name)!r} on rank {rank}"
                )
    return requests[first]


def together(host: HostGroup, call: str) -> RaiseTogether:
    """Raise what one rank cannot do as a CheckpointError on all of them."""
    return RaiseTogether(host, call, CheckpointError, same=CheckpointError)


@contextlib.contextmanager
def storage_errors(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Context of torch.distributed.checkpoint: raises what went wrong on some rank on all of them, as a
    CheckpointError. remedy: what else there is."""
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
