"""Random numbers and sizes between a column-parallel layer and its row-parallel layer.

Random numbers: outside of a region all ranks of a tensor group compute the same, so they have the same generator state.
Inside, each rank has its own state, seeded by its rank and a number that all ranks draw from the common state. So a
region that is recomputed from the state at its beginning (activation checkpointing) draws the same numbers again.

Sizes: some modules read the width of their input, as in ``batch, length, width = x.shape``, to split it into heads.
They get an input whose shape has the width of this rank's part.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolite.tensor_parallel.shard_spec import is_partial
from zerolite.utils.accelerator import host_value, is_fake
from zerolite.utils.torch_private import as_plain_tensors

_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: neighbouring ranks get distant seeds
_MASK = (1 << 63) - 1


class Region:
    """The regions of one module.

    A region begins in a column-parallel layer and ends in a row-parallel layer, or when the module's forward ends.
    """

    def __init__(self, rank: int, random: bool) -> None:
        """
        Args:
            rank: rank in the tensor group.
            random: the module may draw random numbers inside.
        """
        self.rank, self.random = rank, random
        self.open = False
        self._restore: Callable[[], object] | None = None

    def enter(self, out: Tensor, training: bool) -> None:
        """Begin a region: a column-parallel layer has computed ``out``."""
        if self.open:
            return
        self.open = True
        if self.random and training and not is_fake(out):
            self._restore = fork_random_state(out.device, self.rank)

    def leave(self) -> None:
        """End the region: a row-parallel layer begins, or the module has ended. Do nothing outside of a region."""
        self.open = False
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def on_end(self, module: nn.Module, args: object, output: object) -> None:
        """Forward hook of the module, also called if its forward raises."""
        self.leave()

    def watch(self, module: nn.Module) -> None:
        """End regions when ``module``'s forward ends."""
        module.register_forward_hook(self.on_end, always_call=True)


class ReplicatedModuleCheck:
    """Check that a module with replicated parameters is not called inside a region."""

    def __init__(self, region: Region, name: str, parameter: str, inside: str, outside: str) -> None:
        """
        Args:
            region: the region.
            name: name of the module.
            parameter: name of its parameter.
            inside: advice if the module acts on each head alike.
            outside: advice if it does not.
        """
        self.region, self.name, self.parameter = region, name, parameter
        self.inside, self.outside = inside, outside

    def check(self, module: nn.Module, args: object) -> None:
        """Raise RuntimeError inside a region. This is a forward pre-hook.

        Inside, each rank computes a part of the gradient of the module's parameters, and the parts are never summed.
        """
        trained = any(p.requires_grad and not is_partial(p) for p in module.parameters(recurse=False))
        if self.region.open and trained and torch.is_grad_enabled():
            raise RuntimeError(
                "tensor_parallel: expected no replicated parameter between a column-parallel and a row-parallel layer, "
                f"got '{self.parameter}' of '{self.name}': each rank would compute only a part of its gradient"
                f"{self.inside} if it acts on each head alike; else the layers around it cannot be sharded"
                f"{self.outside}"
            )


class FirstForwardErrors:
    """Hook that adds an explanation to an exception in the first forward of a module with sharded layers.

    The module's code may need full tensors, and torch's messages about shapes do not mention that.
    """

    def __init__(self, name: str, how: str) -> None:
        """
        Args:
            name: name of the module.
            how: clause with what tensor parallelism has sharded, and what to do.
        """
        self.name, self.how = name, how

    def watch(self, module: nn.Module) -> None:
        self._handle = module.register_forward_hook(self.on_end, always_call=True)

    def on_end(self, module: nn.Module, args: object, output: object) -> None:
        """Explain the exception. This is a forward hook; after an exception torch calls it without an output."""
        error = sys.exc_info()[1] if output is None else None
        clear = isinstance(error, torch.cuda.OutOfMemoryError) or "tensor_parallel" in str(error)
        if isinstance(error, _SHAPE_ERRORS) and not clear:
            error.args = (
                f"{error}\n(This was raised in the first forward of '{self.name}' ({type(module).__name__}). Its code "
                f"may need full tensors, but tensor_parallel {self.how})",
            )
        elif output is not None:  # after an exception torch iterates over the hooks, so none may be removed
            self._handle.remove()


_SHAPE_ERRORS = (RuntimeError, ValueError, AssertionError, IndexError)


def fork_random_state(device: torch.device, rank: int) -> Callable[[], object]:
    """Give ``device``'s default generator its own state on each rank, derived from the current state by one draw.

    Returns:
        A function that sets the state after that draw. So ranks with equal states before have equal states again.
    """
    if device.type == "cuda":
        return _fork_on_cuda(torch.cuda.default_generators[device.index or 0], rank)
    generator = torch.default_generator
    number = int(host_value(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)))
    state = generator.get_state()
    generator.manual_seed(_seed(number, rank))
    return functools.partial(generator.set_state, state)


