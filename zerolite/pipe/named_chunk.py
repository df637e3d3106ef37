"""Chunks of a model that is split at named modules: see :mod:`zerolite.pipe.split`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from zerolite.data.micro_batch import LossFunction, MicroBatch
from zerolite.pipe.boundary import shapes_of
from zerolite.pipe.chunks import ONE_STAGE_ONLY, Chunk
from zerolite.pipe.dependencies import (
    Call,
    CallRecorder,
    DependencyMode,
    Labels,
    Skeleton,
    caches_cleared,
    fake_parameters,
    materialize,
)
from zerolite.pipe.parameter_assignment import Buffers, ParameterAssignment
from zerolite.precision.dtypes import Precision
from zerolite.utils.dtypes import is_castable
from zerolite.utils.nested import find_tensors, map_tensors, named_leaves
from zerolite.utils.torch_private import COMPILED_CALL


class _ForwardStopped(BaseException):
    """Ends the model's forward where the next part begins. It is no Exception, because a model may catch those."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(frozen=True)
class Prefix:
    """Modules that the model's forward calls before a part.

    Attributes:
        placeholders: modules that are skipped: for each the outputs of its calls, with zeros for tensors.
        executed: modules that run with zeros for their parameters, whose shapes and dtypes these are.
    """

    placeholders: Mapping[str, Sequence[Any]]
    executed: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]


@dataclass(frozen=True)
class ChunkPlan:
    """Plan of all parts for micro-batches of some shapes.

    Attributes:
        boundary_args: for each part, the names of the arguments of its first module that the part before sends.
        prefixes: for each part, the modules before it.
    """

    boundary_args: list[tuple[str, ...]]
    prefixes: list[Prefix]


class ModelSplit:
    """A split model: its parts, their plans by shapes, and the part that runs now."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        assignments: Sequence[ParameterAssignment],
        skeleton: Skeleton,
        buffers: Buffers,
    ) -> None:
        """
        Args:
            model: the model.
            names: names of the modules that begin the parts 1, 2, ...
            assignments: the parts that have each parameter.
            skeleton: copy of the full model without memory.
            buffers: buffers of modules that are on other ranks.
        """
        self.model, self.names, self.assignments, self.buffers = model, list(names), list(assignments), buffers
        self.running: NamedChunk | None = None
        # Received tensors, by the argument that they replaced. Activation checkpointing runs a forward again in
        # backward, and that forward must get the same tensors.
        self.replaced: Any = WeakTensorKeyDictionary()
        self.precision, self.device = Precision(), torch.device("cpu")
        self.loss_fn: LossFunction | None = None
        self._skeleton = skeleton
        self._plans: dict[str, ChunkPlan] = {}
        self._hooked = False

    def connect(self, precision: Precision, device: torch.device, loss_fn: LossFunction | None) -> None:
        """Set precision, device and loss, as :meth:`Chunk.connect` does."""
        self.precision, self.device, self.loss_fn = precision, device, loss_fn
        self.buffers = {
            path: {name: buffer.to(device) for name, buffer in buffers.items()}
            for path, buffers in self.buffers.items()
        }

    def run(self, chunk: NamedChunk, batch: MicroBatch) -> Any:
        """Run the model's forward between the modules where ``chunk`` begins and ends."""
        self.running = chunk
        try:
            return self.model(*batch.args, **batch.kwargs)
        finally:
            self.running = None

    def check_running(self, model: nn.Module, args: object) -> None:
        """Raise RuntimeError if other code calls the model."""
        if self.running is None:
            raise RuntimeError(ONE_STAGE_ONLY)

    def plan(self, batch: MicroBatch) -> ChunkPlan:
        """Return the plan for micro-batches of these shapes. Raises ValueError if the model cannot be split there."""
        key = repr((shapes_of((batch.args, batch.kwargs, batch.target)), self.model.training))
        if key not in self._plans:
            self._plans[key] = _ShapeInference(self, self._skeleton).run(batch)
        if not self._hooked:
            self._hooked = True
            for part, name in enumerate(self.names, 1):
                hook = _boundary_hook(self, part)
                self.model.get_submodule(name).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        return self._plans[key]


