"""The `zerolite` command before it starts anything: help, version, mistakes, and what it costs to ask."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT, output_of, run
from zerolite.version import __version__

ASK_FOR_IMPORTS = """\
import sys
sys.path.insert(0, {root!r})
sys.argv = {argv!r}
from zerolite.launcher.cli import main
try:
    status = main()
except SystemExit as stop:
    status = stop.code
print("status", status, *(name for name in ("torch", "numpy", "pydantic", "hjson", "psutil") if name in sys.modules))
"""


@pytest.mark.fast("-h-*", "plan --help-*", "--nproc *")
@pytest.mark.parametrize(
    ("arguments", "imported", "words"),
    [
        ("-h", "", ["--nproc", "zerolite report"]),
        ("plan --help", " pydantic", ["--input-spec", "exit status"]),
        ("report --help", "", ["usage: zerolite report", "--build"]),
        ("--version", "", [f"zerolite {__version__}\nstatus 0"]),
        ("--nproc 1 train.py", " psutil", []),
    ],
)
def test_the_command_answers_at_once_and_imports_nothing_heavy(
    tmp_path: Path, arguments: str, imported: str, words: list[str]
) -> None:
    """Torch least of all: where a job is started only the agent, a process of its own, needs it. An answer within
    0.3 s is the aim. Counted is the processor's time, of which torch alone takes more than the bound."""
    (tmp_path / "train.py").write_text("")
    code = ASK_FOR_IMPORTS.format(root=str(ROOT), argv=["zerolite", *arguments.split()])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.stdout.splitlines()[-1] == f"status 0{imported}", result.stdout + result.stderr
    assert all(word in result.stdout for word in words)
    assert not words or after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.8


@pytest.mark.slow
def test_import_zerolite_adds_little_to_import_torch() -> None:
    """And imports no torch by itself. Counted in modules, over every public name: seconds depend on what else the
    machine does. Not among them is torch.distributed.checkpoint, with which torch 2.6 imports its compiler."""
    code = (
        "import sys; start = set(sys.modules); import zerolite; zerolite.__version__; early = set(sys.modules) - start;"
        "import torch; before = set(sys.modules); [getattr(zerolite, name) for name in zerolite.__all__];"
        "print('torch' in early, *sorted(early | set(sys.modules) - before))"
    )
    imports_torch, *added = output_of(sys.executable, "-c", code, cwd=ROOT).split()
    assert imports_torch == "False"
    assert len(added) < 430
    unwanted = {"torch.distributed.checkpoint", "torch.distributed.pipelining", "matplotlib", "transformers", "pandas"}
    assert not unwanted & set(added)
