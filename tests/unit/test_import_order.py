"""Imports go downwards only. The rule is docs/architecture.md; this file reads every import statement and holds it."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The folders of zerolite/, lowest first. Each imports itself and those before it, under TYPE_CHECKING too.
FOLDERS = """
    version utils config comm ops optim precision offload zero nn
    tensor_parallel sequence_parallel moe activation_checkpointing checkpointing data pipe
    checkpoint monitor diagnostics engine planning compat launcher
""".split()

# Nothing but the standard library (and each other where they are neighbours).
PURE = (
    "zerolite.version", "zerolite.utils.failure_record", "zerolite.utils.lazy",
    "zerolite.launcher.resources", "zerolite.utils.text",
    "zerolite.checkpoint.boxes", "zerolite.checkpoint.errors",
    "zerolite.zero.accumulation",
    "zerolite.precision.loss_scaler",
    "zerolite.zero.stage3.fetch_schedule", "zerolite.zero.layout",
    "zerolite.zero.stage3.fetch_plan",
    "zerolite.zero.stages", "op_builder",
)  # fmt: skip

# Beside the standard library, torch and zerolite itself. Everything else is forbidden, numpy above all.
THIRD_PARTY = {
    "zerolite.config": {"pydantic", "pydantic_core", "hjson"},
    "zerolite.optim.keyword_params": {"pydantic"},
    "zerolite.checkpoint": {"pydantic"},
    "zerolite.checkpoint.huggingface": {"torchao"},
    "zerolite.launcher.processes": {"psutil"},
    "zerolite.sequence_parallel.huggingface": {"transformers"},
    "zerolite.utils.network": {"psutil"},
    "zerolite.diagnostics.report": {"cpuinfo"},
    "zerolite.monitor.memory_report": {"psutil"},
    "zerolite.offload.from_config": {"psutil"},
    "zerolite.planning.result": {"pydantic"},
    "zerolite.planning.report": {"matplotlib"},
    "zerolite.planning.sources": {"transformers"},
}

WITHOUT_TORCH = (
    "zerolite.version", "zerolite.config", "zerolite.launcher", "zerolite.utils.text",
    "zerolite.utils.memory_tags",
    *(f"zerolite.planning.{name}" for name in ("result", "traffic", "report")),
    "op_builder",
)  # fmt: skip

# The agent is torch's own, in a fork of the command: these modules run there, and are imported there.
AGENT = tuple(f"zerolite.launcher.{name}" for name in ("agent", "logs", "rendezvous"))
AGENT_NAMES = ("torch.distributed.elastic", "torch.distributed.PrefixStore", "torch.distributed.TCPStore")


class Import(NamedTuple):
    """One imported name: `from a.b import c` is `a.b.c`, by a module, at a line."""

    importer: str
    imported: str
    line: int
    at_import_time: bool
    runs: bool = True  # not under TYPE_CHECKING

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.imported}"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def read_imports(path: Path, root: Path = ROOT) -> list[Import]:
    """Every import of a file, also those within functions and under TYPE_CHECKING."""
    importer = module_name(path, root)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]

    def visit(node: ast.AST, at_import_time: bool, runs: bool = True) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno, at_import_time, runs)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield Import(importer, f"{base}.{alias.name}", node.lineno, at_import_time, runs)
        else:
            never = is_type_checking(node)
            later = never or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import_time and not later, runs and not never)

    return list(visit(ast.parse(path.read_text(encoding="utf-8")), True))


def source_files() -> list[Path]:
    return sorted([*ROOT.glob("zerolite/**/*.py"), *ROOT.glob("op_builder/**/*.py")])


@functools.cache
def all_imports() -> list[Import]:
    return [entry for path in source_files() for entry in read_imports(path)]


@functools.cache
def modules() -> set[str]:
    return {module_name(path, ROOT) for path in source_files()}


def module_of(imported: str) -> str:
    """The module behind an imported name: `zerolite.comm.Pending` is in `zerolite.comm`."""
    return imported if imported in modules() else imported.rpartition(".")[0]


def uses_of_torch_distributed(path: Path) -> Iterator[str]:
    """Attribute chains such as `torch.distributed.all_reduce`, which need no import of their own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield f"{module_name(path, ROOT)}, line {node.lineno}: uses torch.distributed"


