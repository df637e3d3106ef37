"""Monitors: the writers, what they do when they cannot write, and what a step writes."""

from __future__ import annotations

import csv
import errno
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from zerolite.comm import Communicator, data_topology
from zerolite.comm.transport import DryTransport
from zerolite.config import load_config
from zerolite.monitor import Event, Monitor, StepLog, open_monitor
from zerolite.monitor.monitoring import Monitoring
from zerolite.monitor.writers import CsvWriter, TensorboardWriter, WandbWriter, Writer, append_lines
from zerolite.zero.observers import Observers

CPU = torch.device("cpu")
LR = ("Train/Samples/lr", 0.5, 8)


class Recording(Writer):
    """A writer that keeps what it gets, or raises ``error`` while that is set."""

    name = "recording"

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.closed = 0

    def write(self, events: Sequence[Event]) -> None:
        if self.error is not None:
            raise self.error
        self.events.extend(events)

    def close(self) -> None:
        self.closed += 1


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_file_holds_whole_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    append_lines(path, "one\n")
    real, room = os.pwrite, iter([2])

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if left := next(room, 0):
            return real(descriptor, data[:left], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="No space"):
            append_lines(path, "two\nthree\n")
    assert path.read_text() == "one\n", "half a line would be taken for a value"
    append_lines(path, "four\n")
    assert path.read_text() == "one\nfour\n"


@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("a\nb", "a\n"), ("a\nb\n", "a\nb\n"), ("torn", ""), ("x\n" + "y" * 200_000, "x\n")]
)
def test_a_line_that_was_cut_off_is_removed(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "lines"
    path.write_text(before)
    append_lines(path, "new\n", "header\n")
    assert path.read_text() == (after or "header\n") + "new\n"


def test_csv_files_are_deepspeeds(tmp_path: Path) -> None:
    out = tmp_path / "out" / "job"
    writer = CsvWriter(out)
    writer.write([LR, ("plain name", 2, 8)])
    assert rows(out / "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.5"]], (
        "a process that is killed loses nothing"
    )
    writer.write([("Train/Samples/lr", math.nan, 16)])
    with pytest.raises(ValueError, match=r'got "a_b" and "a/b", which are both a_b\.csv; rename'):
        writer.write([("a/b", 1.0, 1), ("a_b", 2.0, 1), ("c", 3.0, 1)])
    writer.close()
    again = CsvWriter(out)  # of a job that goes on
    again.write([LR])
    again.close()
    assert {path.name: rows(path) for path in out.iterdir()} == {
        "Train_Samples_lr.csv": [["step", "lr"], ["8", "0.5"], ["16", "nan"], ["8", "0.5"]],
        "plain_name.csv": [["step", "plain name"], ["8", "2"]],
        "a_b.csv": [["step", "b"], ["1", "1.0"]],
        "c.csv": [["step", "c"], ["1", "3.0"]],
    }


def test_a_missing_package_is_a_sentence_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"tensorboard\.enabled: expected the package .* 'zerolite\[tensorboard\]'"):
        TensorboardWriter(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ImportError, match=r"wandb\.enabled: expected the package .* 'zerolite\[wandb\]'"):
        WandbWriter("project", None, None)


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorboardWriter(tmp_path / "job")
    writer.write([LR, ("count", 3, 16)])
    read = EventAccumulator(str(tmp_path / "job")).Reload()  # before close: it is flushed
    assert [(e.step, e.value) for e in read.Scalars("Train/Samples/lr")] == [(8, 0.5)]
    assert [(e.step, e.value) for e in read.Scalars("count")] == [(16, 3.0)]
    writer.close()


@pytest.mark.parametrize("running", [False, True])
def test_wandb_gets_a_call_for_each_step(monkeypatch: pytest.MonkeyPatch, running: bool) -> None:
    wandb = mock.MagicMock()
    run = wandb.init.return_value
    wandb.run = run if running else None
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    writer = WandbWriter("project", "group", None)
    writer.write([("a", 1.0, 8), ("b", 2.0, 8), ("a", 3.0, 16)])
    writer.close()
    writer.close()
    assert run.log.mock_calls == [mock.call({"a": 1.0, "b": 2.0}, step=8), mock.call({"a": 3.0}, step=16)]
    begun = [mock.call(project="project", group="group", entity=None)]
    assert wandb.init.call_args_list == ([] if running else begun)
    assert run.finish.call_count == (0 if running else 1)


def test_values_may_be_numbers_or_tensors() -> None:
    writer = Recording()
    monitor = Monitor([writer])
    monitor.write([("a", 1, 0), ["b", torch.tensor([2.5], dtype=torch.bfloat16), 1]])  # type: ignore[list-item]
    monitor.write_events([("c", torch.tensor(3), 2)])
    assert writer.events == [("a", 1, 0), ("b", 2.5, 1), ("c", 3.0, 2)]


