"""Jobs on several hosts, each a set of Linux namespaces with an sshd of its own (namespaces.py): starting."""

from __future__ import annotations

import os
import re
import signal
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.helpers import COMMAND, REPORT_SCRIPT
from tests.cli.namespaces import VirtualHost
from tests.cli.sites import END_S, TRAIN, MakeSite, needs_hosts, read_losses

pytestmark = needs_hosts


def test_a_job_on_two_hosts(make_site: MakeSite) -> None:
    """Ranks in the order of the hostfile, the script's arguments untouched, variables on both hosts, nothing left."""
    site = make_site(2, 1)
    site.write("report.py", REPORT_SCRIPT)
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
        assert report["MASTER_ADDR"] == "host1"
        assert report["NCCL_DEBUG"] == "WARN" and report["FROM_FILE"] == "it's there"
    assert set(job.output.splitlines()) == {"this is rank 0", "[rank 1] this is rank 1", "[rank 2] this is rank 2"}
    site.assert_idle(END_S)


@pytest.mark.slow
def test_all_that_does_not_fit_is_named_at_once(make_site: MakeSite, tmp_path: Path) -> None:
    """Nothing is started, exit status 2, and each host's trouble is told, with what to do."""
    site = make_site(1, 1, 1, 1, 1)
    site.write("report.py", REPORT_SCRIPT)
    pretend_version(site.hosts[1], tmp_path / "METADATA", "torch", "1.2.3")
    site.hosts[2].run("mount", "-t", "tmpfs", "tmpfs", site.directory.parent)
    site.hosts[3].run("mount", "-t", "tmpfs", "tmpfs", Path(sys.executable).parent)
    os.kill(site.hosts[4].listener, signal.SIGKILL)
    job = site.launch("report.py")
    assert job.process.returncode == 2 and not site.reports()
    torch = re.escape(metadata.version("torch"))
    for complaint in (
        rf"host2: has torch 1\.2\.3, and the job was started with torch {torch}: install",
        rf"host3: has no working directory '{site.directory}'",
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
def test_training_on_several_hosts(make_site: MakeSite) -> None:
    """Losses as on one host with one process."""
    site = make_site(1, 2)
    site.write("train.py", TRAIN)
    alone = site.start(*COMMAND, "--nproc", "1", "train.py", "3")
    assert alone.wait() == 0, alone.errors
    job = site.launch("--tee", "all", "train.py", "3")
    assert job.process.returncode == 0, job.errors
    expected, found = read_losses(alone.output), read_losses(job.output)
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-5)
    for rank, name in enumerate(("host1", "host2", "host2")):
        assert f"rank {rank} of 3 was on {name}" in job.output
    site.assert_idle(END_S)


@pytest.mark.slow
def test_the_launcher_may_be_elsewhere(make_site: MakeSite) -> None:
    """A job whose first host is not the one on which it is started; another one is."""
    site = make_site(1, 1, 1)
    site.write("report.py", REPORT_SCRIPT)
    job = site.launch("--exclude", "host1", "report.py")
    assert job.process.returncode == 0, job.errors
    assert [report["host"] for report in site.reports()] == ["host2", "host3"]
    assert job.output == "this is rank 0\n"
    site.assert_idle(END_S)
    job = site.start(*site.argv("--include", "host1@host3", "report.py"), host=2)
    assert job.wait() == 0, job.errors
    assert [report["host"] for report in site.reports()] == ["host1", "host3"]
    site.assert_idle(END_S)
