"""Random numbers and sizes between a column-parallel layer and its row-parallel layer.

Random numbers: outside all ranks of a tensor group have the same generator state, as what they compute is the same.
Inside, each has numbers of its own, seeded by one that all draw from the common state and by the rank. So a region that
is computed anew from the state that it began with (activation checkpointing) draws the same numbers.

Sizes: a module whose forward asks its input for the width, as in ``batch, length, width = x.shape``, to split it into
heads, is given an input that tells the width of this rank's part.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerolite.tensor_parallel.shard_spec import is_partial
from zerolite.utils.accelerator import is_fake

_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: neighbouring ranks get distant seeds
_MASK = (1 << 63) - 1


class Region:
    """The regions of one module: they begin in its column-parallel layers and end in its row-parallel ones, at the
    latest when its forward ends."""

    def __init__(self, rank: int, random: bool) -> None:
        """
        Args:
            rank: in the tensor group.
            random: whether the module draws random numbers inside.
        """
        self.rank, self.random = rank, random
        self.open = False
        self._restore: Callable[[], None] | None = None

    def enter(self, out: Tensor, training: bool) -> None:
        """A column-parallel layer has computed ``out``."""
        if self.open:
            return
        self.open = True
        if self.random and training and not is_fake(out):
            self._restore = fork_random_state(out.device, self.rank)

    def leave(self) -> None:
        """A row-parallel layer begins, or the module has ended. Does nothing outside of a region."""
        self.open = False
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def on_end(self, module: nn.Module, args: object, output: object) -> None:
        """A forward hook of the module, also called if its forward raises."""
        self.leave()

    def watch(self, module: nn.Module) -> None:
        """End regions with ``module``'s forward."""
        module.register_forward_hook(self.on_end, always_call=True)


class Outside:
    """Refuses that a module is called inside a region: see :meth:`check`."""

    def __init__(self, region: Region, name: str, parameter: str, inside: str, outside: str) -> None:
        """inside, outside: what to do if the module acts on each head alone, and if it does not."""
        self.region, self.name, self.parameter = region, name, parameter
        self.inside, self.outside = inside, outside

    def check(self, module: nn.Module, args: object) -> None:
        """A forward pre-hook. Raises RuntimeError inside a region: the gradients of the module's parameters would be
        parts that are never added up."""
        trained = any(p.requires_grad and not is_partial(p) for p in module.parameters(recurse=False))
        if self.region.open and trained and torch.is_grad_enabled():
            raise RuntimeError(
                f"tensor_parallel: expected layers without whole parameters between a column and its row, got "
                f"'{self.name}' with '{self.parameter}', of which each rank would see the gradient of its part only"
                f"{self.inside} if it acts on each head alike; else the layers around it cannot be cut{self.outside}"
            )


class FirstForward:
    """Says of an exception in the first forward of a module that its layers are cut: its code may ask for whole ones,
    and what torch says of shapes does not help then."""

    def __init__(self, name: str, how: str) -> None:
        """how: in what way it is cut, and what to do."""
        self.name, self.how = name, how

    def watch(self, module: nn.Module) -> None:
        self._handle = module.register_forward_hook(self.on_end, always_call=True)

    def on_end(self, module: nn.Module, args: object, output: object) -> None:
        """A forward hook, also called if the forward raises: without an output, inside of the handler."""
        error = sys.exc_info()[1] if output is None else None
        told = isinstance(error, torch.cuda.OutOfMemoryError) or "tensor_parallel" in str(error)
        if isinstance(error, _OF_SHAPES) and not told:
            error.args = (
                f"{error}\n(This came in the first forward of '{self.name}' ({type(module).__name__}). If its code "
                f"needs whole tensors it does not go with tensor_parallel, {self.how})",
            )
        elif output is not None:  # torch goes through its hooks while it handles an exception: then they have to stay
            self._handle.remove()


_OF_SHAPES = (RuntimeError, ValueError, AssertionError, IndexError)


