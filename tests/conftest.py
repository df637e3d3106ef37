"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
import time
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from tests.toolkit.pool import Pools

# A shell lets the commands that it starts in the background ignore Ctrl-C, and nohup lets them ignore SIGHUP. The
# commands that tests send these signals to would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # still ignored here; a command that is started has the default


SHARES = 8  # a share of the slow tests takes about a quarter of an hour on two cores
SHARE_SECONDS = 18 * 60.0  # of its tests together, in each process that runs tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="NAME",
        help=f"also run one in {SHARES} of the slow tests, chosen by NAME (a hash, for instance), until they took "
        f"{SHARE_SECONDS / 60:.0f} minutes; the rest of them is skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--share"):
        config.option.markexpr = "not slow or share"
        config.pluginmanager.register(Share(config.getoption("--share")), "share")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make the cases slow that a mark ``fast`` does not name."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        _mark_slow(name, cases, complete=not any("::" in argument for argument in config.args))
    share = config.pluginmanager.get_plugin("share")
    if share is not None:
        share.choose(items)


def _mark_slow(name: str, cases: list[pytest.Item], complete: bool) -> None:
    mark = cases[0].get_closest_marker("fast")
    assert mark is not None
    ids = {case: case.callspec.id for case in cases}  # type: ignore[attr-defined]
    if every := mark.kwargs.get("every"):
        fast = set(cases[::every])
    else:
        fast = {case for case in cases for wanted in mark.args if ids[case] == wanted or fnmatchcase(ids[case], wanted)}
    unknown = [one for one in mark.args if not any(i == one or fnmatchcase(i, one) for i in ids.values())]
    if not every and not mark.args:
        raise pytest.UsageError(
            f"{name}: the mark `fast` names no case; say `slow`, or name one of {sorted(ids.values())}"
        )
    if unknown and complete:
        raise pytest.UsageError(f"{name}: the mark `fast` names {unknown}, and the cases are {sorted(ids.values())}")
    for case in cases:
        if case not in fast:
            case.add_marker(pytest.mark.slow)


class Share:
    """The part of the slow tests that a name chooses: ``--share NAME``."""

    def __init__(self, name: str) -> None:
        self._part = zlib.crc32(name.encode()) % SHARES
        self._seconds_left = SHARE_SECONDS

    def choose(self, items: list[pytest.Item]) -> None:
        """Mark the chosen ones."""
        for item in items:
            if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % SHARES == self._part:
                item.add_marker(pytest.mark.share)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Count the seconds of the chosen ones, and skip what comes when they are used up."""
        if item.get_closest_marker("share") is None:
            return (yield)
        if self._seconds_left < 0:
            item.add_marker(pytest.mark.skip(reason=f"--share: its {SHARE_SECONDS / 60:.0f} minutes are over"))
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self._seconds_left -= time.monotonic() - began


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools(world_size).run(function, kwargs)``: persistent distributed workers, killed at the end of the
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
