"""Jobs on several hosts, reached by mpirun, pdsh and srun."""

from __future__ import annotations

import shutil
import signal
import sys
import time

import pytest

from tests.cli.helpers import COMMAND, REPORT_SCRIPT
from tests.cli.namespaces import environment
from tests.cli.sites import END_S, TRAIN, MakeSite, Site, needs_hosts, read_losses

pytestmark = needs_hosts

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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (package openmpi-bin)")
def test_mpirun(make_site: MakeSite) -> None:
    """The same path by mpirun: training, and the end when the launcher is killed."""
    site = make_site(1, 2)
    site.write("train.py", TRAIN)
    arguments = f"--allow-run-as-root --mca plm_rsh_args '-F {site.network.ssh_config}'"
    argv = [*COMMAND, "--hostfile", "hosts", "--launcher", "openmpi", "--launcher-args", arguments]
    job = site.start(*argv, "train.py", "1")
    assert job.wait() == 0, job.errors
    assert len(read_losses(job.output)) == 4
    site.assert_idle(END_S)
    job = site.start_waiting(3, argv)
    job.signal(signal.SIGKILL)
    job.wait()
    site.assert_idle(END_S)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (package pdsh)")
def test_pdsh(make_site: MakeSite) -> None:
    site = make_site(1, 2)
    assert_tool_works(site, "pdsh", PDSH_SSH_ARGS_APPEND=f"-F {site.network.ssh_config}")


@pytest.mark.slow
def test_srun(make_site: MakeSite) -> None:
    """By a stand-in for `srun`, which needs a cluster: hosts from the allocation, and from a hostfile."""
    site = make_site(1, 1, 1)
    tools = site.directory / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "print('host1', 'host2', 'host3', sep=chr(10))")):
        (tools / name).write_text(f"#!{sys.executable}\n{text}")
        (tools / name).chmod(0o755)
    path = f"{tools}:{environment()['PATH']}"
    variables = {"PATH": path, "SSH_CONFIG": str(site.network.ssh_config), "SLURM_JOB_NODELIST": "host[1-3]"}
    site.write("report.py", REPORT_SCRIPT)
    job = site.start(*COMMAND, "--launcher", "slurm", "--nproc", "1", "report.py", **variables)
    assert job.wait() == 0, job.errors
    assert [report["host"] for report in site.reports()] == ["host1", "host2", "host3"]
    site.write("hosts", "host1 slots=1\nhost3 slots=2\n")
    assert_tool_works(site, "slurm", **variables)


def assert_tool_works(site: Site, launcher: str, **variables: str) -> None:
    """Three ranks on two hosts start in order, a crash is told, and nothing outlives the launcher."""
    site.write("report.py", REPORT_SCRIPT)
    argv = [*COMMAND, "--hostfile", "hosts", "--launcher", launcher]
    names = [line.split()[0] for line in (site.directory / "hosts").read_text().splitlines()]
    job = site.start(*argv, "report.py", "$x 100% 'y'", **variables)
    assert job.wait() == 0, job.errors
    found = [(report["host"], report["argv"]) for report in site.reports()]
    assert found == [(name, ["$x 100% 'y'"]) for name in (names[0], names[1], names[1])]
    job = site.start_waiting(3, argv, **variables)
    site.write("crash", "")
    start = time.monotonic()
    assert job.wait() == 1, job.errors
    site.assert_idle(start + END_S - time.monotonic())
    assert f"rank 1 of 3 on host {names[1]}" in job.errors and "rank one has had enough" in job.errors
    job = site.start_waiting(3, argv, **variables)
    job.signal(signal.SIGKILL)
    job.wait()
    site.assert_idle(END_S)
