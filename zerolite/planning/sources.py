"""Loading of models, batches and losses by the names on the command line."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from zerolite.planning.errors import PlanError
from zerolite.planning.training_step import required_parameters

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
"""The arguments of one forward, by name or in order."""

MICRO_BATCH = "B"
"""Placeholder of the config's micro-batch size in the shape of an input."""

_INPUT = re.compile(r"(?:(?P<name>[^\s:\[\],]+):)?(?P<dtype>[^\s:\[\],]+)\[(?P<shape>[^\[\]]*)\]")
_FLOATING = ("float32", "float16", "bfloat16", "float64", "complex64")
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_FLOATING, "int64", "int32", "int16", "int8", "uint8", "bool")
}


# -------------------------------------------------------------------- functions


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """Return the function of ``spec``, as in "package.module:name". Raises PlanError."""
    found = import_object(spec, option)
    if not callable(found):
        raise PlanError(f"{option} {spec}: expected a function, and it is of type {type(found).__name__}")
    function: Callable[..., Any] = found
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
    found = import_object(spec, "--model")
    if isinstance(found, torch.nn.Module):
        raise PlanError(f"--model {spec}: this is a model, which has memory; name a function that makes it")
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


def import_object(spec: str, option: str) -> Any:
    """Import an object by name.

    Args:
        spec: the name, as in "package.module:name" or "package.module:Class.method".
        option: the option with the name, as in "--model", for messages.

    Raises:
        PlanError: a part of the name does not exist, or its import failed.
    """
    module, colon, name = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise PlanError(f"{option} expects a function as in 'package.module:name', and got {spec!r}")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        message = getattr(error, "msg", error)  # the message of a SyntaxError without file and line
        failure = f"{type(error).__name__}: {message}{_location(error)}"
        raise PlanError(f"{option}: importing {module!r} failed with {failure}") from error
    owner = f"module {module!r}"
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [public for public in dir(found) if not public.startswith("_")], n=1)
            raise PlanError(f"{option} {spec}: {owner} has no {part!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        found, owner = getattr(found, part), repr(part)
    return found


def _location(error: BaseException) -> str:
    """Return file and line of the failing code; empty if the import system itself failed."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name != __name__ and name.partition(".")[0] != "importlib":
            location = f" ({frame.f_code.co_filename}, line {line})"
    return location


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
    except Exception as error:  # its type depends on the version of transformers
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
    """Return the function that makes a batch.

    Args:
        spec: name of the function, as in "package.module:make_batch", or an input spec: see :func:`parse_input_spec`.

    Raises:
        PlanError: there is no such function, or the spec is wrong.
    """
    return parse_input_spec(spec) if "[" in spec else load_function(spec, "--batch")


def parse_input_spec(text: str) -> Callable[..., Batch]:
    """Return a function that makes the batch that ``text`` describes.

    Args:
        text: ``name:dtype[sizes]`` for each tensor, or ``dtype[sizes]`` for each, separated by spaces, as in
            "input_ids:int64[B,1024] labels:int64[B,1024]".

    Returns:
        A function that returns a dict by name, or a tuple without names. It takes the micro-batch size if a size is
        "B", otherwise no argument.

    Raises:
        PlanError: ``text`` is wrong.
    """
    inputs, rest = [], text.strip()
    while rest:
        found = _INPUT.match(rest)
        if found is None:
            raise _expected(text, "name:dtype[sizes] for each tensor, as in 'input_ids:int64[4,1024]'", rest)
        shape = [size.strip() for size in found["shape"].split(",")] if found["shape"].strip() else []
        for size in shape:
            if size != MICRO_BATCH and not (size.isascii() and size.isdecimal()):
                sizes = f"sizes that are whole numbers, or {MICRO_BATCH} for the micro-batch size"
                raise _expected(text, sizes, size)
        if found["dtype"] not in _DTYPES:
            raise _expected(text, f"a dtype, one of {', '.join(_DTYPES)}", found["dtype"], _DTYPES)
        inputs.append((found["name"], _DTYPES[found["dtype"]], shape))
        rest = rest[found.end() :].lstrip(" \t\n,;")
    names = [name for name, _, _ in inputs if name is not None]
    if not inputs:
        raise PlanError("--input-spec: expected at least one tensor, as in 'input_ids:int64[4,1024]', got none")
    if names and len(names) < len(inputs):
        raise PlanError(
            f"--input-spec {text!r}: expected a name for every tensor or for none, got some with and some without"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PlanError(f"--input-spec {text!r}: expected every name once, got {twice[0]!r} twice")

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


def _expected(text: str, what: str, got: str, accepted: Iterable[str] = ()) -> PlanError:
    near = difflib.get_close_matches(got, accepted, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return PlanError(f"--input-spec {text!r}: expected {what}, got {got!r}{meant}")
