"""Files that DeepSpeed's users could be given: what would run is not run, and a file that needs it is refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.deepspeed_fakes import Fake
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.compat.deepspeed_import import import_deepspeed
from zerolite.compat.safe_unpickle import load_safely


class Command:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.made_of = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made_of


@pytest.mark.parametrize("function", [eval, exec, os.system, subprocess.getoutput])
def test_a_file_that_would_run_code_is_refused(tmp_path: Path, function: Callable[..., Any]) -> None:
    victim = tmp_path / "victim"
    command = f"open({str(victim)!r}, 'w')" if function in (eval, exec) else f"touch {victim}"
    fake = Fake(1, 1, client_state={"kept": 1, "evil": Command(function, command)})
    path = fake.write(tmp_path) / "mp_rank_00_model_states.pt"
    with pytest.raises(CheckpointError, match=f"'{path}' has more than plain data .*weights_only=False.*take out"):
        import_deepspeed(tmp_path, tmp_path / "ours")
    assert not victim.exists()
    torch.load(path, weights_only=False)  # the file does what it is thought to do
    assert victim.exists()


def test_bare_pickles_and_other_classes_are_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="bare pickle"):
        load_safely(tmp_path / "old.pt")
    torch.save({"where": Path("/x")}, tmp_path / "path.pt")
    with pytest.raises(CheckpointError, match="more than plain data.*PosixPath"):
        load_safely(tmp_path / "path.pt")


def test_states_of_modules_and_of_the_data_are_taken_over(tmp_path: Path) -> None:
    fake = Fake(1, 1, client_state={"run": {"name": "x"}})
    fake.heads[0]["data_sampler"] = {"consumed_samples": 3}
    fake.heads[0]["module"]["layer._extra_state"] = {"x": 1}
    fake.write(tmp_path)
    state = CheckpointReader(import_deepspeed(tmp_path, tmp_path / "ours")).state
    assert state["client_state"] == {"run": {"name": "x"}, "data_sampler": {"consumed_samples": 3}}
    assert state["extra"] == {"layer": {"x": 1}}
