"""Devices and cores of machines that are described in files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerolite.launcher import resources
from zerolite.launcher.resources import count_cores, read_cpu_quota, visible_devices

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


def test_devices_are_counted_by_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a device (MIG) are indented below it and do not count; `-L` must have been asked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resources.count_cuda_devices({}) == 0, "no tool"
    lines = "GPU 0: A (UUID: GPU-1)\\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\\nGPU 1: A (UUID: GPU-2)\\n"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "-L" ] && printf "{lines}"\n')
    tool.chmod(0o755)
    assert resources.count_cuda_devices({}) == 2


class Machine:
    """A machine, described in files. `threads`: CPUs c, c + cores, ... share a core, as Linux numbers them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, cpus: list[int], threads: int = 1) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        cores = len(cpus) // threads
        for cpu in cpus:
            siblings = range(cpu % cores, len(cpus), cores)
            path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            self.write(path, ",".join(map(str, siblings)))
        self.allow(cpus)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def allow(self, cpus: list[int]) -> None:
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(cpus), raising=False)


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [(range(16), 8), (range(8), 8), ([0, 1, 8, 9], 2), ([0, 8, 1], 2), ([*range(4), 8, 9, 10, 11, 4], 5), ([15], 1)],
)
def test_two_threads_of_a_core_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: list[int], cores: int
) -> None:
    """CPUs c and c + 8 are threads of one core; only some CPUs may be used."""
    Machine(tmp_path, monkeypatch, list(range(16)), threads=2).allow(list(allowed))
    assert count_cores(tmp_path) == cores


def test_the_quota_is_the_strictest_of_nested_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, [0])
    machine.write("proc/self/cgroup", "0::/")
    for text in ("150000 100000", "max 100000", "", "100000 0", "nonsense", "1 2 3"):
        machine.write("sys/fs/cgroup/cpu.max", text)
        assert read_cpu_quota(tmp_path) == (1.5 if text.startswith("15") else None), text
    machine.write("proc/self/cgroup", "0::/slice/job/step")
    for group, text in (("slice", "800000 100000"), ("slice/job", "250000 100000"), ("slice/job/step", "max 100000")):
        machine.write(f"sys/fs/cgroup/{group}/cpu.max", text)
    assert read_cpu_quota(tmp_path) == 2.5


def test_a_kill_for_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, monkeypatch, [0])
    machine.write("proc/self/cgroup", "0::/a/b")
    assert resources.count_memory_kills(tmp_path) == 0
    machine.write("sys/fs/cgroup/a/b/memory.events", "low 0\noom 1\noom_kill 2\noom_group_kill 7")
    assert resources.count_memory_kills(tmp_path) == 2
    machine.write("proc/self/cgroup", "4:memory:/docker/1")
    machine.write("sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\noom_kill 3")
    assert resources.count_memory_kills(tmp_path) == 3
