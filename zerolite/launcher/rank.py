"""Entry point of a rank: `main([--script|--module|--command, NAME, args...])`.

It runs the script, module or command in this process exactly as Python, `python -m` or the shell would. If the script
fails, the error file that the agent names gets the reason. It imports nothing heavy, and not torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

from zerolite.launcher.processes import die_with_parent
from zerolite.utils import failure_record

PARENT_VARIABLE = "ZEROLITE_AGENT_PID"
"""Variable with the process id of the agent, which a rank must not outlive."""

_NETWORK_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")

_PRINTERS = ("sys", "torch.distributed.distributed_c10d")
"""Modules whose hooks for uncaught exceptions do nothing but print."""


def is_consequence(error: BaseException) -> bool:
    """Return True if the error only says that another process has ended."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if "PeerLost" in names:  # raised by the watchdog for a lost rank
        return True
    return not names.isdisjoint(_NETWORK_ERRORS) and any(part in str(error) for part in failure_record.PEER_IS_GONE)


def script_traceback(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback from the first frame of the script on; None if no frame is the script's."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    part = tb
    while part is not None and part.tb_frame.f_code.co_filename in ours:
        part = part.tb_next
    return part


_thread_failures: list[tuple[float, str, list[str]]] = []
"""The latest uncaught exception in another thread than the main one: its time, the thread's name, its traceback."""
_RELATED_S = 600.0  # an exception that is older than this, in seconds, is most likely not why the script fails


def note_thread_failures() -> None:
    """Keep the report of an exception that ends a thread: the script may fail soon after because of it."""
    before = threading.excepthook

    def hook(failure: Any) -> None:
        if failure.exc_type is not SystemExit:
            name = failure.thread.name if failure.thread is not None else "unknown"
            lines = traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
            _thread_failures[:] = [(time.monotonic(), name, lines)]
        before(failure)

    threading.excepthook = hook


def thread_failure() -> list[str]:
    """Return the report of a thread that has ended a short time ago; an empty list if there is none."""
    for failed_at, name, lines in _thread_failures:
        seconds = time.monotonic() - failed_at
        if seconds <= _RELATED_S:
            return [f"Exception in thread {name}, {seconds:.0f} s before the script's own:\n", *lines, "\n"]
    return []


def report(error: BaseException) -> int:
    """Print the error that ended the script as Python would, write its record, and return the exit status.

    A plain traceback of Ctrl-C is not printed: the launcher prints one line for all ranks.
    """
    tb = script_traceback(error.__traceback__)
    error.__traceback__ = tb
    lines = traceback.format_exception(type(error), error, tb)
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, SyntaxError):  # the first line of its text is the place, not the error
        message = f"{type(error).__name__}: {error}"
    interrupted = isinstance(error, KeyboardInterrupt)
    failure_record.write(message, "".join([*thread_failure(), *lines]), is_consequence(error))
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
    if not interrupted or getattr(sys.excepthook, "__module__", "") not in _PRINTERS:
        sys.excepthook(type(error), error, tb)
    return 128 + signal.SIGINT if interrupted else 1


def new_main() -> types.ModuleType:
    """Install and return an empty `__main__`, as the interpreter makes it."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}
    return main


def prepend_to_path(directory: str) -> None:
    """Put a directory first on ``sys.path``, where `python script.py` and `python -m` have it."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        sys.path.insert(0, directory)


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script as `python path arguments` does, in a new `__main__`."""
    full = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    main = new_main()
    main.__dict__.update(__file__=full, __cached__=None, __loader__=loader)
    sys.argv = [path, *arguments]
    prepend_to_path(os.path.dirname(os.path.realpath(full)))
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m name arguments` does, in a new `__main__`."""
    new_main()
    sys.argv = [name, *arguments]
    prepend_to_path(os.getcwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def run_command(name: str, arguments: list[str]) -> NoReturn:
    """Replace this process by the command. Raises OSError if there is none of this name."""
    sys.stdout.flush()
    os.execvp(name, [name, *arguments])


def prepare() -> None:
    """Prepare the process for any script: its end with the agent, its input and output."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(int(parent))
    if os.environ.get("RANK", "0") != "0":  # typed input is for rank 0
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    note_thread_failures()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines of several ranks must not mix
    with contextlib.suppress(ValueError, OSError):  # stderr may be closed
        faulthandler.enable()  # prints the Python stack of a crash in native code


def main(argv: list[str]) -> int:
    """Run `[--script | --module | --command, NAME, args...]` and return the exit status."""
    target, name, *arguments = argv
    prepare()
    try:
        if target == "--command":
            run_command(name, arguments)
        elif target == "--module":
            run_module(name, arguments)
        else:
            run_script(name, arguments)
    except SystemExit as stop:
        if stop.code is not None and stop.code != 0:
            text = stop.code if isinstance(stop.code, int) else f"sys.exit({stop.code!r})"
            failure_record.write("" if isinstance(stop.code, int) else str(text), "")
            sys.last_value = stop  # exit handlers read from it how this process ends
        raise
    except BaseException as error:
        return report(error)
    return 0
