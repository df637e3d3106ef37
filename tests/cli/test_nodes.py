"""Jobs on several hosts, each a set of Linux namespaces with an sshd of its own (namespaces.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.helpers import COMMAND, job_environment
from tests.cli.namespaces import VirtualHost, VirtualNetwork, child_of, environment, virtual_network, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TIMEOUT_S = 240
END_S = 10.0
"""All processes of a job have ended this long after its first failure."""

REPORT = """\
import json, os, socket, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG",
         "FROM_FILE")
report = {name: os.environ.get(name) for name in names}
report.update(host=socket.gethostname(), cwd=os.getcwd(), argv=sys.argv[1:])
with open(f"report.{os.environ['RANK']}.json", "w") as file:
    json.dump(report, file)
print("this is rank", os.environ["RANK"], flush=True)
"""

# Waits in steps, so that a Ctrl-C interrupts it; `arrived.RANK` says that it is there.
WAIT = """\
import os, subprocess, sys, time
from pathlib import Path
rank = os.environ["RANK"]
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
Path(f"arrived.{rank}").touch()
try:
    while True:
        time.sleep(0.1)
        if rank == "1" and Path("crash").exists():
            Path("crash").unlink()
            raise ValueError("rank one has had enough")
except KeyboardInterrupt:
    time.sleep(float(sys.argv[1]) if rank == "1" else 0)
    Path(f"interrupted.{rank}").touch()
    raise
