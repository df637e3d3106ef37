"""Conversion of real and meta tensors to fake CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter, unset_fake_temporarily

from zerolite.utils.accelerator import FakeMode, is_fake
from zerolite.utils.nested import map_tensors
from zerolite.zero.stage3.partitioned_parameter import handle_of

_NUMBERS = {
    torch.ops.aten.linspace.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
}
_MOST_NUMBERS = 4096
_OF_STORAGES = {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}
"""torch's cache of what operators return would keep these storages: those that torch.load makes."""


class _Converter(FakeTensorConverter):
    """Remembers what it has made of real tensors alone. A weak reference to anything else would keep
    ``torch.utils.swap_tensors`` from working, and so ``module.half()`` and the like."""

    def set_tensor_memo(self, t: torch.Tensor, v: Any) -> None:
        if not t.is_meta:
            super().set_tensor_memo(t, v)


class WithoutMemory(FakeMode):
    """The mode of a dry run. Copies of its tensors (``copy.deepcopy``) are its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_tensor_converter = _Converter()
        self._constructing = False
        self.stepping = False  # an optimizer may read its counts of steps: they are 1

    def __deepcopy__(self, memo: Any) -> WithoutMemory:
        return self

    @contextlib.contextmanager
    def constructing(self) -> Iterator[None]:
        """Inside, a model is made, as constructors are used to do it: a few numbers that come from Python can be read
        again (``[x.item() for x in torch.linspace(0, 0.1, depth)]``), and ``trunc_normal_``, which looks at what it
        draws, draws nothing for tensors without memory."""
        init: Any = torch.nn.init
        draw = init._no_grad_trunc_normal_

        def truncated(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return tensor if is_fake(tensor) else draw(tensor, *args, **kwargs)

        init._no_grad_trunc_normal_, self._constructing = truncated, True
        try:
            yield
        finally:
            init._no_grad_trunc_normal_, self._constructing = draw, False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stepping and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        device = torch.device((kwargs or {}).get("device") or "cpu")
        if device.type not in ("cpu", "meta"):  # a torch that is built for it makes the tensor, and fails in backward
            raise RuntimeError(f"{func} asks for the device {device}, and tensors of a plan are on the CPU")
        cached, self.cache_enabled = self.cache_enabled, self.cache_enabled and func not in _OF_STORAGES
        try:
            out: Any = super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = cached
        if self._constructing and func in _NUMBERS and out.device.type == "cpu" and out.numel() <= _MOST_NUMBERS:
            with unset_fake_temporarily():
                out.constant = func(*args, **(kwargs or {}))
            self.fake_tensor_converter.add_constant_storage_mapping(out)
        return out


def without_memory(values: Any) -> Any:
    """``values`` (nested) with fake tensors on the CPU in place of all others. Inside a FakeTensorMode."""
    return map_tensors(_fake, values)


def on_the_cpu(model: torch.nn.Module) -> None:
    """Fake parameters and buffers of ``model`` that are on the meta device, to the CPU. Tied ones stay tied. Inside a
    FakeTensorMode."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and handle_of(parameter) is None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(_fake(parameter), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = made.setdefault(id(buffer), _fake(buffer))
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:  # what was made of numbers (torch.tensor(0.5)) remembers them, with the dtype that it had
        tensor.constant = None


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    if is_fake(tensor) and tensor.device.type == "cpu":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
