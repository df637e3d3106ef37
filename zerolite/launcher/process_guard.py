"""Guard process around mpirun, srun or pdsh: ends them and their children if the launcher is gone.

These tools do not notice the launcher's end. The launcher holds the standard input of this process open; when it ends,
however it does, the kernel closes that input.
"""

from __future__ import annotations

import os
import select
import subprocess
import uuid
from collections.abc import Sequence
from contextlib import suppress

from zerolite.launcher.processes import JobProcesses, adopt_orphans

POLL_INTERVAL_S = 0.1

TOOL_END_S = 5.0
"""Seconds in which mpirun and srun end all nodes after SIGTERM."""

GRACE_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status, 128 + n if signal n ended it."""
    adopt_orphans()
    tool = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    while tool.poll() is None:
        if select.select([0], [], [], POLL_INTERVAL_S)[0] and not os.read(0, 64):
            tool.terminate()
            with suppress(subprocess.TimeoutExpired):
                tool.wait(TOOL_END_S)
            break
    # pdsh ends without its ssh connections, and the nodes would live as long as these.
    JobProcesses(uuid.uuid4().hex).end(GRACE_S)
    code = tool.wait()
    return code if code >= 0 else 128 - code
