"""Models, batches and losses by the names given on a command line."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerolite.planning.errors import PlanError
from zerolite.planning.imports import import_object
from zerolite.planning.steps import required_parameters

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
"""The arguments of one forward, by name or in order."""

MICRO_BATCH = "B"
"""In the shape of an input: the micro-batch size of the config."""

_INPUT = re.compile(r"(?:(?P<name>[^\s:\[\],]+):)?(?P<dtype>[^\s:\[\],]+)\[(?P<shape>[^\[\]]*)\]")
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float16", "bfloat16", "float64", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}


class Input(NamedTuple):
    """One tensor of a batch; dims are sizes or :data:`MICRO_BATCH`."""

    name: str | None
    dtype: torch.dtype
    shape: tuple[int | str, ...]

    def make(self, micro_batch: int) -> torch.Tensor:
        """A tensor that any model takes: integers are 0, which every table has a row for; all else is 1."""
        shape = [micro_batch if isinstance(size, str) else size for size in self.shape]
        integers = not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.bool)
        return torch.full(shape, 0 if integers else 1, dtype=self.dtype)


# -------------------------------------------------------------------- functions


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """The function that ``spec``, as in "package.module:name", names. Raises PlanError."""
    found = import_object(spec, option)
    if not callable(found):
        raise PlanError(f"{option} {spec}: expected a function, and it is of type {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def load_model_fn(spec: str) -> Callable[[], torch.nn.Module]:
    """Load the function that makes the model: the function of "package.module:build_model", or the path of a Hugging
    Face config.json, or of the directory that it is in.

    Raises PlanError where there is no such thing, or it cannot be called without arguments.
    """
    if _is_path(spec):
        return _load_hugging_face(Path(spec))
    found = import_object(spec, "--model")
    if isinstance(found, torch.nn.Module):
        raise PlanError(f"--model {spec}: this is a model, with all of its memory; name a function that makes it")
    if not callable(found):
        raise PlanError(
            f"--model {spec}: expected a function that makes the model, and it is of type {type(found).__name__}"
        )
    needed = required_parameters(found)
    if needed:
        raise PlanError(
            f"--model {spec}: expected a function without arguments, and it needs {', '.join(needed)}; write one that "
            "calls it with them"
        )
    make_model: Callable[[], torch.nn.Module] = found
    return make_model


# -------------------------------------------------------------------- Hugging Face


def _is_path(spec: str) -> bool:
    return os.path.exists(spec) or spec.endswith(".json") or os.sep in spec


def _load_hugging_face(path: Path) -> Callable[[], torch.nn.Module]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(
            f"--model {path}: there is no file '{file}'; expected a Hugging Face config.json or its directory, or a "
            "function as in 'package.module:build_model'"
        )
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            f"--model {path}: a Hugging Face config needs transformers ({error}): pip install 'zerolite[transformers]'"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    except Exception as error:  # of many kinds, by version
        raise PlanError(
            f"--model {path}: transformers cannot read '{file}': {str(error).partition('. ')[0]}"
        ) from error
    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return lambda: model_class(config)
    return lambda: transformers.AutoModelForCausalLM.from_config(config)


# -------------------------------------------------------------------- batches


def load_batch(spec: str) -> Callable[..., Any]:
    """Load the function that makes a batch: that of "package.module:make_batch", or one for an input spec, as in
    "input_ids:int64[4,1024] labels:int64[4,1024]" (see :func:`parse_input_spec`). Raises PlanError."""
    return parse_input_spec(spec) if "[" in spec else load_function(spec, "--batch")


def parse_input_spec(text: str) -> Callable[..., Batch]:
    """Return a function that makes the batch that ``text`` describes: one ``name:dtype[sizes]`` or ``dtype[sizes]`` for
    each tensor, with spaces between them. Where a size is "B", it takes the micro-batch size.

    It returns a dict by name, or a tuple where no tensor has a name. Raises PlanError.
    """
    inputs = _read_inputs(text)
    named = [entry for entry in inputs if entry.name is not None]
    if named and len(named) < len(inputs):
        raise PlanError(
            f"--input-spec {text!r}: expected a name for every tensor or for none, got some with and some without"
        )
    twice = {entry.name for entry in named if [other.name for other in named].count(entry.name) > 1}
    if twice:
        raise PlanError(f"--input-spec {text!r}: expected every name once, got {sorted(map(str, twice))[0]!r} twice")

    def make(micro_batch: int = 1) -> Batch:
        tensors = [entry.make(micro_batch) for entry in inputs]
        return (
            {str(entry.name): tensor for entry, tensor in zip(inputs, tensors, strict=True)}
            if named
            else tuple(tensors)
        )

    if any(MICRO_BATCH in entry.shape for entry in inputs):
        return lambda micro_batch: make(micro_batch)
    return lambda: make()


def _read_inputs(text: str) -> list[Input]:
    rest = text.strip()
    inputs = []
    while rest:
        found = _INPUT.match(rest)
        if found is None:
            raise PlanError(
                f"--input-spec {text!r}: expected name:dtype[sizes] for each tensor, as in 'input_ids:int64[4,1024]', "
                f"got {rest!r}"
            )
        inputs.append(Input(found["name"], _read_dtype(found["dtype"], text), _read_shape(found["shape"], text)))
        rest = rest[found.end() :].lstrip(" \t\n,;")
    if not inputs:
        raise PlanError("--input-spec: expected at least one tensor, as in 'input_ids:int64[4,1024]', got none")
    return inputs


def _read_dtype(name: str, text: str) -> torch.dtype:
    if name not in _DTYPES:
        near = difflib.get_close_matches(name, _DTYPES, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise PlanError(f"--input-spec {text!r}: expected a dtype, one of {', '.join(_DTYPES)}, got {name!r}{meant}")
    return _DTYPES[name]


def _read_shape(text: str, spec: str) -> tuple[int | str, ...]:
    sizes: list[int | str] = []
    for size in text.split(",") if text.strip() else ():
        size = size.strip()
        if size != MICRO_BATCH and not (size.isascii() and size.isdecimal()):
            raise PlanError(
                f"--input-spec {spec!r}: expected sizes that are whole numbers, or {MICRO_BATCH} for the micro-batch "
                f"size, got {size!r}"
            )
        sizes.append(size if size == MICRO_BATCH else int(size))
    return tuple(sizes)
