"""Entry point of a rank: `main([--script|--module|--command, NAME, args...])`, by `job.run_module`.

Runs the script, module or command in this process just as Python, `python -m` or the shell would. When the script
fails, the reason is left in the error file that the agent names. Imports nothing heavy, and not torch.
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
import traceback
import types
from typing import NoReturn

from zerolite.launcher.processes import die_with_parent
from zerolite.utils import failure_record

BIND_VARIABLE = "ZEROLITE_BIND_CPUS"
"""The logical CPUs to which this rank is bound, as in `0,1,8`; unset for no binding."""

PARENT_VARIABLE = "ZEROLITE_AGENT_PID"
"""The process that starts the ranks; a rank does not outlive it."""

_PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
"""What gloo, NCCL and torch's store say when another process has ended or cannot be reached."""

_NETWORK_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")

_PRINTERS = ("sys", "torch.distributed.distributed_c10d", "zerolite.diagnostics.uncaught")
"""Modules whose hooks for uncaught exceptions only print them."""


def is_consequence(error: BaseException) -> bool:
    """True if the error only says that another process has gone."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "PeerLost" in names:  # the watchdog's, which says what is known of the other rank
        return True
    return not names.isdisjoint(_NETWORK_ERRORS) and any(part in str(error) for part in _PEER_IS_GONE)


def script_traceback(tb: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the script's own first frame on; None if no frame is the script's."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    part = tb
    while part is not None and part.tb_frame.f_code.co_filename in ours:
        part = part.tb_next
    return part


def report(error: BaseException) -> int:
    """Print an error that ended the script as Python would, except Ctrl-C, leave its record, and return the exit
    status."""
    tb = script_traceback(error.__traceback__)
    error.__traceback__ = tb
    lines = traceback.format_exception(type(error), error, tb)
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, SyntaxError):  # whose first line is its place
        message = f"{type(error).__name__}: {error}"
    interrupted = isinstance(error, KeyboardInterrupt)
    failure_record.write(message, "".join(lines), is_consequence(error))
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
    if not interrupted or getattr(sys.excepthook, "__module__", "") not in _PRINTERS:
        sys.excepthook(type(error), error, tb)  # of Ctrl-C the launcher itself tells, in one line for all ranks
    return 128 + signal.SIGINT if interrupted else 1


def new_main() -> types.ModuleType:
    """An empty `__main__`, as the interpreter makes it."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}
    return main


def put_first(directory: str) -> None:
    """Put a directory where Python looks first for modules; the launcher has left that place free."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        sys.path.insert(0, directory)


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script as `python path arguments` does, in a new `__main__`."""
    full = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    main = new_main()
    main.__dict__.update(__file__=full, __cached__=None, __loader__=loader)
    sys.argv = [path, *arguments]
    put_first(os.path.dirname(os.path.realpath(full)))
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m name arguments` does, in a new `__main__`."""
    new_main()
    sys.argv = [name, *arguments]
    put_first(os.getcwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def run_command(name: str, arguments: list[str]) -> NoReturn:
    """Become the command. Raises OSError if there is none of this name."""
    sys.stdout.flush()
    os.execvp(name, [name, *arguments])


def prepare() -> None:
    """Prepare the process for any script: the end with the agent, the cores, input and output, the stack at a fatal
    signal."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        die_with_parent(int(parent))
    cpus = os.environ.pop(BIND_VARIABLE, None)
    if cpus is not None:
        os.sched_setaffinity(0, set(map(int, cpus.split(","))))
    if os.environ.get("RANK", "0") != "0":  # what is typed is for rank 0
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # every line at once, and whole
    with contextlib.suppress(ValueError, OSError):  # stderr may be closed
        faulthandler.enable()


def main(argv: list[str]) -> int:
    """Run what ``argv`` says: `[--script | --module | --command, NAME, args...]`. Returns the exit status."""
    kind, name, *arguments = argv
    prepare()
    try:
        if kind == "--command":
            run_command(name, arguments)
        elif kind == "--module":
            run_module(name, arguments)
        else:
            run_script(name, arguments)
    except SystemExit as stop:
        if stop.code is not None and stop.code != 0:
            text = stop.code if isinstance(stop.code, int) else f"sys.exit({stop.code!r})"
            failure_record.write("" if isinstance(stop.code, int) else str(text), "")
            sys.last_value = stop  # how this process ends, for exit handlers
        raise
    except BaseException as error:
        return report(error)
    return 0