def test_imports_go_downwards_only() -> None:
    def height(name: str) -> int:
        return FOLDERS.index(name.split(".")[1])

    inside = [e for e in all_imports() if e.importer != "zerolite" and e.imported.startswith("zerolite.")]
    assert [str(e) for e in inside if height(e.imported) > height(e.importer)] == []


def test_everything_lies_in_a_folder() -> None:
    beside = {path.stem for path in ROOT.glob("zerolite/*.py")}
    folders = {path.parent.name for path in ROOT.glob("zerolite/*/__init__.py")}
    assert beside == {"__init__", "version"}
    assert folders | {"version"} == set(FOLDERS)


def test_no_module_imports_itself() -> None:
    """Follow what is imported at import time; a module must not reach itself."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for entry in all_imports():
        target = module_of(entry.imported)
        if entry.at_import_time and target in modules() and entry.importer in modules():
            # A package that gathers its own modules is not a cycle: `from zerolite.comm import recorder` inside comm.
            if not is_within(entry.importer, target):
                graph[entry.importer].add(target)
    for start in graph:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(graph[name])
        assert start not in seen, f"{start} imports itself through {sorted(seen)}"


@pytest.mark.parametrize("pure", PURE)
def test_pure_modules_import_the_standard_library_only(pure: str) -> None:
    entries = [e for e in all_imports() if is_within(e.importer, pure)]
    assert any(is_within(name, pure) for name in modules()), f"{pure} is gone: take it off the list"
    outside = [e for e in entries if not any(is_within(e.imported, other) for other in PURE)]
    assert [str(e) for e in outside if e.imported.partition(".")[0] not in sys.stdlib_module_names] == []


def test_config_and_launcher_never_import_torch() -> None:
    torchs = [e for e in all_imports() if is_within(e.imported, "torch") and e.importer not in AGENT and e.runs]
    assert [str(e) for e in torchs if any(is_within(e.importer, name) for name in WITHOUT_TORCH)] == []
    known = [
        e for e in all_imports() if module_of(e.imported) in AGENT and e.importer not in AGENT and e.at_import_time
    ]
    assert known == [], "the agent imports torch: import it in its own process"


MAY_TOUCH_IT = (
    *("zerolite.pipe.stage", "zerolite.pipe.schedules"),  # subclasses of torch's pipelines
    "zerolite.utils.torch_private",  # private names of torch.distributed, too
    "zerolite.compat.deepspeed.comm",  # passes its functions on
)


def test_only_comm_touches_torch_distributed() -> None:
    bad = []
    for entry in all_imports():
        if not is_within(entry.imported, "torch.distributed") or is_within(entry.importer, "zerolite.comm"):
            continue
        if entry.importer in MAY_TOUCH_IT:
            continue
        if not (entry.importer in AGENT and any(is_within(entry.imported, name) for name in AGENT_NAMES)):
            bad.append(str(entry))
    for path in source_files():
        name = module_name(path, ROOT)
        if not is_within(name, "zerolite.comm") and name not in MAY_TOUCH_IT:
            bad.extend(uses_of_torch_distributed(path))
    assert bad == []


def test_no_other_third_party_package() -> None:
    bad = []
    for entry in all_imports():
        top = entry.imported.partition(".")[0]
        allowed = {"zerolite", "op_builder", "torch", *sys.stdlib_module_names}
        for package, names in THIRD_PARTY.items():
            allowed |= names if is_within(entry.importer, package) else set()
        if top not in allowed:
            bad.append(str(entry))
    assert bad == []
