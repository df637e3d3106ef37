"""Jobs on several hosts, for tests: the hosts, a directory that they share, and scripts to run there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.cli import helpers
from tests.cli.helpers import COMMAND, job_environment, read_reports, wait_until, wait_until_none
from tests.cli.namespaces import VirtualHost, VirtualNetwork, child_of, environment, virtual_network, why_not

TIMEOUT_S = 240
END_S = 10.0
"""All processes of a job have ended this long after its first failure."""

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


class Site:
    """Hosts, and a directory that they share."""

    def __init__(self, network: VirtualNetwork, directory: Path) -> None:
        self.network = network
        self.hosts = network.hosts
        self.directory = directory

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def argv(self, *options: str | Path) -> list[str]:
        """The `zerolite` command line with the hosts' ssh configuration."""
        return [*COMMAND, "--hostfile", "hosts", "--launcher-args", f"-F {self.network.ssh_config}", *map(str, options)]

    def start(self, *argv: str | Path, host: int = 0, **variables: str | None) -> Running:
        """Start a command on a host, with its output in pipes."""
        return Running(self.hosts[host], argv, self.directory, variables)

    def launch(self, *options: str | Path, **variables: str | None) -> Running:
        """Run `zerolite OPTIONS` on the first host to its end."""
        running = self.start(*self.argv(*options), **variables)
        running.wait()
        return running

    def start_waiting(self, ranks: int, argv: Sequence[str], *more: str, **variables: str | None) -> Running:
        """Start WAIT by a command, and wait until its ranks are there."""
        arrivals = [f"arrived.{rank}" for rank in range(ranks)]
        for name in arrivals:
            (self.directory / name).unlink(missing_ok=True)
        self.write("wait.py", WAIT)
        job = self.start(*argv, "wait.py", *more, **variables)
        self.wait_for(*arrivals)
        return job

    def wait_for(self, *names: str) -> None:
        """Wait until all these files are there."""
        wait_until(lambda: all((self.directory / name).exists() for name in names), timeout=60)

    def assert_idle(self, timeout: float, *names: str) -> None:
        """Nothing of a job is left on these hosts, by default all, at the latest in ``timeout`` seconds."""
        hosts = [host for host in self.hosts if not names or host.name in names]
        wait_until_none(lambda: {host.name: left for host in hosts if (left := host.processes())}, timeout)

    def reports(self) -> list[dict[str, Any]]:
        return read_reports(self.directory)


class Running:
    """A command that runs on a host."""

    def __init__(
        self, host: VirtualHost, argv: tuple[str | Path, ...], directory: Path, variables: dict[str, str | None]
    ) -> None:
        base = {key: value for key, value in job_environment().items() if key.startswith(("PATH", "HOME", "LANG"))}
        settings = {**base, "PYTHONDONTWRITEBYTECODE": "1", **variables}
        command = host.command(argv, directory, **settings)
        self.process = helpers.start("env", "-i", f"PATH={environment()['PATH']}", *command)
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


MakeSite: TypeAlias = Callable[..., Site]


def build_site(stack: ExitStack, directory: Path, *slots: int) -> Site:
    """Make hosts with so many slots each, a hostfile `hosts`, and a directory for keys beside the shared one."""
    keys, shared = directory / "keys", directory / "shared" / "work"
    keys.mkdir()
    shared.mkdir(parents=True)
    site = Site(stack.enter_context(virtual_network(len(slots), keys)), shared)
    lines = [f"{host.name} slots={count}\n" for host, count in zip(site.hosts, slots, strict=True)]
    site.write("hosts", "".join(lines))
    return site


def read_losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"(?m)^loss (\S+)$", output)]


def find_process(host: VirtualHost, words: str) -> int:
    """The process of a host whose command line has these words."""
    found = [pid for pid, line in host.processes().items() if words in line and not line.startswith("bash")]
    assert found, host.processes()
    return min(found)


REASON = why_not()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))
