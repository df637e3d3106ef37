"""The `zerolite` command before it starts anything: help, version, mistakes, and what it costs to ask."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT, job_environment, run_command
from zerolite.version import __version__

IMPORTED_BY_HELP = """\
import sys
sys.path.insert(0, {root!r})
sys.argv = ["zerolite", {option!r}]
from zerolite.launcher.cli import main
try:
    main()
except SystemExit as stop:
    heavy = [name for name in ("torch", "numpy", "pydantic", "hjson", "psutil") if name in sys.modules]
    print("status", stop.code, "heavy", heavy)
"""


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_help_and_version_import_nothing_heavy(option: str) -> None:
    code = IMPORTED_BY_HELP.format(root=str(ROOT), option=option)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "status 0 heavy []", result.stdout + result.stderr


def test_help_answers_at_once(tmp_path: Path) -> None:
    """0.3 s is the aim. Counted is the processor's time, of which torch alone takes more than the bound."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run_command("--help", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0 and "--nproc" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.8


def test_version_is_that_of_the_package(tmp_path: Path) -> None:
    result = run_command("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"zerolite {__version__}\n")


def check_mistake(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("zerolite: error: ")
    for part in parts:
        assert part in last, (part, last)


@pytest.mark.fast("no script", "missing script", "port 0", "no such option")
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        pytest.param(["--nproc", "2"], ["expected a script"], id="no script"),
        pytest.param(["no such.py", "--lr", "1"], ["no such.py", "{directory}"], id="missing script"),
        pytest.param(["-m", "no_such_package.train"], ["no_such_package"], id="missing module"),
        pytest.param(["--nproc=0", "train.py"], ["--nproc", "1 or more"], id="0 processes"),
        pytest.param(["--nproc=1000000", "train.py"], ["--nproc", "limit"], id="many processes"),
        pytest.param(["--master-port=0", "train.py"], ["--master-port", "0"], id="port 0"),
        pytest.param(["--nprocs", "2", "train.py"], ["--nprocs"], id="no such option"),
        pytest.param(["--nproc=1", "--master", "29500", "train.py"], ["--master"], id="abbreviation"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    (tmp_path / "train.py").write_text("")
    check_mistake(run_command(*arguments, cwd=tmp_path), *(part.format(directory=tmp_path) for part in parts))


def test_port_in_use(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_mistake(run_command("--master-port", port, "train.py", cwd=tmp_path), f"--master-port {port}", "in use")


@pytest.mark.slow
def test_import_zerolite_adds_little_to_import_torch() -> None:
    """Counted in modules, over every public name: seconds depend on what else the machine does. Not counted is
    torch.distributed.checkpoint, with which torch 2.6 imports its compiler."""
    code = (
        "import torch.distributed.checkpoint, sys; before = set(sys.modules); import zerolite;"
        "[getattr(zerolite, name) for name in zerolite.__all__]; print(*sorted(set(sys.modules) - before))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=job_environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    added = result.stdout.split()
    assert len(added) < 430
    assert not {"torch.distributed.pipelining", "matplotlib", "transformers", "pandas"} & set(added)


def test_import_zerolite_alone_does_not_import_torch() -> None:
    code = "import sys, zerolite; zerolite.__version__; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr
