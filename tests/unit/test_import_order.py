"""Imports go downwards only. The rule is docs/architecture.md; this file reads every import statement and holds it.

The layers, lowest first. A module may import modules of its own layer and of those below, with the exceptions stated.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Longest prefix wins.
LAYERS = {
    "zerolite.version": 0,
    "zerolite.accelerator": 0,
    "zerolite.rounding": 0,
    "zerolite.sizes": 0,
    "zerolite.memory_items": 0,
    "zerolite.pinned_memory": 0,
    "zerolite.failure_record": 0,
    "zerolite.listening": 0,
    "zerolite.network": 0,
    "zerolite.cuts": 0,
    "zerolite.config": 1,
    "zerolite.comm": 1,
    "zerolite.op_builder": 0,
    "zerolite.ops": 1,
    "zerolite.checkpoint": 2,
    "zerolite.checkpoint.model_state": 4,
    "zerolite.checkpoint.window_state": 4,
    "zerolite.checkpoint.saving": 5,
    "zerolite.checkpoint.loading": 5,
    "zerolite.checkpoint.checkpointer": 5,
    "zerolite.launcher": 2,
    "zerolite.report": 2,
    "zerolite.monitor": 2,
    "zerolite.profiling": 4,
    "zerolite.runtime.keyword_params": 2,
    "zerolite.runtime.accumulation": 2,
    "zerolite.runtime.loss_scaler": 2,
    "zerolite.runtime.precision": 2,
    "zerolite.runtime.module_hook": 0,
    "zerolite.runtime.fp32_modules": 2,
    "zerolite.runtime.dtype_errors": 3,
    "zerolite.runtime.uncaught": 4,
    "zerolite.runtime.commands": 2,
    "zerolite.runtime.initial_sync": 2,
    "zerolite.runtime.micro_batch": 3,
    "zerolite.runtime.gradient_sums": 4,
    "zerolite.runtime.whole_model": 4,
    "zerolite.runtime.spread": 5,
    "zerolite.tensor_parallel": 5,
    "zerolite.pipe": 6,
    "zerolite.runtime.parts": 7,
    "zerolite.runtime.wall_clock": 4,
    "zerolite.runtime.monitoring": 6,
    "zerolite.runtime.offload": 4,
    "zerolite.runtime.memory_report": 5,
    "zerolite.runtime.zero": 3,
    "zerolite.runtime.grad_stats": 4,
    "zerolite.runtime.optimizers": 4,
    "zerolite.runtime.kernels": 4,
    "zerolite.runtime.lr_schedules": 4,
    "zerolite.runtime.checkpoint_methods": 5,
    "zerolite.runtime.full_optimizer_state": 5,
    "zerolite.runtime.batch_methods": 5,
    "zerolite.runtime.place": 5,
    "zerolite.runtime.data_position": 4,
    "zerolite.runtime.dataloader": 4,
    "zerolite.runtime.tracked_loader": 4,
    "zerolite.runtime.metrics": 4,
    "zerolite.runtime.init_context": 4,
    "zerolite.runtime.full_state": 4,
    "zerolite.runtime.agreement": 4,
    "zerolite.runtime.consistency": 4,
    "zerolite.runtime.updated_weights": 4,
    "zerolite.runtime.step_checks": 4,
    "zerolite.runtime.arguments": 5,
    "zerolite.runtime.step": 5,
    "zerolite.runtime.step_outcome": 5,
    "zerolite.runtime.state_offload": 6,
    "zerolite.zero": 5,
    "zerolite.checkpointing": 6,
    "zerolite.runtime.activation_checkpointing": 5,
    "zerolite.runtime.growth": 6,
    "zerolite.runtime.parameter_access": 5,
    "zerolite.runtime.pending_gradients": 5,
    "zerolite.runtime.gradient_changes": 4,
    "zerolite.runtime.join": 6,
    "zerolite.runtime.decisions": 5,
    "zerolite.runtime.position": 6,
    "zerolite.runtime.diagnosis": 6,
    "zerolite.runtime.watchdog": 6,
    "zerolite.runtime.engine": 6,
    "zerolite.runtime.evaluation_engine": 6,
    "zerolite.runtime.build_stage3": 7,
    "zerolite.runtime.build": 7,
    "zerolite.planning": 8,
    "zerolite.planning.errors": 0,
    "zerolite.planning.result": 1,
    "zerolite.planning.traffic": 2,
    "zerolite.planning.imports": 2,
    "zerolite.planning.terminal": 2,
    "zerolite.planning.advice": 2,
    "zerolite.planning.palette": 2,
    "zerolite.planning.places": 2,
    "zerolite.planning.grid_config": 2,
    "zerolite.planning.report_grid": 2,
    "zerolite.planning.bubble": 2,
    "zerolite.planning.report": 2,
    "zerolite.planning.picture": 2,
    "zerolite.runtime.initialize": 9,
    "zerolite.planning.measure": 10,
    "zerolite.planning.check": 10,
    "zerolite.planning.command": 10,
    "zerolite.runtime": 10,
    "zerolite": 10,
}

ZERO_LAYERS = {  # within zerolite/runtime/zero
    "zerolite.runtime.zero.layout": 0,
    "zerolite.runtime.zero.space": 0,
    "zerolite.runtime.zero.checksums": 0,
    "zerolite.runtime.zero.spans": 0,
    "zerolite.runtime.zero.questions": 0,
    "zerolite.runtime.zero.stages": 0,
    "zerolite.runtime.zero.fetch_plan": 0,
    "zerolite.runtime.zero.launch_plan": 0,
    "zerolite.runtime.zero.fetch_schedule": 1,
    "zerolite.runtime.zero.tiers": 1,
    "zerolite.runtime.zero.swap_file": 1,
    "zerolite.runtime.zero.released_parameter": 1,
    "zerolite.runtime.zero.user_line": 0,
    "zerolite.runtime.zero.between_steps": 5,
    "zerolite.runtime.zero.transfers": 2,
    "zerolite.runtime.zero.buffer": 2,
    "zerolite.runtime.zero.shard_reader": 3,
    "zerolite.runtime.zero.resting_gradients": 3,
    "zerolite.runtime.zero.bucket_filler": 3,
    "zerolite.runtime.zero.sharded_grad": 3,
    "zerolite.runtime.zero.shown_gradients": 4,
    "zerolite.runtime.zero.hook_sums": 4,
    "zerolite.runtime.zero.optimizer_state": 3,
    "zerolite.runtime.zero.publisher": 3,
    "zerolite.runtime.zero.bucket_state": 4,
    "zerolite.runtime.zero.partitioned_parameter": 4,
    "zerolite.runtime.zero.pieces": 5,
    "zerolite.runtime.zero.grad_reducer": 5,
    "zerolite.runtime.zero.partitioned_param_coordinator": 5,
    "zerolite.runtime.zero.flat_update": 6,
    "zerolite.runtime.zero.piecewise_update": 6,
    "zerolite.runtime.zero.update_sweep": 6,
    "zerolite.runtime.zero.units": 5,
    "zerolite.runtime.zero.module_hooks": 6,
    "zerolite.runtime.zero.sharded_optimizer": 7,
    "zerolite.runtime.zero.partition_parameters": 7,
    "zerolite.runtime.zero.stage3": 8,
}

# Nothing but the standard library (and each other where they are neighbours).
PURE = (
    "zerolite.version",
    "zerolite.failure_record",
    "zerolite.listening",
    "zerolite.sizes",
    "zerolite.planning.errors",
    "zerolite.checkpoint.boxes",
    "zerolite.checkpoint.errors",
    "zerolite.checkpoint.direct_write",
    "zerolite.checkpoint.names",
    "zerolite.runtime.accumulation",
    "zerolite.runtime.commands",
    "zerolite.runtime.keyword_params",
    "zerolite.runtime.loss_scaler",
    "zerolite.runtime.zero.fetch_schedule",
    "zerolite.runtime.zero.launch_plan",
    "zerolite.runtime.zero.layout",
    "zerolite.runtime.zero.checksums",
    "zerolite.runtime.zero.fetch_plan",
    "zerolite.runtime.zero.space",
    "zerolite.runtime.zero.spans",
    "zerolite.runtime.zero.questions",
    "zerolite.runtime.zero.stages",
    "op_builder",
)

# Beside the standard library, torch and zerolite itself. Everything else is forbidden, numpy above all.
THIRD_PARTY = {
    "zerolite.config": {"pydantic", "hjson"},
    "zerolite.network": {"psutil"},
    "zerolite.report": {"cpuinfo"},
    "zerolite.monitor.wandb_writer": {"wandb"},
    "zerolite.runtime.memory_report": {"psutil"},
    "zerolite.runtime.offload": {"psutil"},
    "zerolite.planning.available": {"psutil"},
    "zerolite.planning.result": {"pydantic"},
    "zerolite.planning.measure": {"pydantic", "psutil"},
    "zerolite.planning.picture": {"matplotlib"},
    "zerolite.planning.sources": {"transformers"},
}

WITHOUT_TORCH = (
    "zerolite.version",
    "zerolite.config",
    "zerolite.launcher",
    "zerolite.sizes",
    "zerolite.memory_items",
    *(
        f"zerolite.planning.{name}"
        for name in ("errors", "imports", "result", "traffic", "terminal", "advice", "palette", "report", "picture")
    ),
    "op_builder",
)

# The agent is torch's own, in a process of its own: these modules run there, and nothing else of the launcher imports
# them.
AGENT = tuple(f"zerolite.launcher.{name}" for name in ("agent", "board", "logs", "meeting"))
AGENT_NAMES = (
    "torch.distributed.elastic",
    "torch.distributed.PrefixStore",
    "torch.distributed.TCPStore",
)

STORAGE = "torch.distributed.checkpoint"  # what zerolite.checkpoint is built on; its process group comes from comm


class Import(NamedTuple):
    """One imported name: `from a.b import c` is `a.b.c`, by a module, at a line."""

    importer: str
    imported: str
    line: int
    at_import_time: bool

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
    """Every import of a file, also those within functions; those under TYPE_CHECKING never run and are left out."""
    importer = module_name(path, root)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]

    def visit(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno, at_import_time)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                yield Import(importer, f"{base}.{alias.name}", node.lineno, at_import_time)
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            for child in node.orelse:
                yield from visit(child, at_import_time)
        else:
            later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import_time and not later)

    return list(visit(ast.parse(path.read_text(encoding="utf-8")), True))


def source_files() -> list[Path]:
    return sorted([*ROOT.glob("zerolite/**/*.py"), *ROOT.glob("op_builder/**/*.py")])


ALL_IMPORTS = [entry for path in source_files() for entry in read_imports(path)]
MODULES = {module_name(path, ROOT) for path in source_files()}


def layer_of(name: str, layers: dict[str, int]) -> int | None:
    """The layer of a module or of a name in it; None where the table does not know it."""
    while name:
        if name in layers:
            return layers[name]
        name = name.rpartition(".")[0]
    return None


def module_of(imported: str) -> str:
    """The module behind an imported name: `zerolite.comm.Pending` is in `zerolite.comm`."""
    return imported if imported in MODULES else imported.rpartition(".")[0]


def uses_of_torch_distributed(path: Path) -> Iterator[str]:
    """Attribute chains such as `torch.distributed.all_reduce`, which need no import of their own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield f"{module_name(path, ROOT)}, line {node.lineno}: uses torch.distributed"


def check_layers(imports: list[Import]) -> list[str]:
    """Imports that go upwards."""
    bad = []
    for entry in imports:
        if not is_within(entry.imported, "zerolite") or entry.importer == "zerolite":
            continue
        importer, imported = layer_of(entry.importer, LAYERS), layer_of(entry.imported, LAYERS)
        assert importer is not None and imported is not None
        # The package itself may be imported for a submodule (`from zerolite import comm`), never for its public names.
        if imported > importer:
            bad.append(f"{entry} (layer {importer} imports layer {imported})")
    return bad


def test_imports_go_downwards_only() -> None:
    assert check_layers(ALL_IMPORTS) == []


def test_every_runtime_module_has_a_layer() -> None:
    """A new module must be put somewhere on purpose; falling through to the top layer would allow it everything."""
    new = {name for name in MODULES if is_within(name, "zerolite.runtime")} - {
        "zerolite.runtime",
        "zerolite.runtime.zero",
    }
    assert {name for name in new if layer_of(name, LAYERS) == LAYERS["zerolite.runtime"]} == set()
    assert {name for name in new if is_within(name, "zerolite.runtime.zero")} <= set(ZERO_LAYERS)


def test_only_the_package_itself_imports_the_engine_beside_build() -> None:
    building = ("build", "build_stage3", "evaluation_engine", "initialize")
    allowed = {"zerolite", *(f"zerolite.runtime.{name}" for name in building)}
    allowed |= {f"zerolite.planning.{name}" for name in ("dry_run", "steps", "measure", "check")}
    assert [
        e for e in ALL_IMPORTS if is_within(e.imported, "zerolite.runtime.engine") and e.importer not in allowed
    ] == []


def test_no_import_cycle() -> None:
    """Follow what is imported at import time; a module must not reach itself."""
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for entry in ALL_IMPORTS:
        target = module_of(entry.imported)
        if entry.at_import_time and target in MODULES and entry.importer in MODULES:
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


def test_zero_is_layered_and_knows_neither_ops_nor_the_schema() -> None:
    bad = []
    for entry in ALL_IMPORTS:
        if not is_within(entry.importer, "zerolite.runtime.zero"):
            continue
        if is_within(entry.imported, "zerolite.ops") or is_within(entry.imported, "zerolite.config"):
            bad.append(str(entry))
        importer, imported = layer_of(entry.importer, ZERO_LAYERS), layer_of(entry.imported, ZERO_LAYERS)
        if importer is not None and imported is not None and imported >= importer:
            bad.append(str(entry))
    assert bad == []


@pytest.mark.parametrize("pure", PURE)
def test_pure_modules_import_the_standard_library_only(pure: str) -> None:
    entries = [e for e in ALL_IMPORTS if is_within(e.importer, pure)]
    assert any(is_within(name, pure) for name in MODULES), f"{pure} is gone: take it off the list"
    outside = [e for e in entries if not any(is_within(e.imported, other) for other in PURE)]
    assert [str(e) for e in outside if e.imported.partition(".")[0] not in sys.stdlib_module_names] == []


def test_config_and_launcher_never_import_torch() -> None:
    bad = [
        str(e)
        for e in ALL_IMPORTS
        if any(is_within(e.importer, name) for name in WITHOUT_TORCH)
        and is_within(e.imported, "torch")
        and e.importer not in AGENT
    ]
    assert bad == []
    known = [e for e in ALL_IMPORTS if module_of(e.imported) in AGENT and e.importer not in AGENT]
    assert known == [], "the agent imports torch: start it as a process"


def test_only_comm_touches_torch_distributed() -> None:
    bad = []
    for entry in ALL_IMPORTS:
        if not is_within(entry.imported, "torch.distributed") or is_within(entry.importer, "zerolite.comm"):
            continue
        if is_within(entry.imported, STORAGE) and is_within(entry.importer, "zerolite.checkpoint"):
            continue
        if entry.importer == "zerolite.pipe.stage":
            continue
        if not (entry.importer in AGENT and any(is_within(entry.imported, name) for name in AGENT_NAMES)):
            bad.append(str(entry))
    for path in source_files():
        name = module_name(path, ROOT)
        if not is_within(name, "zerolite.comm") and name != "zerolite.pipe.stage":
            bad.extend(uses_of_torch_distributed(path))
    assert bad == []


def test_no_other_third_party_package() -> None:
    bad = []
    for entry in ALL_IMPORTS:
        top = entry.imported.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("zerolite", "op_builder", "torch"):
            continue
        allowed = {
            name for package, names in THIRD_PARTY.items() if is_within(entry.importer, package) for name in names
        }
        if top not in allowed:
            bad.append(str(entry))
    assert bad == []


def test_the_checks_see_what_they_forbid(tmp_path: Path) -> None:
    """Relative imports, imports inside functions, and imports under TYPE_CHECKING are read as Python reads them."""
    path = tmp_path / "zerolite" / "runtime" / "zero" / "buffer.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import hidden\nelse:\n    import shown\n"
        "from ..step import StepPipeline\n"
        "from . import layout\n"
        "def f():\n    import torch.distributed as dist\n"
    )
    entries = read_imports(path, tmp_path)
    assert [(e.imported, e.at_import_time) for e in entries] == [
        ("typing.TYPE_CHECKING", True),
        ("shown", True),
        ("zerolite.runtime.step.StepPipeline", True),
        ("zerolite.runtime.zero.layout", True),
        ("torch.distributed", False),
    ]
    (upwards,) = check_layers(entries)
    assert "zerolite.runtime.step" in upwards
