"""Handler of uncaught exceptions in processes with engines: Ctrl-C in one line, and dtype errors explained."""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from types import TracebackType
from typing import Any

import torch

from zerolite.precision.dtype_errors import explain


class _ExceptHook:
    """Replacement of ``sys.excepthook`` that calls the earlier hook at its end."""

    def __init__(self) -> None:
        self.models: weakref.WeakKeyDictionary[torch.nn.Module, torch.dtype | None] = weakref.WeakKeyDictionary()
        self.rank = 0
        self._before: Any = None

    def install(self) -> None:
        if self._before is None:
            self._before, sys.excepthook = sys.excepthook, self

    def __call__(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and _only_prints(self._before):
            if self.rank == 0:  # Ctrl-C reaches every rank: one line for the whole job
                print(f"{_new_line()}zerolite: interrupted by Ctrl-C{_user_line(trace)}", file=sys.stderr, flush=True)
            return
        for model, compute in list(self.models.items()):
            explain(error, model, compute)
        self._before(error_type, error, trace)


_hook = _ExceptHook()


def watch(model: torch.nn.Module, compute: torch.dtype | None, rank: int) -> None:
    """Let uncaught exceptions be explained with facts about an engine's model.

    Args:
        model: the engine's model.
        compute: see :func:`explain`.
        rank: rank in the job; only rank 0 prints.
    """
    _hook.models[model], _hook.rank = compute, rank
    _hook.install()


def _only_prints(hook: Any) -> bool:
    """Return True for Python's own hook, also inside the hook of torch.distributed.

    torch's hook only puts the rank before each line; it keeps the hook that it wraps in a closure.
    """
    if getattr(hook, "__module__", "") != "torch.distributed.distributed_c10d":
        return hook is sys.__excepthook__
    inside = [cell.cell_contents for cell in hook.__closure__ or ()]
    return all(_only_prints(other) for other in inside if callable(other))


def _new_line() -> str:
    """Return a line break on a terminal, which shows ``^C`` on the current line."""
    return "\n" if sys.stderr.isatty() else ""


def _user_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the script that the process runs, as " at FILE, line N"."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    lines = [entry for entry in traceback.extract_tb(trace) if main is not None and entry.filename == main]
    return f" at {os.path.basename(lines[-1].filename)}, line {lines[-1].lineno}" if lines else ""
