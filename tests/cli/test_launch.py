"""`zerolite` starting real processes: environment, arguments, exit statuses, signals, two jobs at once."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.helpers import REPORT_SCRIPT, TIMEOUT_S, is_running, read_reports, run_command, start_command
from zerolite.launcher.resources import count_cores

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
report["sum"] = total.item()
Path(__file__).with_name(f"report.{os.environ['RANK']}.json").write_text(json.dumps(report))
dist.destroy_process_group()
"""

# Says that it is up, then stays until a signal comes; a pipe that nobody writes to is waited for, so nothing is timed.
WAIT_FOR_SIGNAL = """
os.write(1, f"up {os.getpid()}\\n".encode())  # one write, so that the lines of two ranks do not mix
os.read(os.pipe()[0], 1)
"""

ODD_ARGUMENTS = [
    "--",
    "--nproc",
    "7",
    "-m",
    "--help",
    "",
    "two words",
    "$HOME",
    "$$",
    "${local_rank}",
    "a\nb",
    "ü",
    "-",
]


def test_two_processes_meet(tmp_path: Path) -> None:
    """A path with spaces and odd arguments: the script gets exactly what followed it."""
    directory = tmp_path / "a directory $local_rank"
    directory.mkdir()
    (directory / "my train.py").write_text(REPORT_SCRIPT + ALL_REDUCE)
    result = run_command("--nproc", "2", directory / "my train.py", *ODD_ARGUMENTS, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    reports = read_reports(directory, 2)
    for rank, report in enumerate(reports):
        assert report["argv"] == ODD_ARGUMENTS
        assert report["sum"] == 3.0
        assert report["main"] == "__main__"
        assert report["cwd"] == str(tmp_path)
        assert (report["RANK"], report["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (report["WORLD_SIZE"], report["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert report["MASTER_ADDR"] == "127.0.0.1"
    assert reports[0]["MASTER_PORT"] == reports[1]["MASTER_PORT"]
    assert reports[0]["pid"] != reports[1]["pid"]


def test_module_and_threads(tmp_path: Path) -> None:
    """`-m` finds a package in the working directory; the cores are shared out, in one line that says so."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "train.py").write_text(REPORT_SCRIPT)
    result = run_command("--nproc=8", "-m", "pkg.train", "--lr", "1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for report in read_reports(tmp_path / "pkg", 8):
        assert report["argv"] == ["--lr", "1"]
        assert report["OMP_NUM_THREADS"] == str(max(1, count_cores() // 8))
    lines = [line for line in result.stderr.splitlines() if "OMP_NUM_THREADS" in line]
    assert len(lines) == 1 and "8 processes" in lines[0]


def test_default_is_one_process_and_the_users_threads_stay(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPORT_SCRIPT)
    result = run_command("train.py", cwd=tmp_path, OMP_NUM_THREADS="3", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    (report,) = read_reports(tmp_path, 1)
    assert (report["WORLD_SIZE"], report["OMP_NUM_THREADS"]) == ("1", "3")
    assert result.stderr == ""


def test_one_process_per_visible_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPORT_SCRIPT)
    result = run_command("train.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="1,0,2")
    assert result.returncode == 0, result.stderr
    assert [report["WORLD_SIZE"] for report in read_reports(tmp_path, 3)] == ["3", "3", "3"]


def test_exit_status_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    """Rank 1 fails while the others are stuck; the last line names it."""
    body = "import os, sys\nif os.environ['RANK'] == '1': sys.exit(37)\nos.read(os.pipe()[0], 1)\n"
    (tmp_path / "train.py").write_text(body)
    result = run_command("--nproc", "3", "train.py", cwd=tmp_path)
    assert result.returncode == 37, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("zerolite: rank 1 of 3 ") and "exit status 37" in last


def test_uncaught_exception_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise RuntimeError('the data are gone')\n")
    result = run_command("--nproc", "1", "train.py", cwd=tmp_path)
    assert result.returncode == 1
    assert "RuntimeError: the data are gone" in result.stderr
    assert "rank 0 of 1" in result.stderr.splitlines()[-1]


def test_rank_killed_by_a_signal(tmp_path: Path) -> None:
    body = "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "train.py").write_text(body + "os.read(os.pipe()[0], 1)\n")
    result = run_command("--nproc", "2", "train.py", cwd=tmp_path)
    assert result.returncode == 128 + signal.SIGKILL, result.stderr
    last = result.stderr.splitlines()[-1]
    assert "rank 1 of 2" in last and "SIGKILL" in last


def start_waiting_job(directory: Path, *options: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start two ranks that wait for a signal; returns once both are up, with their process ids."""
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(
        REPORT_SCRIPT + ALL_REDUCE.replace("dist.destroy", "# dist.destroy") + WAIT_FOR_SIGNAL
    )
    job = start_command("--nproc", "2", *options, "train.py", cwd=directory)
    assert job.stdout is not None
    pids = []
    while len(pids) < 2:
        line = job.stdout.readline()
        assert line, job.communicate()[1]
        if line.startswith("up "):
            pids.append(int(line.split()[1]))
    return job, pids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    job, pids = start_waiting_job(tmp_path)
    try:
        job.send_signal(number)
        _, stderr = job.communicate(timeout=TIMEOUT_S)
    finally:
        job.kill()
    assert job.returncode == 128 + number, stderr
    assert number.name in stderr.splitlines()[-1]
    assert [pid for pid in pids if is_running(pid)] == []


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """Neither is told a port. Each all-reduces among its own two ranks while the other one is up."""
    first, first_pids = start_waiting_job(tmp_path / "first")
    try:
        second, second_pids = start_waiting_job(tmp_path / "second")
        second.terminate()
        second.communicate(timeout=TIMEOUT_S)
        assert [pid for pid in second_pids if is_running(pid)] == []
        assert all(is_running(pid) for pid in first_pids), "the end of one job ended the other"
    finally:
        first.terminate()
        first.communicate(timeout=TIMEOUT_S)
    ports = set()
    for name in ("first", "second"):
        reports = read_reports(tmp_path / name, 2)
        assert [report["sum"] for report in reports] == [3.0, 3.0]
        ports.update(report["MASTER_PORT"] for report in reports)
    assert len(ports) == 2


def test_given_port_is_used(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (tmp_path / "train.py").write_text(REPORT_SCRIPT + ALL_REDUCE)
    result = run_command("--master-port", port, "--nproc", "2", "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [(report["MASTER_PORT"], report["sum"]) for report in read_reports(tmp_path, 2)] == [(port, 3.0)] * 2
