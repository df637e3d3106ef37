"""Chunks of a model that is split at named modules: see split.py."""

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
from zerolite.pipe.chunks import NOT_WHOLE, Chunk
from zerolite.pipe.dependencies import Call, Calls, Labelling, Labels, caches_restored, fake_parameters, filled
from zerolite.pipe.parameter_assignment import Buffers, ParameterAssignment
from zerolite.precision.dtypes import Precision
from zerolite.utils.nested import find_tensors, map_tensors, named_leaves
from zerolite.utils.skeleton import Skeleton


class _Left(BaseException):
    """Leaves the model's forward where the next part begins. It is no Exception, because models may catch those."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(frozen=True)
class Prefix:
    """Stand-ins for the modules that run before a part in the model's forward.

    Attributes:
        stand_ins: by module, the outputs of each call.
        opened: modules that run themselves, with the shapes and dtypes of their parameters, which are replaced by
            zeros.
    """

    stand_ins: Mapping[str, Sequence[Any]]
    opened: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]


@dataclass(frozen=True)
class ChunkPlan:
    """Plan for micro-batches of some shapes.

    Attributes:
        crossing: by part, the arguments of its first module that come from the part before.
        prefixes: by part.
    """

    crossing: list[tuple[str, ...]]
    prefixes: list[Prefix]


class Splitting:
    """Split of one model: its parts, how they run for micro-batches of any shapes, and the part that runs now."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        assignments: Sequence[ParameterAssignment],
        skeleton: Skeleton,
        elsewhere: Buffers,
    ) -> None:
        """
        Args:
            model: the model.
            names: names of the modules that begin the parts 1, 2, ...
            assignments: the parts that have each parameter.
            skeleton: copy of the full model without memory.
            elsewhere: buffers of modules that are on other ranks.
        """
        self.model, self.names, self.assignments, self.buffers = model, list(names), list(assignments), elsewhere
        self.running: NamedChunk | None = None
        # Received tensors, by the argument that they replaced: activation checkpointing runs a forward again in
        # backward, where it has to be given the same tensors.
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
            raise RuntimeError(NOT_WHOLE)

    def plan(self, batch: MicroBatch) -> ChunkPlan:
        """Return the plan for micro-batches like this one. Raises ValueError for a model that cannot be divided
        there."""
        key = repr((shapes_of((batch.args, batch.kwargs, batch.target)), self.model.training))
        if key not in self._plans:
            self._plans[key] = _ShapeRun(self, self._skeleton).run(batch)
        if not self._hooked:
            self._hooked = True
            for part, name in enumerate(self.names, 1):
                hook = _reached(self, part)
                self.model.get_submodule(name).register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        return self._plans[key]


def _reached(splitting: Splitting, part: int) -> Callable[..., object]:
    """Return a hook for the module that begins ``part``."""

    def hook(module: nn.Module, args: object, kwargs: object) -> object:
        chunk = splitting.running
        if chunk is not None and chunk.index == part:
            return chunk.enter(args, kwargs)
        if chunk is not None and chunk.index == part - 1:
            raise _Left(chunk.leaving(args, kwargs))
        if chunk is None and any(tensor in splitting.replaced for tensor in find_tensors((args, kwargs))):
            return map_tensors(lambda tensor: splitting.replaced.get(tensor, tensor), (args, kwargs))
        return None

    return hook


