"""Calls that may never return."""

from __future__ import annotations

import threading

import pytest

from zerolite.comm.store_requests import in_time


def test_results_and_errors_come_through() -> None:
    assert in_time(lambda: 7, 5.0) == 7
    assert in_time(lambda: None, 5.0) is None
    with pytest.raises(KeyError, match="a"):
        in_time(lambda: {}["a"], 5.0)


def test_a_call_that_does_not_return_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError):
        in_time(never.wait, 0.05)
    never.set()


def test_where_no_thread_can_start_the_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert in_time(threading.get_ident, 5.0) == threading.get_ident()