"""

TRAIN = """\
import os, socket, sys
import torch, zerolite
stage, world, rank = int(sys.argv[1]), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {"train_batch_size": 12, "zero_optimization": {"stage": stage},
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
engine = zerolite.initialize(model, config)
generator = torch.Generator().manual_seed(1)
for step in range(4):
    batch = torch.randn(12, 8, generator=generator)
    loss = engine(batch[rank * 12 // world : (rank + 1) * 12 // world]).pow(2).mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    if rank == 0:
        print("loss", (total / world).item(), flush=True)
print(f"rank {rank} of {world} was on {socket.gethostname()}", flush=True)
"""

ELASTIC = """\
import os, time
import torch, zerolite
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
          "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3, 4, 6], "max_gpus": 4}}
engine = zerolite.initialize(model, config)
if os.path.exists("checkpoints/latest"):
    engine.load_checkpoint("checkpoints")
if rank == 0:
    print("started with", world, "ranks at step", engine.global_steps, flush=True)
for step in range(engine.global_steps, 8):
    batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    total = torch.zeros(())
    for micro in batch[rank * 12 // world : (rank + 1) * 12 // world].split(engine.train_micro_batch_size_per_gpu):
        loss = engine(micro).pow(2).mean()
        engine.backward(loss)
        engine.step()
        total += loss.detach() / engine.gradient_accumulation_steps
    torch.distributed.all_reduce(total)
    if rank == 0:
        print("loss", total.item() / world, flush=True)
    engine.save_checkpoint("checkpoints")
    if step == 3 and world == 3:
        open(f"arrived.{rank}", "w").close()
        time.sleep(3)
"""

# Stands for SLURM's command: runs what follows the options once on each host of the allocation.
SRUN = """\
import os, shlex, subprocess, sys
first = next(i for i, word in enumerate(sys.argv) if i and not word.startswith("-"))
asked = [word for word in sys.argv[:first] if word.startswith("--nodelist=")]
names = asked[0].partition("=")[2].split(",") if asked else ["host1", "host2", "host3"]
assert f"--nodes={len(names)}" in sys.argv and "--ntasks-per-node=1" in sys.argv
tasks = [subprocess.Popen(["ssh", "-F", os.environ["SSH_CONFIG"], name, shlex.join(
         ["env", f"SLURMD_NODENAME={name}", *sys.argv[first:]])], stdin=subprocess.DEVNULL) for name in reversed(names)]
sys.exit(max(task.wait() for task in tasks))
"""


class Site:
    """Hosts, and a directory that they share."""

    def __init__(self, network: VirtualNetwork, directory: Path) -> None:
        self.network = network
        self.hosts = network.hosts
        self.directory = directory

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def argv(self, *options: str | Path, hostfile: bool = True) -> list[str]:
        """The `zerolite` command line with the hosts' ssh configuration."""
        given = ["--hostfile", "hosts"] if hostfile else []
        return [*COMMAND, *given, "--launcher-args", f"-F {self.network.ssh_config}", *map(str, options)]

    def start(self, *argv: str | Path, host: int = 0, **variables: str | None) -> Running:
        """Start a command on a host, with its output in pipes."""
        return Running(self.hosts[host], argv, self.directory, variables)

    def launch(self, *options: str | Path, **variables: str | None) -> Running:
        """Run `zerolite OPTIONS` on the first host to its end."""
        running = self.start(*self.argv(*options), **variables)
        running.wait()
        return running

    def wait_for(self, *names: str, timeout: float = 60) -> None:
        """Wait until all these files are there."""
        deadline = time.monotonic() + timeout
        while not all((self.directory / name).exists() for name in names):
            assert time.monotonic() < deadline, f"none of the processes has written {names}"
            time.sleep(0.05)

    def assert_idle(self, timeout: float, *names: str) -> None:
        """Nothing of a job is left on these hosts, by default all, at the latest in ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        for host in self.hosts:
            if not names or host.name in names:
                left = host.wait_until_idle(max(0.0, deadline - time.monotonic()))
                assert not left, f"still there on {host.name}: {left}"

    def reports(self) -> list[dict[str, object]]:
        """What the ranks have written, in their order."""
        count = len(list(self.directory.glob("report.*.json")))
        return [json.loads((self.directory / f"report.{rank}.json").read_text()) for rank in range(count)]


class Running:
    """A command that runs on a host."""

    def __init__(
        self, host: VirtualHost, argv: tuple[str | Path, ...], directory: Path, variables: dict[str, str | None]
    ) -> None:
        base = {key: value for key, value in job_environment().items() if key.startswith(("PATH", "HOME", "LANG"))}
        settings = {**base, "PYTHONDONTWRITEBYTECODE": "1", **variables}
        self.process = subprocess.Popen(
            ["env", "-i", f"PATH={environment()['PATH']}", *host.command(argv, directory, **settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = self.errors = ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(child_of(self.process.pid), number)

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Wait for its end; return its exit status."""
        try:
            self.output, self.errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.output, self.errors = self.process.communicate()
            raise AssertionError(f"not ended after {timeout} s:\n{self.output}\n{self.errors}") from None
        return self.process.returncode


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Make hosts with so many slots each."""
    with ExitStack() as stack:

        def make(*slots: int) -> Site:
            keys, shared = tmp_path / "keys", tmp_path / "shared" / "work"
            keys.mkdir()
            shared.mkdir(parents=True)
            site = Site(stack.enter_context(virtual_network(len(slots), keys)), shared)
            lines = [f"{host.name} slots={count}\n" for host, count in zip(site.hosts, slots, strict=True)]
            site.write("hosts", "".join(lines))
            return site

        yield make


def test_a_job_on_two_hosts(make_site: Callable[..., Site]) -> None:
    """Ranks in the order of the hostfile, the script's arguments untouched, variables on both hosts, nothing left."""
    site = make_site(2, 1)
    site.write("report.py", REPORT)
    site.write(".zerolite_env", "FROM_FILE=it's there\n")
    job = site.launch("--tee", "all", "report.py", "--x", "$HOME 'y'", NCCL_DEBUG="WARN")
    assert job.process.returncode == 0, job.errors
    reports = site.reports()
    assert [(report["host"], report["RANK"], report["LOCAL_RANK"], report["WORLD_SIZE"]) for report in reports] == [
        ("host1", "0", "0", "3"),
        ("host1", "1", "1", "3"),
        ("host2", "2", "0", "3"),
    ]
    for report in reports:
        assert report["argv"] == ["--x", "$HOME 'y'"] and report["cwd"] == str(site.directory)
        assert report["MASTER_ADDR"] == "host1" and report["GLOO_SOCKET_IFNAME"] == "eth0"
        assert report["NCCL_DEBUG"] == "WARN" and report["FROM_FILE"] == "it's there"
    assert "GLOO_SOCKET_IFNAME=eth0 on each host" in job.errors
    assert set(job.output.splitlines()) == {"this is rank 0", "[rank 1] this is rank 1", "[rank 2] this is rank 2"}
    site.assert_idle(END_S)


def test_all_that_does_not_fit_is_named_at_once(make_site: Callable[..., Site], tmp_path: Path) -> None:
    """Nothing is started, exit status 2, and each host's trouble is told, with what to do."""
    site = make_site(1, 1, 1, 1, 1)
    site.write("report.py", REPORT)
    pretend_version(site.hosts[1], tmp_path / "METADATA", "torch", "1.2.3")
    site.hosts[2].run("mount", "-t", "tmpfs", "tmpfs", site.directory.parent)
    site.hosts[2].run("hostname", "host2")
    site.hosts[3].run("mount", "-t", "tmpfs", "tmpfs", Path(sys.executable).parent)
    os.kill(site.hosts[4].listener, signal.SIGKILL)
    job = site.launch("report.py")
    assert job.process.returncode == 2 and not site.reports()
    torch = re.escape(metadata.version("torch"))
    for complaint in (
        rf"host2: has torch 1\.2\.3 where torch {torch} was expected, as on this host: install the same version",
        rf"host3: has no working directory '{site.directory}'",
        r"host3: calls itself 'host2', as host2 does",
        rf"host4: cannot run '{sys.executable}', the Python of this job",
        r"host5: cannot be reached by ssh \(ssh: connect to host host5 port 22: Connection refused\)",
        r"leave out what cannot take part: --exclude host2@host3@host4@host5\n",
    ):
        assert re.search(complaint, job.errors), f"{complaint}\n{job.errors}"
    assert "host1:" not in job.errors
    site.assert_idle(5.0)


def pretend_version(host: VirtualHost, path: Path, package: str, version: str) -> None:
    """Let a host believe that a package has another version."""
    original = next(file for file in metadata.files(package) or () if file.name == "METADATA").locate()
    path.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", Path(str(original)).read_text(), count=1))
    host.run("mount", "--bind", path, Path(str(original)))


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "stage"), [((2,), 2), ((1, 1), 2), ((1, 1, 1), 0), ((1, 1, 1), 3), ((1, 2), 3)])
def test_training_on_several_hosts(make_site: Callable[..., Site], slots: tuple[int, ...], stage: int) -> None:
    """Losses as on one host with one process."""
    site = make_site(*slots)
    site.write("train.py", TRAIN)
    alone = site.start(*COMMAND, "--nproc", "1", "train.py", stage := str(stage))
    assert alone.wait() == 0, alone.errors
    job = site.launch("--tee", "all", "train.py", stage)
    assert job.process.returncode == 0, job.errors
    expected, found = read_losses(alone.output), read_losses(job.output)
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-5)
    ranks = [host.name for host, count in zip(site.hosts, slots, strict=True) for _ in range(count)]
    for rank, name in enumerate(ranks):
        assert f"rank {rank} of {sum(slots)} was on {name}" in job.output
    site.assert_idle(END_S)


def read_losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"(?m)^loss (\S+)$", output)]


