"""However a rank, the agent or the launcher ends: the job ends within seconds, says why, and leaves no process."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cli import helpers
from tests.cli.helpers import TIMEOUT_S, find_processes, output_of, start_command, wait_until, wait_until_none

LIMIT_S = 10.0

# `fail()` notes the time; `up()` makes a file, after which the rank waits for ever in `wait()`.
PRELUDE = """\
import os, signal, subprocess, sys, threading, time
from pathlib import Path
RANK = os.environ["RANK"]
def failing(): Path("failed_at").write_text(str(time.time()))
def up(): Path(f"up.{RANK}").write_text(str(os.getpid()))
def wait():
    while True: signal.pause()
def wait_for(name):
    while not Path(name).exists(): time.sleep(0.02)
"""

OTHERS_WAIT = PRELUDE + "if RANK != '1': up(); wait()\nwait_for('up.0')\nfailing()\n"

# A child that ignores SIGTERM, as the rank itself does; grandchildren; one of them in a session of its own and without
# the marker, whose parents have ended; a pool of workers.
UNRULY = (
    PRELUDE
    + """
import multiprocessing
def work(depth):
    if depth: multiprocessing.Process(target=work, args=(depth - 1,)).start()
    wait()
if __name__ == "__main__" and RANK == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", stubborn])
    subprocess.run(["sh", "-c", "setsid sleep 1000.7777 >/dev/null 2>&1 &"], env={"PATH": os.environ["PATH"]})
    subprocess.run(["sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000 & wait' &"])
    for _ in range(2): multiprocessing.get_context("fork").Process(target=work, args=(1,)).start()
    time.sleep(0.3)
    up(); wait()
