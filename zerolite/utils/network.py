"""Addresses, ports and network interfaces of this host."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from collections.abc import Iterator

from zerolite.utils.listening import is_loopback, plain_address

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Gloo's network interface. Unless it is set, gloo uses the address of the host's own name. Many distributions map this
name to 127.0.1.1, and the ranks of other hosts would then connect to themselves. NCCL finds interfaces by itself, may
use several, and prefers fast ones, so its variable is not set."""

PORTS = range(20000, 32000)
"""Ports below those that Linux uses for outgoing connections (32768 and above)."""


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
    return next((interface for interface, own in interface_addresses() if plain_address(own) == plain), None)


def resolve(name: str) -> list[str]:
    """Return the addresses of a host name or an address; [] if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(plain_address(str(entry[4][0])) for entry in found))


def is_this_host(name: str) -> bool:
    """Return True if a host name or an address means the host that this runs on."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    addresses = resolve(name)
    if any(is_loopback(address) for address in addresses):
        return True
    own = {plain_address(address) for _, address in interface_addresses()}
    return not own.isdisjoint(addresses)


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
            listen(port).close()
            return port
    raise OSError(f"none of 200 TCP ports between {PORTS.start} and {PORTS.stop} is free")


def listen(port: int) -> socket.socket:
    """Return a socket that listens at a port on all IPv4 and IPv6 addresses. Raises OSError if the port is taken."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