def _boundary_hook(model_split: ModelSplit, part: int) -> Callable[..., object]:
    """Return a hook for the module that begins ``part``."""

    def hook(module: nn.Module, args: object, kwargs: object) -> object:
        chunk = model_split.running
        if chunk is not None and chunk.index == part:
            return chunk.enter(args, kwargs)
        if chunk is not None and chunk.index == part - 1:
            raise _ForwardStopped(chunk.tensors_to_send(args, kwargs))
        if chunk is None and any(tensor in model_split.replaced for tensor in find_tensors((args, kwargs))):
            return map_tensors(lambda tensor: model_split.replaced.get(tensor, tensor), (args, kwargs))
        return None

    return hook


class NamedChunk(Chunk):
    """One part: the model's own forward from the part's first module to the first module of the next part."""

    def __init__(
        self, index: int, model: nn.Module, model_split: ModelSplit, parameters: Sequence[nn.Parameter]
    ) -> None:
        self.index, self.module = index, model
        self._model_split, self._parameters = model_split, list(parameters)
        self._plan: ChunkPlan | None = None
        self._received: tuple[torch.Tensor, ...] = ()
        self._prefix: contextlib.ExitStack | None = None  # while the modules before the part run

    def parameters(self) -> list[nn.Parameter]:
        return list(self._parameters)

    def connect(self, precision: Precision, device: torch.device, loss_fn: LossFunction | None) -> None:
        self._model_split.connect(precision, device, loss_fn)

    def prepare(self, batch: MicroBatch) -> None:
        self._plan = self._model_split.plan(batch)

    def forward(self, received: tuple[torch.Tensor, ...], single: bool, batch: MicroBatch) -> Any:
        assert self._plan is not None, "prepare comes first"
        model_split = self._model_split
        self._received = received
        with contextlib.ExitStack() as prefix:
            self._prefix = prefix
            if self.index:
                prefix.enter_context(_earlier_modules_skipped(model_split, self._plan.prefixes[self.index]))
            try:
                outputs = model_split.run(self, batch)
            except _ForwardStopped as stop:
                return stop.tensors
            finally:
                self._received, self._prefix = (), None
        if self.index < len(model_split.names):
            raise RuntimeError(
                f"pipeline.split: expected the model's forward to call '{model_split.names[self.index]}', which begins "
                f"part {self.index + 1}, as it did for the first micro-batch of these shapes; it did not"
            )
        return outputs

    def enter(self, args: object, kwargs: object) -> Any:
        """Begin the part: return the arguments of its first module with the received tensors in them."""
        assert self._plan is not None and self._prefix is not None
        received = self._received
        # A reentrant checkpoint runs its forward under no_grad, so the received tensors would get no gradients to send
        # back.
        if any(tensor.requires_grad for tensor in received) and not torch.is_grad_enabled():
            raise RuntimeError(
                f"pipeline.split: '{self._model_split.names[self.index - 1]}' begins a part inside of a reentrant "
                "checkpoint, which computes no gradients of the received tensors; pass use_reentrant=False"
            )
        self._prefix.close()
        tensors = self._boundary_args(args, kwargs, self.index)
        values = dict(zip(tensors, received, strict=True))
        for name, value in values.items():
            self._model_split.replaced[tensors[name]] = value
        return replace_tensors((args, kwargs), values)

    def tensors_to_send(self, args: object, kwargs: object) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the first module of the next part needs from this part."""
        return tuple(self._boundary_args(args, kwargs, self.index + 1).values())

    def _boundary_args(self, args: object, kwargs: object, part: int) -> dict[str, torch.Tensor]:
        assert self._plan is not None
        tensors = dict(named_tensors((args, kwargs)))
        names = self._plan.boundary_args[part]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise RuntimeError(
                f"pipeline.split: expected '{self._model_split.names[part - 1]}' to be called with tensors in "
                f"{', '.join(names)} for every micro-batch of these shapes, got none in {', '.join(missing)}"
            )
        return {name: tensors[name] for name in names}


def named_tensors(value: object) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in ``value`` with the names that :func:`named_leaves` gives them."""
    return [(name, leaf) for name, leaf in named_leaves(value) if isinstance(leaf, torch.Tensor)]


def replace_tensors(value: object, replaced: Mapping[str, torch.Tensor]) -> Any:
    """Return ``value`` with the tensors of these names replaced."""
    names = iter([name for name, _ in named_tensors(value)])
    return map_tensors(lambda tensor: replaced.get(next(names), tensor), value)


