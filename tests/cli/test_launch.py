"""`zerolite` starting real processes: environment, arguments, output, the script as `__main__`, two jobs at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli import helpers
from tests.cli.helpers import COMMAND, REPORT_SCRIPT, TIMEOUT_S, output_of, read_reports, run_command
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

ODD_ARGUMENTS = [
    "--", "--nproc", "7", "-m", "--help", "", "two words", "$HOME", "$$", "${local_rank}", "a\nb", "ü", "-",
]  # fmt: skip


def test_two_processes_meet(tmp_path: Path) -> None:
    """A path with spaces and odd arguments: the script gets exactly what followed it."""
    directory = tmp_path / "a directory $local_rank"
    directory.mkdir()
    (directory / "my train.py").write_text(REPORT_SCRIPT + ALL_REDUCE)
    visible = "1,0"  # one process for each
    result = run_command(directory / "my train.py", *ODD_ARGUMENTS, cwd=tmp_path, CUDA_VISIBLE_DEVICES=visible)
    assert result.returncode == 0, result.stderr
    reports = read_reports(directory)
    assert len(reports) == 2
    for rank, report in enumerate(reports):
        assert report["argv"] == ODD_ARGUMENTS
        assert report["sum"] == 3.0
        assert report["main"] == "__main__"
        assert report["cwd"] == str(tmp_path)
        assert (report["RANK"], report["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (report["WORLD_SIZE"], report["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert report["MASTER_ADDR"] == "127.0.0.1"
        assert report["OMP_NUM_THREADS"] == str(max(1, count_cores() // 2))
    assert reports[0]["MASTER_PORT"] == reports[1]["MASTER_PORT"]
    assert reports[0]["pid"] != reports[1]["pid"]


def start_waiting_job(directory: Path, *options: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start two ranks that wait for ever; returns once both have met, with their process ids."""
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(
        REPORT_SCRIPT + ALL_REDUCE.replace("dist.destroy", "# dist.destroy") + "import signal\nsignal.pause()\n"
    )
    job = helpers.start_command("--nproc", "2", *options, "train.py", cwd=directory)
    helpers.wait_until(lambda: sum('"sum"' in file.read_text() for file in directory.glob("report.*.json")) == 2, job)
    return job, [report["pid"] for report in read_reports(directory)]


@pytest.mark.slow
def test_two_jobs_at_once(tmp_path: Path) -> None:
    """Neither is told a port. Each all-reduces among its own two ranks while the other one is up."""
    first, first_pids = start_waiting_job(tmp_path / "first")
    try:
        second, second_pids = start_waiting_job(tmp_path / "second")
        second.terminate()
        second.communicate(timeout=TIMEOUT_S)
        assert not any(psutil.pid_exists(pid) for pid in second_pids)
        assert all(psutil.pid_exists(pid) for pid in first_pids), "the end of one job ended the other"
    finally:
        first.terminate()
        first.communicate(timeout=TIMEOUT_S)
    ports = set()
    for name in ("first", "second"):
        reports = read_reports(tmp_path / name)
        assert [report["sum"] for report in reports] == [3.0, 3.0]
        ports.update(report["MASTER_PORT"] for report in reports)
    assert len(ports) == 2


# What a script can find out about how it is run, without being told.
MAIN_SCRIPT = """\
import inspect, json, multiprocessing, os, pickle, sys
class Point:
    def __init__(self, x): self.x = x
def square(x): return x * x
if __name__ == "__main__":
    main = sys.modules["__main__"]
    with multiprocessing.get_context("spawn").Pool(1) as pool: squares = pool.map(square, [2, 3])
    print(json.dumps({
        "argv": sys.argv, "file": __file__, "path": sys.path[0], "spec": str(__spec__ and __spec__.name),
        "package": __package__, "loader": type(__loader__).__name__, "names": sorted(vars(main)),
        "pickled": pickle.loads(pickle.dumps(Point(3))).x, "squares": squares, "cwd": os.getcwd(),
        "source": inspect.getsource(square), "import": type(__import__("neighbour")).__name__,
    }))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "module"])
def test_the_script_runs_as_python_runs_it(tmp_path: Path, how: str) -> None:
    """Its `__main__` is its own: what it sees, pickles and starts is what it is under plain `python`."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(MAIN_SCRIPT)
    (tmp_path / "sub" / "neighbour.py").write_text("")
    (tmp_path / "neighbour.py").write_text("")
    what = ["sub/train.py", "--x", "1"] if how == "script" else ["-m", "sub.train", "--x", "1"]
    plain = output_of(sys.executable, *what, cwd=tmp_path)
    assert json.loads(output_of(*COMMAND, "--nproc", "1", *what, cwd=tmp_path)) == json.loads(plain)


@pytest.mark.slow
def test_the_output_of_each_rank_has_its_place(tmp_path: Path) -> None:
    """Rank 0 to the terminal, rank 1 behind its number, rank 2 to files alone; all into the log directory."""
    script = "import os, sys\nr = os.environ['RANK']\nprint('out', r)\nprint('err', r, file=sys.stderr)\n"
    (tmp_path / "train.py").write_text(script)
    result = run_command("--nproc", "3", "--tee", "1", "--log-dir", "logs", "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[rank 1] out 1", "out 0"]
    lines = [line for line in result.stderr.splitlines() if not line.startswith("zerolite: ")]
    assert sorted(lines) == ["[rank 1] err 1", "err 0"]
    (directory,) = (tmp_path / "logs").iterdir()
    found = {path.name: path.read_text() for path in directory.iterdir()}
    assert found == {f"rank_{rank}.{kind}": f"{kind} {rank}\n" for rank in range(3) for kind in ("out", "err")}


@pytest.mark.slow
def test_rank_0_has_the_terminal_itself(tmp_path: Path) -> None:
    """No pipe between: progress bars and colours work. Nothing stays behind in the temporary directory."""
    (tmp_path / "train.py").write_text("import sys\nprint('terminal', sys.stdout.isatty(), sys.stderr.isatty())\n")
    (tmp_path / "tmp").mkdir()
    ours, theirs = os.openpty()
    command, environ = [*COMMAND, "--nproc", "2", "train.py"], helpers.job_environment(TMPDIR=str(tmp_path / "tmp"))
    job = subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 4096):
            text += part
    except OSError:  # how a terminal says that its other side is closed
        pass
    os.close(ours)
    assert job.wait(timeout=TIMEOUT_S) == 0
    assert b"terminal True True" in text and text.count(b"terminal") == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_command_and_the_env_file(tmp_path: Path) -> None:
    """`--no-python`, and the env file of the working directory."""
    (tmp_path / ".zerolite_env").write_text("# for all ranks\nGREETING='hello there'\n")
    options = ["--nproc", "2", "--tee", "all", "--no-python"]
    result = run_command(*options, "sh", "-c", "echo $GREETING $RANK", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[rank 1] hello there 1", "hello there 0"]


def test_dry_run_prints_what_would_run(tmp_path: Path) -> None:
    """A shell that runs the printed lines runs the script as ranks 0 and 1."""
    (tmp_path / "my train.py").write_text(REPORT_SCRIPT)
    result = run_command("--nproc", "2", "--dry-run", "my train.py", *ODD_ARGUMENTS, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.glob("report.*")) == []
    output_of("sh", given=result.stdout, cwd=tmp_path, PYTHONPATH=str(helpers.ROOT))
    found = [(report["argv"], report["RANK"], report["WORLD_SIZE"]) for report in read_reports(tmp_path)]
    assert found == [(ODD_ARGUMENTS, "0", "2"), (ODD_ARGUMENTS, "1", "2")]
