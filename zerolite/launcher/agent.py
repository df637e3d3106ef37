"""Runs the processes of a job under torchrun's own elastic agent, in this process.

The one module of the launcher that imports torch; the command line imports it when everything else is checked.
"""

from __future__ import annotations

import signal
import sys
import uuid
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# The agent looks at its processes this often. Of ranks that fail between two looks, the lowest is reported.
MONITOR_INTERVAL_S = 0.05

LOCALHOST = "127.0.0.1"


def launch(target: Sequence[str], script_args: Sequence[str], nproc: int, master_port: int | None) -> int:
    """Start `nproc` processes of `python -u TARGET SCRIPT_ARGS`, wait for them, and return the job's exit status.

    When a rank fails the others are ended, and the last line on stderr names the rank that failed first.

    Returns:
        0 if every rank succeeded; else the exit status of the rank that failed first. 128 + n if signal n ended that
        rank, or was sent to the launcher.
    """
    # The agent expands `$` macros in arguments; a doubled `$` is a plain one.
    arguments = [argument.replace("$", "$$") for argument in ["-u", *target, *script_args]]
    try:
        elastic_launch(make_launch_config(nproc, master_port), sys.executable)(*arguments)
    except ChildFailedError as error:
        say(describe_failures(error.failures, nproc))
        return exit_status(first_failure(error.failures)[1].exitcode)
    except SignalException as error:
        received = signal.Signals(error.sigval)
        say(f"received {received.name} and ended all {nproc} ranks")
        return 128 + received
    return 0


def make_launch_config(nproc: int, master_port: int | None) -> LaunchConfig:
    """One machine, no restarts. Without a port, the rendezvous store binds a free one itself: no race between jobs."""
    if master_port is None:
        backend, endpoint, extra = "c10d", "localhost:0", {}
    else:
        backend, endpoint, extra = "static", f"{LOCALHOST}:{master_port}", {"rank": 0}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=dict(extra),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=LOCALHOST,
    )


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return (rank, failure) of the rank that failed first.

    The agent inserts failures in the order in which it saw them, and those it ended itself afterwards. Their timestamps
    are whole seconds, too coarse to tell.
    """
    return next(iter(failures.items()))


def describe_failures(failures: Mapping[int, ProcessFailure], nproc: int) -> str:
    """Say in one line which rank failed first and how."""
    rank, failure = first_failure(failures)
    if failure.exitcode < 0:
        how = f"was ended by signal {-failure.exitcode} ({failure.signal_name()})"
    else:
        how = f"failed with exit status {failure.exitcode}"
    others = "; the others were stopped" if nproc > 1 else ""
    return f"rank {rank} of {nproc} (process {failure.pid}) {how}{others}"


def exit_status(exitcode: int) -> int:
    """Turn a `Popen.returncode` into what a shell would report."""
    return exitcode if exitcode >= 0 else 128 - exitcode


def say(sentence: str) -> None:
    print(f"zerolite: {sentence}", file=sys.stderr, flush=True)
