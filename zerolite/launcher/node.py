"""Entry point of a node: run this node's part of a job.

Without arguments, or with `ssh`, the job comes as the first line of the standard input, over which the launcher then
gives signs of life. With two, of :func:`zerolite.launcher.remote_commands.pack`, it comes by mpirun, srun or pdsh, and
the node's part ends when its output has no reader any more.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from zerolite.launcher.check import node_index
from zerolite.launcher.job import NodeJob, read_line
from zerolite.launcher.remote_commands import unpack

END_MARK = b"zerolite-node-ended\n"
"""Behind the last line on stderr of a node that ended by itself. Without it, the connection was lost."""


def read_job(argv: Sequence[str], environ: Mapping[str, str]) -> NodeJob:
    """Return this node's part. Raises ValueError or TypeError if there is none that this version understands."""
    if len(argv) < 2:
        return NodeJob.from_json(read_line(0))
    content = unpack(argv[0])
    return NodeJob.from_json(content["jobs"][node_index(argv[1], content["hosts"], environ)])


def end_with_reader() -> None:
    """Wait until the reader of the standard output has gone, then end this node's part."""
    poll = select.poll()
    poll.register(1, 0)
    while not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll()):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(argv: Sequence[str]) -> int:
    """Run this node's part; return its exit status."""
    from zerolite.launcher.supervisor import run_node

    try:
        job = read_job(argv, os.environ)
    except (ValueError, TypeError, KeyError) as error:
        print(
            f"zerolite: this node's part of the job cannot be read ({error}): do the versions differ?", file=sys.stderr
        )
        return 2
    if len(argv) == 2:
        threading.Thread(target=end_with_reader, daemon=True).start()
    try:
        return run_node(job)
    finally:
        if list(argv) == ["ssh"]:
            with suppress(OSError):
                sys.stderr.flush()
                os.write(2, END_MARK)
