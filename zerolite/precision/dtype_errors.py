"""Explanation of torch's dtype errors in 16-bit models: the module, and what to do."""

from __future__ import annotations

import re
import traceback

import torch

from zerolite.utils.dtypes import DTYPES

_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|datatype|Input type|output type|the type torch\.|not implemented for|primitive descriptor"
)
_KINDS = (RuntimeError, ValueError, TypeError)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def explain(error: BaseException, model: torch.nn.Module, compute: torch.dtype | None) -> None:
    """Add a sentence to the message of ``error`` if it is torch's, about dtypes, from a module of ``model``.

    Args:
        error: the exception, with its traceback.
        model: the model that ran.
        compute: the 16-bit dtype to which the engine has cast the parameters; None explains nothing.
    """
    if compute is None or not isinstance(error, _KINDS) or not _ABOUT_DTYPES.search(str(error)):
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or str(frames[-1].f_globals.get("__name__", "")).startswith("zerolite."):
        return  # an error of zerolite itself, which says what to do
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and id(module) in names:
            sentence = _sentence(names[id(module)], type(module).__name__, compute)
            if sentence not in str(error):
                error.args = (f"{error}\n{sentence}",)
            return


def _sentence(name: str, cls: str, compute: torch.dtype) -> str:
    key = _NAMES[compute]
    where = f"module '{name}' ({cls})" if name else f"the model's own forward or method ({cls})"
    keep = f'keep that module in fp32 ("fp32_modules": ["{name}"]), ' if name else ""
    return (
        f'zerolite: "{key}" casts parameters, and floating inputs of engine(...), to {compute}, but neither buffers '
        f"nor other tensors, and they met in {where}; {keep}cast the model's buffers "
        f'("data_types": {{"buffer_dtype": "{key}"}}), cast the tensors yourself with .to({compute}), or use '
        f'"torch_autocast" instead of "{key}".'
    )
