"""Reads of the watchdog's thread of the collectives under way."""

from __future__ import annotations

import gc
import weakref

import torch

from zerolite.comm.flight_recorder import Wait


class Work:
    def __init__(self, done: bool = False) -> None:
        self.done, self.asked = done, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.done


def test_time_between_two_looks_counts_up_to_a_limit() -> None:
    wait = Wait()
    wait.works = (Work(),)
    assert wait.look(1.0) == 0.0
    wait._looked -= 100.0  # as if the process had stood still
    assert 1.0 <= wait.look(1.0) < 1.5
    wait._looked -= 0.5
    assert 1.5 <= wait.look(1.0) < 2.0
    wait.number, wait.works = wait.number + 1, (Work(),)
    assert wait.look(1.0) == 0.0


def test_what_was_waited_for_last_can_be_let_go() -> None:
    wait, shard = Wait(), torch.ones(4)
    known = weakref.ref(shard)
    wait.entry, wait.works = ("all_gather", "parameters", [shard], None, 1), (Work(),)
    del shard
    wait.forget()
    assert wait.under_way() and known() is not None
    wait.works = (Work(done=True),)
    wait.forget()
    gc.collect()
    assert known() is None and not wait.works
