"""Several hosts on one machine, for real: each has its own network, host name, processes, shared memory and sshd.

A host is a set of Linux namespaces, held by a first process that ends with this one; a bridge in a namespace of its own
connects them. Nothing of it has a name outside, so that nothing is left behind when a run of the tests is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import namespaces
from tests.cli.helpers import wait_until

TOOLS = ("ip", "unshare", "nsenter", "mount", "ssh", "sshd", "ssh-keygen")

# The first process of a host. It reaps what is left to it, and ends, with all of the host, at the end of its input.
FIRST_PROCESS = """\
import os, signal, socket, subprocess, sys
name, hosts_file = sys.argv[1:]
socket.sethostname(name)
subprocess.run("mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run && mkdir /run/sshd && ip link set lo up",
               shell=True, check=True)
if hosts_file:
    subprocess.run(["mount", "--bind", hosts_file, "/etc/hosts"], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


def why_not() -> str | None:
    """Say why hosts cannot be made here, or return None."""
    trial = ("--fork", "--mount-proc", "ip", "link", "add", "zl0", "type", "bridge")
    flags = ("--net", "--uts", "--ipc", "--mount", "--pid")
    return namespaces.why_not(TOOLS, "iproute2, util-linux, openssh-server", flags, trial)


@dataclass
class VirtualHost:
    """A host.

    Attributes:
        name, address: `host1` and `10.77.0.1`.
        first: process id of its first process.
        listener: process id of its sshd, 0 if it has none.
    """

    name: str
    address: str
    first: int
    listener: int = 0

    def command(self, argv: Sequence[str | Path], cwd: Path | str = "/", **variables: str | None) -> list[str]:
        """The command line that runs ``argv`` on this host."""
        unset = [key for key, value in variables.items() if value is None]
        given = [f"{key}={value}" for key, value in variables.items() if value is not None]
        inside = ["env", "-C", str(cwd), *(word for key in unset for word in ("-u", key)), *given, *map(str, argv)]
        return ["nsenter", "-t", str(self.first), "-m", "-u", "-i", "-n", "-p", *inside]

    def run(self, *argv: str | Path) -> str:
        """Run a command on this host, and return what it prints; it must succeed."""
        return call(*self.command(argv))

    def processes(self) -> dict[int, str]:
        """Command lines of what runs on this host, besides its first process and sshd.

        The sshd of a connection that is cut notices that only after hours.
        """
        found = {}
        for pid in pids_in(namespace_of(self.first)):
            if pid not in (self.first, self.listener):
                line = command_line(pid)
                if line and not line.startswith("sshd: "):
                    found[pid] = line
        return found


@dataclass
class VirtualNetwork:
    """Hosts and the switch between them.

    Attributes:
        hosts: in the order of their numbers.
        switch: process id of the process that holds the bridge.
        ssh_config: a file for `ssh -F`, by which root gets from each host to each other without a password.
    """

    hosts: list[VirtualHost]
    switch: int
    ssh_config: Path

    def set_link(self, number: int, up: bool) -> None:
        """Plug host ``number`` (from 0) in or unplug it."""
        state = "up" if up else "down"
        call("nsenter", "-t", str(self.switch), "-n", "ip", "link", "set", f"port{number}", state)


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": namespaces.SEARCH_PATH}


def call(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout


def namespace_of(pid: int) -> str:
    """The namespace of a process's process ids."""
    return os.readlink(f"/proc/{pid}/ns/pid")


def pids_in(namespace: str) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if namespace_of(int(entry)) == namespace:
                    yield int(entry)
            except OSError:
                continue


def command_line(pid: int) -> str:
    """The command line of a process, "" if it has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def child_of(pid: int) -> int:
    """The one child of a process, as soon as there is one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(children.read_text, timeout=4)
    return int(children.read_text().split()[0])


def hold_namespaces(stack: ExitStack, flags: Sequence[str], name: str, hosts_file: str) -> int:
    """Start the first process of a host; return its process id."""
    command = ["unshare", *flags, "--fork", "--kill-child", sys.executable, "-c", FIRST_PROCESS, name, hosts_file]
    return child_of(namespaces.start(stack, command))


def write_ssh_files(directory: Path, hosts: Mapping[str, str]) -> Path:
    """Keys and configurations of all hosts (address of each name); return the file for `ssh -F`."""
    for key in ("host_key", "user_key"):
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key))
    shutil.copy(directory / "user_key.pub", directory / "authorized_keys")
    host_key = (directory / "host_key.pub").read_text()
    known = "".join(f"{name},{address} {host_key}" for name, address in hosts.items())
    (directory / "known_hosts").write_text(known)
    (directory / "sshd_config").write_text(
        f"HostKey {directory}/host_key\nAuthorizedKeysFile {directory}/authorized_keys\nUsePAM no\nStrictModes no\n"
        f"PidFile none\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nMaxStartups 100\nUseDNS no\n"
    )
    config = directory / "ssh_config"
    config.write_text(
        f"Host *\n  User root\n  IdentityFile {directory}/user_key\n  IdentitiesOnly yes\n  LogLevel ERROR\n"
        f"  UserKnownHostsFile {directory}/known_hosts\n  StrictHostKeyChecking yes\n"
    )
    return config


def start_sshd(stack: ExitStack, host: VirtualHost, directory: Path) -> None:
    sshd = shutil.which("sshd", path=namespaces.SEARCH_PATH)
    assert sshd is not None
    log = stack.enter_context(open(directory / f"sshd.{host.name}.log", "wb"))
    argv = host.command([sshd, "-D", "-e", "-f", directory / "sshd_config"])
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())
    host.listener = child_of(process.pid)

    def end() -> None:
        try:
            os.kill(host.listener, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(10)

    stack.callback(end)
    sockets = Path(f"/proc/{host.first}/net/tcp")
    wait_until(lambda: "00000000:0016 00000000:0000" in sockets.read_text(), process, timeout=20)


@contextmanager
def virtual_network(count: int, directory: Path) -> Iterator[VirtualNetwork]:
    """Hosts `host1` to `hostN`, which know each other by name; each takes its own name for 127.0.1.1, as on Debian.

    Args:
        directory: for keys and configurations; empty.
    """
    addresses = {f"host{i + 1}": f"10.77.0.{i + 1}" for i in range(count)}
    host_flags = ("--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc")
    with ExitStack() as stack:
        switch = hold_namespaces(stack, ("--net", "--uts", "--mount"), "switch", "")
        call("nsenter", "-t", str(switch), "-n", "ip", "link", "add", "bridge", "type", "bridge")
        call("nsenter", "-t", str(switch), "-n", "ip", "link", "set", "bridge", "up")
        ssh_config = write_ssh_files(directory, addresses)
        hosts = []
        for i, (name, address) in enumerate(addresses.items()):
            hosts_file = directory / f"hosts.{name}"
            others = "".join(f"{addresses[other]} {other}\n" for other in addresses if other != name)
            hosts_file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
            first = hold_namespaces(stack, host_flags, name, str(hosts_file))
            host = VirtualHost(name, address, first)
            pair = ("type", "veth", "peer", "name", "eth0", "netns", str(first))
            call("nsenter", "-t", str(switch), "-n", "ip", "link", "add", f"port{i}", *pair)
            call("nsenter", "-t", str(switch), "-n", "ip", "link", "set", f"port{i}", "master", "bridge", "up")
            host.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            start_sshd(stack, host, directory)
            hosts.append(host)
        yield VirtualNetwork(hosts, switch, ssh_config)