@contextlib.contextmanager
def _earlier_modules_skipped(model_split: ModelSplit, prefix: Prefix) -> Iterator[None]:
    """Context in which the modules before a part return zeros, and parameters of other ranks are zeros."""
    changed: list[tuple[nn.Module, str, Any]] = []
    try:
        for path, templates in prefix.placeholders.items():
            module = model_split.model.get_submodule(path)
            # nn.Module.__call__ runs this attribute in place of forward and hooks, if it is set.
            changed.append((module, COMPILED_CALL, vars(module).get(COMPILED_CALL)))
            vars(module)[COMPILED_CALL] = _placeholder_call(templates, model_split.device, path)
        for path, shapes in prefix.executed.items():
            module = model_split.model.get_submodule(path)
            zeros: dict[str, torch.Tensor] = {
                name: torch.zeros((), dtype=dtype, device=model_split.device).expand(shape)
                for name, (shape, dtype) in shapes.items()
                if module._parameters.get(name) is None
            }
            for name, value in (zeros | dict(model_split.buffers.get(path, {}))).items():
                changed.append((module, name, None))
                vars(module)[name] = value
        yield
    finally:
        for module, name, old in changed:
            vars(module).pop(name, None)
            if old is not None:
                vars(module)[name] = old


def _placeholder_call(templates: Sequence[object], device: torch.device, path: str) -> Callable[..., object]:
    """Return a function that replaces the calls of the module ``path`` and returns zeros."""
    rest = iter(templates)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return materialize(next(rest), device)
        except StopIteration:
            raise RuntimeError(
                f"pipeline.split: expected the model to call '{path}' {len(templates)} times for every micro-batch of "
                "these shapes, got one more"
            ) from None

    return call


# -------------------------------------------------------------------- run on fake tensors


