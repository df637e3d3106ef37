"""Tests whose body runs on every rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.toolkit.pool import Pools


def on_ranks(*worlds: int, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body every worker of a pool runs: once for each number of ranks in ``worlds``.

    Its arguments are those of `pytest.mark.parametrize`, and travel by pickle. The test fails where the body raises on
    any rank; the tracebacks of all ranks that raised are shown. timeout: in seconds.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(pools: Pools, world: int, **arguments: Any) -> None:
            pools(world).run(run, arguments, timeout)

        functools.update_wrapper(run, test)  # with the marks of the decorators below this one
        run.on_rank = test  # type: ignore[attr-defined]  # what the pool's workers call
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("pools", "world")]
        asked = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inspect.signature(test).parameters.values()]
        run.__signature__ = inspect.Signature(own + asked)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(run)

    return decorate
