"""Devices, cores and what is shared out of them, on machines that are described in files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerolite.launcher import resources
from zerolite.launcher.resources import core_sets, count_core_groups, count_cores, read_cpu_quota, visible_devices

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("visible", "chosen", "result"),
    [(None, [0, 2], "0,2"), ("4,5,6,7", [0, 2], "4,6"), ("4, 5", [1, 0], "5,4"),
     ("GPU-8932f937,GPU-1f0e", [1], "GPU-1f0e"), ("MIG-GPU-8932f937/1/2,3", [0, 1], "MIG-GPU-8932f937/1/2,3"),
     ("0,1", [], "")],
)  # fmt: skip
def test_chosen_devices_are_some_of_the_visible_ones(visible: str | None, chosen: list[int], result: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_devices(environ, chosen) == result
    assert resources.count_visible_entries(result) == len(chosen)


@pytest.mark.parametrize(
    ("visible", "chosen", "words"),
    [
        ("4,5", [0, 2, 5], "slots below 2, since CUDA_VISIBLE_DEVICES=4,5 leaves 2 devices, got 2, 5;"),
        ("4,-1,5", [1], "leaves 1 device, got 1;"),
        ("", [0], "leaves 0 devices, got 0;"),
    ],
)
def test_devices_that_are_not_visible(visible: str, chosen: list[int], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        visible_devices({"CUDA_VISIBLE_DEVICES": visible}, chosen)
    assert words in str(caught.value)


def test_devices_are_counted_by_the_tool_or_else_by_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a device (MIG) are indented below it and do not count; `-L` must have been asked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resources.count_cuda_devices({}) == 0, "no tool"
    lines = "GPU 0: A (UUID: GPU-1)\\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\\nGPU 1: A (UUID: GPU-2)\\n"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "-L" ] && printf "{lines}"\n')
    tool.chmod(0o755)
    assert resources.count_cuda_devices({}) == resources.default_nproc({}) == 2
    tool.unlink()
    Machine(tmp_path, monkeypatch, [[0, 1], [2, 3]])
    assert resources.default_nproc({}, tmp_path) == 2


class Machine:
    """A machine, described in files. `nodes`: the CPUs of each NUMA node. `threads`: CPUs c, c + cores, ... share a
    core, as Linux numbers them."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[list[int]], threads: int = 1, sockets: int = 0
    ) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        cpus = [cpu for node in nodes for cpu in node]
        cores = len(cpus) // threads
        for number, node in enumerate(nodes):
            self.write(f"sys/devices/system/node/node{number}/cpulist", ",".join(map(str, node)))
        for cpu in cpus:
            topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
            siblings = range(cpu % cores, len(cpus), cores)
            self.write(f"{topology}/thread_siblings_list", ",".join(map(str, siblings)))
            self.write(f"{topology}/physical_package_id", str(cpu % cores * sockets // cores))
        self.allow(cpus)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def allow(self, cpus: list[int]) -> None:
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(cpus), raising=False)


def two_nodes(root: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two nodes of four cores with two threads each: node 0 has cores 0-3, that is CPUs 0-3 and 8-11."""
    return Machine(root, monkeypatch, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]], threads=2, sockets=2)


@pytest.mark.parametrize(
    ("allowed", "groups"),
    [
        (range(16), 2),
        (range(8), 2),  # one thread of each core
        ([0, 1, 8, 9], 1),  # of one node
        ([0, 8, 1], 1),
        ([*range(4), 8, 9, 10, 11, 4], 1),  # one core is left of the other
        ([*range(4), 4, 5], 2),
        (range(3, 13), 2),
        ([15], 1),
    ],
)
def test_sets_are_whole_cores_that_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: list[int], groups: int
) -> None:
    two_nodes(tmp_path, monkeypatch).allow(list(allowed))
    cores = count_cores(tmp_path)
    assert cores == len({cpu % 8 for cpu in allowed}) and count_core_groups(tmp_path) == groups
    for nproc in range(1, 20):
        sets = core_sets(nproc, tmp_path)
        assert len(sets) == nproc and all(sets)
        assert {cpu for cpus in sets for cpu in cpus} <= set(allowed)
        sizes = [len({cpu % 8 for cpu in cpus}) for cpus in sets]
        assert max(sizes) - min(sizes) <= 1 and max(1, cores // nproc) == min(sizes)
        if nproc <= cores:
            assert sorted(cpu for cpus in sets for cpu in cpus) == sorted(allowed), "none is left out or given twice"


def test_cores_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_nodes(tmp_path, monkeypatch)
    assert core_sets(2, tmp_path) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert core_sets(3, tmp_path) == [[0, 1, 8, 9], [2, 3, 4, 10, 11, 12], [5, 6, 7, 13, 14, 15]]
    assert core_sets(16, tmp_path) == [[core, core + 8] for core in range(8) for _ in range(2)]


def test_the_quota_is_the_strictest_of_nested_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, [[0]])
    machine.write("proc/self/cgroup", "0::/")
    for text in ("150000 100000", "max 100000", "", "100000 0", "nonsense", "1 2 3"):
        machine.write("sys/fs/cgroup/cpu.max", text)
        assert read_cpu_quota(tmp_path) == (1.5 if text.startswith("15") else None), text
    machine.write("proc/self/cgroup", "0::/slice/job/step")
    for group, text in (("slice", "800000 100000"), ("slice/job", "250000 100000"), ("slice/job/step", "max 100000")):
        machine.write(f"sys/fs/cgroup/{group}/cpu.max", text)
    assert read_cpu_quota(tmp_path) == 2.5


def test_a_kill_for_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, [[0]])
    machine.write("proc/self/cgroup", "0::/a/b")
    assert resources.count_memory_kills(tmp_path) == 0
    machine.write("sys/fs/cgroup/a/b/memory.events", "low 0\noom 1\noom_kill 2\noom_group_kill 7")
    assert resources.count_memory_kills(tmp_path) == 2
    machine.write("proc/self/cgroup", "4:memory:/docker/1")
    machine.write("sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\noom_kill 3")
    assert resources.count_memory_kills(tmp_path) == 3