class NamedChunk(Chunk):
    """One part, which runs the model's own forward from its first module to the next part's."""

    def __init__(self, index: int, model: nn.Module, splitting: Splitting, parameters: Sequence[nn.Parameter]) -> None:
        self.index, self.module = index, model
        self._splitting, self._parameters = splitting, list(parameters)
        self._plan: ChunkPlan | None = None
        self._received: tuple[torch.Tensor, ...] = ()
        self._leave_prefix: contextlib.ExitStack | None = None

    def parameters(self) -> list[nn.Parameter]:
        return list(self._parameters)

    def connect(self, precision: Precision, device: torch.device, loss_fn: LossFunction | None) -> None:
        self._splitting.connect(precision, device, loss_fn)

    def prepare(self, batch: MicroBatch) -> None:
        self._plan = self._splitting.plan(batch)

    def forward(self, received: tuple[torch.Tensor, ...], single: bool, batch: MicroBatch) -> Any:
        assert self._plan is not None, "prepare comes first"
        splitting = self._splitting
        self._received = received
        with contextlib.ExitStack() as prefix:
            self._leave_prefix = prefix
            if self.index:
                prefix.enter_context(_left_out(splitting, self._plan.prefixes[self.index]))
            try:
                outputs = splitting.run(self, batch)
            except _Left as left:
                return left.tensors
            finally:
                self._received, self._leave_prefix = (), None
        if self.index < len(splitting.names):
            raise RuntimeError(
                f"pipeline.split: expected the model's forward to call '{splitting.names[self.index]}', which begins "
                f"part {self.index + 1}, as it did for the first micro-batch of these shapes; it did not"
            )
        return outputs

    def enter(self, args: object, kwargs: object) -> Any:
        """Begin the part: return its first module's arguments with the received tensors in them."""
        assert self._plan is not None and self._leave_prefix is not None
        received = self._received
        # A reentrant checkpoint runs its forward under no_grad, so the received tensors would get no gradients to send
        # back.
        if any(tensor.requires_grad for tensor in received) and not torch.is_grad_enabled():
            raise RuntimeError(
                f"pipeline.split: '{self._splitting.names[self.index - 1]}' begins a part inside of a reentrant "
                "checkpoint, which keeps gradients from what the part receives; use use_reentrant=False"
            )
        self._leave_prefix.close()
        tensors = self._crossing(args, kwargs, self.index)
        values = dict(zip(self._plan.crossing[self.index], received, strict=True))
        for place, value in values.items():
            self._splitting.replaced[tensors[place]] = value
        return with_tensors((args, kwargs), values)

    def leaving(self, args: object, kwargs: object) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the next part's first module needs."""
        return tuple(self._crossing(args, kwargs, self.index + 1).values())

    def _crossing(self, args: object, kwargs: object, part: int) -> dict[str, torch.Tensor]:
        assert self._plan is not None
        given = dict(tensors_with_places((args, kwargs)))
        crossing = self._plan.crossing[part]
        missing = [place for place in crossing if place not in given]
        if missing:
            raise RuntimeError(
                f"pipeline.split: expected '{self._splitting.names[part - 1]}' to be called with tensors in "
                f"{', '.join(crossing)} for every micro-batch of these shapes, got none in {', '.join(missing)}"
            )
        return {place: given[place] for place in crossing}


def tensors_with_places(value: object) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in ``value`` with their places, as :func:`named_leaves` names them."""
    return [(place, leaf) for place, leaf in named_leaves(value) if isinstance(leaf, torch.Tensor)]


def with_tensors(value: object, replaced: Mapping[str, torch.Tensor]) -> Any:
    """Return ``value`` with the tensors at the places in ``replaced`` replaced."""
    places = iter([place for place, _ in tensors_with_places(value)])
    return map_tensors(lambda tensor: replaced.get(next(places), tensor), value)


@contextlib.contextmanager
def _left_out(splitting: Splitting, prefix: Prefix) -> Iterator[None]:
    """Context in which modules before the part return zeros, and parameters of other ranks are zeros."""
    changed: list[tuple[nn.Module, str, Any]] = []
    try:
        for path, templates in prefix.stand_ins.items():
            module = splitting.model.get_submodule(path)
            # nn.Module.__call__ runs this attribute in place of forward and hooks, if it is set.
            changed.append((module, "_compiled_call_impl", vars(module).get("_compiled_call_impl")))
            vars(module)["_compiled_call_impl"] = _stand_in(templates, splitting.device, path)
        for path, shapes in prefix.opened.items():
            module = splitting.model.get_submodule(path)
            zeros: dict[str, torch.Tensor] = {
                name: torch.zeros((), dtype=dtype, device=splitting.device).expand(shape)
                for name, (shape, dtype) in shapes.items()
                if module._parameters.get(name) is None
            }
            for name, value in (zeros | dict(splitting.buffers.get(path, {}))).items():
                changed.append((module, name, None))
                vars(module)[name] = value
        yield
    finally:
        for module, name, old in changed:
            vars(module).pop(name, None)
            if old is not None:
                vars(module)[name] = old


def _stand_in(templates: Sequence[object], device: torch.device, path: str) -> Callable[..., object]:
    """Return a function that replaces a module's call."""
    rest = iter(templates)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return filled(next(rest), device)
        except StopIteration:
            raise RuntimeError(
                f"pipeline.split: expected the model to call '{path}' {len(templates)} times for every micro-batch of "
                "these shapes, got one more"
            ) from None

    return call