def fork_random_state(device: torch.device, rank: int) -> Callable[[], None]:
    """Give ``device``'s default generator a state of ``rank``'s own, made of the present one; what is returned brings
    it back to the state behind the draw. All ranks with equal states have equal ones again then."""
    if device.type == "cuda":
        return _fork_on_cuda(torch.cuda.default_generators[device.index or 0], rank)
    generator = torch.default_generator
    number = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
    state = generator.get_state()
    generator.manual_seed(_seed(number, rank))
    return lambda: _set_state(generator, state)


def _fork_on_cuda(generator: torch.Generator, rank: int) -> Callable[[], None]:
    # The state is a seed and how many numbers have been drawn, both on the host: nothing waits for the device.
    state, drawn = generator.get_state(), generator.get_offset()
    generator.manual_seed(_seed(generator.initial_seed() + drawn * _STRIDE, rank))

    def restore() -> None:
        generator.set_state(state)
        generator.set_offset(drawn + 4)  # as if one number had been drawn; a multiple of 4 is asked for

    return restore


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _seed(number: int, rank: int) -> int:
    return (number + (rank + 1) * _STRIDE) & _MASK


class SeenInput(Tensor):
    """A tensor that tells the shape of what this rank makes of it as its own. Every operation works on the tensor that
    it stands for, and gives an ordinary one."""

    whole: Tensor

    @staticmethod
    def of(whole: Tensor, shape: Sequence[int]) -> Tensor:
        seen: Any = _Seen.apply(whole, shape)
        seen.whole = whole
        return seen

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.detach and any(f.function == "detach_variable" for f in inspect.stack(0)[1:4]):
            raise RuntimeError(_REFUSED)  # a reentrant checkpoint would compute with the shape of the whole
        return func(*_whole(args), **_whole(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        return func(*_whole(args), **_whole(kwargs or {}))


_REFUSED = (
    "tensor_parallel: expected the input of a module that splits it into heads to be used by ordinary operations, got "
    "an autograd function or a reentrant checkpoint inside of that module's forward; checkpoint the module from "
    "outside, or with use_reentrant=False"
)


class _Seen(torch.autograd.Function):
    """Autograd functions take a tensor past ``__torch_function__``: it must require a gradient as the whole one does,
    so that what comes back to it is not lost."""

    @staticmethod
    def forward(ctx: object, whole: Tensor, shape: Sequence[int]) -> Tensor:
        made: Tensor = Tensor._make_wrapper_subclass(SeenInput, shape, dtype=whole.dtype, device=whole.device)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:
        raise RuntimeError(_REFUSED)


_TOLD = {Tensor.shape.__get__, Tensor.size}  # type: ignore[attr-defined]


def _whole(value: Any) -> Any:
    if isinstance(value, SeenInput):
        return value.whole
    if type(value) in (tuple, list):
        return type(value)(_whole(item) for item in value)
    if type(value) is dict:
        return {key: _whole(item) for key, item in value.items()}
    return value


def seen_input(x: Tensor) -> Tensor:
    """The tensor that a layer is to work on."""
    return x.whole if type(x) is SeenInput else x


class SeenInputs:
    """Give a module that splits its input into heads the shape of this rank's part: of the width, and with sequence
    parallelism of the whole sequence, which its layers gather."""

    def __init__(self, width: int, narrower: int, longer: int, dim: int) -> None:
        """
        Args:
            width: of the input.
            narrower: by what the width is divided.
            longer: by what ``dim`` is multiplied.
        """
        self.width, self.narrower, self.longer, self.dim = width, narrower, longer, dim

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A forward pre-hook: the first floating input [..., width], wherever it is given."""
        inputs = [*args, *kwargs.values()]
        found = next((value for value in inputs if self._fits(value)), None)
        if found is None:
            return None
        shape = [*found.shape[:-1], self.width // self.narrower]
        shape[self.dim] *= self.longer
        seen = SeenInput.of(found, shape)
        given = [seen if value is found else value for value in inputs]
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    def _fits(self, value: object) -> bool:
        if not isinstance(value, Tensor) or type(value) is SeenInput:
            return False
        return value.dim() > self.dim + 1 and value.shape[-1] == self.width and value.is_floating_point()
