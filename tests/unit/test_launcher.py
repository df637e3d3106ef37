"""What the launcher finds out before it starts anything: devices, cores, the command line, who failed first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from zerolite.launcher import cli, resources


class TestDevices:
    @pytest.mark.parametrize(
        ("visible", "count"),
        [
            ("", 0),
            ("-1", 0),
            ("0", 1),
            ("3,1, 2", 3),
            ("0,1,-1,2", 2),
            ("0,,1", 1),
            ("GPU-8932f937,GPU-1f0e", 2),
            ("MIG-GPU-8932f937/1/2", 1),
            ("none", 0),
        ],
    )
    def test_visible_entries(self, visible: str, count: int) -> None:
        assert resources.count_visible_entries(visible) == count

    def fake_nvidia_smi(self, directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
        tool = directory / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(directory))

    def test_listed_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts of a device (MIG) are indented below it and do not count; `-L` must have been asked for."""
        lines = "GPU 0: A (UUID: GPU-1)\\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\\nGPU 1: A (UUID: GPU-2)\\n"
        self.fake_nvidia_smi(tmp_path, monkeypatch, f'[ "$*" = "-L" ] && printf "{lines}"')
        assert resources.count_cuda_devices({}) == 2
        assert resources.default_nproc({}) == 2

    def test_variable_comes_before_the_tool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake_nvidia_smi(tmp_path, monkeypatch, f'touch "{tmp_path}/asked"; echo "GPU 0: A"')
        assert resources.count_cuda_devices({"CUDA_VISIBLE_DEVICES": ""}) == 0
        assert resources.default_nproc({"CUDA_VISIBLE_DEVICES": "0,1,2"}) == 3
        assert not (tmp_path / "asked").exists()

    def test_a_tool_that_fails_means_no_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake_nvidia_smi(tmp_path, monkeypatch, 'echo "GPU 0: but the driver is broken"; exit 9')
        assert resources.count_cuda_devices({}) == 0

    def test_a_tool_that_hangs_means_no_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake_nvidia_smi(tmp_path, monkeypatch, "")

        def hang(command: list[str], timeout: float, **_: object) -> None:
            raise subprocess.TimeoutExpired(command, timeout)

        monkeypatch.setattr(subprocess, "run", hang)
        assert resources.count_cuda_devices({}) == 0

    def test_no_tool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert resources.count_cuda_devices({}) == 0
        assert resources.default_nproc({}) == 1


class TestCores:
    @pytest.mark.parametrize(
        ("text", "quota"),
        [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("100000 0\n", None), ("nonsense", None)],
    )
    def test_quota(self, tmp_path: Path, text: str, quota: float | None) -> None:
        (tmp_path / "cpu.max").write_text(text)
        assert resources.read_cpu_quota(tmp_path / "cpu.max") == quota

    def test_no_quota_file(self, tmp_path: Path) -> None:
        assert resources.read_cpu_quota(tmp_path / "cpu.max") is None

    @pytest.mark.parametrize(
        ("usable", "physical", "logical", "quota", "cores"),
        [
            (64, 32, 64, None, 32),  # two hardware threads a core
            (16, 32, 64, None, 8),  # a quarter of the machine
            (64, 64, 64, None, 64),
            (64, 32, 64, "250000 100000", 3),  # a container
            (1, 32, 64, None, 1),
            (4, None, None, None, 4),  # psutil does not know
        ],
    )
    def test_cores(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        usable: int,
        physical: int | None,
        logical: int | None,
        quota: str | None,
        cores: int,
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(usable)), raising=False)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True, _l=logical: _l if logical else physical)
        monkeypatch.setattr(resources, "CGROUP_CPU_MAX", tmp_path / "cpu.max")
        if quota is not None:
            (tmp_path / "cpu.max").write_text(quota)
        assert resources.count_cores() == cores