"""
)


class Job:
    """A running `zerolite` command, whose processes all carry a token of the test's own."""

    def __init__(self, directory: Path, script: str, *options: str, through: Sequence[str] = ()) -> None:
        self.token = secrets.token_hex(8)
        self.directory = directory
        (directory / "train.py").write_text(script)
        changes = {"ZEROLITE_TEST_TOKEN": self.token, "TMPDIR": str(directory)}
        self.process = start_command(*options, "train.py", cwd=directory, through=through, **changes)
        self.stdout = self.stderr = ""
        self.ended_at = 0.0

    def wait_up(self, *ranks: int) -> list[int]:
        """Until the ranks are up; returns their processes."""
        files = [self.directory / f"up.{rank}" for rank in ranks]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), self.process)
        return [int(file.read_text()) for file in files]

    def finish(self) -> int:
        """Wait for the command's end; returns its exit status."""
        self.stdout, self.stderr = self.process.communicate(timeout=TIMEOUT_S)
        self.ended_at = time.time()
        return self.process.returncode

    def left(self) -> list[str]:
        """Commands of the job's processes that are still there."""
        return find_processes(self.token)

    def agent(self) -> int:
        """The process id of the job's agent."""
        children = output_of("ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid))
        (line,) = [line for line in children.splitlines() if "bin/zerolite" in line]  # a fork of the command
        return int(line.split()[0])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    jobs = []

    def begin(script: str, *options: str, directory: Path = tmp_path, through: Sequence[str] = ()) -> Job:
        jobs.append(Job(directory, script, *options, through=through))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        for pid in find_processes(job.token, pids=True):
            subprocess.run(["kill", "-9", pid], check=False)
        job.process.communicate(timeout=TIMEOUT_S)


def headline(stderr: str) -> str:
    """The sentence about what failed first."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("zerolite: rank ") and " failed: " in line]
    return line


FAILURES = {
    "error": ("import no_such_module\n", 1, "exit status 1, ModuleNotFoundError: No module named 'no_such_module'"),
    "status": ("os._exit(41)\n", 41, "exit status 41"),
    "killed": ("os.kill(os.getpid(), 9)\n", 137, "signal 9 (SIGKILL)"),
    "memory": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\nbytearray(1 << 33)\n",
        1,
        "exit status 1, out of memory, MemoryError",
    ),
    "segment": (
        "import ctypes\ndef deep():\n    ctypes.string_at(0)\ndeep()\n",
        128 + signal.SIGSEGV,
        "signal 11 (SIGSEGV)",
    ),
    "thread": (  # the interpreter waits for it, for ever
        "threading.Thread(target=wait_for, args=('never',)).start()\nraise ValueError('hanging')\n",
        1,
        "ValueError: hanging",
    ),
    "long message": ("raise ValueError('x' * 9_000_000)\n", 1, "ValueError: xxx"),
    "side thread": (  # its error is the cause of the script's own
        "def load(): {}['batch']\nloader = threading.Thread(target=load, name='loader')\n"
        "loader.start()\nloader.join()\nraise ValueError('no batch')\n",
        1,
        "ValueError: no batch",
    ),
}


@pytest.mark.fast("error")
@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_ends_the_job(start, how: str) -> None:
    """Rank 1 of three fails while the others wait; they do not wait for ever."""
    body, status, said = FAILURES[how]
    job = start(OTHERS_WAIT + body, "--nproc", "3")
    assert job.finish() == status, job.stderr
    assert job.ended_at - float((job.directory / "failed_at").read_text()) < LIMIT_S
    assert job.left() == []
    line = headline(job.stderr)
    assert re.match(r"zerolite: rank 1 of 3 on host \S+ \(process \d+\) failed: ", line)
    assert said in line
    if "raise" in body or "import no" in body:
        traceback = job.stderr[job.stderr.index(line) :].splitlines()[1:]
        if how == "side thread":
            end = traceback.index("KeyError: 'batch'")
            assert re.match(r"Exception in thread loader, \d+ s before the script's own:", traceback[0])
            traceback = traceback[end + 2 :]
        assert traceback[0] == "Traceback (most recent call last):"
        assert traceback[1].startswith(f'  File "{job.directory}/train.py"'), "our own frames are shown"
    if how == "segment":
        assert "Fatal Python error: Segmentation fault" in job.stderr
        assert re.search(r'File ".*train.py", line \d+ in deep', job.stderr)
    assert "the other 2 ranks were ended" in job.stderr
    (directory,) = re.findall(r"^zerolite: output of the ranks: (.*)$", job.stderr, re.MULTILINE)
    assert (Path(directory) / "rank_1.err").exists()


@pytest.mark.slow
def test_killed_for_want_of_memory(start) -> None:
    """The kernel sends the signal of `kill -9`; the control group's counter tells the difference."""
    grow = "hold = []\nwhile True: hold.append(b'x' * (16 << 20))\n"
    with helpers.limited_memory(800 << 20) as processes:
        enter = ["sh", "-c", f'echo $$ > {processes}; exec "$@"', "sh"]
        job = start(OTHERS_WAIT + grow, "--nproc", "2", through=enter)
        assert job.finish() == 137, job.stderr
    assert "failed: killed by the kernel, since memory had run out" in headline(job.stderr)
    assert job.left() == []


@pytest.mark.slow
def test_unruly_children_of_a_failing_job(start) -> None:
    killed = "if __name__ == '__main__': wait_for('up.0'); failing(); os.kill(os.getpid(), 9)\n"
    hidden = f"sleep 1000.{secrets.randbelow(10**9)}"
    job = start(UNRULY.replace("sleep 1000.7777", hidden) + killed, "--nproc", "2")
    assert job.finish() == 137, job.stderr
    assert job.ended_at - float((job.directory / "failed_at").read_text()) < LIMIT_S
    assert job.left() == []
    assert hidden not in output_of("ps", "-eo", "args")


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process(start) -> None:
    """Nothing can be passed on or cleared up by a process that gets SIGKILL; the agent sees that it has gone."""
    job = start(UNRULY.replace("sleep 1000.7777", "true") + "if __name__ == '__main__': up(); wait()\n", "--nproc", "2")
    job.wait_up(0, 1)
    job.process.kill()
    wait_until_none(job.left, LIMIT_S)


@pytest.mark.slow
def test_a_killed_agent_leaves_no_process(start) -> None:
    job = start(UNRULY + "if __name__ == '__main__': up(); wait()\n", "--nproc", "2")
    job.wait_up(0, 1)
    since = time.time()
    subprocess.run(["kill", "-9", str(job.agent())], check=True)
    assert job.finish() == 137, job.stderr
    assert job.ended_at - since < LIMIT_S and job.left() == []
    assert re.search(r"zerolite: the agent \(process \d+\), .* ended by signal 9 \(SIGKILL\)", job.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_launcher(start, number: signal.Signals) -> None:
    """The ranks get SIGTERM, and seconds to do something about it."""
    on_term = "signal.signal(signal.SIGTERM, lambda *_: (Path(f'told.{RANK}').touch(), sys.exit(0)))\n"
    job = start(PRELUDE + on_term + "up()\nwait()\n", "--nproc", "2")
    job.wait_up(0, 1)
    since = time.time()
    job.process.send_signal(number)
    assert job.finish() == 128 + number, job.stderr
    assert job.ended_at - since < LIMIT_S and job.left() == []
    assert f"zerolite: received {number.name} and ended 2 ranks" in job.stderr
    assert [(job.directory / f"told.{rank}").exists() for rank in (0, 1)] == [True, True]


@pytest.mark.slow
def test_interrupt_once_lets_the_ranks_finish(start) -> None:
    """Rank 1 needs longer than rank 0, and is not cut short by its end."""
    body = "try:\n    up(); wait()\nfinally:\n"
    body += "    if RANK == '1': wait_for('saved.0'); time.sleep(2)\n    Path(f'saved.{RANK}').touch()\n"
    job = start(PRELUDE + body, "--nproc", "2")
    job.wait_up(0, 1)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.stderr
    assert [(job.directory / f"saved.{rank}").exists() for rank in (0, 1)] == [True, True]
    assert "20 s to finish" in job.stderr and job.left() == []
    assert "Traceback" not in job.stderr and "KeyboardInterrupt" not in job.stderr, job.stderr


# The command with less time to finish: it comes instead of bin/zerolite.
IMPATIENT = f"import sys; sys.path.insert(0, {str(helpers.ROOT)!r}); sys.argv = sys.argv[2:]\n"
IMPATIENT += "from zerolite.launcher import cli, supervisor; supervisor.INTERRUPT_GRACE_S = 2.0; sys.exit(cli.main())"


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_interrupted_ranks_that_do_not_finish_are_killed(start, twice: bool) -> None:
    """When their time is over, or at once when a second Ctrl-C comes."""
    ignores = "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\nup()\nwait()\n"
    through = [] if twice else [sys.executable, "-c", IMPATIENT]
    job = start(PRELUDE + ignores, "--nproc", "2", through=through)
    job.wait_up(0, 1)
    since = time.time()
    job.process.send_signal(signal.SIGINT)
    if twice:
        wait_until(lambda: "20 s to finish" in job.process.stderr.readline(), job.process)
        time.sleep(0.6)  # what comes earlier is a repetition of the same
        since = time.time()
        job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.stderr
    seconds = job.ended_at - since
    assert seconds < 3.0 if twice else 1.9 < seconds < 2 + LIMIT_S and "did not finish within 2 s" in job.stderr
    assert job.left() == []


@pytest.mark.slow
def test_processes_left_behind_by_success(start) -> None:
    job = start(PRELUDE + "subprocess.Popen(['setsid', 'sleep', '1000'])\n", "--nproc", "1")
    assert job.finish() == 0
    assert "the ranks left 1 process behind, ended now: sleep" in job.stderr and job.left() == []


# -------------------------------------------------------------------- ssh, in whose place a shell runs the command here

TWO_HOSTS = (
    PRELUDE
    + """
if HOW == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN)
if HOW == "stubborn" and RANK == "0": up()
while HOW == "stubborn" and RANK == "0": print("alive", file=sys.stderr, flush=True); time.sleep(0.05)
if RANK == "1" and HOW in ("rank", "stubborn"): wait_for("up.0"); failing(); raise ValueError("there" * 20_000)
print("rank", RANK, flush=True)
try:
    up(); wait()
finally:
    print("end of", RANK, flush=True)
"""
)


@pytest.fixture
def start_two(start, tmp_path: Path) -> Callable[..., Job]:
    """``start_two(script)`` starts a rank here and one on another host, which is this one too."""

    def begin(script: str, hosts: str = "localhost slots=1\nelsewhere slots=1\n") -> Job:
        (tmp_path / "hosts").write_text(hosts)
        return start(script, *options, through=through)

    (tmp_path / "ssh").write_text('#!/bin/sh\nfor last; do :; done\nsh -c "$last"\n')
    (tmp_path / "ssh").chmod(0o755)
    options = ("--hostfile", "hosts", "--tee", "all", "--master-addr", "127.0.0.1")
    through = ["env", f"PATH={tmp_path}:{os.environ['PATH']}"]
    return begin


@pytest.mark.fast("rank")
@pytest.mark.parametrize(
    "how", ["rank", "stubborn", "interrupt", "terminate", "launcher killed", "connection", "agent"]
)
def test_a_job_with_another_host_ends(start_two, tmp_path: Path, how: str) -> None:
    """As on one machine. The launcher notices a connection that is lost, and the host that its launcher has gone.

    Where ranks ignore SIGTERM, the reason is told while they still run.
    """
    job = start_two(f"HOW = {how!r}\n{TWO_HOSTS}")
    if how not in ("rank", "stubborn"):
        job.wait_up(0, 1)
    since = time.time()
    if how == "connection":
        (client,) = output_of("pgrep", "-P", str(job.process.pid), "-f", f"{tmp_path}/ssh").split()
        os.kill(int(client), signal.SIGKILL)
    elif how == "agent":
        os.kill(job.agent(), signal.SIGKILL)
    elif how not in ("rank", "stubborn"):
        numbers = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "launcher killed": signal.SIGKILL}
        job.process.send_signal(numbers[how])
    statuses = {"interrupt": 130, "terminate": 143, "launcher killed": -9, "agent": 137}
    assert job.finish() == statuses.get(how, 1), job.stderr
    if how in ("rank", "stubborn"):
        since = float((tmp_path / "failed_at").read_text())
        assert "rank 1 of 2 on host" in headline(job.stderr) and "ValueError: there" in headline(job.stderr)
    if how == "stubborn":
        assert job.stderr.rindex("alive") > job.stderr.index(headline(job.stderr))
    if how == "interrupt":
        assert {"rank 0", "[rank 1] rank 1", "end of 0", "[rank 1] end of 1"} == set(job.stdout.splitlines())
    if how == "connection":
        assert "zerolite: the connection to elsewhere is lost" in job.stderr
    if how == "agent":
        assert re.search(r"the agent \(process \d+\), .* ended by signal 9", job.stderr)
    wait_until_none(job.left, since + LIMIT_S - time.time())


@pytest.mark.slow
def test_rank_0_on_another_host_ends_within_a_line(start_two) -> None:
    """Its last words, a progress bar say, do not hide that its host has reported."""
    body = "if RANK == '1': up(); wait()\nwait_for('up.1')\nsys.stderr.write('\\r 45%')\nos._exit(41)\n"
    job = start_two(PRELUDE + body, hosts="elsewhere slots=1\nlocalhost slots=1\n")
    assert job.finish() == 41, job.stderr
    assert " 45%" in job.stderr and "is lost" not in job.stderr and "rank 0 of 2 on host" in job.stderr
    assert job.left() == []


@pytest.mark.slow
def test_a_rank_that_finishes_early_on_another_host(start_two) -> None:
    """The first host's agent, which holds the store, stays until the others have ended."""
    body = "if RANK == '1': up(); sys.exit()\nwait_for('up.1')\ntime.sleep(2)\nprint('done')\n"
    job = start_two(PRELUDE + body)
    assert job.finish() == 0, job.stderr
    assert job.stdout == "done\n" and job.left() == []
