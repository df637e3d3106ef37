"""Failures of a job, which of them came first, and the report of it. Needs no torch."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerolite.utils.failure_record import FailureRecord
from zerolite.utils.text import counted

TAIL_LINES = 20

_LATER = 3  # number of further failures that are reported

_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory", "bad_alloc")


@dataclass(frozen=True)
class Failure:
    """Failure of a rank as the agent of its node saw it, or of a node.

    Attributes:
        rank: the rank's number in the job; meaningless for a node.
        world_size: number of ranks of the job.
        host: name of the node.
        pid: process id of the rank.
        exitcode: exit status as in `Popen.returncode`: negative for a signal.
        seen: time at which the agent saw it, in seconds since the epoch.
        record: the record that the rank has written itself; None without one.
        killed_for_memory: the kernel killed the rank because memory had run out.
        output: paths of the files with the rank's standard output and error; empty if they go to the terminal.
        tail: the last lines of the rank's standard error; "" if it goes to the terminal.
        by_itself: the rank ended without being told to. Only then does its exit status say why.
        node_failure: for a node, a sentence that says why its part failed; "" for a rank.
    """

    rank: int = -1
    world_size: int = 0
    host: str = ""
    pid: int = 0
    exitcode: int = 1
    seen: float = 0.0
    record: FailureRecord | None = None
    killed_for_memory: bool = False
    output: list[str] = field(default_factory=list)
    tail: str = ""
    by_itself: bool = True
    node_failure: str = ""

    @property
    def time(self) -> float:
        """Time of the failure in seconds since the epoch: of the rank's record, else when the agent saw it."""
        return self.record.time if self.record is not None and self.record.time else self.seen

    @property
    def consequence(self) -> bool:
        """True if the rank failed only because it lost another one."""
        return self.record is not None and self.record.consequence

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Failure:
        record = fields.pop("record")
        return cls(**fields, record=None if record is None else FailureRecord(**record))


def causes_first(failures: Sequence[Failure]) -> list[Failure]:
    """Sort failures so that the likeliest cause comes first.

    The order is: failures of ranks, failures of nodes, errors about the loss of another rank, exits with status 0.
    Within each of these groups failures are sorted by time. Exits with status 0 count only where every other failure
    tells of a lost rank: then the rank that had finished is the cause.
    """
    failed = [failure for failure in failures if failure.exitcode]
    if not all(failure.consequence for failure in failed):
        failures = failed

    def rank_of_cause(failure: Failure) -> tuple[bool, bool, bool, float]:
        succeeded = failure.exitcode == 0
        return succeeded, failure.consequence, bool(failure.node_failure), failure.time

    return sorted(failures, key=rank_of_cause)


def exit_status(failures: Sequence[Failure]) -> int:
    """Return the job's exit status: that of the first rank that failed and ended by itself, else 1; 0 if none failed.

    A rank that signal n ended gives 128 + n, as in a shell.
    """
    for failure in causes_first(failures):
        if failure.by_itself and failure.exitcode:
            return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    return int(any(failure.exitcode for failure in failures))


def ran_out_of_memory(failure: Failure) -> bool:
    """Return True if the process itself reported an error for lack of memory."""
    text = recorded_message(failure) if failure.record is not None else last_line(failure.tail)
    return any(part in text for part in _OUT_OF_MEMORY)


def reason(failure: Failure) -> str:
    """Describe the end of a rank and its cause, if known, without a full stop: `exit status 1, ValueError: ...`."""
    message = recorded_message(failure)
    if failure.killed_for_memory:
        return "killed by the kernel, since memory had run out (SIGKILL)"
    if not failure.by_itself:
        how = "an error"
    elif failure.exitcode < 0:
        how = f"ended by signal {-failure.exitcode} ({signal_name(-failure.exitcode)})"
        if failure.exitcode == -signal.SIGKILL:
            how += "; the kernel also sends this signal when memory runs out: see `dmesg`"
    else:
        how = f"exit status {failure.exitcode}"
    if ran_out_of_memory(failure):
        how += ", out of memory"
    return f"{how}, {message.splitlines()[0].removeprefix('zerolite: ')}" if message else how


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def headline(failure: Failure) -> str:
    """Return one sentence with the rank, its host and its end."""
    if failure.node_failure:
        return failure.node_failure
    where = f"rank {failure.rank} of {failure.world_size} on host {failure.host} (process {failure.pid})"
    if failure.exitcode == 0:
        return f"{where} had exited with status 0"
    return f"{where} failed: {reason(failure)}"


def describe(failures: Sequence[Failure], host: str) -> list[str]:
    """Return the last lines for the terminal after a failed job, of which the first names the first failure.

    A message or traceback that rank 0 has written to the terminal itself is not repeated.

    Args:
        failures: all that are known; at least one.
        host: the host of the terminal; files on another host are named with theirs.
    """
    first, *others = causes_first(failures)
    message = recorded_message(first)
    same = [other for other in others if message and recorded_message(other) == message]
    lines = [f"zerolite: {headline(first)}"]
    if any(failure.rank == 0 and not failure.output for failure in (first, *same)):
        lines[0] += " (see above)" if detail_lines(first) else ""
    else:
        lines.extend(detail_lines(first))
    if first.output:
        where = "" if first.host == host else f" on host {first.host}"
        lines.append(f"zerolite: all output of rank {first.rank}{where}: {' and '.join(first.output)}")
    if same:
        lines.append(f"zerolite: {counted(len(same), 'other rank')} ended with the same message")
    independent = [other for other in others if not other.consequence and not other.node_failure and other not in same]
    later = independent[:_LATER]
    lines.extend(
        f"zerolite: {'after' if failure.exitcode else 'before'} that, {headline(failure)}" for failure in later
    )
    ended = first.world_size - 1 - len(same) - len(later)
    if ended > 0:
        others_text = f"other {counted(ended, 'rank')} were" if ended > 1 else "other rank was"
        lines.append(f"zerolite: the {others_text} ended, if still running")
    return lines


def recorded_message(failure: Failure) -> str:
    """Return the message of the rank's own record; "" without a record."""
    return failure.record.message if failure.record is not None else ""


def detail_lines(failure: Failure) -> list[str]:
    """Return the lines below the headline: traceback, rest of a long message, or end of the standard error."""
    record = failure.record
    if record is not None and record.message:
        return record.traceback.rstrip().splitlines() or record.message.rstrip().splitlines()[1:]
    if not failure.tail:
        return []
    lines = failure.tail.rstrip().splitlines()[-TAIL_LINES:]
    return [f"zerolite: the last lines of rank {failure.rank}'s standard error:", *lines]