def _fork_on_cuda(generator: torch.Generator, rank: int) -> Callable[[], None]:
    # The CUDA state is a seed and a count of drawn numbers, both on the host, so the host does not wait for the device.
    state, drawn = generator.get_state(), generator.get_offset()
    generator.manual_seed(_seed(generator.initial_seed() + drawn * _STRIDE, rank))

    def restore() -> None:
        generator.set_state(state)
        generator.set_offset(drawn + 4)  # as if one number had been drawn; CUDA accepts multiples of 4 only

    return restore


def _seed(number: int, rank: int) -> int:
    return (number + (rank + 1) * _STRIDE) & _MASK


class LocalShapeTensor(Tensor):
    """A tensor whose ``shape`` is that of this rank's part.

    Every operation uses the full tensor and returns an ordinary one.
    """

    full: Tensor

    def __new__(cls, full: Tensor, shape: Sequence[int]) -> LocalShapeTensor:
        local: LocalShapeTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=full.dtype, device=full.device)
        return local

    def __init__(self, full: Tensor, shape: Sequence[int]) -> None:
        self.full = full

    @staticmethod
    def of(full: Tensor, shape: Sequence[int]) -> Tensor:
        local: Tensor = _LocalShape.apply(full, shape)
        return local

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if func is Tensor.detach and _is_input_of_reentrant_checkpoint():
            raise RuntimeError(_REFUSED)
        return func(*_unwrap(args), **_unwrap(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        return func(*_unwrap(args), **_unwrap(kwargs or {}))


def _is_input_of_reentrant_checkpoint() -> bool:
    """Return True if torch's reentrant checkpoint detaches the tensor, to recompute with the shape of the full one.

    Only the caller's name tells. Modules themselves may detach their input in a backward, where another checkpoint
    recomputes them.
    """
    frame = sys._getframe(1)
    for _ in range(3):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "detach_variable":
            return True
    return False


_REFUSED = (
    "tensor_parallel: expected the input of a module that splits it into heads to be used by ordinary operations, got "
    "an autograd function or a reentrant checkpoint inside of that module's forward; checkpoint the module from "
    "outside, or with use_reentrant=False"
)


class _LocalShape(torch.autograd.Function):
    """Autograd function that makes a LocalShapeTensor.

    Autograd functions ignore ``__torch_function__``. The tensor requires a gradient as the full one does, so that its
    backward raises an error and no gradient is lost silently.
    """

    @staticmethod
    def forward(ctx: object, full: Tensor, shape: Sequence[int]) -> Tensor:
        return LocalShapeTensor(full, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:
        raise RuntimeError(_REFUSED)


_METADATA = {Tensor.shape.__get__, Tensor.size}  # type: ignore[attr-defined]


def _unwrap(value: Any) -> Any:
    if isinstance(value, LocalShapeTensor):
        return value.full
    if type(value) in (tuple, list):
        return type(value)(_unwrap(element) for element in value)
    if type(value) is dict:
        return {key: _unwrap(element) for key, element in value.items()}
    return value


def full_tensor(x: Tensor) -> Tensor:
    """Return the full tensor behind a :class:`LocalShapeTensor`; any other tensor itself."""
    return x.full if type(x) is LocalShapeTensor else x


class LocalShapeHook:
    """Hook that gives a module an input with the shape of this rank's part.

    The module splits its input into heads, so the width must be that of this rank's heads. With sequence parallelism
    the sequence is the full one, because the layers gather it.
    """

    def __init__(self, width: int, narrower: int, longer: int, dim: int) -> None:
        """
        Args:
            width: width of the input.
            narrower: divisor of the width.
            longer: factor of the length along ``dim``.
            dim: the sequence dimension.
        """
        self.width, self.narrower, self.longer, self.dim = width, narrower, longer, dim

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the first floating input [..., width], positional or by keyword. This is a forward pre-hook."""
        inputs = [*args, *kwargs.values()]
        hidden = next((value for value in inputs if self._fits(value)), None)
        if hidden is None:
            return None
        shape = [*hidden.shape[:-1], self.width // self.narrower]
        shape[self.dim] *= self.longer
        local = LocalShapeTensor.of(hidden, shape)
        values = [local if value is hidden else value for value in inputs]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _fits(self, value: object) -> bool:
        if not isinstance(value, Tensor) or type(value) is LocalShapeTensor:
            return False
        return value.dim() > self.dim + 1 and value.shape[-1] == self.width and value.is_floating_point()
