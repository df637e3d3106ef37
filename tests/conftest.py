"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pools

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it starts in the background ignore Ctrl-C, and so would the commands that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools(world_size).run("module:function", kwargs)``: persistent distributed workers, killed at the end of the
    session."""
    pools = Pools()
    try:
        yield pools
    finally:
        pools.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of torch: on tensors of a few hundred elements more would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
