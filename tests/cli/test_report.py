"""`zerolite report`: what it says, in which forms, and that it answers where things are missing."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zerolite.diagnostics import report
from zerolite.version import __version__

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`ask(*options)` is what `zerolite report` prints in a process that has loaded nothing, with an empty cache."""
    for variable in ("ZEROLITE_KERNELS", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ZEROLITE_CACHE_DIR", str(tmp_path / "cache"))

    def ask(*options: str) -> str:
        sys.modules["zerolite.op_builder.load"]._load.cache_clear()
        assert report.main(options) == 0
        return capsys.readouterr().out

    return ask


def op(answer: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [entry for entry in answer["ops"] if entry["name"] == name]
    return found


def test_the_text_names_everything(tmp_path: Path, ask: Callable[..., str]) -> None:
    lines = ask().splitlines()
    pairs = [re.fullmatch(r" {2}(\S.*?) {2,}(.*)", line) for line in lines]
    values = {match[1]: match[2] for match in pairs if match}
    assert values["zerolite"] == __version__ and values["torch"] == torch.__version__
    assert values["CUDA of torch"] == str(torch.version.cuda or "none")
    assert values["directory"] == str(tmp_path / "cache") and values["usable"] == "yes"
    assert {"python", "C++ compiler", "nvcc", "NVRTC", "ninja", "name", "features"} <= set(values)
    assert {"op async_io", "op cpu_kernels", "op cuda_kernels", "op cuda_kernels_nvrtc"} <= set(lines)
    if not torch.cuda.is_available():
        assert values["kernels on CUDA"] == "none; torch's optimizers update"


@pytest.mark.slow
@needs_compiler
def test_the_report_builds_what_it_foretold(tmp_path: Path, ask: Callable[..., str]) -> None:
    """Before: it could be built. After: it is there."""
    before, after = json.loads(ask("--json")), json.loads(ask("--json", "--build"))
    found = {"name": "cpu_kernels", "compatible": True, "reason": "", "built": False, "path": None}
    assert op(before, "cpu_kernels") == found
    assert op(after, "cpu_kernels")["built"]
    path = Path(op(after, "cpu_kernels")["path"])
    assert path.parent == tmp_path / "cache" / "kernels" and path.is_file()
    assert op(after, "cuda_kernels")["built"] == op(after, "cuda_kernels")["compatible"]
    assert str(path) in ask()


def test_the_report_says_why_not(ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CUDA_HOME", "/no such toolkit")
    answer = json.loads(ask("--json", "--build"))
    assert not op(answer, "cpu_kernels")["compatible"]
    assert "no-such-compiler" in op(answer, "cpu_kernels")["reason"]
    assert "no-such-compiler" in answer["versions"]["C++ compiler"]
    assert "/no such toolkit" in answer["versions"]["nvcc"]
    if not torch.cuda.is_available():
        assert "GPU" in op(answer, "cuda_kernels")["reason"]
    monkeypatch.setenv("ZEROLITE_KERNELS", "0")
    assert re.search(r"compatible +no\n +built +no\n +why not +ZEROLITE_KERNELS=0", ask())
