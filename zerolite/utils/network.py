"""Addresses, ports and network interfaces of this host; listening addresses and shared secret of a job's processes.

torch.distributed's stores listen on all addresses and have no secret.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

Store = TypeVar("Store")

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)  # EINVAL: a link-local address without its scope

SECRET_VARIABLE = "ZEROLITE_JOB_SECRET"
"""Environment variable with the secret of a job, the same on all its ranks."""


GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Gloo's network interface. Unless it is set, gloo uses the address of the host's own name. Many distributions map this
name to 127.0.1.1, and the ranks of other hosts would then connect to themselves. NCCL finds interfaces by itself, may
use several, and prefers fast ones, so its variable is not set."""

PORTS = range(20000, 32000)
"""Ports below those that Linux uses for outgoing connections (32768 and above)."""


def plain_address(address: str) -> str:
    """Return the address in its normal form: an IPv4 address written as IPv6 becomes an IPv4 address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def is_loopback(host: str) -> bool:
    """Return True if a name or an address means this machine itself: `localhost`, `127.0.0.1`, `::1`, ..."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(plain_address(host)).is_loopback
    except ValueError:
        return False


def loopback_interface() -> str | None:
    """Return the name of this host's loopback interface; None if it has none of the usual names. Raises OSError in a
    sandbox that does not tell of its interfaces."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def listen_at(host: str, port: int) -> tuple[int | None, int]:
    """Listen on the address of this machine that ``host`` means, and on no other.

    Args:
        host: a name or an address. Loopback addresses count only if it is a loopback name itself. Many machines map
            their own name to 127.0.1.1, where no other machine finds them.
        port: TCP port; 0 for a free one.

    Returns:
        The file descriptor of the socket, which belongs to the caller, and its port. None and ``port`` if ``host`` is
        no address of this machine, as behind a port forwarding, or a name of several addresses.

    Raises:
        OSError: something listens there already, or the port may not be used.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None, port
    listeners: list[socket.socket] = []
    # IPv4 first: every client tries it, whatever else the name means.
    for family, _, _, _, address in sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET):
        if is_loopback(str(address[0])) != is_loopback(host):
            continue
        try:
            if not listeners or listeners[0].family == family:
                listeners.append(socket.create_server(address[:2], family=family, backlog=2048))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                for listener in listeners:
                    listener.close()
                raise
    if len(listeners) == 1:
        bound = int(listeners[0].getsockname()[1])
        return listeners[0].detach(), bound
    for listener in listeners:
        listener.close()
    return None, port


def keep_store(make: Callable[..., Store], host: str, port: int, torch_version: str) -> Store:
    """Return a TCPStore that listens on this machine's address ``host`` alone, or on all if ``host`` is none of them.

    Args:
        make: torch.distributed.TCPStore, with further arguments.
        host: a name or an address.
        port: as in :func:`listen_at`, whose errors are raised.
        torch_version: torch 2.6's faster server (libuv) cannot use a given socket, so 2.6 uses the other one.
    """
    listener, port = listen_at(host, port)
    if listener is None:
        return make(host, port, is_master=True)
    server = {"use_libuv": False} if torch_version < "2.7" else {}
    return make(host, port, is_master=True, master_listen_fd=listener, **server)


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) for the IPv4 and IPv6 addresses of this host."""
    import psutil

    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                yield interface, address.address.partition("%")[0]


def interface_of(address: str) -> str | None:
    """Return the interface that has this address; None for loopback addresses."""
    if is_loopback(address):
        return None
    plain = plain_address(address)
    return next((interface for interface, known in interface_addresses() if plain_address(known) == plain), None)


def resolve(name: str) -> list[str]:
    """Return the addresses of a host name or an address; [] if it cannot be resolved."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(plain_address(str(entry[4][0])) for entry in entries))


def is_this_host(name: str) -> bool:
    """Return True if a host name or an address means the host that this runs on."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    addresses = resolve(name)
    if any(is_loopback(address) for address in addresses):
        return True
    own_numbers = {plain_address(address) for _, address in interface_addresses()}
    return not own_numbers.isdisjoint(addresses)


def own_addresses() -> list[str]:
    """Return the IPv4 addresses at which others may reach this host."""
    return [
        address
        for _, address in interface_addresses()
        if ":" not in address and not is_loopback(address) and not ipaddress.ip_address(address).is_link_local
    ]


def address_towards(name: str) -> str | None:
    """Return the address from which this host would connect to another; None without a route. Sends nothing."""
    for address in resolve(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # A UDP connect sends no packet, but lets the kernel choose the route and with it the address.
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return None


def interface_towards(name: str) -> str | None:
    """Return this host's interface that leads to another host; None if there is none.

    If ``name`` means this host, it is the interface at which other hosts reach it.
    """
    address = address_towards(name)
    interface = None if address is None else interface_of(address)
    if interface is None and is_this_host(name):
        candidates = own_addresses()
        interface = interface_of(candidates[0]) if candidates else None
    return interface


def free_port() -> int:
    """Return a random TCP port at which nothing listens on this host."""
    draw = random.SystemRandom()
    for _ in range(200):
        port = draw.choice(PORTS)
        with contextlib.suppress(OSError):
            socket.create_server(("", port)).close()
            return port
    raise OSError(f"none of 200 TCP ports between {PORTS.start} and {PORTS.stop} is free")