@pytest.mark.slow
def test_filters(make_site: Callable[..., Site]) -> None:
    site = make_site(1, 3, 2)
    site.write("report.py", REPORT)
    job = site.launch("--include", "host1@host2:0,2", "report.py")
    assert job.process.returncode == 0, job.errors
    found = [(report["host"], report["CUDA_VISIBLE_DEVICES"]) for report in site.reports()]
    assert found == [("host1", None), ("host2", "0,2"), ("host2", "0,2")]
    job = site.launch("--exclude", "host4", "report.py")
    assert job.process.returncode == 2
    assert "the host 'host4', which is not among the known ones: host1, host2, host3" in job.errors
    site.write("hosts", "host1 slots=1\nhost2 slot=1\n")
    job = site.launch("report.py")
    assert job.process.returncode == 2 and "line 2 of the hostfile 'hosts' ('host2 slot=1')" in job.errors
    (site.directory / "hosts").unlink()
    job = site.launch("report.py")
    assert job.process.returncode == 2 and "there is no hostfile 'hosts'" in job.errors


@pytest.mark.slow
def test_the_launcher_may_be_elsewhere(make_site: Callable[..., Site]) -> None:
    """A job whose first host is not the one on which it is started; another one is."""
    site = make_site(1, 1, 1)
    site.write("report.py", REPORT)
    job = site.launch("--exclude", "host1", "report.py")
    assert job.process.returncode == 0, job.errors
    assert [report["host"] for report in site.reports()] == ["host2", "host3"]
    assert job.output == "this is rank 0\n"
    site.assert_idle(END_S)
    job = site.start(*site.argv("--include", "host1@host3", "report.py"), host=2)
    assert job.wait() == 0, job.errors
    assert [report["host"] for report in site.reports()] == ["host1", "host3"]
    site.assert_idle(END_S)


