"""Work of the launcher that starts nothing: the command line, threads, processes, the first failure."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import record

from zerolite.launcher import cli, failures, options, plan, supervisor
from zerolite.launcher.failures import Failure
from zerolite.launcher.hosts import HostsError
from zerolite.launcher.job import NodeJob
from zerolite.launcher.processes import JobProcesses
from zerolite.launcher.supervisor import Part
from zerolite.utils import failure_record
from zerolite.utils.failure_record import FailureRecord


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("zerolite.launcher.resources.count_cores", lambda: 8)
    for nproc, threads in ((1, 8), (3, 2), (16, 1)):
        job = NodeJob(["t.py"], job_id="1", nproc=nproc)
        assert job.threads_per_rank({}) == threads
    users = {"OMP_NUM_THREADS": "5"}
    assert job.threads_per_rank(users) is dataclasses.replace(job, env=users).threads_per_rank({}) is None


@pytest.mark.parametrize(
    ("line", "own", "rest"),
    [("t.py", "", "t.py"), ("--nproc 2 t.py --nproc 3", "--nproc 2", "t.py --nproc 3"), ("--nproc", "--nproc", ""),
     ("--nproc=2 t.py -- -m", "--nproc=2", "t.py -- -m"), ("--nproc 2 -m pkg -m x", "--nproc 2 -m pkg", "-m x"),
     ("--num_gpus 2 --dry_run a_b.py --c_d", "--num-gpus 2 --dry-run", "a_b.py --c_d"),
     ("--log_dir=a_b t.py", "--log-dir=a_b", "t.py"), ("-i a@b_c t.py", "-i a@b_c", "t.py"),
     ("-- -odd.py -- x", "", "-odd.py -- x"), ("--version t.py", "--version", "t.py")],
)  # fmt: skip
def test_options_end_where_the_script_begins(line: str, own: str, rest: str) -> None:
    assert options.split_command_line(line.split(), options.build_parser()) == (own.split(), rest.split())


def request_of(*argv: str) -> options.LaunchRequest:
    return options.read_options(argv, options.build_parser())


def test_every_option_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "vars").write_text("A=1\n")
    line = (
        "--nproc 3 --num-nodes 4 --master-addr n0 --master-port 29511 --hostfile h --include a "
        "--launcher-args '-F file' --ssh-port 22 --log-dir logs "
        "--tee 1,3-4 --env-file vars --dry-run t.py --nproc x"
    )
    given: dict[str, Any] = {
        "nproc": 3, "num_nodes": 4, "master_addr": "n0", "master_port": 29511, "hostfile": "h", "include": "a",
        "launcher_args": ["-F", "file"], "ssh_port": 22, "log_dir": str(tmp_path / "logs"),
        "tee": [1, 3, 4], "env": {"A": "1"}, "dry_run": True,
    }  # fmt: skip
    assert request_of(*shlex.split(line)) == options.LaunchRequest(["t.py"], ["--nproc", "x"], **given)
    assert request_of("t.py") == options.LaunchRequest(["t.py"])
    assert request_of("-m", "t", "--x") == options.LaunchRequest(["-m", "t"], ["--x"])
    for given in ("fd00::3", "[fd00::3]"):
        assert request_of("--master-addr", given, "t.py").master_addr == "fd00::3"


def test_names_of_deepspeed_and_torchrun() -> None:
    theirs = request_of("--num_gpus=2", "--num_nodes=3", "--no_local_rank", "--module", "a.b", "x")
    assert theirs == request_of("--nproc", "2", "--num-nodes", "3", "-m", "a.b", "x")
    theirs = request_of("--enable_each_rank_log", "d", "-H", "h", "-e", "f", "--no_python", "c")
    assert theirs == request_of("--log-dir=d", "--hostfile=h", "--exclude=f", "--no-python", "c")
    assert request_of("--nproc_per_node", "2", "--nnodes", "2", "t.py").num_nodes == 2


@pytest.mark.parametrize(
    ("line", "parts"),
    [("--nprocs 2", ["--nprocs", "--nproc?"]), ("--master 29500", ["--master"]), ("--xyzzy", ["--xyzzy", "--help"]),
     ("--save_pid", ["--save-pid is not supported", "$!"]), ("--num-nodes 0", ["--num-nodes", "'0'"]),
     ("--tee some", ["--tee", "'some'"]), ("--include a --exclude b", ["--include and --exclude"]),
     ("--no-python -m", ["--no-python and a module"]), ("--env-file nowhere", ["nowhere"]),
     ("--launcher pdsh", ["--launcher is not supported", "srun", "mpirun"]),
     ("--no_ssh --node_rank 1", ["--no-ssh is not supported", "torchrun --nnodes 2 --node-rank 0"]),
     ("--node_rank 1", ["--node-rank is not supported", "torchrun --nnodes"]),
     ("--bind_cores_to_rank", ["--bind-cores-to-rank is not supported", "numactl", "--numa-binding"]),
     ("--max-restarts 3", ["--max-restarts is not supported", "torchrun --max-restarts N"]),
     ("--nnodes 2:4", ["--num-nodes 2:4 is not supported", "torchrun --nnodes 2:4"])],
)  # fmt: skip
def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], line: str, parts: list[str]) -> None:
    """An abbreviation is none of the options: --master."""
    with pytest.raises(SystemExit) as stop:
        request_of(*line.split(), "t.py")
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("zerolite: error: ") and all(part in last for part in parts), last


def test_mistakes_that_the_machine_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are one sentence too, behind which nothing has been started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for line, *parts in (
            ("--nproc 2", "expected a script"),
            ("gone.py --lr 1", "gone.py", str(tmp_path)),
            ("-m no_such_package.train", "no_such_package"),
            ("--nproc=0 train.py", "--nproc", "1 or more"),
            ("--master-port=0 train.py", "--master-port", "0"),
            (f"--master-port {port} train.py", f"--master-port {port}", "in use"),
        ):
            with pytest.raises(SystemExit) as stop:
                cli.main(line.split())
            said = capsys.readouterr()
            assert stop.value.code == 2 and said.out == "" and "Traceback" not in said.err
            last = said.err.splitlines()[-1]
            assert last.startswith("zerolite: error: ") and all(part in last for part in parts), last


def test_what_torchrun_does_on_several_hosts() -> None:
    with pytest.raises(
        HostsError, match="--num-nodes asks for 2 hosts and nothing says which: .* `torchrun --nnodes 2`"
    ):
        plan.make_plan(request_of("--num-nodes", "2", "t.py"))


def test_the_env_file_is_found_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    environ = {"HOME": str(home)}
    assert options.find_env_files(None, environ) == []
    (home / ".zerolite_env").write_text("")
    assert options.find_env_files(None, environ) == [str(home / ".zerolite_env")]
    (tmp_path / ".zerolite_env").write_text("# comment\n\nA=1\n B = two words \nC='x=\"y\"'\nD=\n")
    assert options.find_env_files(None, environ) == [str(tmp_path / ".zerolite_env")]
    monkeypatch.setenv("HOME", str(home))
    assert options.find_env_files("~/other", environ, deepspeed=True) == [str(home / "other")]
    assert options.read_env_file(".zerolite_env") == {"A": "1", "B": "two words", "C": 'x="y"', "D": ""}
    (tmp_path / "bad").write_text("A=1\nno value\n")
    with pytest.raises(ValueError, match="line 2 of bad is 'no value'"):
        options.read_env_file("bad")


def test_deepspeeds_env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("A=1\nB=1\nC=1\n")
    (tmp_path / ".deepspeed_env").write_text("B=2\nC=2\n")
    (tmp_path / ".zerolite_env").write_text("C=3\n")
    assert request_of("t.py").env == {"C": "3"}
    env = request_of("--deepspeed-compat", "t.py").env
    assert {key: env.get(key) for key in ("A", "B", "C")} == {"A": "1", "B": "2", "C": "3"}
    monkeypatch.setenv("DS_ENV_FILE", "mine")
    (tmp_path / "mine").write_text("D=4\n")
    env = request_of("--deepspeed-compat", "t.py").env
    assert "A" not in env and (env["C"], env["D"]) == ("3", "4")


# -------------------------------------------------------------------- failures


def failure_of(number: int, seen: float, **fields: object) -> Failure:
    failure = Failure(rank=number, world_size=4, host="node7", pid=4711, seen=seen)
    return dataclasses.replace(failure, **fields)  # type: ignore[arg-type]


def record_of(message: str, time: float, consequence: bool = False) -> FailureRecord:
    return FailureRecord(message, "", time, "node7", consequence)


def test_causes_come_before_consequences() -> None:
    """Records tell the time better than the agent, which looks now and then."""
    peer = failure_of(0, 10.0, record=record_of("RuntimeError: reset by peer", 9.0, True))
    late = failure_of(1, 10.2)
    cause = failure_of(2, 10.3, record=record_of("ValueError: x", 10.1))
    lost = Failure(host="node3", node_failure="host node3 gave no sign of life", seen=1.0)
    gone = failure_of(3, 1.0, exitcode=0)
    assert failures.causes_first([lost, peer, gone, late, cause]) == [cause, late, lost, peer]
    assert failures.causes_first([gone, peer]) == [peer, gone], "that rank 3 has finished may be the cause"


def test_the_reason_and_the_exit_status() -> None:
    fields: dict[str, object]
    for fields, reason, status in (
        ({"exitcode": 3}, "exit status 3", 3),
        ({"exitcode": -11}, "ended by signal 11 (SIGSEGV)", 139),
        ({"exitcode": -99}, "ended by signal 99 (SIG99)", 227),
        ({"exitcode": -9, "killed_for_memory": True}, "killed by the kernel, since memory had run out", 137),
        ({"exitcode": 1, "tail": "a\nMemoryError\n"}, "exit status 1, out of memory", 1),
    ):
        failure = failure_of(2, 1.0, **fields)
        assert failures.reason(failure).startswith(reason) and failures.exit_status([failure]) == status
    hanging = failure_of(2, 1.0, by_itself=False, record=record_of("PeerLost", 1.0, True))
    assert failures.exit_status([hanging, failure_of(1, 1.0, exitcode=0)]) == 1
    for message in (
        "MemoryError",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried",
        "OSError: [Errno 12] Cannot allocate memory",
    ):
        failure = failure_of(2, 1.0, record=record_of(message, 1.0))
        assert failures.reason(failure) == f"exit status 1, out of memory, {message}"


def test_the_last_lines_name_rank_host_and_cause() -> None:
    record = FailureRecord("ValueError: x\ny", "Traceback\n  here\nValueError: x\ny\n", 1.0)
    first = failure_of(2, 1.0, record=record, output=["/l/rank_2.out", "/l/rank_2.err"])
    lines = failures.describe([first, failure_of(3, 2.0, exitcode=-6)], "node7")
    assert lines == [
        "zerolite: rank 2 of 4 on host node7 (process 4711) failed: exit status 1, ValueError: x",
        *("Traceback", "  here", "ValueError: x", "y"),
        "zerolite: all output of rank 2: /l/rank_2.out and /l/rank_2.err",
        "zerolite: after that, rank 3 of 4 on host node7 (process 4711) failed: ended by signal 6 (SIGABRT)",
        "zerolite: the other 2 ranks were ended, if still running",
    ]
    silent = failures.describe([failure_of(1, 1.0, tail="a\nb")], "node7")
    assert silent[1:4] == ["zerolite: the last lines of rank 1's standard error:", "a", "b"]


def test_a_marker_finds_what_is_no_descendant() -> None:
    """A process of another job, or with a longer marker, is not found."""
    command = "exec setsid sleep 100 </dev/null >/dev/null 2>&1 & echo $!"
    pids = [
        int(subprocess.run(["sh", "-c", command], env={"ZEROLITE_JOB_ID": marker}, capture_output=True).stdout)
        for marker in ("feed-0", "feed-01")
    ]
    try:
        mine = JobProcesses("feed-0")
        assert any(pids[0] in mine.find() for _ in range(200)) and pids[1] not in mine.find()
    finally:
        subprocess.run(["kill", "-9", *map(str, pids)], check=True)


def test_children_from_before_are_no_processes_of_the_job() -> None:
    """The `tee` of `zerolite t.py > >(tee log)` is a child of the command."""
    tee = subprocess.Popen(["sleep", "100"])
    mine = JobProcesses("feed-1")
    child = subprocess.Popen(["sleep", "100"])
    try:
        found = mine.find()
        assert tee.pid not in found and child.pid in found
    finally:
        for process in (tee, child):
            process.kill()
            process.wait()


def test_the_ranks_own_record_replaces_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's decorator knows neither the fraction of the second nor what is a consequence."""
    path = tmp_path / "record.json"
    monkeypatch.setenv(failure_record.VARIABLE, str(path))

    @record
    def fail() -> None:
        raise RuntimeError("Connection closed by peer [10.0.0.5]:4711")

    with pytest.raises(RuntimeError):
        fail()
    os.utime(path, (99.75, 99.75))
    theirs = failure_record.read(str(path))
    assert theirs is not None and (theirs.time, theirs.consequence, theirs.pid) == (99.75, True, 0)
    failure_record.write("ValueError: mine", "Traceback")
    failure_record.write("SystemExit: too late", "")
    mine = failure_record.read(str(path))
    assert mine is not None and (mine.message, mine.consequence, mine.pid) == ("ValueError: mine", False, os.getpid())
    content = json.loads(path.read_text())
    content["zerolite"]["pid"] += 1
    path.write_text(json.dumps(content))
    failure_record.write("ValueError: the rank's", "")
    last = failure_record.read(str(path))
    assert last is not None and last.message == "ValueError: the rank's"


