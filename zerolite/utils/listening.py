"""Listening addresses and shared secret of a job's processes. Needs no torch.

torch.distributed's stores listen on all addresses and have no secret.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from typing import TypeVar

Store = TypeVar("Store")

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)  # EINVAL: a link-local address without its scope

SECRET_VARIABLE = "ZEROLITE_JOB_SECRET"
"""Environment variable with the secret of a job, the same on all its ranks."""


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
    """Return the name of this host's loopback interface; None if it has none of the usual names."""
    try:
        names = {name for _, name in socket.if_nameindex()}
    except OSError:  # a sandbox without netlink
        return None
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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None, port
    listeners: list[socket.socket] = []
    # IPv4 first: every client tries it, whatever else the name means.
    for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
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
    """Return a TCPStore that listens only on the address of this machine that ``host`` means; on all if it means none.

    Args:
        make: torch.distributed.TCPStore, with further arguments.
        host: a name or an address.
        port: as in :func:`listen_at`, whose errors are raised.
        torch_version: torch 2.6's faster server (libuv) cannot use a given socket, so there the other one is used.
    """
    listener, port = listen_at(host, port)
    if listener is None:
        return make(host, port, is_master=True)
    server = {"use_libuv": False} if torch_version < "2.7" else {}
    return make(host, port, is_master=True, master_listen_fd=listener, **server)