@pytest.mark.slow
def test_a_rank_that_crashes_on_another_host_ends_all(make_site: Callable[..., Site]) -> None:
    """In time, also children that ignore SIGTERM; the last lines name the rank, the host and the cause."""
    site = make_site(1, 1, 1)
    site.write("wait.py", WAIT)
    job = site.start(*site.argv("wait.py"))
    site.wait_for("arrived.0", "arrived.1", "arrived.2")
    site.write("crash", "")
    start = time.monotonic()
    assert job.wait() == 1, job.errors
    site.assert_idle(start + END_S - time.monotonic())
    assert re.search(r"zerolite: rank 1 of 3 on host host2 \(process \d+\) failed", job.errors), job.errors
    assert "ValueError: rank one has had enough" in job.errors and 'wait.py", line' in job.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"),
    [("launcher", signal.SIGKILL), ("launcher", signal.SIGTERM), ("ssh", signal.SIGKILL), ("node", signal.SIGKILL)],
)
def test_nothing_outlives_the_launcher_or_a_connection(
    make_site: Callable[..., Site], victim: str, number: signal.Signals
) -> None:
    site = make_site(1, 1, 1)
    site.write("wait.py", WAIT)
    job = site.start(*site.argv("wait.py"))
    site.wait_for("arrived.0", "arrived.1", "arrived.2")
    start = time.monotonic()
    if victim == "launcher":
        job.signal(number)
    elif victim == "ssh":
        os.kill(find_process(site.hosts[0], "ssh -F"), number)
    else:
        os.kill(find_process(site.hosts[1], "zerolite.launcher.node"), number)
    status = job.wait()
    site.assert_idle(start + END_S - time.monotonic())
    if victim == "launcher":
        assert status == (-9 if number is signal.SIGKILL else 143) or status == 137, (status, job.errors)
    else:
        assert status == 1, (status, job.errors)
        assert re.search(r"the connection to host[23] is lost .*; the job ends on all hosts", job.errors), job.errors


def find_process(host: VirtualHost, words: str) -> int:
    """The process of a host whose command line has these words."""
    found = [pid for pid, line in host.processes().items() if words in line and not line.startswith("bash")]
    assert found, host.processes()
    return min(found)


@pytest.mark.slow
def test_ctrl_c(make_site: Callable[..., Site]) -> None:
    """Once: every rank may finish; twice: the end comes at once."""
    site = make_site(1, 1)
    site.write("wait.py", WAIT)
    job = site.start(*site.argv("wait.py", "9"))
    site.wait_for("arrived.0", "arrived.1")
    job.signal(signal.SIGINT)
    assert job.wait() == 130, job.errors
    site.assert_idle(END_S)
    for name in ("interrupted.0", "interrupted.1", "arrived.0", "arrived.1"):
        (site.directory / name).unlink()
    job = site.start(*site.argv("wait.py", "300"))
    site.wait_for("arrived.0", "arrived.1")
    job.signal(signal.SIGINT)
    time.sleep(2)
    job.signal(signal.SIGINT)
    assert job.wait(20) == 130, job.errors
    site.assert_idle(END_S)


