"""Private names of torch: in one file, each there in the installed torch, and no others."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2] / "zerolite"
HOME = "utils/torch_private.py"
SEEN_IN = "2.6, 2.11 and 2.13"

# What torch documents, although it has an underscore, and what its modules and tensors consist of.
DOCUMENTED = re.compile(
    r"_scaled_dot_product_\w+|"  # operators, which a ring of attention needs with their log-sum-exp
    r"_foreach_\w+|_grouped_mm|_amp_\w+|_to_copy|_local_scalar_dense|_has_compatible_shallow_copy_type"  # operators
    r"|_parameters|_buffers|_modules|_forward_hooks|_forward_pre_hooks|_state_dict_pre_hooks|_backward_hooks|_backward_pre_hooks"
    r"|_non_persistent_buffers_set|_apply|_BatchNorm|_ConvNd|_DropoutNd"  # torch.nn.Module
    r"|_version|_base|_is_view|_make_wrapper_subclass|_make_subclass|_post_accumulate_grad_hooks"  # torch.Tensor
    r"|_python_dispatch|_pytree|_ops"  # torch.utils._python_dispatch, torch.utils._pytree, torch._ops.OpOverload
)
# Python's own.
PYTHON = set("_replace _asdict _fields _exit _getframe _current_frames _lru_cache_wrapper _actions".split())
PYTHON |= set("_NamedFuncPointer _ArgumentGroup _run_module_as_main".split())
TRANSFORMERS = {"_attn_implementation"}  # a model's config has no public name for the attention that it has chosen


# Names that zerolite reads from objects of torch, whose classes the source does not show.
OF_OBJECTS = """
    torch.jit._recursive.create_script_module
    torch.UntypedStorage._cdata torch.nn.Module._call_impl torch.nn.Module._compiled_call_impl
    torch._dynamo.eval_frame.cached_backends torch.distributed.ProcessGroup._device_types
    torch.distributed.ProcessGroup._get_backend torch.distributed.ProcessGroup._get_sequence_number_for_group
    torch.distributed.pipelining.schedules._batch_p2p
    torch.distributed.pipelining.schedules.PipelineScheduleMulti._step_microbatches
""".split()

# Without CUDA zerolite goes another way.
ONLY_WITH_CUDA = "torch._C._set_storage_data_ptr_access_error_msg"


def used_names() -> set[str]:
    """The private names of torch that its home writes out, in full."""
    names = set(OF_OBJECTS)
    for node in ast.walk(ast.parse((ROOT / HOME).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node).replace("distributed_c10d.", "torch.distributed.distributed_c10d.", 1)
            if re.match(r"torch\.[\w.]*\b_[a-zA-Z]", name):
                names.add(name)
    return names


@pytest.mark.parametrize("name", sorted(used_names()))
def test_torch_has_the_name(name: str) -> None:
    if name == ONLY_WITH_CUDA and not torch.backends.cuda.is_built():
        pytest.skip("only a torch built with CUDA has it")
    try:
        pkgutil.resolve_name(name)
    except AttributeError:
        raise AssertionError(
            f"torch {torch.__version__} has no {name}, which {SEEN_IN} have: zerolite/{HOME} says what it is for; find "
            "what replaces it there, and keep the old name for the older versions"
        ) from None


def test_each_has_a_reason() -> None:
    """Functions a docstring, and the others a text below."""
    body = ast.parse((ROOT / HOME).read_text()).body
    public: set[str] = set()
    said = {node.name for node in body if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)}
    for node, text in pairwise(body):
        names: set[str] = set()
        if isinstance(node, ast.FunctionDef):
            names = {node.name}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and is_written(name)}
            said |= names if isinstance(text, ast.Expr) else set()
        public |= {name for name in names if name.islower() and not name.startswith("_")}
    assert public <= said and len(public) <= 32, "one more needs a reason that none of the others has"


def is_written(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def defined_here(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if re.match(r"_[a-zA-Z]", part))


def test_no_other_file_uses_private_names() -> None:
    allowed, used = PYTHON | TRANSFORMERS, []
    for path, tree in trees():
        allowed |= set(defined_here(tree))
        used += [(path, line, name) for line, name in private_names(tree) if path != HOME]
    found = [
        f"zerolite/{path}:{line} {name}"
        for path, line, name in used
        if name not in allowed and not DOCUMENTED.fullmatch(name)
    ]
    assert not found, f"private names of torch belong into zerolite/{HOME}, with a reason: {found}"
