"""Error file of a failed rank, in an extended format of torch's elastic agent.

Needs the standard library alone, so that it works before and without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable in which the agent says where the file is to be."""

EXIT_COUNT, NUMBERED_EXIT = "zerolite/exits", "zerolite/exits/{}"
"""Keys in the store of the launcher's agent: how many ranks have exited with status 0, and the n-th of them, from 1."""


@dataclass(frozen=True)
class FailureRecord:
    """One rank's failure.

    Attributes:
        message: what the last lines on the terminal begin with: an exception's type and text, or several lines.
        traceback: as Python prints it, or "".
        time: seconds since the epoch at which it happened, by this host's clock; 0 if unknown.
        host: the host's name, "" if unknown.
        consequence: whether it followed from another rank's failure.
    """

    message: str
    traceback: str = ""
    time: float = 0.0
    host: str = ""
    consequence: bool = False


def write(message: str, traceback: str, consequence: bool = False) -> None:
    """Leave the record of this process, unless there is one already or none was asked for. Raises nothing."""
    path = os.environ.get(VARIABLE)
    if not path or os.path.exists(path):
        return
    now = time.time()
    extra = {"py_callstack": traceback, "timestamp": str(int(now))}
    ours = {"time": now, "host": socket.gethostname(), "consequence": consequence}
    content = {"message": {"message": message, "extraInfo": extra}, "zerolite": ours}
    with contextlib.suppress(OSError):
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)


def read(path: str) -> FailureRecord | None:
    """Read the record that :func:`write`, or torch's ``record`` decorator, has left; None if nothing can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        inside = content["message"]
        if isinstance(inside, str):
            return FailureRecord(inside)
        extra, ours = inside.get("extraInfo", {}), content.get("zerolite", {})
        return FailureRecord(
            str(inside.get("message", "")),
            str(extra.get("py_callstack", "")),
            float(ours.get("time") or extra.get("timestamp") or 0),
            str(ours.get("host", "")),
            bool(ours.get("consequence", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
