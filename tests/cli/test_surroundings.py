"""The command in awkward surroundings: files with Python's names, closed or shared streams, no room, nohup."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.helpers import COMMAND, TIMEOUT_S, run, run_command, start_command, wait_until
from tests.toolkit.disks import small_disk

slow = pytest.mark.slow

ASKS = """\
import os, sys
try:
    heard = input()
except EOFError:
    heard = "nothing"
print("rank", os.environ["RANK"], "heard", heard)
"""


def run_with(redirections: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `zerolite ARGUMENTS` by a shell that closes or redirects its streams."""
    shell = ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh"]
    return run(*shell, *COMMAND, *arguments, cwd=directory, given="one\ntwo\n")


def test_files_with_the_names_of_pythons_modules_and_who_reads_standard_input(tmp_path: Path) -> None:
    for name in ("timeit", "queue", "select", "logging", "traceback", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not the module that was meant')")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(ASKS)
    finished = run_with("", tmp_path, "--nproc", "2", "--tee", "all", "sub/train.py")
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.split("\n")) == ["", "[rank 1] rank 1 heard nothing", "rank 0 heard one"]


def test_a_log_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    (tmp_path / "file").write_text("")
    finished = run_command("--log-dir", "file/logs", "train.py", cwd=tmp_path)
    assert finished.returncode == 2 and finished.stdout == ""
    assert "file/logs' cannot be made (Not a directory" in finished.stderr and "Traceback" not in finished.stderr


@slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_job_runs_with_closed_streams(tmp_path: Path, closed: str) -> None:
    (tmp_path / "train.py").write_text("print('hello')\nopen('done', 'a').write('x')")
    finished = run_with(closed, tmp_path, "--nproc", "2", "train.py")
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "done").read_text() == "xx"
    assert finished.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "hello\n")


@slow
def test_nohup_holds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nopen('up', 'w')\ntime.sleep(3)\nprint('finished')")
    job = start_command("--nproc", "1", "train.py", cwd=tmp_path, through=["nohup"])
    wait_until((tmp_path / "up").exists, job)
    job.send_signal(signal.SIGHUP)
    out, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0 and out == "finished\n"


@slow
def test_lines_of_several_ranks_come_whole(tmp_path: Path) -> None:
    script = "import os\nfor i in range(20000): print('rank', os.environ['RANK'], 'line', i)"
    (tmp_path / "train.py").write_text(script)
    finished = run_command("--nproc", "2", "--tee", "all", "--log-dir", "logs", "train.py", cwd=tmp_path)
    lines = finished.stdout.splitlines()
    assert sorted(lines) == sorted(
        f"{prefix}rank {rank} line {i}" for rank, prefix in ((0, ""), (1, "[rank 1] ")) for i in range(20000)
    )


@slow
def test_no_room_for_the_output(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1': print('x' * 10_000_000)")
    with small_disk(tmp_path / "small", "256k") as small:
        finished = run_command("--nproc", "2", "--log-dir", small, "train.py", cwd=tmp_path)
    assert finished.returncode != 0
    assert "could not be written" in finished.stderr and str(small) in finished.stderr
