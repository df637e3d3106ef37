"""Error messages of a dry run: for models that it cannot run, and for jobs that the engine refuses."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from zerolite.config import ConfigError
from zerolite.planning.result import PlanError, RefusedError
from zerolite.utils.torch_private import DataDependentOutputException, DynamicOutputShapeException

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


@contextlib.contextmanager
def as_plan_error(where: str, module: Callable[[], str] | None = None) -> Iterator[None]:
    """Context that turns errors into PlanError.

    Args:
        where: the failing part, for the message.
        module: returns the name of the current module; called after a failure.
    """
    try:
        yield
    except (PlanError, ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except DataDependentOutputException as error:
        raise PlanError(
            f"{_location(where, module, error)} reads the values of a tensor ({error.func}), and a plan runs without "
            "values. Replace it (a condition such as `if mask.any()`, `tensor.item()`, `int(tensor)`) by a decision "
            "from shapes or Python numbers, or plan with a model whose branch is chosen by an argument"
        ) from error
    except DynamicOutputShapeException as error:
        raise PlanError(
            f"{_location(where, module, error)} makes a tensor whose shape depends on values ({error.func}), and a "
            "plan runs without values. Use shapes that are known beforehand (a capacity per expert instead of "
            "`x[mask]` or `nonzero()`), or leave the batch out: model states and traffic are planned without one"
        ) from error
    except Exception as error:
        if "cuda" in _first_line(error).lower():
            raise PlanError(
                f"{_location(where, module, error)} asks for a CUDA device: {_first_line(error)}. A plan makes the "
                "model on the CPU, without memory. Name no device in the model: zerolite.initialize moves it"
            ) from error
        raise PlanError(
            f"{_location(where, module, error)} failed on tensors without memory, with {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error


@contextlib.contextmanager
def as_refusal() -> Iterator[None]:
    """Context that turns errors of the engine into RefusedError with the same sentence."""
    try:
        yield
    except (PlanError, ConfigError):
        raise
    except (ValueError, RuntimeError, TypeError) as error:
        raise RefusedError(
            f"the engine refuses this job: {str(error).removeprefix('zerolite.initialize: ')}"
        ) from error


def _location(where: str, module: Callable[[], str] | None, error: BaseException) -> str:
    """Return the failing part for a message, with the innermost line of the user's code."""
    name = module() if module is not None else ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH, _PACKAGE))]
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{where}{f', in module {name!r},' if name else ''}{line}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
