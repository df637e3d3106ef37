"""Which rank failed first, and why, in the words of the last lines on the terminal. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerolite.failure_record import FailureRecord

TAIL_LINES = 20

_LATER = 3  # so many failures after the first are told of

_OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory", "bad_alloc")


@dataclass(frozen=True)
class Failure:
    """One rank's end, as the agent of its node saw it.

    Attributes:
        rank, local_rank: the rank's number in the job, and on its node.
        world_size: ranks of the job.
        host: name of its node.
        pid: its process.
        exitcode: as `Popen.returncode`: negative for a signal. 1 for a rank that reported an error and did not end.
        seen: seconds since the epoch at which the agent saw it.
        record: what the rank has left itself, None if nothing.
        killed_for_memory: whether the kernel killed it because memory had run out.
        output: paths of the files with its standard output and error; empty where they go to the terminal.
        tail: the last lines of its standard error, "" where it goes to the terminal.
        of_agent: why the node's whole part failed, "" for the failure of a rank; then `rank` means nothing.
    """

    rank: int = -1
    local_rank: int = -1
    world_size: int = 0
    host: str = ""
    pid: int = 0
    exitcode: int = 1
    seen: float = 0.0
    record: FailureRecord | None = None
    killed_for_memory: bool = False
    output: list[str] = field(default_factory=list)
    tail: str = ""
    of_agent: str = ""

    @property
    def time(self) -> float:
        """The best knowledge of when it happened, in seconds since the epoch."""
        return self.record.time if self.record is not None and self.record.time else self.seen

    @property
    def consequence(self) -> bool:
        """Whether it only followed from another failure."""
        return self.record is not None and self.record.consequence

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Failure:
        record = fields.pop("record")
        return cls(**fields, record=None if record is None else FailureRecord(**record))


@dataclass(frozen=True)
class Outcome:
    """How a node's part ended, as its agent tells its supervisor.

    Attributes:
        failures: of all nodes as far as known, none for success.
        speaks: whether this node's supervisor prints the last lines; one node does.
        attempt: which attempt it was, 0 for the first.
    """

    failures: list[Failure] = field(default_factory=list)
    speaks: bool = True
    attempt: int = 0

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "failures": [f.to_json() for f in self.failures]})

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        fields = json.loads(text)
        failures = [Failure.from_json(one) for one in fields.pop("failures")]
        return cls(failures=failures, **fields)


def in_order(failures: Sequence[Failure]) -> list[Failure]:
    """The failures by what they say of the cause: causes before consequences, each as they happened.

    The records' times decide where there are any; what an agent says of a node counts when no rank has failed.
    """
    return sorted(failures, key=lambda failure: (bool(failure.of_agent), failure.consequence, failure.time))


def exit_status(failure: Failure) -> int:
    """What a shell would report."""
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def ran_out_of_memory(failure: Failure) -> bool:
    """Whether an error that the process itself noticed tells of it."""
    text = failure.record.message if failure.record is not None else last_line(failure.tail)
    return any(part in text for part in _OUT_OF_MEMORY)


def reason(failure: Failure) -> str:
    """How the rank ended, and as far as known why, without a full stop: `exit status 1, ValueError: ...`."""
    message = failure.record.message if failure.record is not None else ""
    if failure.killed_for_memory:
        return "killed by the kernel, since memory had run out (SIGKILL)"
    if failure.exitcode < 0:
        how = f"ended by signal {-failure.exitcode} ({signal_name(-failure.exitcode)})"
        if failure.exitcode == -signal.SIGKILL:
            how += "; where the kernel kills for want of memory, it sends this signal too: see `dmesg`"
    else:
        how = f"exit status {failure.exitcode}"
    if ran_out_of_memory(failure):
        how += ", out of memory"
    return f"{how}, {message.splitlines()[0]}" if message else how


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def headline(failure: Failure) -> str:
    """One sentence of the rank, its host and its end."""
    if failure.of_agent:
        return failure.of_agent
    where = f"rank {failure.rank} of {failure.world_size} on host {failure.host} (process {failure.pid})"
    return f"{where} failed: {reason(failure)}"


def describe(outcome: Outcome) -> list[str]:
    """The last lines on the terminal for a job that failed. The first is the headline of what failed first."""
    first, *others = in_order(outcome.failures)
    attempt = f" in attempt {outcome.attempt}" if outcome.attempt else ""
    lines = [f"zerolite: {headline(first)}{attempt}"]
    details = first.record.traceback if first.record is not None else ""
    if details:
        lines.extend(details.rstrip().splitlines())
    elif first.record is not None and "\n" in first.record.message:
        lines.extend(first.record.message.rstrip().splitlines()[1:])
    elif first.tail:
        lines.append(f"zerolite: the last lines of rank {first.rank}'s standard error:")
        lines.extend(first.tail.rstrip().splitlines()[-TAIL_LINES:])
    if first.output:
        lines.append(f"zerolite: all output of rank {first.rank}: {' and '.join(first.output)}")
    later = [failure for failure in others if not failure.consequence and not failure.of_agent]
    lines.extend(f"zerolite: after that, {headline(failure)}" for failure in later[:_LATER])
    ended = first.world_size - 1 - len(later[:_LATER])
    if ended > 0:
        lines.append(f"zerolite: the other {count(ended, 'rank') if ended > 1 else 'rank'} {were(ended)} ended")
    return lines


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def were(number: int) -> str:
    return "was" if number == 1 else "were"