# -------------------------------------------------------------------- the end of all parts


class FakePart(Part):
    """A part that does what its test says, and never ends by itself."""

    def __init__(self, name: str, log: list[str], *failures: Failure) -> None:
        super().__init__(name)
        self.log, self.failures = log, list(failures)

    def poll(self) -> bool:
        return self.status is not None

    def send_signal(self, number: int) -> None:
        self.log.append(f"{self.name} gets {number}")

    def end(self) -> None:
        self.log.append(f"{self.name} ends")

    def kill(self) -> None:
        self.log.append(f"{self.name} is killed")
        self.status = 137


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_reason_is_told_before_the_ranks_have_ended(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    """Parts that do not end are killed, and the first failure gives the status, whatever signal comes later."""
    monkeypatch.setattr(supervisor, "TELL_S", 0.1)
    monkeypatch.setattr(supervisor, "KILL_S", 0.3)
    log: list[str] = []
    signals: list[int] = []

    def pause() -> None:
        time.sleep(0.02)
        if interrupted and not signals:
            signals.append(2)

    parts = [FakePart("a", log), FakePart("b", log, failure_of(1, 1.0, exitcode=7))]
    assert supervisor.wait_for(parts, signals, pause, lambda failures: log.append(f"rank {failures[0].rank}")) == 7
    gets = ["a gets 2", "b gets 2"] if interrupted else []
    assert log == ["a ends", *gets, "rank 1", "a is killed", "b is killed"]


def test_a_signal_at_once_repeated_counts_once() -> None:
    """`timeout -s INT` sends it to its child and to the group of both; two of Ctrl-C would end the ranks at once."""
    before = {number: signal.getsignal(number) for number in (*supervisor.SIGNALS, signal.SIGCHLD)}
    try:
        signals = supervisor.record_signals()
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals == [signal.SIGINT, signal.SIGTERM]
        time.sleep(supervisor.REPETITION_S + 0.05)
        signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
