"""Diagnosis of a hang from the positions of all ranks: divergence, likely cause and remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerolite.comm.ranks import list_of, name_ranks
from zerolite.diagnostics.last_words import EXITED
from zerolite.diagnostics.position import AMONG, Entries, Position

_STACKS = 6  # different ones that are printed
_TORCH_CALL = re.compile(r'distributed_c10d\.py", line \d+, in ([a-z]\w*)')
_LOOP = {
    "",
    "the forward",
    "loss.backward()",
    "engine.backward()",
    "engine.step()",
    "engine.optimizer.step()",
    "engine.optimizer.zero_grad()",
    "engine.join()",
}


@dataclass(frozen=True)
class Absent:
    """A rank that does not report its position.

    Attributes:
        ended: how it has left, such as "ended normally after step 10", or "" if it has said nothing.
        last: its last sign of life, such as "in step 12, 40 s ago".
    """

    ended: str = ""
    last: str = ""


class Parting(NamedTuple):
    """The first use or collective in which ranks differ. said: the ranks that have each one there, "" for none yet."""

    said: Mapping[str, Sequence[int]]
    of_modules: bool
    sentence: str


def diagnose(reason: str, positions: Sequence[Position], absent: Mapping[int, Absent]) -> str:
    """Return the message that ends a job whose ranks have parted.

    Args:
        reason: the sentence to begin with.
        positions: by rank, of those that have answered.
        absent: the others.
    """
    parted = first_difference(positions)
    cause, remedy = _cause(positions, absent, parted)
    parts = [reason, "Where the ranks are:\n" + _table(positions, absent), "\n".join(one.sentence for one in parted)]
    parts += [f"Likely cause: {cause}", f"What to do: {remedy}", _stacks(positions)]
    return "\n\n".join(part for part in parts if part)


# -------------------------------------------------------------------- who is where


def _table(positions: Sequence[Position], absent: Mapping[int, Absent]) -> str:
    lines: dict[str, list[int]] = {}
    for position in positions:
        waits = f"; waits for {position.waits_for}" if position.waits_for else "; waits for no rank"
        lines.setdefault(position.place() + waits, []).append(position.rank)
    for rank, known in absent.items():
        said = known.ended or (
            f"no answer, last seen {known.last}: dead, or stuck outside of Python"
            if known.last
            else "no answer, and no step so far: dead, stuck outside of Python, or not yet in zerolite.initialize()"
        )
        lines.setdefault(said, []).append(rank)
    hosts = {position.rank: f"host {position.host}, process {position.process}" for position in positions}
    told = []
    for line, ranks in sorted(lines.items(), key=lambda item: item[1]):
        host = f" ({hosts[ranks[0]]})" if len(ranks) == 1 and ranks[0] in hosts else ""
        told.append(f"  {name_ranks(ranks)}{host}: {line}")
    return "\n".join(told)


# -------------------------------------------------------------------- where they parted


def first_difference(positions: Sequence[Position]) -> list[Parting]:
    """The first use of a module in which the ranks differ, or else the first collective of each communicator, among
    those that they remember."""
    if len({position.schedule_step for position in positions}) == 1:
        uses = _parting({p.rank: p.uses for p in positions}, "use of a module", "in this step")
        if uses:
            return uses
    found = []
    for name in dict.fromkeys(name for position in positions for name in position.collectives):
        members = [p for p in positions if name in p.collectives or AMONG not in name]
        found += _parting({p.rank: p.collectives.get(name, []) for p in members}, "collective", f"of the {name}")
    return found


def _parting(of_rank: Mapping[int, Entries], what: str, where: str) -> list[Parting]:
    """Find where the sequences part: entries with the same number that differ, or that some ranks do not have yet."""
    known = {rank: dict(entries) for rank, entries in of_rank.items()}
    first = max((min(entries, default=1) for entries in known.values()), default=1)
    last = max((max(entries, default=0) for entries in known.values()), default=0)
    for number in range(first, last + 1):
        said: dict[str, list[int]] = {}
        for rank, entries in known.items():
            said.setdefault(entries.get(number, ""), []).append(rank)
        if len(said) > 1:
            told = "; ".join(f"{name_ranks(ranks)}: {entry or 'nothing so far'}" for entry, ranks in said.items())
            same = next((entries[number - 1] for entries in known.values() if number - 1 in entries), "")
            before = f" (the one before, {same}, was the same)" if same else ""
            sentence = f"They parted at {what} number {number} {where}: {told}{before}."
            return [Parting(said, what == "use of a module", sentence)]
    return []


# -------------------------------------------------------------------- why


def _cause(positions: Sequence[Position], absent: Mapping[int, Absent], parted: Sequence[Parting]) -> tuple[str, str]:
    """Describe in sentences the likely cause, and the remedy."""
    if len(positions) == 1 and not absent:
        return (
            "the other ranks have ended or are stuck, or their host has gone.",
            "see the output of the other ranks, of rank 0 above all.",
        )
    found = (
        _gone(absent)
        or _different_engines(positions)
        or _different_modules(parted)
        or _different_places(positions)
        or _called_alone(positions)
        or _different_collectives(positions)
    )
    if found:
        return found
    if parted:
        return (
            "the ranks launch their collectives in different orders (see where they parted).",
            "make the same calls in the same order on all ranks.",
        )
    return (
        "all ranks wait in the same place, so the messages between them do not get through.",
        "check the network between the hosts (interface names in NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, firewalls, "
        "cables), and run with NCCL_DEBUG=INFO.",
    )


_Cause = tuple[str, str] | None


def _gone(absent: Mapping[int, Absent]) -> _Cause:
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
            "put the loop in `with engine.join():`, or give all ranks as many batches (a DistributedSampler, "
            "dataloader_drop_last, a fixed number of steps); or see why it called sys.exit.",
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


def _different_engines(positions: Sequence[Position]) -> _Cause:
    nobody_waits = not any(p.waits_for for p in positions)  # the collective has failed
    engines = {p.engine for p in positions if p.engine and (p.waits_for or nobody_waits)}
    if len(engines) <= 1:
        return None
    told = [
        f"{name_ranks([p.rank for p in positions if p.engine == engine])} in {engine}" for engine in sorted(engines)
    ]
    return (
        f"the ranks call several engines in different orders: they are {list_of(told)} (in the order of their "
        "zerolite.initialize), or one rank leaves out a call of one of them.",
        "make the calls of all engines in the same order on all ranks.",
    )


def _different_modules(parted: Sequence[Parting]) -> _Cause:
    said = sorted({text.rsplit(" ", 1)[0] for one in parted if one.of_modules for text in one.said if text})
    if len(said) <= 1:
        return None
    return (
        f"a branch that depends on the rank (or on its data): the ranks run different modules, {' and '.join(said)}, "
        "whose parameters all ranks must gather together.",
        "make one unit of the module that contains the branch (its class or name in zero_optimization.leaf_modules), "
        "so that all its parameters are gathered on all ranks; or take the same branch everywhere; or use stage 2.",
    )


def _different_places(positions: Sequence[Position]) -> _Cause:
    """Some wait in zerolite, others are elsewhere."""
    idle = [p for p in positions if not p.waits_for]
    waiting = [p for p in positions if p.waits_for]
    if not idle or not waiting:
        return None
    who = name_ranks([p.rank for p in idle])
    own = {found[1] for p in idle if (found := _TORCH_CALL.search(p.stack)) and not p.call}
    if len(own) == 1 and all(_TORCH_CALL.search(p.stack) for p in idle):
        return (
            f"{who} called torch.distributed.{own.pop()} at {idle[0].inside or idle[0].line}, which the others do not "
            "make there: they wait for each other in different collectives.",
            "make that call on all ranks, after the same calls of the engine (not inside `if rank == 0`).",
        )
    step = max(p.step for p in waiting)
    behind = all(p.step < step for p in idle) or all(not p.call for p in idle)
    where = idle[0].inside or idle[0].line or "an unknown line"
    if idle[0].call and not behind:
        return (
            f"{who} is slow or stuck in {idle[0].call}, at {where}, and all other ranks wait for it.",
            "find out why (the stack below); where it is only slow, raise desync_timeout_s.",
        )
    return (
        f"{who} is outside of the engine, at {where}, and all other ranks wait for it: it is slow or stuck there, has "
        "no more batches than that, or does something alone that takes long.",
        "if it has fewer batches, put the loop in `with engine.join():` or give all ranks as many; if something runs "
        "on one rank alone, let it run on all or keep it short; if it is only slow, raise desync_timeout_s.",
    )


def _called_alone(positions: Sequence[Position]) -> _Cause:
    """Some wait in a call that is no part of the loop's, the others elsewhere."""
    calls = {p.call for p in positions} - _LOOP
    if len(calls) != 1:
        return None
    call = calls.pop()
    alone = [p.rank for p in positions if p.call == call]
    if len(alone) == len(positions):
        return None
    return (
        f"{name_ranks(alone)} called {call}, and the others did not: they are in "
        f"{' and '.join(sorted({p.call or 'no call of the engine' for p in positions if p.call != call}))}.",
        f"call {call} on all ranks, in the same place of the loop (not inside `if rank == 0`), or on none.",
    )


def _different_collectives(positions: Sequence[Position]) -> _Cause:
    waits = {p.waits_for for p in positions}
    calls = {p.call for p in positions}
    if len(waits) <= 1 and len(calls) <= 1:
        return None
    steps = {p.rank: p.step for p in positions}
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
        "zerolite.get_full_...) on all ranks, in the same order, outside of `if rank == 0`; evaluate, and end windows "
        "of micro-batches, on all ranks alike.",
    )


# -------------------------------------------------------------------- stacks


def _stacks(positions: Sequence[Position]) -> str:
    """Each different one once."""
    of: dict[str, list[int]] = {}
    for position in positions:
        of.setdefault(position.stack, []).append(position.rank)
    told = [f"Stack of {name_ranks(ranks)} (main thread):\n{stack.rstrip()}" for stack, ranks in of.items() if stack]
    more = len(told) - _STACKS
    return "\n\n".join(told[:_STACKS]) + (f"\n\n({more} more stacks)" if more > 0 else "")