@pytest.mark.slow
def test_a_host_is_unplugged(make_site: Callable[..., Site]) -> None:
    """The job ends with the host's name, and the host, left alone, ends its part too."""
    site = make_site(1, 1, 1)
    site.write("wait.py", WAIT)
    job = site.start(*site.argv("wait.py"))
    site.wait_for("arrived.0", "arrived.1", "arrived.2")
    site.network.set_link(1, up=False)
    status = job.wait(60)
    assert status == 1, job.errors
    assert "host2" in job.errors, job.errors
    site.assert_idle(END_S, "host1", "host3")
    site.assert_idle(60)


@pytest.mark.slow
def test_the_port_is_taken_or_closed(make_site: Callable[..., Site]) -> None:
    site = make_site(1, 1)
    site.write("report.py", REPORT)
    taken = site.start(
        sys.executable, "-c", "import socket, time; s = socket.create_server(('', 29600)); time.sleep(99)"
    )
    deadline = time.monotonic() + 20
    while ":73A0 " not in Path(f"/proc/{site.hosts[0].first}/net/tcp").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job = site.launch("--master-port", "29600", "report.py")
    taken.signal(signal.SIGKILL)
    taken.wait()
    assert job.process.returncode == 2, job.errors
    assert "host1: cannot listen at port 29600" in job.errors and "(Address already in use)" in job.errors
    site.hosts[1].run("ip", "rule", "add", "pref", "0", "ipproto", "tcp", "dport", "29601", "blackhole")
    job = site.launch("--master-port", "29601", "report.py")
    assert job.process.returncode == 2 and not site.reports()
    assert "host2: cannot reach host1 at port 29601" in job.errors, job.errors
    job = site.launch("--master-port", "29602", "report.py")
    assert job.process.returncode == 0, job.errors
    site.assert_idle(END_S)


@pytest.mark.slow
def test_one_command_per_node(make_site: Callable[..., Site]) -> None:
    """`--no-ssh`: a training job, whose second node is started first."""
    site = make_site(1, 1)
    site.write("train.py", TRAIN)
    options = ["--no-ssh", "--num-nodes", "2", "--nproc", "1", "--master-addr", "host1", "--master-port", "29700"]
    second = site.start(*COMMAND, *options, "--node-rank", "1", "--tee", "all", "train.py", "2", host=1)
    first = site.start(*COMMAND, *options, "--node-rank", "0", "train.py", "2")
    assert first.wait() == 0, first.errors
    assert second.wait() == 0, second.errors
    assert len(read_losses(first.output)) == 4 and "rank 1 of 2 was on host2" in second.output
    site.assert_idle(END_S)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (package openmpi-bin)")
def test_mpirun(make_site: Callable[..., Site]) -> None:
    """The same path by mpirun: training, and the end when the launcher is killed."""
    site = make_site(1, 2)
    site.write("train.py", TRAIN)
    site.write("wait.py", WAIT)
    arguments = f"--allow-run-as-root --mca plm_rsh_args '-F {site.network.ssh_config}'"
    argv = [*COMMAND, "--hostfile", "hosts", "--launcher", "openmpi", "--launcher-args", arguments]
    job = site.start(*argv, "train.py", "1")
    assert job.wait() == 0, job.errors
    assert len(read_losses(job.output)) == 4
    site.assert_idle(END_S)
    job = site.start(*argv, "wait.py")
    site.wait_for("arrived.0", "arrived.1", "arrived.2")
    job.signal(signal.SIGKILL)
    job.wait()
    site.assert_idle(END_S)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (package pdsh)")