# -------------------------------------------------------------------- without values


class _ShapeRun:
    """One run of the full model without values, which shows what crosses each boundary."""

    def __init__(self, splitting: Splitting, skeleton: Skeleton) -> None:
        self._splitting, self._skeleton = splitting, skeleton
        self._names = splitting.names
        self._part = 0
        self._labelling = Labelling()
        self._crossing: list[tuple[str, ...]] = [()]
        self._parts_by_name: dict[str, frozenset[int]] = {}

    def run(self, batch: MicroBatch) -> ChunkPlan:
        splitting, model = self._splitting, self._skeleton.model
        for copied, original in zip(model.modules(), splitting.model.modules(), strict=True):
            copied.training = original.training
        precision, device = splitting.precision, splitting.device
        with torch.no_grad(), fake_parameters(model, device, precision.compute) as mode:
            self._label_parameters(model)
            calls = Calls(model, self._labelling, lambda: self._part)
            handles = [
                model.get_submodule(name).register_forward_pre_hook(self._boundary(part), with_kwargs=True)
                for part, name in enumerate(self._names, 1)
            ]
            given = (batch.args, batch.kwargs, batch.target)
            args, kwargs, target = given if mode is None else map_tensors(mode.from_tensor, given)
            try:
                with caches_restored(), self._labelling, precision.autocast_context(device):
                    outputs = model(*args, **kwargs)
                    if splitting.loss_fn is None:
                        outputs = MicroBatch(args, kwargs, target).loss(outputs, None)
            except _Refused as refused:
                raise ValueError(str(refused)) from None
            except Exception as error:
                raise ValueError(
                    "pipeline.split: the model's forward is run once without values, to learn what its modules give, "
                    f"and this failed: {type(error).__name__}: {error}. A forward that depends on values (.item(), "
                    "tensors as conditions) needs a PipelineModule instead"
                ) from error
            finally:
                calls.close()
                for handle in handles:
                    handle.remove()
        self._check_end(outputs)
        prefixes = [self._prefix(calls.root, part) for part in range(len(self._names) + 1)]
        return ChunkPlan(self._crossing, prefixes)

    def _label_parameters(self, model: nn.Module) -> None:
        parts = {name: assignment.parts for assignment in self._splitting.assignments for name in assignment.names}
        for name, parameter in model.named_parameters():
            self._parts_by_name[name] = parts[name]
            self._labelling.mark(parameter, frozenset([name]))

    def _boundary(self, part: int) -> Callable[..., object]:
        def hook(module: nn.Module, args: object, kwargs: object) -> object:
            name = self._names[part - 1]
            if self._part != part - 1:
                when = "again" if self._part >= part else f"before '{self._names[self._part]}'"
                raise _Refused(
                    f"pipeline.split: expected the model to call '{name}' once, after the modules that begin the parts "
                    f"before, got a call {when}; name modules that are called one after the other"
                )
            tensors = dict(tensors_with_places((args, kwargs)))
            crossing = tuple(place for place, tensor in tensors.items() if self._labelling.of(tensor))
            if not crossing:
                raise _Refused(
                    f"pipeline.split: expected arguments of '{name}' that are computed from parameters, got none; the "
                    "part before it would have nothing to send"
                )
            for place in crossing:
                self._check(self._labelling.of(tensors[place]), f"an argument of '{name}'")
            self._crossing.append(crossing)
            self._part = part
            received = {place: self._received(tensors[place], part) for place in crossing}
            return with_tensors((args, kwargs), received)

        return hook

    def _received(self, tensor: torch.Tensor, part: int) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._labelling.mark(made, frozenset([_RECEIVED + str(part)]))
        return made

    def _check(self, labels: Labels, what: str) -> None:
        """Raise unless ``what``, which leaves the current part, depends only on that part's parameters and received
        tensors."""
        part = self._part
        for label in sorted(labels):
            if label == _RECEIVED + str(part) or part in self._parts_by_name.get(label, ()):
                continue
            before = "the model" if part == 0 else f"'{self._names[part - 1]}'"
            if label.startswith(_RECEIVED):
                source = f"what '{self._names[int(label[len(_RECEIVED) :]) - 1]}' was called with"
                raise _Refused(
                    f"pipeline.split: {what} needs {source}, which does not pass through the arguments of {before}: a "
                    "skip connection over a boundary; only the arguments of the module that begins a part are sent to "
                    "it. Name other modules"
                )
            parts = ", ".join(map(str, sorted(self._parts_by_name[label])))
            raise _Refused(
                f"pipeline.split: {what}, in part {part}, needs parameter '{label}', which is in part {parts} (by the "
                f"order of registration), other than through the arguments of {before}. Only these are sent: let skip "
                "connections not cross a boundary, register modules in the order in which they are called (or give the "
                "model dummy_inputs, a dict of its forward's arguments, from which the order is learnt), and register "
                "shared weights in each module that uses them"
            )

    def _check_end(self, outputs: object) -> None:
        if self._part != len(self._names):
            raise ValueError(
                f"pipeline.split: expected the model's forward to call '{self._names[self._part]}', which begins part "
                f"{self._part + 1}, got no call; name a module that is called by itself"
            )
        what = "the loss" if self._splitting.loss_fn is None else "an output of the model"
        for tensor in find_tensors(outputs):
            try:
                self._check(self._labelling.of(tensor), what)
            except _Refused as refused:
                raise ValueError(str(refused)) from None

    def _prefix(self, root: Call, part: int) -> Prefix:
        """Choose stand-ins for the outermost calls before ``part`` whose outputs are known; all other modules run
        themselves."""
        forced: set[str] = set()
        while True:
            stand_ins: dict[str, list[Any]] = {}
            opened: set[str] = set()
            _visit(root, part, forced, stand_ins, opened)
            # A module that is called twice may be known in one call and not in the other: then it runs itself in both.
            clash = opened & set(stand_ins)
            if not clash:
                break
            forced |= clash
        model = self._skeleton.model
        compute = self._splitting.precision.compute
        shapes = {
            path: {
                name: (tuple(p.shape), compute if compute is not None and p.is_floating_point() else p.dtype)
                for name, p in model.get_submodule(path)._parameters.items()
                if p is not None
            }
            for path in opened
        }
        return Prefix(stand_ins, shapes)


def _visit(call: Call, part: int, forced: set[str], stand_ins: dict[str, list[object]], opened: set[str]) -> None:
    if call.path and call.static and 0 <= call.ended < part and call.path not in forced:
        stand_ins.setdefault(call.path, []).append(call.template)
        return
    opened.add(call.path)
    for inner in call.inner:
        if inner.began < part:
            _visit(inner, part, forced, stand_ins, opened)


_RECEIVED = "received by part "


class _Refused(BaseException):
    """The model cannot be divided there. It is no Exception, because models may catch those."""
