"""Loading of models, batches and losses by the names on the command line."""

from __future__ import annotations

import difflib
import os
import pkgutil
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerolite.planning.result import PlanError
from zerolite.planning.training_step import required_parameters

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
"""The arguments of one forward, by name or in order."""

MICRO_BATCH = "B"
"""Placeholder of the config's micro-batch size in the shape of an input."""

LENGTH = "S"
"""Placeholder of the number of tokens of a sequence."""

_FUNCTION = re.compile(r"(?!\d)\w+(\.(?!\d)\w+)*:(?!\d)\w+(\.(?!\d)\w+)*")
_WORD = re.compile(r"[^\s,;\[]+(?:\[[^\]]*\]?)?|\[")
_INPUT = re.compile(
    r"(?:(?P<name>[^\s:\[\],]+):)?(?P<dtype>[^\s:\[\],]+)\[\s*(?P<shape>(?:([0-9]+|[BS])(\s*,\s*([0-9]+|[BS]))*)?)\s*\]"
)
_FLOATING = ("float32", "float16", "bfloat16", "float64", "complex64")
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_FLOATING, "int64", "int32", "int16", "int8", "uint8", "bool")
}


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        spec: its name, as in "package.module:name" or "package.module:Class.method".
        option: the option with the name, as in "--loss", for messages.

    Raises:
        PlanError: there is no such function, or its import failed.
    """
    if not _FUNCTION.fullmatch(spec):
        raise PlanError(f"{option} expects a function as in 'package.module:name', and got {spec!r}")
    try:
        function = pkgutil.resolve_name(spec)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        raise PlanError(f"{option} {spec}: importing it failed with {where}") from error
    if not callable(function):
        raise PlanError(f"{option} {spec}: expected a function, and it is of type {type(function).__name__}")
    return function


def load_model_fn(spec: str) -> Callable[[], torch.nn.Module]:
    """Return a function that makes the model.

    Args:
        spec: "package.module:build_model", or the path of a Hugging Face config.json or of its directory.

    Raises:
        PlanError: there is no such function or file, or the function needs arguments.
    """
    if _is_path(spec):
        return _load_hugging_face(Path(spec))
    make_model = load_function(spec, "--model")
    if isinstance(make_model, torch.nn.Module):
        raise PlanError(f"--model {spec}: this is a model, which has memory; name a function that makes it")
    needed = required_parameters(make_model)
    if needed:
        raise PlanError(
            f"--model {spec}: expected a function without arguments, and it needs {', '.join(needed)}; write one that "
            "calls it with them"
        )
    return make_model


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
    except Exception as error:  # its type depends on the version of transformers
        raise PlanError(
            f"--model {path}: transformers cannot read '{file}': {str(error).partition('. ')[0]}"
        ) from error
    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return lambda: model_class(config)
    return lambda: transformers.AutoModelForCausalLM.from_config(config)


def parse_input_spec(text: str, length: int | None = None) -> Callable[..., Batch]:
    """Return a function that makes the batch that ``text`` describes.

    Args:
        text: ``name:dtype[sizes]`` for each tensor, or ``dtype[sizes]`` for each, separated by spaces, as in
            "input_ids:int64[B,1024] labels:int64[B,1024]".
        length: size of "S", the tokens of a sequence; None if there is none.

    Returns:
        A function that returns a dict by name, or a tuple without names. It takes the micro-batch size if a size is
        "B", otherwise no argument.

    Raises:
        PlanError: ``text`` is wrong.
    """
    inputs: list[tuple[str | None, torch.dtype, list[str]]] = []
    for word in _WORD.findall(text):
        found = _INPUT.fullmatch(word)
        if found is None:
            raise PlanError(
                f"--input-spec {text!r}: expected name:dtype[sizes] for each tensor, as in 'input_ids:int64[4,1024]' "
                f"(sizes are whole numbers, {MICRO_BATCH} for the micro-batch size, or S for --seq-len), got {word!r}"
            )
        if found["dtype"] not in _DTYPES:
            near = difflib.get_close_matches(found["dtype"], _DTYPES, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            expected = f"expected a dtype, one of {', '.join(_DTYPES)}"
            raise PlanError(f"--input-spec {text!r}: {expected}, got {found['dtype']!r}{meant}")
        shape = [str(length) if size == LENGTH else size for size in re.findall(r"\w+", found["shape"])]
        inputs.append((found["name"], _DTYPES[found["dtype"]], shape))
    names = [name for name, _, _ in inputs if name is not None]
    if not inputs or len(names) not in (0, len(inputs)) or len(set(names)) < len(names):
        raise PlanError(
            f"--input-spec {text!r}: expected one or more tensors, with a name of its own for every tensor or for none"
        )

    def make(micro_batch: int = 1) -> Batch:
        tensors = []
        for _, dtype, shape in inputs:  # integers are 0, a valid index for every embedding; all others are 1
            floating = dtype.is_floating_point or dtype.is_complex or dtype is torch.bool
            sizes = [micro_batch if size == MICRO_BATCH else int(size) for size in shape]
            tensors.append(torch.full(sizes, 1 if floating else 0, dtype=dtype))
        return dict(zip(names, tensors, strict=True)) if names else tuple(tensors)

    if any(MICRO_BATCH in shape for _, _, shape in inputs):
        return lambda micro_batch: make(micro_batch)
    return lambda: make()
