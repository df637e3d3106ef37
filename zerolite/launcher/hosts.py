"""Hosts of a job: the hostfile, and the filters `--include` and `--exclude`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names of hosts and users, and IPv4 addresses. They cannot begin with a hyphen, or ssh would take them for options."""

MOST_SLOTS = 4096
"""Largest number of processes per host; a larger one is a typing error."""


class HostsError(ValueError):
    """A hostfile or filter cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Host:
    """Host of a job.

    Attributes:
        name: name, IPv4 address, or IPv6 address without brackets, by which the other hosts reach it.
        slots: number of processes to run, 1 or more.
        devices: ascending indices of the CUDA devices to use, as many as slots; None for all visible ones.
        user: user for the login by ssh; None leaves it to ssh's configuration.
    """

    name: str
    slots: int
    devices: tuple[int, ...] | None = None
    user: str | None = None

    @property
    def login(self) -> str:
        """The host as ssh gets it: with the user, if there is one."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def read_host_name(text: str) -> str | None:
    """Return a host's name or address, an IPv6 address without brackets; None if the text is neither."""
    if HOST_NAME.fullmatch(text):
        return text
    bracketed = text.startswith("[") and text.endswith("]")
    address = text[1:-1] if bracketed else text
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return None
    return address if address.isascii() and not set(address) & set(" ,;'\"/[]@") else None


def read_hostfile(path: str) -> list[Host]:
    """Return the hosts of a hostfile in their order. Raises HostsError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise HostsError(f"there is no hostfile {path!r}: check the path given with --hostfile") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError(f"the hostfile {path!r} cannot be read: {error}") from None
    return parse_hostfile(text, path)


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Return the hosts of lines `NAME slots=N`. A comment begins with `#`.

    Args:
        text: contents of the file.
        path: path of the file, for messages.

    Raises:
        HostsError: a line is malformed, a host is repeated, or there is none.
    """
    hosts: list[Host] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} of the hostfile {path!r} ({line.strip()!r})"
        host = parse_host(words, where)
        if host.name in line_of:
            raise HostsError(
                f"{where} names the host {host.name!r} again, which stands in line {line_of[host.name]} already: "
                f"name each host once, with all of its slots"
            )
        line_of[host.name] = number
        hosts.append(host)
    if not hosts:
        raise HostsError(f"the hostfile {path!r} names no host: expected lines such as 'worker-1 slots=8'")
    return hosts


def parse_host(words: Sequence[str], where: str) -> Host:
    """Return the host of one line, split into words. Raises HostsError."""
    login, settings = words[0], words[1:]
    user, at, host = login.rpartition("@")
    name = read_host_name(host)
    if name is None or (at and not HOST_NAME.fullmatch(user)):
        raise HostsError(
            f"{where} begins with {login!r}: expected the name or the address of a host, such as worker-1, 10.0.0.3, "
            f"fd00::3 or user@worker-1"
        )
    slots: int | None = None
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key != "slots" or not equals:
            raise HostsError(
                f"{where} has {setting!r}: expected 'slots=N' after the name of the host, and nothing else"
            )
        if slots is not None:
            raise HostsError(f"{where} gives the number of slots twice")
        if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= MOST_SLOTS:
            raise HostsError(
                f"{where} has {setting!r}: expected the number of processes of the host, 1 to {MOST_SLOTS}"
            )
        slots = int(value)
    if slots is None:
        raise HostsError(f"{where} lacks the number of processes of the host: expected '{login} slots=N'")
    return Host(name, slots, user=user or None)


def parse_filter(text: str, option: str, logins: Collection[str]) -> dict[str, tuple[int, ...] | None]:
    """Return the slots of each host in a filter such as `host1:0,2-3@host2`; None for all slots of a host.

    Args:
        text: the filter.
        option: `--include` or `--exclude`, for messages.
        logins: hosts of the form `user@host`. A filter may repeat that form, whose `@` does not separate hosts then.

    Raises:
        HostsError: the filter is malformed.
    """
    rest = text
    for login in logins:
        rest = re.sub(rf"(^|@)\s*{re.escape(login)}(?=\s*(?:[:@]|$))", rf"\1{login.rpartition('@')[2]}", rest)
    chosen: dict[str, tuple[int, ...] | None] = {}
    for item in rest.split("@"):
        name, colon, slots = split_slots(item.strip())
        if name is None:
            raise HostsError(
                f"{option} {text!r} names {item.strip()!r} as a host: expected hosts separated by '@', each with its "
                f"slots after a ':' if not all are meant, as in 'host1:0,2-3@host2' or '[fd00::3]:0'"
            )
        if name in chosen:
            raise HostsError(f"{option} {text!r} names the host {name!r} twice: name all of its slots at once")
        chosen[name] = parse_slots(slots, f"{option} {text!r}") if colon else None
    return chosen