class _ShapeInference:
    """One run of the full model on fake tensors, to find the tensors that cross each boundary."""

    def __init__(self, model_split: ModelSplit, skeleton: Skeleton) -> None:
        self._model_split, self._skeleton = model_split, skeleton
        self._names = model_split.names
        self._part = 0
        self._dependencies = DependencyMode()
        self._boundary_args: list[tuple[str, ...]] = [()]
        self._parts_by_name: dict[str, frozenset[int]] = {}

    def run(self, batch: MicroBatch) -> ChunkPlan:
        model_split, model = self._model_split, self._skeleton.model
        for copied, original in zip(model.modules(), model_split.model.modules(), strict=True):
            copied.training = original.training
        precision, device = model_split.precision, model_split.device
        with torch.no_grad(), fake_parameters(model, device, precision.compute) as mode:
            self._label_parameters(model)
            calls = CallRecorder(model, self._dependencies, lambda: self._part)
            handles = [
                model.get_submodule(name).register_forward_pre_hook(self._boundary_hook(part), with_kwargs=True)
                for part, name in enumerate(self._names, 1)
            ]
            real_batch = (batch.args, batch.kwargs, batch.target)
            args, kwargs, target = real_batch if mode is None else map_tensors(mode.from_tensor, real_batch)
            try:
                with caches_cleared(), self._dependencies, precision.autocast_context(device):
                    outputs = model(*args, **kwargs)
                    if model_split.loss_fn is None:
                        outputs = MicroBatch(args, kwargs, target).loss(outputs, None)
            except _CannotSplit as refused:
                raise ValueError(str(refused)) from None
            except Exception as error:
                raise ValueError(
                    "pipeline.split: expected a model whose forward can run once on tensors without values, to find "
                    f"the shapes of its modules' outputs, got {type(error).__name__}: {error}. Write a model whose "
                    "forward depends on values (.item(), tensors as conditions) as a PipelineModule"
                ) from error
            finally:
                calls.remove()
                for handle in handles:
                    handle.remove()
        self._check_end(outputs)
        prefixes = [self._prefix(calls.root, part) for part in range(len(self._names) + 1)]
        return ChunkPlan(self._boundary_args, prefixes)

    def _label_parameters(self, model: nn.Module) -> None:
        parts = {name: assignment.parts for assignment in self._model_split.assignments for name in assignment.names}
        for name, parameter in model.named_parameters():
            self._parts_by_name[name] = parts[name]
            self._dependencies.add_labels(parameter, frozenset([name]))

    def _boundary_hook(self, part: int) -> Callable[..., object]:
        def hook(module: nn.Module, args: object, kwargs: object) -> object:
            name = self._names[part - 1]
            if self._part != part - 1:
                when = "again" if self._part >= part else f"before '{self._names[self._part]}'"
                raise _CannotSplit(
                    f"pipeline.split: expected the model to call '{name}' once, after the modules that begin earlier "
                    f"parts, got a call {when}; name modules that are called one after the other"
                )
            tensors = dict(named_tensors((args, kwargs)))
            boundary = tuple(arg for arg, tensor in tensors.items() if self._dependencies.labels_of(tensor))
            if not boundary:
                raise _CannotSplit(
                    f"pipeline.split: expected arguments of '{name}' that are computed from parameters, got none: the "
                    "part before it would have nothing to send. Name other modules"
                )
            for arg in boundary:
                self._check(self._dependencies.labels_of(tensors[arg]), f"an argument of '{name}'")
            self._boundary_args.append(boundary)
            self._part = part
            received = {arg: self._received(tensors[arg], part) for arg in boundary}
            return replace_tensors((args, kwargs), received)

        return hook

    def _received(self, tensor: torch.Tensor, part: int) -> torch.Tensor:
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._dependencies.add_labels(received, frozenset([_RECEIVED + str(part)]))
        return received

    def _check(self, labels: Labels, what: str) -> None:
        """Raise unless ``what``, a result of the current part, depends only on its parameters and received tensors."""
        part = self._part
        for label in sorted(labels):
            if label == _RECEIVED + str(part) or part in self._parts_by_name.get(label, ()):
                continue
            before = "the model" if part == 0 else f"'{self._names[part - 1]}'"
            if label.startswith(_RECEIVED):
                source = f"an argument of '{self._names[int(label[len(_RECEIVED) :]) - 1]}'"
                raise _CannotSplit(
                    f"pipeline.split: {what} needs {source}, which does not pass through the arguments of {before}: a "
                    "skip connection over a boundary. Only the arguments of the module that begins a part are sent to "
                    "the part. Name other modules"
                )
            parts = ", ".join(map(str, sorted(self._parts_by_name[label])))
            raise _CannotSplit(
                f"pipeline.split: {what}, in part {part}, needs parameter '{label}', which is in part {parts} (by the "
                f"order of registration), other than through the arguments of {before}. Only these arguments are sent. "
                "Do not let skip connections cross a boundary, register modules in the order in which they are called "
                "(or give the model dummy_inputs, a dict of its forward's arguments, which shows the order), and "
                "register shared weights in each module that uses them"
            )

    def _check_end(self, outputs: object) -> None:
        if self._part != len(self._names):
            raise ValueError(
                f"pipeline.split: expected the model's forward to call '{self._names[self._part]}', which begins part "
                f"{self._part + 1}, got no call; name a module that is called by itself"
            )
        what = "the loss" if self._model_split.loss_fn is None else "an output of the model"
        for tensor in find_tensors(outputs):
            try:
                self._check(self._dependencies.labels_of(tensor), what)
            except _CannotSplit as refused:
                raise ValueError(str(refused)) from None

    def _prefix(self, root: Call, part: int) -> Prefix:
        """Replace the outermost calls before ``part`` whose outputs are known; other modules run themselves."""
        forced: set[str] = set()
        while True:
            placeholders: dict[str, list[Any]] = {}
            executed: set[str] = set()
            _visit(root, part, forced, placeholders, executed)
            # If the outputs of only one of two calls are known, the module runs itself in both.
            clash = executed & set(placeholders)
            if not clash:
                break
            forced |= clash
        model = self._skeleton.model
        compute = self._model_split.precision.compute
        shapes = {
            path: {
                name: (tuple(p.shape), compute if compute is not None and is_castable(p) else p.dtype)
                for name, p in model.get_submodule(path)._parameters.items()
                if p is not None
            }
            for path in executed
        }
        return Prefix(placeholders, shapes)


def _visit(call: Call, part: int, forced: set[str], placeholders: dict[str, list[object]], executed: set[str]) -> None:
    if call.path and call.static and 0 <= call.ended < part and call.path not in forced:
        placeholders.setdefault(call.path, []).append(call.template)
        return
    executed.add(call.path)
    for inner in call.inner:
        if inner.began < part:
            _visit(inner, part, forced, placeholders, executed)


_RECEIVED = "received by part "


class _CannotSplit(BaseException):
    """The model cannot be split there. It is no Exception, because a model may catch those."""
