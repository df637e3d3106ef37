"""Building libraries on first use: keys, many processes at once, broken and unusable caches, what is missing.

The sources are tiny ones under the names of the real ones, so that the real table of ops is built from them. A wrapper
around the compiler writes down every call.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import op_builder
from op_builder import OpUnavailable, build, cache, tools
from op_builder import load as load_function

ROOT = Path(__file__).resolve().parents[2]
GXX = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
X86 = os.uname().machine == "x86_64"
load_module = sys.modules["op_builder.load"]

needs_compiler = pytest.mark.skipif(GXX is None, reason="no C++ compiler on the PATH")

ANSWER = "#define ANSWER 42\n"
DISPATCH = """\
#include "answer.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int answer() { return ANSWER; }
"""
KERNELS = """\
#include "../shared.h"
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
extern "C" __attribute__((visibility("default"))) int JOIN(level_, ZL_ISA)() {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
  return 2;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  return 1;
#else
  return 0;
#endif
}
"""
CUDA = """\
__global__ void kernel(float* x) { x[threadIdx.x] = 1; }
extern "C" __attribute__((visibility("default"))) int answer() { return sizeof(kernel) > 0 ? 7 : 0; }
"""
# A stand-in for the compiler. While the file `hang` is there, it writes its process id down and sleeps that long.
WRAPPER = """\
#!/bin/sh
echo "$*" >> {here}/calls
case "$*" in
  *--version*) ;;
  *) if [ -e {here}/hang ]; then echo $$ >> {here}/pids; sleep "$(cat {here}/hang)"; fi ;;
esac
exec {gxx} "$@"
"""
ELSEWHERE = """\
import json, sys
from pathlib import Path
import op_builder
op_builder.build.csrc_path = lambda: Path(sys.argv[1])
result = {}
try:
    result["answer"] = op_builder.load("cpu_kernels").answer()
    result["path"] = str(op_builder.status("cpu_kernels").path)
except op_builder.OpUnavailable as error:
    result["error"] = str(error)
print(json.dumps(result))
"""


class Place:
    """Tiny sources, an empty cache, an empty temporary directory, and a compiler that writes its calls down."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.csrc, self.cache, self.cxx = self.here / "csrc", self.here / "cache", self.here / "cxx"

    def calls(self, word: str = "") -> list[str]:
        """Calls of the compiler so far that contain a word."""
        log = self.here / "calls"
        return [line for line in (log.read_text().splitlines() if log.exists() else []) if word in line]

    def work(self) -> list[Path]:
        """Return what builders have left in the temporary directory and in the cache."""
        return [*(self.here / "tmp").iterdir(), *(self.cache / "kernels").glob("building-*")]

    def start(self, **changes: str) -> subprocess.Popen[str]:
        """Load in another process, with changes to the environment."""
        command = [sys.executable, "-c", ELSEWHERE, str(self.csrc)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, cwd=self.here)

    def elsewhere(self, **changes: str) -> dict[str, str]:
        return finish(self.start(**changes))


