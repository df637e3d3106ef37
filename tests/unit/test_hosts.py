"""Hostfiles and the filters over their hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerolite.launcher.hosts import Host, HostsError, limit_hosts, parse_hostfile, read_hostfile, select_hosts

HOSTS = [Host("host1", 4), Host("host2", 2), Host("10.0.0.3", 1)]


def test_a_hostfile_has_comments_blank_lines_and_an_order(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all of them\n\nworker-2 slots=8\n  worker-1\tslots=4  # the old one\r\n10.0.0.3 slots=1\n")
    assert read_hostfile(str(path)) == [Host("worker-2", 8), Host("worker-1", 4), Host("10.0.0.3", 1)]


def test_a_hostfile_that_is_missing_or_unreadable_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match=r"there is no hostfile '.*nowhere'"):
        read_hostfile(str(tmp_path / "nowhere"))
    with pytest.raises(HostsError, match="cannot be read: .*directory"):
        read_hostfile(str(tmp_path))
    for content, words in ((b"\xff\xfe\x00", "cannot be read"), (b"\n# host1 slots=2\n", "names no host: exp")):
        (tmp_path / "hosts").write_bytes(content)
        with pytest.raises(HostsError, match=words):
            read_hostfile(str(tmp_path / "hosts"))


NO_HOST = r"is no host: expected a name or an IPv4 address and the number of processes, 1 to 4096"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("host2", NO_HOST), ("host٣ slots=2", NO_HOST), ("host2 slots=0", NO_HOST), ("host2 slots=4097", NO_HOST),
     ("host2 slots=2 slots=2", NO_HOST), ("host2 slots=٣", NO_HOST), ("host2 slots=2 max_slots=4", NO_HOST),
     ("-oProxyCommand=x slots=2", NO_HOST), ("ann@host2 slots=2", NO_HOST), ("fd00::3 slots=2", NO_HOST),
     ("host1 slots=2", "names the host 'host1' again, which stands in line 2 already")],
)  # fmt: skip
def test_a_bad_line_is_quoted_with_its_number(line: str, complaint: str) -> None:
    with pytest.raises(HostsError, match=complaint) as caught:
        parse_hostfile(f"# hosts\nhost1 slots=1\n\n{line}  # this one\n", "the/file")
    assert str(caught.value).startswith(f"line 4 of the hostfile 'the/file' ('{line}  # this one')")


def test_filters_choose_hosts_and_slots() -> None:
    assert select_hosts(HOSTS, None, None) == HOSTS
    assert select_hosts(HOSTS, "host2", None) == [Host("host2", 2)]
    assert select_hosts(HOSTS, "10.0.0.3@host1:2,0", None) == [Host("host1", 2, (0, 2)), Host("10.0.0.3", 1)]
    assert select_hosts(HOSTS, None, "host1") == HOSTS[1:]
    assert select_hosts(HOSTS, None, "host1:0,2@10.0.0.3") == [Host("host1", 2, (1, 3)), Host("host2", 2)]


@pytest.mark.parametrize(
    ("include", "exclude", "complaint"),
    [
        ("host9", None, "names the host 'host9', which is not among the known ones: host1, host2, 10.0.0.3"),
        (None, "host2:2", "--exclude 'host2:2' names slot 2 of the host 'host2', which has the slots 0 to 1"),
        ("host1:0,x", None, "has 'host1:0,x': expected hosts separated by '@', each once, with its slots"),
        ("host1:3-1", None, "has 'host1:3-1': expected"),
        ("host1:0-2,1", None, "has 'host1:0-2,1': expected"),
        ("host1,host2", None, "has 'host1,host2': expected"),
        ("host1@host1:0", None, "has 'host1:0': expected"),
        (None, "host1@host2@10.0.0.3", "leaves no host"),
    ],
)
def test_a_bad_filter_is_named(include: str | None, exclude: str | None, complaint: str) -> None:
    with pytest.raises(HostsError, match=complaint):
        select_hosts(HOSTS, include, exclude)
    for nobody in ("ann@host2", "[host1", "fd00::3:0", "[]", "host1:٣", "host1:"):
        with pytest.raises(HostsError, match="--include"):
            select_hosts(HOSTS, nobody, None)


def test_the_first_hosts_with_their_first_slots() -> None:
    assert limit_hosts(HOSTS, 2, 1) == [Host("host1", 1), Host("host2", 1)]
    assert limit_hosts([Host("host1", 2, (1, 3))], None, 1) == [Host("host1", 1, (1,))]
    assert limit_hosts(HOSTS, None, None) == limit_hosts(HOSTS, 3, None) == HOSTS
    with pytest.raises(HostsError, match="--num-nodes asks for 4 hosts, and there are 3: host1, host2, 10.0.0.3"):
        limit_hosts(HOSTS, 4, None)
    with pytest.raises(HostsError, match="2 processes on each host, and the host '10.0.0.3' has 1 slot"):
        limit_hosts(HOSTS, None, 2)
