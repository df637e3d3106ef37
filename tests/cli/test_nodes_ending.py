"""Jobs on several hosts: how they end, whatever fails."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.cli.sites import END_S, MakeSite, find_process, needs_hosts

pytestmark = needs_hosts


@pytest.mark.slow
def test_a_rank_that_crashes_on_another_host_ends_all(make_site: MakeSite) -> None:
    """Children that ignore SIGTERM end in time too; the last lines name rank, host and cause."""
    site = make_site(1, 1, 1)
    job = site.start_waiting(3, site.argv())
    site.write("crash", "")
    start = time.monotonic()
    assert job.wait() == 1, job.errors
    site.assert_idle(start + END_S - time.monotonic())
    assert re.search(r"zerolite: rank 1 of 3 on host host2 \(process \d+\) failed", job.errors), job.errors
    assert "ValueError: rank one has had enough" in job.errors and 'wait.py", line' in job.errors


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "ssh"])
def test_nothing_outlives_the_launcher_or_a_connection(make_site: MakeSite, victim: str) -> None:
    site = make_site(1, 1, 1)
    job = site.start_waiting(3, site.argv())
    start = time.monotonic()
    if victim == "launcher":
        job.signal(signal.SIGKILL)
    else:
        os.kill(find_process(site.hosts[0], "ssh -F"), signal.SIGKILL)
    status = job.wait()
    site.assert_idle(start + END_S - time.monotonic())
    if victim == "launcher":
        assert status in (-9, 137), (status, job.errors)
    else:
        assert status == 1, (status, job.errors)
        assert re.search(r"the connection to host[23] is lost .*; the job ends on all hosts", job.errors), job.errors


@pytest.mark.slow
def test_ctrl_c(make_site: MakeSite) -> None:
    """Once: every rank may finish; twice: the end comes at once."""
    site = make_site(1, 1)
    job = site.start_waiting(2, site.argv(), "9")
    job.signal(signal.SIGINT)
    assert job.wait() == 130, job.errors
    site.assert_idle(END_S)
    for rank in range(2):
        assert (site.directory / f"interrupted.{rank}").exists(), (rank, job.output, job.errors)
    job = site.start_waiting(2, site.argv(), "300")
    job.signal(signal.SIGINT)
    time.sleep(2)
    job.signal(signal.SIGINT)
    assert job.wait(20) == 130, job.errors
    site.assert_idle(END_S)


@pytest.mark.slow
def test_a_host_is_unplugged(make_site: MakeSite) -> None:
    """The job ends with the host's name, and the host, left alone, ends its part too."""
    site = make_site(1, 1, 1)
    job = site.start_waiting(3, site.argv())
    site.network.set_link(1, up=False)
    status = job.wait(60)
    assert status == 1, job.errors
    assert "host2" in job.errors, job.errors
    site.assert_idle(END_S, "host1", "host3")
    site.assert_idle(60)
