"""Diagnosis of a hang from the reports of all ranks: where they diverge, the likely cause, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerolite.comm.flight_recorder import CollectiveFailed
from zerolite.diagnostics.stack_report import AMONG, Entries, StackReport
from zerolite.utils.text import list_of, name_ranks

EXITED = "exited with status 0"
_STACKS = 6  # different stacks in one message
_EXECUTION = "module execution"
_TORCH_CALL = re.compile(r'distributed_c10d\.py", line \d+, in ([a-z]\w*)')
# Calls of an ordinary training loop, which every rank is expected to make.
_LOOP = {
    "",
    "the forward",
    "loss.backward()",
    "engine.backward()",
    "engine.step()",
    "engine.optimizer.step()",
    "engine.optimizer.zero_grad()",
}


@dataclass(frozen=True)
class Absent:
    """A rank that does not answer.

    Attributes:
        ended: how its process ended, such as "ended normally after step 10"; "" if it left no message.
        last: when it was last seen, such as "in step 12, 40 s ago"; "" if it was never seen.
    """

    ended: str = ""
    last: str = ""


class PeerLost(CollectiveFailed):
    """A collective has failed because another process has gone."""


class Divergence(NamedTuple):
    """The first module execution or collective in which ranks differ.

    Attributes:
        by_entry: ranks by their entry at this number; the entry "" means that a rank has not come so far.
        of_modules: True for a module execution, False for a collective.
        sentence: the same for the message.
    """

    by_entry: Mapping[str, Sequence[int]]
    of_modules: bool
    sentence: str


def diagnose(reason: str, reports: Sequence[StackReport], absent: Mapping[int, Absent]) -> str:
    """Return the message that ends a job whose ranks have diverged.

    Args:
        reason: first sentence of the message.
        reports: reports of the ranks that have answered, by rank.
        absent: all other ranks.
    """
    divergences = first_difference(reports)
    cause, remedy = _cause(reports, absent, divergences)
    calls = _first_divergence({r.rank: r.calls for r in reports}, "call", "that all ranks make")
    parted = "\n".join(one.sentence for one in (*calls, *divergences))
    parts = [reason, "Where the ranks are:\n" + _table(reports, absent), parted]
    parts += [f"Likely cause: {cause}", f"What to do: {remedy}", _stacks(reports)]
    return "\n\n".join(part for part in parts if part)


def lost_peer(error: RuntimeError, rank: int, location: str, ended: Mapping[int, str]) -> PeerLost:
    """Return the error of a collective whose connection broke, with how other ranks have ended.

    Args:
        error: the error of the collective.
        rank: this rank.
        location: engine call and line of this rank, as ``StackReport.summary`` says it.
        ended: how other ranks have ended, by rank.
    """
    cause, remedy = _ended_ranks({one: Absent(how) for one, how in ended.items()}) or (
        "the process of another rank died.",
        "see its output, and the last lines of the launcher; if it was aborted by gloo for the size of a message, the "
        "ranks launched different collectives here, and TORCH_DISTRIBUTED_DEBUG=DETAIL names them.",
    )
    endings = "; ".join(f"{name_ranks([one])} {how}" for one, how in ended.items())
    return PeerLost(
        f"rank {rank} has lost another rank, in {location}: {endings or 'it said nothing before it went'}. Likely "
        f"cause: {cause} What to do: {remedy} ({error})"
    )


# -------------------------------------------------------------------- who is where


def _table(reports: Sequence[StackReport], absent: Mapping[int, Absent]) -> str:
    lines: dict[str, list[int]] = {}
    for report in reports:
        waits = f"; waits for {report.waits_for}" if report.waits_for else "; waits for no rank"
        lines.setdefault(report.summary() + waits, []).append(report.rank)
    for rank, known in absent.items():
        answer = known.ended or (
            f"no answer, last seen {known.last}: dead, or stuck outside of Python"
            if known.last
            else "no answer, and no step so far: dead, stuck outside of Python, or not yet in zerolite.initialize()"
        )
        lines.setdefault(answer, []).append(rank)
    hosts = {report.rank: f"host {report.host}, process {report.process}" for report in reports}
    rows = []
    for line, ranks in sorted(lines.items(), key=lambda item: item[1]):
        host = f" ({hosts[ranks[0]]})" if len(ranks) == 1 and ranks[0] in hosts else ""
        rows.append(f"  {name_ranks(ranks)}{host}: {line}")
    return "\n".join(rows)


# -------------------------------------------------------------------- where they diverge


def first_difference(reports: Sequence[StackReport]) -> list[Divergence]:
    """Return the first module execution in which the ranks differ; without one, the first collective of each
    communicator.

    Only the entries that the ranks still remember are compared.
    """
    # Module executions are numbered within a step, so they can be compared only if all ranks are in the same one.
    if len({report.schedule_step for report in reports}) == 1:
        executions = _first_divergence({r.rank: r.executions for r in reports}, _EXECUTION, "in this step")
        if executions:
            return executions
    divergences = []
    for name in dict.fromkeys(name for report in reports for name in report.collectives):
        members = [r for r in reports if name in r.collectives or AMONG not in name]
        latest = {r.rank: r.collectives.get(name, []) for r in members}
        divergences += _first_divergence(latest, "collective", f"of the {name}")
    return divergences


def _first_divergence(of_rank: Mapping[int, Entries], what: str, where: str) -> list[Divergence]:
    """Compare entries of the same number: return the first that differ, or that some ranks do not have yet.

    The list has one item, or none if all ranks agree.
    """
    known = {rank: dict(entries) for rank, entries in of_rank.items()}
    # Each rank remembers only its latest entries: start at the first number that all of them still have.
    first = max((min(entries, default=1) for entries in known.values()), default=1)
    last = max((max(entries, default=0) for entries in known.values()), default=0)
    for number in range(first, last + 1):
        by_entry: dict[str, list[int]] = {}
        for rank, entries in known.items():
            by_entry.setdefault(entries.get(number, ""), []).append(rank)
        if len(by_entry) > 1:
            differing = [f"{name_ranks(ranks)}: {entry or 'nothing so far'}" for entry, ranks in by_entry.items()]
            same = next((entries[number - 1] for entries in known.values() if number - 1 in entries), "")
            before = f" (the one before, {same}, was the same)" if same else ""
            sentence = f"They diverge at {what} number {number} {where}: {'; '.join(differing)}{before}."
            return [Divergence(by_entry, what == _EXECUTION, sentence)]
    return []


# -------------------------------------------------------------------- why


def _cause(
    reports: Sequence[StackReport], absent: Mapping[int, Absent], divergences: Sequence[Divergence]
) -> tuple[str, str]:
    """Return the likely cause and the remedy, in sentences."""
    if len(reports) == 1 and not absent:
        return (
            "the other ranks have ended or are stuck, or their host has gone.",
            "see the output of the other ranks, of rank 0 above all.",
        )
    # From the surest sign to the vaguest: a rank that has gone explains everything else.
    cause = (
        _ended_ranks(absent)
        or _done_by_some(reports)
        or _different_engines(reports)
        or _different_modules(divergences)
        or _different_places(reports)
        or _called_alone(reports)
        or _different_collectives(reports)
    )
    if cause:
        return cause
    if divergences:
        return (
            "the ranks launch their collectives in different orders (see where they diverge).",
            "make the same calls in the same order on all ranks.",
        )
    return (
        "all ranks wait in the same place, so the messages between them do not get through.",
        "check the network between the hosts (interface names in NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, firewalls, "
        "cables), and run with NCCL_DEBUG=INFO.",
    )


_Cause = tuple[str, str] | None


def _ended_ranks(absent: Mapping[int, Absent]) -> _Cause:
    if not absent:
        return None
    normally = [rank for rank, known in absent.items() if known.ended.startswith("ended normally")]
    exited = [rank for rank, known in absent.items() if known.ended.startswith(EXITED)]
    failed = [rank for rank, known in absent.items() if known.ended and rank not in (*normally, *exited)]
    who = name_ranks(failed or exited or normally or absent)
    if failed:
        return f"{who} ended with an exception.", f"see the output of {who}."
    if exited:
        return (
            f"{who} exited with status 0 without Python's clean-up, while the others went on: it has called os._exit, "
            "or a library has.",
            f"see the output of {who}; let all ranks end their loops alike.",
        )
    if normally:
        return (
            f"uneven batches: {who} came to the end of the loop while the others still had batches (or called "
            "sys.exit).",
            "give all ranks as many batches (a DistributedSampler, dataloader_drop_last, a fixed number of steps), or "
            "repeat the last batch with weight=0 (docs/uneven-data.md); or see why it called sys.exit.",
        )
    died = "died (killed by the system for lack of memory, a crash, a lost host), or hangs in native code."
    look = f"see the output of {who} and its host's kernel log; `py-spy dump` shows where a process hangs that is "
    if any(known.last for known in absent.values()):
        return f"{who} {died}", f"{look}still there."
    return (
        f"{who} has not come to zerolite.initialize yet (it works alone before: loads data, say), or {died}",
        "if it needs longer, raise desync_timeout_s, or let it do that before init_distributed(timeout=...); "
        f"{look}still there.",
    )


def _done_by_some(reports: Sequence[StackReport]) -> _Cause:
    """Return the cause if some ranks have done what all must do alike."""
    common = set(reports[0].events).intersection(*(report.events for report in reports)) if reports else set()
    done: dict[str, list[int]] = {}
    for report in reports:
        # Each rank keeps its latest events only: those before the last common one may be missing for their age.
        old = max((place for place, event in enumerate(report.events, 1) if event in common), default=0)
        for event in dict.fromkeys(report.events[old:]):
            done.setdefault(event, []).append(report.rank)
    alone = {event: ranks for event, ranks in done.items() if len(ranks) < len(reports)}
    if not alone:
        return None
    event, ranks = alone.popitem()  # the latest one
    others = name_ranks([report.rank for report in reports if report.rank not in ranks])
    return (
        f"{name_ranks(ranks)} {event}, and {others} did not.",
        "do it on all ranks, in the same place of the loop (not inside `if rank == 0`, nor where a rank's own data "
        "decides), or on none.",
    )


def _different_engines(reports: Sequence[StackReport]) -> _Cause:
    none_waits = not any(r.waits_for for r in reports)  # the collective has already failed on all of them
    engines = {r.engine for r in reports if r.engine and (r.waits_for or none_waits)}
    if len(engines) <= 1:
        return None
    places = [
        f"{name_ranks([r.rank for r in reports if r.engine == engine])} in {engine}" for engine in sorted(engines)
    ]
    return (
        f"the ranks call several engines in different orders: they are {list_of(places)} (in the order of their "
        "zerolite.initialize), or one rank leaves out a call of one of them.",
        "make the calls of all engines in the same order on all ranks.",
    )


def _different_modules(divergences: Sequence[Divergence]) -> _Cause:
    # An entry is "'name' entered" or "'name' left": the name alone matters here.
    modules = sorted({text.rsplit(" ", 1)[0] for one in divergences if one.of_modules for text in one.by_entry if text})
    if len(modules) <= 1:
        return None
    return (
        f"a branch that depends on the rank (or on its data): the ranks run different modules, "
        f"{' and '.join(modules)}, whose parameters all ranks must gather together.",
        "name the module whose forward has the branch in zero_optimization.leaf_modules (its class or its name), so "
        "that all its parameters are gathered on all ranks, whatever they call; naming the module that some ranks do "
        "not call is not enough, because they do not come to its gather. Or take the same branch everywhere, or use "
        "stage 2.",
    )


def _different_places(reports: Sequence[StackReport]) -> _Cause:
    """Return the cause if some ranks wait in zerolite and others work elsewhere."""
    idle = [r for r in reports if not r.waits_for]
    waiting = [r for r in reports if r.waits_for]
    if not idle or not waiting:
        return None
    who = name_ranks([r.rank for r in idle])
    # The stack of a rank that calls torch.distributed itself shows the name of the collective.
    called = {match[1] for r in idle if (match := _TORCH_CALL.search(r.stack)) and not r.call}
    if len(called) == 1 and all(_TORCH_CALL.search(r.stack) for r in idle):
        return (
            f"{who} called torch.distributed.{called.pop()} at {idle[0].inside or idle[0].line}, which the others do "
            "not make there: they wait for each other in different collectives.",
            "make that call on all ranks, after the same calls of the engine (not inside `if rank == 0`).",
        )
    step = max(r.step for r in waiting)
    behind = all(r.step < step for r in idle) or all(not r.call for r in idle)
    where = idle[0].inside or idle[0].line or "an unknown line"
    if idle[0].call and not behind:
        return (
            f"{who} is slow or stuck in {idle[0].call}, at {where}, and all other ranks wait for it.",
            "find out why (the stack below); where it is only slow, raise desync_timeout_s.",
        )
    return (
        f"{who} is outside of the engine, at {where}, and all other ranks wait for it: it is slow or stuck there, has "
        "no more batches than that, or does something alone that takes long.",
        "if it has fewer batches, give all ranks as many (docs/uneven-data.md); if something runs on one rank alone, "
        "let it run on all or keep it short; if it is only slow, raise desync_timeout_s.",
    )


def _called_alone(reports: Sequence[StackReport]) -> _Cause:
    """Return the cause if some ranks wait in a call that is not part of the loop, and the others are elsewhere."""
    calls = {r.call for r in reports} - _LOOP
    if len(calls) != 1:
        return None
    call = calls.pop()
    alone = [r.rank for r in reports if r.call == call]
    if len(alone) == len(reports):
        return None
    return (
        f"{name_ranks(alone)} called {call}, and the others did not: they are in "
        f"{' and '.join(sorted({r.call or 'no call of the engine' for r in reports if r.call != call}))}.",
        f"call {call} on all ranks, in the same place of the loop (not inside `if rank == 0`), or on none.",
    )


def _different_collectives(reports: Sequence[StackReport]) -> _Cause:
    waits = {r.waits_for for r in reports}
    calls = {r.call for r in reports}
    if len(waits) <= 1 and len(calls) <= 1:
        return None
    steps = {r.rank: r.step for r in reports}
    if len(set(steps.values())) > 1:
        ahead = [rank for rank, step in steps.items() if step == max(steps.values())]
        return (
            f"the ranks are in different steps: {name_ranks(ahead)} {'is' if len(ahead) == 1 else 'are'} ahead, so the "
            "others have made more calls of the engine in a step, or have skipped one (a `continue`, an exception that "
            "was caught).",
            "call engine(...), engine.backward and engine.step equally often on all ranks, also for batches that one "
            "rank would rather skip (give those a weight of 0).",
        )
    if len(calls) == 1:
        return (
            f"the ranks are in the same call, {next(iter(calls))}, and launch different collectives there: they have "
            "made unequal numbers of forwards or backwards before it, or have used different parameters.",
            "call engine(...), engine.backward and engine.step equally often on all ranks, and take the same branches.",
        )
    return (
        "a branch that depends on the rank: the ranks make different calls of the engine "
        f"({', '.join(sorted(call or 'none' for call in calls))}).",
        "make every call of the engine that all ranks must make (backward, step, reduce, gather, save_checkpoint, "
        "zerolite.get_full_...) on all ranks, in the same order, outside of `if rank == 0`; evaluate, and end gradient "
        "accumulation, on all ranks alike.",
    )


# -------------------------------------------------------------------- stacks


def _stacks(reports: Sequence[StackReport]) -> str:
    """Return the stacks of the main threads; equal ones are printed once, with all their ranks."""
    of: dict[str, list[int]] = {}
    for report in reports:
        of.setdefault(report.stack, []).append(report.rank)
    texts = [f"Stack of {name_ranks(ranks)} (main thread):\n{stack.rstrip()}" for stack, ranks in of.items() if stack]
    more = len(texts) - _STACKS
    return "\n\n".join(texts[:_STACKS]) + (f"\n\n({more} more stacks)" if more > 0 else "")
