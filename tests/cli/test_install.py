"""Files that installing zerolite puts in place: wheel, source distribution, editable install, an empty environment."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import REPORT_SCRIPT, ROOT, output_of, read_reports
from zerolite.version import __version__

LEFT_BEHIND = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "runs")
WHERE = "import zerolite, zerolite.op_builder as b; print(zerolite.__file__); print(b.csrc_path())"
# Loads the CPU kernels where nothing can be compiled, and prints where they come from.
LOAD_WITHOUT_COMPILER = """\
from zerolite.utils.builder import op_builder
for name in ("async_io", "cpu_kernels"):
    op_builder.load(name)
    print(op_builder.status(name).path)
"""
NO_COMPILER = {"CC": "false", "CXX": "false"}
SAMPLE_SOURCE = Path("csrc") / "sample" / "sample.cpp"


def run(*command: str | Path, **options: Any) -> str:
    """Run a command that must succeed, without what PYTHONPATH names, and return its standard output."""
    return output_of(*command, **{"PYTHONPATH": None, **options})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, with a kernel source in a subdirectory of csrc/ beside what is there."""
    copy = tmp_path_factory.mktemp("source") / "zerolite"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    (copy / SAMPLE_SOURCE).parent.mkdir()
    (copy / SAMPLE_SOURCE).write_text("// not a kernel\n")
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel as it comes without asking for more."""
    return build_wheel(source, tmp_path_factory.mktemp("wheel"), ZEROLITE_BUILD_OPS=None, **NO_COMPILER)


def build_wheel(source: Path, directory: Path, **changes: str | None) -> Path:
    """Make a wheel with the tools of this environment and without the network."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", directory]
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=directory, **changes)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the wheel was installed, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def expected_files(source: Path) -> set[str]:
    """Every file that must travel, named as in the wheel."""
    files = {path.relative_to(source).as_posix() for path in source.glob("zerolite/**/*.py")}
    files.add("zerolite_deepspeed.pth")
    for name, pattern in (("csrc", "**/*"), ("op_builder", "**/*.py")):
        files |= {f"zerolite/{p.relative_to(source).as_posix()}" for p in (source / name).glob(pattern) if p.is_file()}
    return files


@pytest.mark.slow
def test_wheel_holds_every_module_and_kernel_source_and_nothing_else(source: Path, wheel: Path) -> None:
    assert wheel.name == f"zerolite-{__version__}-py3-none-any.whl"  # pure Python: nothing was compiled
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = archive.read(f"zerolite-{__version__}.dist-info/entry_points.txt").decode()
        metadata = archive.read(f"zerolite-{__version__}.dist-info/METADATA").decode()
        assert any(name.endswith("/LICENSE") for name in archive.namelist())
        assert "zerolite/compat/alias/deepspeed-0.19.8.dist-info/METADATA" in archive.namelist()
    assert names == expected_files(source)
    assert {"zerolite/csrc/README.md", "zerolite/csrc/sample/sample.cpp", "zerolite/op_builder/__init__.py"} <= names
    assert "zerolite = zerolite.launcher.cli:main" in entry_points
    assert "Requires-Python: >=3.10" in metadata and "Requires-Dist: torch>=2.6" in metadata
    assert not any(line.startswith("Requires-Dist: numpy") and "extra" not in line for line in metadata.splitlines())


@pytest.mark.slow
def test_an_installed_wheel_imports_and_launches_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    """And ``import deepspeed`` finds it where a variable asks for that."""
    where = {"cwd": tmp_path, "PYTHONPATH": str(installed)}
    assert run(sys.executable, "-c", WHERE, **where).splitlines() == [
        str(installed / "zerolite" / "__init__.py"), str(installed / "zerolite" / "csrc"),
    ]  # fmt: skip
    names = "import zerolite; [getattr(zerolite, name) for name in zerolite.__all__]; print(zerolite.__version__)"
    assert run(sys.executable, "-c", names, **where) == f"{__version__}\n"
    code = f"import importlib.util, site; site.addsitedir({str(installed)!r}); "
    code += "print(importlib.util.find_spec('deepspeed').origin)"
    found = run(sys.executable, "-c", code, **where, ZEROLITE_DEEPSPEED_COMPAT="1")
    assert found == f"{installed / 'zerolite' / 'compat' / 'alias' / 'deepspeed' / '__init__.py'}\n"
    (tmp_path / "train.py").write_text(REPORT_SCRIPT)
    run(installed / "bin" / "zerolite", "--nproc", "2", "train.py", "--lr", "1", **where)
    assert [report["argv"] for report in read_reports(tmp_path)] == [["--lr", "1"]] * 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the PATH")
