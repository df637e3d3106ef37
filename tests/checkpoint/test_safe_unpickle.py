"""Files that DeepSpeed's users could be given: what would run is not run, and what is not plain is left out."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.deepspeed_fakes import Fake, deepspeed_present
from zerolite.checkpoint.errors import CheckpointError
from zerolite.compat.deepspeed_universal import UniversalReader, find_checkpoint
from zerolite.compat.safe_unpickle import load_safely


def read(directory: Path) -> UniversalReader:
    return UniversalReader(find_checkpoint(directory, None))


class Command:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.made_of = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made_of


def test_a_file_that_would_run_code_runs_none(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for function in (eval, exec):
        fake = Fake(1, 1, client_state={"kept": 1, "evil": Command(function, f"open({str(victim)!r}, 'w')")})
        fake.write(tmp_path / function.__name__)
        imported = read(tmp_path / function.__name__)
        assert imported.state["client_state"] == {"kept": 1}
        assert imported.left_out == [f"client_state['evil'], a builtins.{function.__name__}"]
    popen = Fake(1, 1, client_state={"evil": Command(subprocess.Popen, ["touch", str(victim)])})
    popen.write(tmp_path / "popen")
    assert read(tmp_path / "popen").state["client_state"] == {}
    assert not victim.exists()
    with deepspeed_present():  # the files do what they are thought to do
        torch.load(tmp_path / "exec" / "step6_universal" / "mp_rank_00_model_states.pt", weights_only=False)
    assert victim.exists()


def test_a_file_that_torch_refuses_even_so_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    fake = Fake(1, 1, client_state={"evil": Command(os.system, f"touch {victim}")})
    path = fake.write(tmp_path) / "mp_rank_00_model_states.pt"
    with pytest.raises(CheckpointError, match=re.escape(f"'{path}' would need unpickling, which lets a file run any")):
        read(tmp_path)
    assert not victim.exists()


def test_bare_pickles_and_containers_of_other_classes_are_refused(tmp_path: Path) -> None:
    from collections import defaultdict

    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="bare pickle"):
        load_safely(tmp_path / "old.pt")
    torch.save(defaultdict(list, {1: 2}), tmp_path / "default.pt")
    with pytest.raises(CheckpointError, match="would need unpickling.*defaultdict"):
        load_safely(tmp_path / "default.pt")


class Declared:
    """A class that other code has told torch to be safe."""

    calls = 0

    def __setstate__(self, state: Any) -> None:
        type(self).calls += 1


def test_what_other_code_has_declared_safe_is_not_run_and_stays_declared(tmp_path: Path) -> None:
    value = Declared()
    value.x = 1  # type: ignore[attr-defined]
    torch.save(value, tmp_path / "declared.pt")
    with torch.serialization.safe_globals([Declared]):
        before = set(torch.serialization.get_safe_globals())
        assert load_safely(tmp_path / "declared.pt").fields == {"x": 1}
        assert Declared.calls == 0 and set(torch.serialization.get_safe_globals()) == before
        torch.load(tmp_path / "declared.pt", weights_only=True)
        assert Declared.calls == 1


def test_what_is_not_plain_is_left_out_and_named(tmp_path: Path) -> None:
    state = {"run": {"name": "x", "where": Path("/x"), "list": [1, Path("/x")]}, "epoch": 2}
    fake = Fake(1, 1, client_state=state)
    fake.heads[0]["lr_scheduler"] = {"last_batch_iteration": 1, "helper": Path("/x")}
    fake.heads[0]["data_sampler"] = {"consumed_samples": 3}
    fake.heads[0]["module"]["layer._extra_state"] = {"x": 1}
    fake.heads[0]["module"]["other._extra_state"] = Path("/x")
    fake.heads[0]["module"]["more"] = "text"
    fake.write(tmp_path)
    imported = read(tmp_path)
    assert imported.state["client_state"] == {"run": {"name": "x"}, "epoch": 2}
    assert imported.state["lr_scheduler"] == {"type": None, "state": {"last_batch_iteration": 1}}
    assert imported.state["extra"] == {"layer": {"x": 1}}
    expected = (
        "'more' of the model's state, a str", "data_sampler", "schedule['helper'], a pathlib.PosixPath",
        "extra state 'other._extra_state', a pathlib.PosixPath", "client_state['run']['where'], a pathlib.PosixPath",
        "client_state['run']['list'], a list that holds other objects",
    )  # fmt: skip
    assert len(imported.left_out) == 6
    assert all(sum(words in text for text in imported.left_out) == 1 for words in expected), imported.left_out
