"""Hosts of a job: the hostfile, and the filters `--include` and `--exclude`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names and IPv4 addresses of hosts. They cannot begin with a hyphen, or ssh would take them for options."""

MOST_SLOTS = 4096
"""Largest number of processes per host; a larger one is a typing error."""


class HostsError(ValueError):
    """The hosts of a job cannot be determined; the message says why and what to do."""


@dataclass(frozen=True)
class Host:
    """Host of a job.

    Attributes:
        name: name or IPv4 address by which the other hosts reach it.
        slots: number of processes to run, 1 or more.
        devices: ascending indices of the CUDA devices to use, as many as slots; None for all visible ones.
    """

    name: str
    slots: int
    devices: tuple[int, ...] | None = None


def read_numbers(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a list such as `0,2-3`; None if the text is none, or names a number twice."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part, re.ASCII)
        in_part = [] if match is None else list(range(int(match[1]), int(match[2] or match[1]) + 1))
        if not in_part:
            return None
        numbers += in_part
    return tuple(numbers) if len(set(numbers)) == len(numbers) else None


def read_hostfile(path: str) -> list[Host]:
    """Return the hosts of a hostfile in their order. Raises HostsError."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse_hostfile(file.read(), path)
    except FileNotFoundError:
        raise HostsError(f"there is no hostfile {path!r}: check the path given with --hostfile") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError(f"the hostfile {path!r} cannot be read: {error}") from None


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Return the hosts of lines `NAME slots=N`. A comment begins with `#`.

    Args:
        text: contents of the file.
        path: path of the file, for messages.

    Raises:
        HostsError: a line is malformed, a host is repeated, or there is none.
    """
    hosts: dict[str, Host] = {}
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where, host = f"line {number} of the hostfile {path!r} ({line.strip()!r})", parse_host(words)
        if host is None:
            raise HostsError(
                f"{where} is no host: expected a name or an IPv4 address and the number of processes, 1 to "
                f"{MOST_SLOTS}, as in 'worker-1 slots=8' or '10.0.0.3 slots=4'; users and ports stand in "
                "~/.ssh/config, and names for IPv6 addresses in /etc/hosts"
            )
        if host.name in hosts:
            raise HostsError(
                f"{where} names the host {host.name!r} again, which stands in line {line_of[host.name]} already: "
                "name each host once, with all of its slots"
            )
        hosts[host.name], line_of[host.name] = host, number
    if not hosts:
        raise HostsError(f"the hostfile {path!r} names no host: expected lines such as 'worker-1 slots=8'")
    return list(hosts.values())


def parse_host(words: Sequence[str]) -> Host | None:
    """Return the host of one line, split into words; None if it is malformed."""
    slots = re.fullmatch(r"slots=([0-9]{1,4})", " ".join(words[1:]), re.ASCII)
    if slots is None or not HOST_NAME.fullmatch(words[0]) or not 1 <= int(slots[1]) <= MOST_SLOTS:
        return None
    return Host(words[0], int(slots[1]))


def parse_filter(hosts: Sequence[Host], text: str, option: str) -> dict[str, tuple[int, ...]]:
    """Return the slots of each host in a filter such as `host1:0,2-3@host2`; all slots of a host without a list.

    Args:
        hosts: all hosts.
        text: the filter.
        option: `--include` or `--exclude`, for messages.

    Raises:
        HostsError: the filter is malformed, or names an unknown host or slot.
    """
    slots_of = {host.name: host.slots for host in hosts}
    chosen: dict[str, tuple[int, ...]] = {}
    for part in map(str.strip, text.split("@")):
        name, colon, listed = part.partition(":")
        slots = read_numbers(listed) if colon else ()
        if not HOST_NAME.fullmatch(name) or slots is None or name in chosen:
            raise HostsError(
                f"{option} {text!r} has {part!r}: expected hosts separated by '@', each once, with its slots after a "
                "':' if not all are meant, as in 'host1:0,2-3@host2'"
            )
        if name not in slots_of:
            known = ", ".join(slots_of)
            raise HostsError(f"{option} {text!r} names the host {name!r}, which is not among the known ones: {known}")
        chosen[name] = tuple(sorted(slots)) or tuple(range(slots_of[name]))
        unknown = [slot for slot in chosen[name] if slot >= slots_of[name]]
        if unknown:
            raise HostsError(
                f"{option} {text!r} names slot {unknown[0]} of the host {name!r}, which has the slots 0 to "
                f"{slots_of[name] - 1}"
            )
    return chosen


def select_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts that the filters leave, in the order of ``hosts``.

    Args:
        hosts: all hosts.
        include: filter that names the hosts and slots to use; None for all. Slots are indices of CUDA devices, from 0.
        exclude: filter that names those to leave out. Not both filters at once.

    Raises:
        HostsError: a filter is malformed, names an unknown host or slot, or leaves none.
    """
    text = exclude if include is None else include
    if text is None:
        return list(hosts)
    named = parse_filter(hosts, text, "--exclude" if include is None else "--include")
    left: list[Host] = []
    for host in hosts:
        slots = named.get(host.name, ())
        if include is None:
            slots = tuple(slot for slot in range(host.slots) if slot not in slots)
        if len(slots) == host.slots:
            left.append(host)
        elif slots:
            left.append(replace(host, slots=len(slots), devices=slots))
    if not left:
        raise HostsError(f"--exclude {exclude!r} leaves no host to run on")
    return left


def limit_hosts(hosts: Sequence[Host], num_nodes: int | None, nproc: int | None) -> list[Host]:
    """Return the first hosts up to a number, each with its first slots up to a number; None means all.

    Raises:
        HostsError: there are too few hosts or slots.
    """
    if num_nodes is not None and num_nodes > len(hosts):
        known = ", ".join(host.name for host in hosts)
        raise HostsError(f"--num-nodes asks for {num_nodes} hosts, and there are {len(hosts)}: {known}")
    chosen = list(hosts[:num_nodes])
    for host in chosen:
        if nproc is not None and nproc > host.slots:
            raise HostsError(
                f"--nproc asks for {nproc} processes on each host, and the host {host.name!r} has {host.slots} slots: "
                "ask for fewer, or give it more slots in the hostfile"
            )
    return [replace(host, slots=nproc or host.slots, devices=host.devices and host.devices[:nproc]) for host in chosen]
