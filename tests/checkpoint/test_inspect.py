"""`zerolite inspect`: what a checkpoint holds, and a sentence for everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.crafted import FILES, RANK, flip
from zerolite.checkpoint import inspect


@pytest.mark.parametrize("verify", [False, True])
def test_what_a_whole_checkpoint_holds_is_said(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], verify: bool
) -> None:
    assert inspect.main([str(checkpoint.parent), *["--verify"][:verify]]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    for expected in (
        f"checkpoint {checkpoint}",
        "saved 2026-01-02T03:04:05.000000+00:00, at step 12",
        "ranks 2, stage 3",
        "versions zerolite 0.1, torch 2.13",
        "parameters 5 77 276 B",
        "optimizer/exp_avg 1 55 220 B",
        "buffers 3 9 60 B",
    ):
        assert expected in lines
    assert f"{RANK} {(checkpoint / RANK).stat().st_size / 1000:.2f} KB" in lines
    assert ("every byte of 3 files" in said.out) == verify


def test_what_is_wrong_is_said_for_each_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(checkpoint / RANK, -1)
    assert inspect.main([str(checkpoint)]) == 0  # it was not read
    capsys.readouterr()
    assert inspect.main([str(checkpoint), "--verify"]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and f"zerolite inspect: '{checkpoint / RANK}' is damaged" in said.err
    assert "ranks        2, stage 3" in said.out and "every byte" not in said.out
    state = checkpoint / "state.json"
    state.write_bytes(state.read_bytes()[:-3])
    assert inspect.main([str(checkpoint), "--verify"]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 2
    size = state.stat().st_size
    assert f"'{state}' is damaged: expected {size + 3} bytes, found {size}" in said.err
    assert "every byte" not in said.out


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_without_verify(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (checkpoint / name).unlink()
    assert inspect.main([str(checkpoint)]) == 1
    said = capsys.readouterr()
    assert ("no checkpoint in" if name == "manifest.json" else f"{name}' cannot be read") in said.err
    assert said.err.count("\n") == 1


def test_no_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert inspect.main([str(path)]) == 1
        said = capsys.readouterr()
        assert f"no checkpoint in '{path}'" in said.err and said.out == ""