def finish(process: subprocess.Popen[str]) -> dict[str, str]:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, process.returncode
    result: dict[str, str] = json.loads(output)
    return result


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    here = tmp_path / "a place"  # a space, as paths may have
    place = Place(here)
    texts = {"shared.h": "", "cpu/answer.h": ANSWER, "cpu/dispatch.cpp": DISPATCH, "cpu/kernels.cpp": KERNELS}
    for name, text in {**texts, "cuda/kernels.cu": CUDA}.items():
        (place.csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (place.csrc / name).write_text("// old\n" + text)
    place.cxx.write_text(WRAPPER.format(here=str(here).replace(" ", "\\ "), gxx=GXX))
    place.cxx.chmod(0o755)
    (here / "tmp").mkdir()
    for variable in ("ZEROLITE_KERNELS", "CUDA_HOME", "CUDA_PATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ZEROLITE_CACHE_DIR", str(place.cache))
    monkeypatch.setenv("CXX", str(place.cxx).replace(" ", "\\ "))
    monkeypatch.setenv("TMPDIR", str(here / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(build, "csrc_path", lambda: place.csrc)
    yield place
    load_module._load.cache_clear()


@needs_compiler
def test_each_object_has_the_instruction_set_of_its_own_flags(place: Place) -> None:
    library = load_function("cpu_kernels")
    assert library.answer() == 42
    levels = {"plain": 0, "avx2": 1, "avx512": 2} if X86 else {"plain": 0}
    assert {name: library[f"level_{name}"]() for name in levels} == levels
    assert not any("-march=native" in call for call in place.calls())
    assert load_function("cpu_kernels") is library
    assert len(place.calls("-shared")) == 1 and place.work() == []


def test_sources_headers_and_flags_are_part_of_the_key(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return build.make_recipe("cpu_kernels", None, None).file_name

    op, names = op_builder.OPS["cpu_kernels"], [key()]
    for name in ("cpu/kernels.cpp", "cpu/answer.h", "shared.h"):
        path = place.csrc / name
        path.write_text(path.read_text().replace("// old", "// new"))
        names.append(key())
    for change in ({"flags": (*op.flags, "-g")}, {"link_flags": ("-g",)}, {"sources": op.sources[:-1]}):
        monkeypatch.setitem(op_builder.OPS, "cpu_kernels", dataclasses.replace(op, **change))
        names.append(key())
    assert len(set(names)) == 7


@pytest.mark.slow
@needs_compiler
def test_eight_processes_build_once(place: Place) -> None:
    processes = [place.start() for _ in range(8)]
    assert [finish(process)["answer"] for process in processes] == [42] * 8
    assert len(place.calls("-shared")) == 1 and place.work() == []


@pytest.mark.slow
@needs_compiler
def test_a_killed_builder_blocks_nobody(place: Place) -> None:
    """The builder dies of SIGKILL while its compilers run on; a process that was waiting builds at once."""
    (place.here / "hang").write_text("30")
    builder = place.start()
    wait_until(lambda: (place.here / "pids").exists())
    waiting = place.start()
    time.sleep(0.5)
    (place.here / "hang").unlink()
    start = time.monotonic()
    builder.kill()
    try:
        assert finish(waiting)["answer"] == 42
        assert time.monotonic() - start < 5
        assert len(place.calls("-shared")) == 1
    finally:
        builder.communicate()
        for pid in (place.here / "pids").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def test_a_lock_is_not_waited_for_forever(tmp_path: Path) -> None:
    """Its holder may be stopped, or on a lost machine that shares the file system."""
    held = "import sys, time; from op_builder.cache import build_lock; from pathlib import Path\n"
    held += "with build_lock(Path(sys.argv[1]), 10): print(flush=True); time.sleep(30)"
    command = [sys.executable, "-c", held, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        start = time.monotonic()
        with cache.build_lock(tmp_path / "lock", 0.5):
            assert time.monotonic() - start >= 0.5
        holder.kill()


@pytest.mark.slow
@needs_compiler
def test_those_who_waited_for_a_failure_fail_with_it(place: Place) -> None:
    (place.csrc / "cpu" / "dispatch.cpp").write_text("#error not like this\n")
    (place.here / "hang").write_text("1")
    processes = [place.start() for _ in range(4)]
    errors = [finish(process)["error"] for process in processes]
    assert all("not like this" in error for error in errors)
    assert len(place.calls("dispatch.cpp")) == 1


@pytest.mark.fast("writable by the group", "no home")
@needs_compiler
@pytest.mark.parametrize(
    "how", ["a file", "of another user", "writable by the group", "a link to a directory", "read-only", "no home"]
)
def test_an_unusable_cache_is_left_alone(place: Place, how: str) -> None:
    """The library is built for the one process, in a directory that is gone afterwards."""
    if how == ("read-only" if os.geteuid() == 0 else "of another user"):
        pytest.skip("root may write everywhere, and others cannot give a directory away")
    changes = {"ZEROLITE_CACHE_DIR": "", "HOME": "nowhere"} if how == "no home" else {}
    if how == "a file":
        place.cache.write_text("")
    elif how != "no home":
        place.cache.mkdir()
        place.cache.chmod({"writable by the group": 0o775, "read-only": 0o500}.get(how, 0o700))
    if how == "of another user":
        os.chown(place.cache, 12345, -1)
    elif how == "a link to a directory":
        (place.cache / "kernels").symlink_to(place.here / "tmp")
    result = place.elsewhere(**changes)
    assert result["answer"] == 42 and result["path"] == "None"
    assert list((place.here / "tmp").iterdir()) == []
    assert not list(place.here.glob("cache/**/*.so")) and not (place.here / "nowhere").exists()


@needs_compiler
def test_a_compile_error_quotes_the_compiler_and_keeps_the_log(place: Place) -> None:
    (place.csrc / "cpu" / "dispatch.cpp").write_text("int f() { return no_such_name; }\n")
    with pytest.raises(OpUnavailable) as caught:
        load_function("cpu_kernels")
    error = caught.value
    assert "no_such_name" in error.cause and "dispatch.cpp:1" in error.cause and "CXX" in error.remedy
    assert error.log is not None and str(error.log) in error.cause and "no_such_name" in error.log.read_text()
    attempts = len(place.calls("dispatch.cpp"))
    with pytest.raises(OpUnavailable, match="no_such_name"):
        load_function("cpu_kernels")
    assert len(place.calls("dispatch.cpp")) == attempts, "a failure is final for the process"
    (place.csrc / "cpu" / "dispatch.cpp").write_text(DISPATCH)
    assert place.elsewhere()["answer"] == 42 and place.work() == []


@pytest.mark.slow
@needs_compiler
def test_a_build_that_takes_too_long_is_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.here / "hang").write_text("30")
    monkeypatch.setattr(build, "BUILD_S", 0.5)
    start = time.monotonic()
    with pytest.raises(OpUnavailable, match=r"longer than 0\.5 s"):
        load_function("cpu_kernels")
    assert time.monotonic() - start < 10
    for pid in (place.here / "pids").read_text().split():
        wait_until(lambda pid=pid: not Path("/proc", pid).exists())  # type: ignore[misc]
    assert place.work() == []


def check_unavailable(*parts: str) -> None:
    """Both `load` and `status` give the same reason."""
    load_module._load.cache_clear()
    status = op_builder.status("cpu_kernels")
    with pytest.raises(OpUnavailable) as caught:
        load_function("cpu_kernels")
    assert not status.compatible and not status.built
    assert status.reason == str(caught.value) == f"{caught.value.cause} {caught.value.remedy}"
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))


def test_what_is_missing_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROLITE_KERNELS", "0")
    check_unavailable("ZEROLITE_KERNELS=0")
    assert place.calls() == [] and not place.cache.exists()
    monkeypatch.delenv("ZEROLITE_KERNELS")
    monkeypatch.setenv("PATH", "")
    if GXX is not None:
        with monkeypatch.context() as patch:
            patch.setattr(tools.sysconfig, "get_path", lambda _: "/nowhere")
            check_unavailable("no ninja", "pip install ninja")
    with monkeypatch.context() as patch:
        patch.delenv("CXX")
        check_unavailable("no C++ compiler", "apt install g++", "ZEROLITE_KERNELS=0")
    (place.csrc / "cpu" / "kernels.cpp").unlink()
    check_unavailable("kernels.cpp", "incomplete", "--force-reinstall")


def test_an_unknown_op_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no op 'adam'; there are async_io, cpu_kernels, cuda_kernels"):
        load_function("adam")


@needs_compiler
def test_status_builds_nothing_and_says_where_and_a_warm_load_runs_no_program(place: Place) -> None:
    status = op_builder.status("cpu_kernels")
    assert (status.compatible, status.reason, status.built, status.path) == (True, "", False, None)
    assert [call for call in place.calls() if "--version" not in call] == []
    assert place.elsewhere()["answer"] == 42
    status = op_builder.status("cpu_kernels")
    (library,) = (place.cache / "kernels").glob("*.so")
    assert (status.compatible, status.built, status.path) == (True, True, library)
    calls = place.calls()
    assert place.elsewhere(PATH="")["answer"] == 42 and place.calls() == calls


@needs_compiler
def test_a_damaged_library_is_built_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it would end the process: by SIGBUS where it was cut, by SIGSEGV where it is zeroed."""
    place.elsewhere()
    path = op_builder.status("cpu_kernels").path
    assert path is not None
    good = path.read_bytes()
    for damaged in (good[:4096], good[: len(good) // 2].ljust(len(good), b"\0")):
        path.write_bytes(damaged)
        assert not op_builder.status("cpu_kernels").built
        assert place.elsewhere() == {"answer": 42, "path": str(path)}
    for damaged in (b"", bytes(len(good)), good[:-9], b"x" + good[1:]):
        path.write_bytes(damaged)
        assert not op_builder.status("cpu_kernels").built
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    check_unavailable("There is no C++ compiler", "apt install g++")


@needs_compiler
def test_a_library_built_ahead_needs_neither_compiler_nor_cache(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt = place.here / "prebuilt"
    built = op_builder.build_into(prebuilt, "cpu_kernels")
    assert built.parent == prebuilt and not place.cache.exists() and list(prebuilt.iterdir()) == [built]
    monkeypatch.setattr(load_module, "PREBUILT", prebuilt)
    calls = place.calls()
    for variable, value in (("PATH", ""), ("CXX", "no-such-compiler"), ("ZEROLITE_CACHE_DIR", "/proc/zerolite")):
        monkeypatch.setenv(variable, value)
    status = op_builder.status("cpu_kernels")
    assert status.built and status.path == built
    assert load_function("cpu_kernels").answer() == 42
    assert place.calls() == calls
    (place.csrc / "cpu" / "answer.h").write_text("#define ANSWER 43\n")
    check_unavailable("no-such-compiler")


def test_cuda_of_another_major_version(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = place.here / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 11.8, V11.8.1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(place.here / "cuda"))
    status = op_builder.status("cuda_kernels", capability=(9, 0), torch_cuda="12.6")
    assert not status.compatible
    assert "is of CUDA 11.8, and torch was built with CUDA 12.6" in status.reason and "CUDA_HOME" in status.reason
    with pytest.raises(OpUnavailable, match=r"CUDA 11\.8"):
        load_function("cuda_kernels", capability=(9, 0), torch_cuda="12.6")
    if GXX is not None:
        assert op_builder.status("cuda_kernels", capability=(9, 0), torch_cuda="11.1").compatible


def test_no_nvcc_and_no_gpu(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/no such toolkit")
    assert "no nvcc in /no such toolkit/bin" in op_builder.status("cuda_kernels", capability=(9, 0)).reason
    monkeypatch.delenv("CUDA_HOME")
    assert "no compute capability" in op_builder.status("cuda_kernels").reason
    monkeypatch.setattr(tools.shutil, "which", lambda name, path=None: None)
    reason = op_builder.status("cuda_kernels", capability=(9, 0)).reason
    assert "no CUDA compiler" in reason and "ZEROLITE_KERNELS=0" in reason


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_cuda_is_compiled_where_there_is_no_gpu(place: Place) -> None:
    assert load_function("cuda_kernels", capability=(9, 0)).answer() == 7
    assert op_builder.status("cuda_kernels", capability=(9, 0)).built
    assert not op_builder.status("cuda_kernels", capability=(8, 0)).built
