"""Addresses on which stores listen, signatures, and what is unpickled."""

from __future__ import annotations

import pickle
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch

from zerolite.comm import objects
from zerolite.launcher.job import NodeJob
from zerolite.launcher.rendezvous import open_store
from zerolite.utils.network import SECRET_VARIABLE, listen_at


class Trap:
    """Unpickling it leaves a mark."""

    sprung: list[str] = []

    def __reduce__(self) -> Any:
        return spring, ()


def spring() -> None:
    Trap.sprung.append("sprung")


@pytest.fixture(autouse=True)
def no_trap() -> None:
    Trap.sprung.clear()


def test_a_name_for_loopback_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian calls a machine's own name 127.0.1.1."""
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [entry])
    assert listen_at("worker-1", 4711) == (None, 4711)
    foreign = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [foreign])
    assert listen_at("gateway", 4711) == (None, 4711)


def test_the_launchers_store_listens_where_the_first_node_is() -> None:
    store = open_store(NodeJob(["train.py"], job_id="job", master_port=0))
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5).close()


@pytest.mark.parametrize("value", [None, 1.5, [1, [True, None]], {1: (2, "text")}, frozenset("ab"), timedelta(1)])
def test_objects_keep_their_types(value: Any) -> None:
    packed = objects.pack(value)
    found = objects.unpack(packed, packed.numel())
    assert found == value and type(found) is type(value)


def test_nothing_is_unpickled_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "of another job")
    pickled = pickle.dumps(Trap())
    forged = [bytes(objects.pack(Trap()).tolist()), b"\0" * 32 + pickled, pickled, b"\0"]
    monkeypatch.setenv(SECRET_VARIABLE, "of this job")
    for content in forged:
        with pytest.raises(RuntimeError, match="not signed with the secret of its job"):
            objects.unpack(torch.frombuffer(bytearray(content), dtype=torch.uint8), len(content))
    assert not Trap.sprung
    packed = objects.pack(Trap())
    objects.unpack(packed, packed.numel())
    assert Trap.sprung == ["sprung"], "the trap works"