def split_slots(item: str) -> tuple[str | None, str, str]:
    """Return (name of the host or None, ":" or "", slots) of `host`, `host:0,2`, `fd00::3` or `[fd00::3]:0,2`."""
    whole = read_host_name(item)
    if whole is not None:
        return whole, "", ""
    bracketed, bracket, rest = item.partition("]") if item.startswith("[") else ("", "", item)
    name, colon, slots = rest.partition(":")
    return read_host_name(bracketed + bracket + name), colon, slots


def parse_slots(text: str, where: str) -> tuple[int, ...]:
    """Return the slots of a list such as `0,2-3`, ascending. Raises HostsError."""
    slots: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part, re.ASCII)
        if match is None:
            raise HostsError(f"{where} has {part!r} as slots: expected numbers and ranges, as in '0,2-3'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise HostsError(f"{where} has the range {part.strip()!r}, which runs backwards")
        both = slots.intersection(range(first, last + 1))
        if both:
            raise HostsError(f"{where} names slot {min(both)} twice")
        slots.update(range(first, last + 1))
    return tuple(sorted(slots))


def select_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts that the filters leave, in the order of ``hosts``.

    Args:
        hosts: all hosts.
        include: filter that names the hosts and slots to use; None for all. Slots are indices of CUDA devices, from 0.
        exclude: filter that names those to leave out. Not both filters at once.

    Raises:
        HostsError: a filter is malformed, names an unknown host or slot, or leaves none.
    """
    if include is not None:
        chosen = checked_filter(hosts, include, "--include")
        return [restrict(host, chosen[host.name]) for host in hosts if host.name in chosen]
    if exclude is None:
        return list(hosts)
    dropped = checked_filter(hosts, exclude, "--exclude")
    left: list[Host] = []
    for host in hosts:
        if host.name not in dropped:
            left.append(host)
            continue
        gone = dropped[host.name]
        devices = tuple(slot for slot in range(host.slots) if gone is not None and slot not in gone)
        if devices:
            left.append(restrict(host, devices))
    if not left:
        raise HostsError(f"--exclude {exclude!r} leaves no host to run on")
    return left


def checked_filter(hosts: Sequence[Host], text: str, option: str) -> dict[str, tuple[int, ...] | None]:
    """Return :func:`parse_filter` of the text. Raises HostsError for an unknown host or slot."""
    slots_of = {host.name: host.slots for host in hosts}
    chosen = parse_filter(text, option, [host.login for host in hosts if host.user is not None])
    for name, slots in chosen.items():
        if name not in slots_of:
            known = ", ".join(slots_of)
            raise HostsError(f"{option} {text!r} names the host {name!r}, which is not among the known ones: {known}")
        unknown = [slot for slot in slots or () if slot >= slots_of[name]]
        if unknown:
            raise HostsError(
                f"{option} {text!r} names slot {unknown[0]} of the host {name!r}, which has the slots "
                f"0 to {slots_of[name] - 1}"
            )
    return chosen


def restrict(host: Host, devices: tuple[int, ...] | None) -> Host:
    """Return the host with only these devices; None leaves it as it is."""
    return host if devices is None else replace(host, slots=len(devices), devices=devices)


def limit_hosts(hosts: Sequence[Host], asked: tuple[int, int] | None, nproc: int | None) -> list[Host]:
    """Return the first hosts up to a number, each with its first slots up to a number.

    Args:
        hosts: all hosts.
        asked: (fewest, most) hosts; None for all.
        nproc: slots of each host; None for all.

    Raises:
        HostsError: there are too few hosts or slots.
    """
    if asked is not None and asked[0] > len(hosts):
        known = ", ".join(host.name for host in hosts)
        raise HostsError(f"--num-nodes asks for {asked[0]} hosts, and there are {len(hosts)}: {known}")
    chosen = list(hosts if asked is None else hosts[: asked[1]])
    if nproc is None:
        return chosen
    for host in chosen:
        if nproc > host.slots:
            raise HostsError(
                f"--nproc asks for {nproc} processes on each host, and the host {host.name!r} has {host.slots} slots: "
                f"ask for fewer, or give it more slots in the hostfile"
            )
    return [
        replace(host, slots=nproc, devices=None if host.devices is None else host.devices[:nproc]) for host in chosen
    ]
