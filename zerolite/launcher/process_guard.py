"""Guard process for mpirun, srun or pdsh: ends them and their children when the launcher is gone.

`main(COMMAND)` runs in a process whose standard input the launcher holds open.
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
"""mpirun and srun end all nodes within this time when they get SIGTERM."""

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
    # pdsh leaves its connections behind, and with them all nodes.
    JobProcesses(uuid.uuid4().hex).end(GRACE_S)
    code = tool.wait()
    return code if code >= 0 else 128 - code
