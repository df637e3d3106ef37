"""Simulated backend of a dry run: tensors without memory, and a platform without files or other ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerolite.offload.placement import Transfer
from zerolite.planning import shape_cache
from zerolite.utils.accelerator import FakeMode, Platform, is_fake
from zerolite.utils.torch_private import (
    FakeTensor,
    FakeTensorConverter,
    as_fake_tensor,
    trunc_normal_leaves,
    unset_fake_temporarily,
)
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

_MAX_READABLE = 4096  # elements
_USE_STORAGES = {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}
"""Operators that are not cached, because torch's cache would keep their storages, which torch.load makes."""

_CPU = torch.device("cpu")


class _Converter(FakeTensorConverter):
    """Converter that caches the results for real tensors only.

    For meta tensors it would keep weak references, and ``torch.utils.swap_tensors``, which ``module.half()`` and the
    like use, refuses tensors with weak references.
    """

    def set_tensor_memo(self, t: torch.Tensor, v: Any) -> None:
        if not t.is_meta:
            super().set_tensor_memo(t, v)


class DryFakeMode(FakeMode):
    """FakeTensorMode of a dry run."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_tensor_converter = _Converter()
        self._constructing = False
        self._attributes: dict[str, Any] = {}  # attributes of a FakeTensor, equal for all
        self._stepping = False

    def __deepcopy__(self, memo: Any) -> DryFakeMode:
        return self  # so that a copied tensor belongs to the same mode

    @contextlib.contextmanager
    def constructing(self) -> Iterator[None]:
        """Context for constructors of models, which may read a few values.

        Small tensors of numbers are readable, as in ``[x.item() for x in torch.linspace(0, 0.1, depth)]``.
        ``trunc_normal_``, which reads the values that it draws, leaves fake tensors alone.
        """
        self._constructing = True
        try:
            with trunc_normal_leaves(is_fake):
                yield
        finally:
            self._constructing = False

    @contextlib.contextmanager
    def phase(self, step: bool) -> Iterator[None]:
        """Context of a phase. In the optimizer's step, values that it reads are 2.

        They are mostly step counts, and some optimizers divide by 1 minus a power of a number below 1.
        """
        self._stepping = step
        try:
            yield
        finally:
            self._stepping = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in a dry run, and torch's guard against it costs time at each operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return shape_cache.cached_call(
            self, func, args, given, lambda: super(DryFakeMode, self).__torch_dispatch__(func, types, args, given)
        )

    def wrapped(self, tensor: torch.Tensor) -> FakeTensor:
        """Return a meta tensor as a FakeTensor of this mode, with attributes copied from the first one."""
        if not self._attributes:
            self._attributes.update(vars(FakeTensor(self, tensor, _CPU)))
        return as_fake_tensor(tensor, self._attributes)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._stepping and func is torch.ops.aten._local_scalar_dense.default:
            return 2.0 if args[0].is_floating_point() else 2
        device = torch.device((kwargs or {}).get("device") or "cpu")
        if device.type not in ("cpu", "meta"):  # torch built with CUDA would make the tensor and fail only in backward
            raise RuntimeError(f"{func} asks for the device {device}, and tensors of a plan are on the CPU")
        cached, self.cache_enabled = self.cache_enabled, self.cache_enabled and func not in _USE_STORAGES
        try:
            out: Any = super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = cached
        few = func in shape_cache.NUMBERS and out.device.type == "cpu" and out.numel() <= _MAX_READABLE
        if self._constructing and few:
            with unset_fake_temporarily():
                out.constant = func(*args, **(kwargs or {}))
            self.fake_tensor_converter.add_constant_storage_mapping(out)
        return out


def move_meta_to_fake_cpu(model: torch.nn.Module) -> None:
    """Replace meta parameters, and meta and real buffers of ``model``, by fake ones on the CPU.

    Called inside a FakeTensorMode.

    Tied parameters stay tied.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and sharded_param_of(parameter) is None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(as_fake(parameter), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and (buffer.is_meta or not is_fake(buffer)):  # a constant of the user's, for example
                module._buffers[name] = made.setdefault(id(buffer), as_fake(buffer))
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:  # the constant of torch.tensor(0.5) has its old dtype even after a conversion
        tensor.constant = None


@contextlib.contextmanager
def one_document_each() -> Iterator[None]:
    """Context in which Hugging Face's models take each sequence for one document.

    They find packed documents by the values of positions. Without values they would make a mask for every pair of
    tokens, and attention with a mask takes other memory.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is not None:
        masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        if find is not None:
            masks.find_packed_sequence_indices = find


def as_fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like ``tensor`` on the CPU, or itself if it is one. Called inside a FakeTensorMode."""
    if is_fake(tensor) and tensor.device.type == "cpu":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


class DryPlatform(Platform):
    """Platform of a simulated rank: the CPU, no memory, no files, and zeros for values that are read.

    Attributes:
        host_waits: number of reads for which the host has waited in the step that began them.
        is_beside: the code that runs is in the context of :meth:`side_stream`.
        skipped: bytes that kernels would have read and written, of those that an engine tells of.
    """

    joins_jobs = False

    def __init__(self, device_kind: str = "cpu") -> None:
        """device_kind: type of the device that is simulated."""
        self._device_kind, self.is_beside = device_kind, False
        self.step = self.host_waits = self.skipped = 0

    def queues(self, tensor: torch.Tensor) -> bool:
        return self._device_kind != "cpu"

    @contextlib.contextmanager
    def side_stream(self, device: torch.device) -> Iterator[None]:
        self.is_beside = True
        try:
            yield
        finally:
            self.is_beside = False

    def skip_kernel(self, nbytes: int) -> None:
        self.skipped += nbytes

    def end_step(self) -> None:
        self.step += 1

    def reset_host_waits(self) -> None:
        self.host_waits = 0

    def wait(self, step: int) -> None:
        """Wait for a read that began in ``step``."""
        self.host_waits += step == self.step

    def device(self, local_rank: int) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    def host_memory(self, nbytes: int, pin: bool, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor of shape [nbytes] and dtype uint8, without memory if ``like`` has none."""
        make = torch.empty if like is None else like.new_empty
        return make(nbytes, dtype=torch.uint8, device="cpu")

    def file(self, make: Callable[[], Any]) -> Any:
        """Return a file that keeps nothing."""
        return DryFile()

    def read(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return zeros for a tensor without memory, and an event that counts a wait of the host."""
        if not is_fake(tensor):
            return super().read(tensor)
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"), DryEvent(self)


class DryEvent:
    """Event of a read to the host. The read is assumed to be complete when the step that began it has ended."""

    def __init__(self, platform: DryPlatform) -> None:
        self._platform, self._step = platform, platform.step

    def synchronize(self) -> None:
        self._platform.wait(self._step)


class DryFile:
    """Swap file of a dry run, without contents."""

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def read(self, offloaded: torch.Tensor, into: torch.Tensor) -> Transfer:
        into.copy_(offloaded)
        return Transfer()

    def write(self, offloaded: torch.Tensor, source: torch.Tensor) -> Transfer:
        offloaded.copy_(source)
        return Transfer()

    def drop_page_cache(self, replaced: bool = False) -> None:
        return

    def verify(self) -> None:
        return