@pytest.mark.parametrize(
    "event",
    ["loss", "abc", 3, ("", 1.0, 1), ("loss", "1.0", 1), ("loss", torch.zeros(2), 1), ("loss", 1.0, -1),
     ("a", 1.0, None), ("a", 1j, 1), ("a", 1.0), (b"a", 1.0, 1)],
)  # fmt: skip
def test_bad_events_raise_on_every_rank(event: Any) -> None:
    for writers in ([Recording()], []):
        with pytest.raises(ValueError) as caught:
            Monitor(writers).write([LR, event])
        assert str(caught.value).startswith("monitor.write: expected ") and f"got {event!r}" in str(caught.value)
        assert all(not writer.events for writer in writers)


def test_a_writer_that_fails_warns_once_and_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recording(), Recording()
    monitor = Monitor([bad, good])
    bad.error = OSError(errno.ENOSPC, "No space left on device")
    with caplog.at_level(logging.WARNING, "zerolite"):
        monitor.write([LR])
        monitor.write([LR])
    (record,) = caplog.records
    assert "recording: values of a step could not be written: " in record.getMessage()
    assert "No space left on device. Training goes on" in record.getMessage()
    bad.error = None
    monitor.write([LR])
    assert (bad.events, good.events) == ([LR], [LR] * 3)
    monitor.close()
    monitor.close()
    monitor.write([LR])
    assert (bad.closed, good.closed, len(good.events)) == (1, 1, 3) and not monitor.enabled


def everything_enabled(folder: Path) -> dict[str, Any]:
    place = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    return {"csv_monitor": place}


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_opens_writers(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is opened without being asked for."""
    monkeypatch.chdir(tmp_path)
    assert not open_monitor(load_config({}), Communicator(), CPU).enabled and list(tmp_path.iterdir()) == []
    monitor = open_monitor(load_config(everything_enabled(tmp_path)), Communicator(DryTransport(rank, 2)), CPU)
    assert monitor.enabled == (rank == 0)
    monitor.write([LR])
    monitor.close()
    names = sorted(path.name for path in tmp_path.rglob("*.*"))
    assert names == (["Train_Samples_lr.csv"] if rank == 0 else [])


def test_losses_belong_to_their_window() -> None:
    writer, optimizer = Recording(), SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 0.25}])
    log = StepLog(Monitor([writer]), 8, optimizer, None)
    log.add_loss(torch.tensor(100.0), 1.0, steps=0, first=True)
    log.add_loss(torch.tensor(1.0), 1.0, steps=0, first=True)  # the first was dropped with its gradient
    log.add_loss(torch.tensor(2.0), 1.0, steps=1, first=True)  # before the host knows the first step's outcome
    log.on_settled(1, norm=1.0)
    log.close_early(4.0, steps=1)
    log.on_settled(2, norm=1.0)
    log.on_settled(3, norm=1.0)
    assert [event[1:] for event in writer.events if event[0].endswith("/train_loss")] == [(1.0, 8), (8.0, 16)]
    assert [event[1:] for event in writer.events if event[0].endswith("/lr_group1")] == [(0.25, n) for n in (8, 16, 24)]


@pytest.mark.parametrize("how", ["close", "delete"])
def test_the_last_step_is_written_when_the_monitor_is_closed_and_when_the_engine_goes(tmp_path: Path, how: str) -> None:
    observers = Observers()

    class Late:
        """One step behind, as on CUDA: its only step is settled when it is read."""

        settled = False

        def settle(self) -> None:
            if not self.settled:
                self.settled = True
                for updated in observers.on_updated:
                    updated()
                for settled in observers.on_settled:
                    settled(1, 7.0)

    engine: Any = type("Engine", (), {})()  # something that can go
    outcomes, optimizer = Late(), SimpleNamespace(param_groups=[{"lr": 0.5}])
    config = load_config(everything_enabled(tmp_path))
    parts: Any = SimpleNamespace(
        config=config, topology=data_topology(Communicator()), device=CPU, pipeline=SimpleNamespace(state=outcomes),
        observers=observers, optimizer=optimizer, scaler=None, model=torch.nn.Linear(1, 1), call=None,
    )  # fmt: skip
    started = Monitoring(parts)
    started.end_with(engine)
    assert started.watch_module() == []
    folder = tmp_path / "job"
    assert list(folder.iterdir()) == []
    if how == "close":
        started.monitor.close()
    del engine, outcomes
    written = {"lr": 0.5, "grad_norm": 7.0, "loss_scale": 1.0, "global_steps": 1}
    found = {path.name: rows(path)[1:] for path in folder.iterdir()}
    assert found == {f"Train_Steps_{name}.csv": [["1", str(value)]] for name, value in written.items()}