def test_pdsh(make_site: Callable[..., Site]) -> None:
    site = make_site(1, 2)
    assert_tool_works(site, "pdsh", PDSH_SSH_ARGS_APPEND=f"-F {site.network.ssh_config}")


@pytest.mark.slow
def test_srun(make_site: Callable[..., Site]) -> None:
    """By a stand-in for `srun`, which needs a cluster: hosts from the allocation, and from a hostfile."""
    site = make_site(1, 1, 1)
    tools = site.directory / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "print('host1', 'host2', 'host3', sep=chr(10))")):
        (tools / name).write_text(f"#!{sys.executable}\n{text}")
        (tools / name).chmod(0o755)
    path = f"{tools}:{environment()['PATH']}"
    variables = {"PATH": path, "SSH_CONFIG": str(site.network.ssh_config), "SLURM_JOB_NODELIST": "host[1-3]"}
    site.write("report.py", REPORT)
    job = site.start(*COMMAND, "--launcher", "slurm", "--nproc", "1", "report.py", **variables)
    assert job.wait() == 0, job.errors
    assert [report["host"] for report in site.reports()] == ["host1", "host2", "host3"]
    site.write("hosts", "host1 slots=1\nhost3 slots=2\n")
    assert_tool_works(site, "slurm", **variables)


def assert_tool_works(site: Site, launcher: str, **variables: str) -> None:
    """Three ranks on two hosts start in order, a crash is told, and nothing outlives the launcher."""
    site.write("report.py", REPORT)
    site.write("wait.py", WAIT)
    argv = [*COMMAND, "--hostfile", "hosts", "--launcher", launcher]
    names = [line.split()[0] for line in (site.directory / "hosts").read_text().splitlines()]
    job = site.start(*argv, "report.py", "$x 100% 'y'", **variables)
    assert job.wait() == 0, job.errors
    found = [(report["host"], report["argv"]) for report in site.reports()]
    assert found == [(name, ["$x 100% 'y'"]) for name in (names[0], names[1], names[1])]
    job = site.start(*argv, "wait.py", **variables)
    site.wait_for("arrived.0", "arrived.1", "arrived.2")
    site.write("crash", "")
    start = time.monotonic()
    assert job.wait() == 1, job.errors
    site.assert_idle(start + END_S - time.monotonic())
    assert f"rank 1 of 3 on host {names[1]}" in job.errors and "rank one has had enough" in job.errors
    for rank in range(3):
        (site.directory / f"arrived.{rank}").unlink()
    job = site.start(*argv, "wait.py", **variables)
    site.wait_for("arrived.0", "arrived.1", "arrived.2")
    job.signal(signal.SIGKILL)
    job.wait()
    site.assert_idle(END_S)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["unplugged", "killed"])
def test_an_elastic_job_goes_on_with_one_host_fewer(make_site: Callable[..., Site], way: str) -> None:
    """From the checkpoint, with the same global batch: the losses are those of one process."""
    site = make_site(1, 1, 1)
    site.write("train.py", ELASTIC)
    alone = site.start(*COMMAND, "--nproc", "1", "train.py")
    assert alone.wait() == 0, alone.errors
    shutil.rmtree(site.directory / "checkpoints")
    job = site.start(*site.argv("--num-nodes", "2:3", "--max-restarts", "1", "train.py"))
    site.wait_for("arrived.0", "arrived.1", "arrived.2")
    if way == "unplugged":
        site.network.set_link(2, up=False)
    else:
        os.kill(find_process(site.hosts[2], "zerolite.launcher.node"), signal.SIGKILL)
    assert job.wait() == 0, job.errors
    assert re.findall(r"started with .*", job.output) == [
        "started with 3 ranks at step 0",
        "started with 2 ranks at step 4",
    ]
    assert read_losses(job.output) == pytest.approx(read_losses(alone.output), rel=1e-5)
    assert "the connection to host3 is lost" in job.errors and "goes on with 2 of 3 hosts" in job.errors
    site.assert_idle(40)
