"""Error file of a failed rank, in an extended format of torch's elastic agent.

It needs only the standard library, so that it works before torch is imported, and without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the file, set by the agent."""

EXIT_COUNT, NUMBERED_EXIT = "zerolite/exits", "zerolite/exits/{}"
"""Keys in the store of the launcher's agent: the number of ranks that have exited with status 0, and the n-th of
them, from 1."""

_MOST_TEXT = 1 << 16  # characters of a message, and of a traceback: a store takes no megabytes

PEER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
"""Parts of the messages of gloo, NCCL and torch's store if another process has ended or cannot be reached."""


@dataclass(frozen=True)
class FailureRecord:
    """One rank's failure.

    Attributes:
        message: first lines of the launcher's report: an exception's type and text, or several lines.
        traceback: as Python prints it, or "".
        time: time of the failure in seconds since the epoch, by this host's clock; 0 if unknown.
        host: the host's name, "" if unknown.
        consequence: it followed from another rank's failure.
        pid: process id of its writer, 0 if unknown. Children of the rank have the variable too.
    """

    message: str
    traceback: str = ""
    time: float = 0.0
    host: str = ""
    consequence: bool = False
    pid: int = 0


def _shortened(text: str) -> str:
    """Return a long text without its middle."""
    half = _MOST_TEXT // 2
    return text if len(text) <= _MOST_TEXT else f"{text[:half]} ... {text[-half:]}"


def write(message: str, traceback: str, consequence: bool = False) -> None:
    """Write the record of this process, unless it has written one or the agent wants none. It never raises.

    It replaces the record of a child, and that of torch's ``record`` decorator, which knows less.
    """
    path = os.environ.get(VARIABLE)
    if not path or ((before := read(path)) is not None and before.pid == os.getpid()):
        return
    now = time.time()
    extra = {"py_callstack": traceback, "timestamp": str(int(now))}
    ours = {"time": now, "host": socket.gethostname(), "consequence": consequence, "pid": os.getpid()}
    content = {"message": {"message": message, "extraInfo": extra}, "zerolite": ours}
    with contextlib.suppress(OSError):
        # Renamed when it is complete, so that the agent never reads half a file.
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)


def read(path: str) -> FailureRecord | None:
    """Read a record of :func:`write`, or of torch's ``record`` decorator; None if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            content, written_at = json.load(file), os.fstat(file.fileno()).st_mtime
        inside, ours = content["message"], content.get("zerolite", {})
        if isinstance(inside, str):
            inside = {"message": inside}
        message = str(inside.get("message", ""))
        return FailureRecord(
            _shortened(message),
            _shortened(str(inside.get("extraInfo", {}).get("py_callstack", ""))),
            float(ours.get("time") or written_at),  # torch's timestamp has whole seconds
            str(ours.get("host", "")),
            bool(ours.get("consequence", any(part in message for part in PEER_IS_GONE))),
            int(ours.get("pid", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