def test_kernels_built_ahead(source: Path, tmp_path: Path) -> None:
    """`ZEROLITE_BUILD_OPS=1`: two libraries more and the platform's name; it loads without compiler and cache. The next
    wheel without the variable, from the same directory, holds nothing of it."""
    for name in ("ahead", "pure", "installed"):
        (tmp_path / name).mkdir()
    wheel = build_wheel(source, tmp_path / "ahead", ZEROLITE_BUILD_OPS="1")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"zerolite-{__version__}-py3-none-{platform}.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    libraries = sorted(names - expected_files(source))
    assert [name.rpartition("-")[0].rpartition("/")[2] for name in libraries] == ["async_io", "cpu_kernels"]
    assert all(name.startswith("zerolite/op_builder/prebuilt/") and name.endswith(".so") for name in libraries)
    assert expected_files(source) <= names
    target = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    changes = {"PYTHONPATH": str(target), "ZEROLITE_CACHE_DIR": "/proc/zerolite", "PATH": "", **NO_COMPILER}
    assert run(sys.executable, "-c", LOAD_WITHOUT_COMPILER, cwd=tmp_path, **changes) == "".join(
        f"{target / library}\n" for library in libraries
    )
    assert all((source / "build" / "lib" / library).exists() for library in libraries)
    pure = build_wheel(source, tmp_path / "pure", ZEROLITE_BUILD_OPS=None)
    assert pure.name == f"zerolite-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(pure) as archive:
        assert not any(name.endswith(".so") for name in archive.namelist())


def make_environment(directory: Path) -> Path:
    """Make an empty virtual environment and return its bin/ directory."""
    run(sys.executable, "-m", "venv", directory, cwd=directory.parent)
    return directory / "bin"


@pytest.mark.slow
def test_an_editable_install_finds_both_directories(source: Path, tmp_path: Path) -> None:
    """Both top-level directories are found as subpackages of zerolite. Build tools are borrowed. What is built ahead
    goes into the cache and not into the checkout."""
    bin_directory = make_environment(tmp_path / "venv")
    tools = run(
        sys.executable, "-c", "import setuptools, os; print(os.path.dirname(setuptools.__path__[0]))", cwd=tmp_path
    )
    options = ["--no-build-isolation", "--no-deps", "--no-index"]
    changes = {"PYTHONPATH": tools.strip(), "ZEROLITE_BUILD_OPS": "1", "ZEROLITE_CACHE_DIR": str(tmp_path / "cache")}
    run(bin_directory / "pip", "install", *options, "-e", source, cwd=tmp_path, **changes)
    built = sorted(path.name.partition("-")[0] for path in tmp_path.glob("cache/kernels/*.so"))
    assert built == ["async_io", "cpu_kernels"]
    assert not list(source.glob("op_builder/**/*.so"))
    lines = run(bin_directory / "python", "-c", WHERE, cwd=tmp_path).splitlines()
    assert lines == [str(source / "zerolite" / "__init__.py"), str(source / "csrc")]
    assert run(bin_directory / "zerolite", "--version", cwd=tmp_path) == f"zerolite {__version__}\n"


@pytest.mark.slow
def test_an_empty_environment_runs_the_main_job(source: Path, tmp_path: Path) -> None:
    """`pip install PATH` from outside the checkout, with every dependency from the index; then the main job."""
    bin_directory = make_environment(tmp_path / "venv")
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    outside = tmp_path / "outside"
    outside.mkdir()
    run(bin_directory / "python", "-m", "pip", "install", *pins, cwd=outside, timeout=1800)
    # A compiler that always fails: installing never compiles.
    run(bin_directory / "python", "-m", "pip", "install", source, cwd=outside, timeout=1800, **NO_COMPILER)
    lines = run(bin_directory / "python", "-c", WHERE, cwd=outside).splitlines()
    assert all(Path(line).is_relative_to(tmp_path / "venv") for line in lines), lines
    example = source / "examples" / "gpt"
    arguments = ["--config", example / "configs" / "zero2.json", "--steps", "3", "--out", outside / "run"]
    run(bin_directory / "zerolite", "--nproc", "2", example / "train.py", *arguments, cwd=outside, timeout=600)
    assert (outside / "run" / "metrics.jsonl").stat().st_size > 0
    if shutil.which("g++") is not None:  # unless it is asked to; pip then brings ninja for the while
        options = ["--no-deps", "--force-reinstall", source]
        run(bin_directory / "pip", "install", *options, cwd=outside, timeout=1800, ZEROLITE_BUILD_OPS="1")
        changes = {"ZEROLITE_CACHE_DIR": "/proc/zerolite", "PATH": "", **NO_COMPILER}
        found = run(bin_directory / "python", "-c", LOAD_WITHOUT_COMPILER, cwd=outside, **changes)
        assert Path(found.strip()).parent.name == "prebuilt"
