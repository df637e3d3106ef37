"""Contents of state.json: everything but the tensors, as models that are checked before the engine is changed."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from zerolite.checkpoint.errors import CheckpointError
from zerolite.utils.dtypes import BY_CODE

Result = TypeVar("Result")
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
Natural = Annotated[int, Field(ge=0)]


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, and its wrapper of checkpointed modules


def clean(name: str) -> str:
    """Return a parameter's name in the model as it was written, without the names of wrappers around its modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class FileModel(BaseModel):
    """A JSON object. Types must match exactly; keys that this version does not know are ignored."""

    model_config = STRICT


def validated(validate: Callable[[], Result]) -> Result:
    """Return the result of ``validate``, which calls pydantic.

    Raises ValueError with the path of the first wrong value, what was expected, and what was found.
    """
    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    # Raised outside of the except clause: as the context of the new exception, the ValidationError would live on. The
    # garbage collector cannot look into it, so cycles through its frames, and the engine in them, would never be freed.
    where = ".".join(map(str, first["loc"])) or "it"
    if first["type"] == "missing":
        raise ValueError(f"{where}: expected this entry, found none")
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    raise ValueError(f"{where}: {expected}, found {_describe_value(first['input'])}")


def _describe_value(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print a number of thousands of digits
        return f"a {type(value).__name__}"


def _known_dtype(code: str) -> str:
    if code not in BY_CODE:
        raise ValueError(f"expected a dtype out of {', '.join(BY_CODE)}")
    return code


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("expected a number")
    return value


def _scalar(value: object) -> object:
    allowed = value is None or isinstance(value, bool) or (isinstance(value, torch.Tensor) and not value.dim())
    return value if allowed else _number(value)


# Every integer up to this one is exact in JSON, as a float, and as the 64-bit integer that ranks exchange.
Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[Any, AfterValidator(_number)]
Scalar = Annotated[Any, AfterValidator(_scalar)]
Plain = InstanceOf[dict]  # a dict of the user's or of torch's, whose content is not checked here


class TensorFacts(FileModel):
    """A buffer, with the other names of a tied one in ``aliases``."""

    shape: list[Natural]
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    aliases: list[str] = []


class ParameterFacts(TensorFacts):
    """A parameter, with the dtype that it computes in."""

    trained: bool


class GroupState(FileModel):
    """A param group: names of its parameters, and its hyperparameters."""

    names: list[str]
    values: Plain


class OptimizerState(FileModel):
    """Type and param groups of an optimizer.

    Attributes:
        scalars: states that are one number for the parameter, by state and parameter.
    """

    type: str
    groups: list[GroupState]
    scalars: dict[str, dict[str, Scalar]]


class ScheduleState(FileModel):
    """State of a learning rate schedule. The type is None if only the user knows it."""

    type: str | None
    state: Plain


class Counters(FileModel):
    """See :class:`~zerolite.zero.step_state.StepCounters`."""

    micro_steps: Count
    global_steps: Count
    skipped_steps: Count
    skipped_in_a_row: Count
    last_norm: Number | None
    weight_unit: Number


class StoredModel(FileModel):
    """The model's part of state.json. ``quantized``: see :class:`ModelFacts`."""

    parameters: dict[str, ParameterFacts]
    buffers: dict[str, TensorFacts]
    quantized: dict[str, str] = {}

    def check(self, stored: Mapping[str, Sequence[int]], without_frozen: bool) -> None:
        """Raise ValueError if this file names a parameter that has no stored tensor, or another shape than is stored.

        Args:
            stored: shapes of the stored tensors, by key.
            without_frozen: frozen parameters were left out of the checkpoint.
        """
        for name, parameter in self.parameters.items():
            if f"parameters/{name}" not in stored and (parameter.trained or not without_frozen):
                raise ValueError(f"expected a tensor for each parameter in it, found none for '{name}'")
        for section, entries in (("parameters", self.parameters), ("buffers", self.buffers)):
            for name, entry in entries.items():
                shape = list(stored.get(f"{section}/{name}", entry.shape))
                if shape != entry.shape:
                    raise ValueError(f"{section}/{name}: expected the shape {entry.shape}, found {shape} stored")


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model, or a pipeline stage of it, as they are in state.json.

    Attributes:
        parameters: by the first of their names, with full shapes.
        buffers: by name.
        groups: names of the parameters in each of the optimizer's param groups.
        extra: state that modules add to their state dict by ``get_extra_state``.
        quantized: class and attributes of the quantized weights whose inner tensors are parameters, in torchao's JSON.
    """

    parameters: dict[str, ParameterFacts]
    buffers: dict[str, TensorFacts]
    groups: list[list[str]]
    extra: dict[str, Any] = field(default_factory=dict)
    quantized: dict[str, str] = field(default_factory=dict)


def joined(stages: Sequence[ModelFacts]) -> ModelFacts:
    """Join the facts of all stages, from the first to the last. Raises CheckpointError if they are not one model."""
    parameters: dict[str, ParameterFacts] = {}
    buffers: dict[str, TensorFacts] = {}
    extra: dict[str, Any] = {}
    groups: list[list[str]] = [[] for _ in stages[0].groups]
    for number, stage in enumerate(stages):
        for name, entry in stage.parameters.items():
            known = parameters.setdefault(name, entry)
            if known.shape != entry.shape:
                raise CheckpointError(
                    f"parameter '{name}' is {tuple(known.shape)} on one stage of the pipeline and "
                    f"{tuple(entry.shape)} on stage {number}; expected one parameter of the model to have one shape"
                )
        for name, buffer in stage.buffers.items():
            buffers.setdefault(name, buffer)
        for name, value in stage.extra.items():
            extra.setdefault(name, value)
        if len(stage.groups) != len(groups):
            raise CheckpointError(
                f"the optimizer has {len(groups)} param groups on the first stage of the pipeline and "
                f"{len(stage.groups)} on stage {number}; expected as many on all, with or without parameters"
            )
        groups = [list(dict.fromkeys(pair[0] + pair[1])) for pair in zip(groups, stage.groups, strict=True)]
    quantized = {name: description for stage in stages for name, description in stage.quantized.items()}
    return ModelFacts(parameters, buffers, groups, extra, quantized)


class SavedState(StoredModel):
    """The content of state.json."""

    extra: Plain
    optimizer: OptimizerState
    lr_scheduler: ScheduleState | None
    loss_scaler: dict[str, Number] | None
    counters: Counters
    loaders: list[Plain] | None
    client_state: Plain

    def check(self, stored: Mapping[str, Sequence[int]], without_frozen: bool) -> None:
        """Raise ValueError also if a param group has parameters that the file does not have."""
        super().check(stored, without_frozen)
        unknown = [name for group in self.optimizer.groups for name in group.names if name not in self.parameters]
        if unknown:
            raise ValueError(f"expected parameters of the file in the param groups, found '{unknown[0]}'")


def check_hyperparameters(group: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Raise ValueError if a saved value has another type than the value that it would replace."""
    for key, value in saved.items():
        are_set = value is not None and group.get(key) is not None
        if are_set and _shape(value) != _shape(group[key]):
            raise ValueError(f"{key}: expected a value like {group[key]!r:.40}, found {value!r:.40}")


def _shape(value: object) -> object:
    """Return the kind of a value: all numbers are of one kind, and so are lists of equally many."""
    if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return "number"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_shape(element) for element in value]
    return type(value).__name__
