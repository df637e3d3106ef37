"""Gathers in flight at the ends of engines, of processes and of all groups, and where a process is forked."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from tests.toolkit.transports import RawMessage
from tests.unit.test_launches import stack, train
from tests.unit.test_reads_in_flight import overlapping
from zerolite.comm import process_group
from zerolite.zero import param_gatherer

pytestmark = pytest.mark.usefixtures("without_ranks", "nothing_compiled")


def test_a_forked_process_finds_whole_weights() -> None:
    """A worker of a DataLoader: the threads that gather are not in it."""
    model = stack()
    comm, engine = overlapping(model)
    train(engine)
    assert comm.of("wait") == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 on forks beside threads
        child = os.fork()
    if not child:
        whole = all(type(p) is nn.Parameter and bool(p.isfinite().all()) for p in model.parameters())
        os._exit(0 if whole else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(comm.of("wait")) == list(range(8))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_process_that_is_forked_after_a_rank_was_lost_does_not_wait_for_ever() -> None:
    model = stack(2)
    comm, engine = overlapping(model)
    train(engine)
    comm.in_wait = mock.Mock(side_effect=RuntimeError("rank 1 has gone"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        try:
            model[0].weight.sum()
        except RuntimeError as error:
            os._exit(0 if "this process was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(RuntimeError, match="rank 1 has gone"):
        model[0].weight.sum()
    comm.in_wait = lambda: None
    assert model[0].weight.isfinite().all() and model[1].weight.isfinite().all()


def test_at_the_end_of_a_process_gathers_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    model = stack(4)
    comm, engine = overlapping(model)
    train(engine)
    with pytest.raises(ValueError, match="Invalid process group"):  # which is the program's own
        dist.destroy_process_group(mock.Mock())
    assert not comm.of("wait")
    process_group._notify_of_end()  # of all groups: other tests may use some
    assert sorted(comm.of("wait")) == [0, 1, 2, 3] and not caplog.text
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_at_the_end_of_a_process_a_rank_that_does_not_come_is_waited_for_in_vain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = stack(4)
    _, engine = overlapping(model)
    train(engine)
    late = mock.Mock(side_effect=RuntimeError("Timed out"))
    with mock.patch.object(RawMessage, "wait", late):
        param_gatherer._end_in_time()
    ((timeout,),) = {call.args for call in late.mock_calls}
    assert 50 < timeout.total_seconds() <= param_gatherer.END_S
    assert "Other ranks may not get this rank's part" in caplog.text
    with pytest.raises(RuntimeError, match=r"values of an update .* Timed out"):
        model[2].weight.sum()
    model.zero_grad()
    del engine
    gc.collect()  # the end of the engine does all but the wait
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.slow
def test_the_model_outlives_its_engine() -> None:
    model = stack()
    comm, engine = overlapping(model)
    train(engine)
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None and {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(p.isfinite().all() for p in model.parameters())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