class TestThreads:
    @pytest.mark.parametrize(("cores", "nproc", "threads"), [(8, 1, "8"), (8, 3, "2"), (2, 4, "1")])
    def test_shared_out(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cores: int, nproc: int, threads: str
    ) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "to be removed")
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setattr(cli, "count_cores", lambda: cores)
        cli.set_thread_count(nproc)
        assert os.environ["OMP_NUM_THREADS"] == threads
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"zerolite: OMP_NUM_THREADS={threads} ") and f"{cores} cores" in line

    def test_the_users_choice_stays(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        cli.set_thread_count(1)
        assert os.environ["OMP_NUM_THREADS"] == "5"
        assert capsys.readouterr().err == ""


class TestCommandLine:
    @pytest.mark.parametrize(
        ("argv", "own", "rest"),
        [
            (["t.py"], [], ["t.py"]),
            (["--nproc", "2", "t.py", "--nproc", "3"], ["--nproc", "2"], ["t.py", "--nproc", "3"]),
            (["--nproc=2", "t.py", "--", "-m"], ["--nproc=2"], ["t.py", "--", "-m"]),
            (["--nproc", "2", "-m", "pkg", "-m", "x"], ["--nproc", "2", "-m", "pkg"], ["-m", "x"]),
            (["--", "-odd.py", "--", "x"], [], ["-odd.py", "--", "x"]),
            (["--nproc"], ["--nproc"], []),
            (["-m"], ["-m"], []),
            (["--version", "t.py"], ["--version"], ["t.py"]),
            ([], [], []),
        ],
    )
    def test_split(self, argv: list[str], own: list[str], rest: list[str]) -> None:
        assert cli.split_command_line(argv, cli.build_parser()) == (own, rest)

    def test_request(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "t.py").write_text("")
        assert cli.parse_command_line(["--nproc", "3", "--master-port", "29511", "t.py", "--nproc", "x"]) == (
            cli.LaunchRequest(["t.py"], ["--nproc", "x"], 3, 29511)
        )
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        assert cli.parse_command_line(["-m", "t", "--x"]) == cli.LaunchRequest(["-m", "t"], ["--x"], 2, None)

    def test_module_search_leaves_no_trace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "zl_search_probe").mkdir()
        (tmp_path / "zl_search_probe" / "__init__.py").write_text("raise SystemExit('imported')")
        before = list(sys.path)
        assert cli.find_module_problem("zl_search_probe.train") is None
        assert sys.path == before and "zl_search_probe" not in sys.modules

    def test_unreadable_script(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "t.py").write_text("")
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert "cannot be read" in str(cli.find_script_problem(str(tmp_path / "t.py")))

    def test_largest_number_of_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        assert cli.find_nproc_problem(64) is None
        assert "64" in str(cli.find_nproc_problem(65))
        monkeypatch.setattr(os, "cpu_count", lambda: 128)
        assert cli.find_nproc_problem(512) is None
        assert cli.find_nproc_problem(513) is not None


class TestFailures:
    def failure(self, exitcode: int, timestamp: int) -> SimpleNamespace:
        return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, pid=4321, signal_name=lambda: "SIGSEGV")

    def test_first_seen_is_reported(self) -> None:
        from zerolite.launcher import agent

        failures = {2: self.failure(9, 100), 0: self.failure(-15, 100), 1: self.failure(1, 100)}
        assert agent.first_failure(failures)[0] == 2
        assert agent.describe_failures(failures, 3) == (
            "rank 2 of 3 (process 4321) failed with exit status 9; the others were stopped"
        )

    def test_signal(self) -> None:
        from zerolite.launcher import agent

        sentence = agent.describe_failures({0: self.failure(-11, 100)}, 1)
        assert sentence == "rank 0 of 1 (process 4321) was ended by signal 11 (SIGSEGV)"
        assert [agent.exit_status(code) for code in (0, 1, 255, -9, -15)] == [0, 1, 255, 137, 143]
