"""``engine.offload_states()``: move all states of an engine from its device to the host and back.

Use it while something else needs the device's memory, such as a model that generates in reinforcement learning, or an
evaluation. Storages are emptied and filled again instead of being replaced, so every view of them stays valid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from zerolite.utils.accelerator import host_memory
from zerolite.utils.memory_tags import BUCKETS, COMPUTE, GRADIENTS, HOST, MASTERS, STATES, resize, tag_memory
from zerolite.utils.nested import Arguments, Function, Keywords
from zerolite.zero.engine_parts import EngineParts
from zerolite.zero.stage3.absent_parameter import AbsentParameter
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

KINDS = {
    "optim_states": STATES,
    "hp_params": MASTERS,
    "lp_params": COMPUTE,
    "lp_grads": GRADIENTS,
    "contiguous_grad_buffer": BUCKETS,
}
"""DeepSpeed's names (OffloadStateTypeEnum), and the memory category that each stands for.

In this order: optimizer states, separate master weights, compute parameters, reduced gradients before the step, and
gradient buckets for reuse."""


class StateOffload:
    """Offload of one engine's states. Only :meth:`reload` at stage 3 is a collective: it gathers persistent
    parameters."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        parts.memory_sources.append(self.memory)
        self._out: list[tuple[torch.UntypedStorage, torch.Tensor]] = []  # emptied storages, and their bytes on the host
        self._categories: list[str] = []  # memory categories of ``_out``
        self._persistent: list[Any] = []  # handles of stage 3's persistent parameters
        self._class: type = type("OffloadedParameter", (AbsentParameter,), {"source": _OnHost(parts.model)})
        self._copied: torch.cuda.Event | None = None  # end of copies to the host that the host has not waited for

    @torch.no_grad()
    def offload(self, include: Iterable[object] | None, device: object, pin_memory: bool, non_blocking: bool) -> None:
        """See :meth:`Engine.offload_states`. All memory on the host is allocated before anything is changed."""
        kinds, pipeline = _kinds(include), self._parts.pipeline
        if str(getattr(device, "value", device)) != "cpu":
            raise ValueError(f'engine.offload_states: expected device to be "cpu", got {device!r}')
        if pipeline.suspended:
            raise RuntimeError("engine.offload_states: states are on the host already; call engine.reload_states()")
        pipeline.check_between_steps()
        pipeline.state.settle()
        pipeline.wait_for_reductions()
        pipeline.written.collect()
        if self._parts.coordinator is not None:
            self._parts.coordinator.collect_frozen_writes()
        parameters = list(self._parts.model.named_parameters()) if "lp_params" in kinds else []
        self._check_class(parameters)
        pin = pin_memory and self._parts.device.type == "cuda"
        chosen = self._chosen({KINDS[name] for name in kinds})
        out = [
            (storage, tag_memory(host_memory(storage.nbytes(), pin), category, HOST)) for category, storage in chosen
        ]
        for storage, copy in out:
            copy.copy_(_bytes_of(storage), non_blocking=pin)
        if not non_blocking:
            self._synchronize()
        elif pin:
            self._leave_running([storage for storage, _ in out])
        if parameters:
            self._let_go()
        for storage, _ in out:
            resize(storage, 0)
        for _, parameter in parameters:
            if sharded_param_of(parameter) is None:
                parameter.__class__ = self._class
        self._out, self._categories = out, [category for category, _ in chosen]
        pipeline.suspend(_SUSPENDED)

    def reload(self) -> None:
        """See :meth:`Engine.reload_states`."""
        self.restore()
        persistent, self._persistent = self._persistent, []
        if self._parts.coordinator is not None:
            self._parts.coordinator.context.gather(persistent)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore this rank's states, without a collective. This is enough if the engine is deleted and its model
        stays."""
        if not self._parts.pipeline.suspended:
            return
        if self._copied is not None:  # the current stream may be another one than that of the copies to the host
            torch.cuda.current_stream(self._parts.device).wait_event(self._copied)
            self._copied = None
        for storage, copy in self._out:
            resize(storage, copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self._synchronize()  # the copies must be complete before the host's memory is freed
        self._out = []
        self._parts.pipeline.suspend("")
        if self._parts.coordinator is not None:
            self._parts.coordinator.context.suspend("")
        for parameter in self._parts.model.parameters():
            if type(parameter) is self._class:
                parameter.__class__ = torch.nn.Parameter

    def memory(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that are on the host now, each with its memory category."""
        return [(category, copy) for category, (_, copy) in zip(self._categories, self._out, strict=False)]

    def _chosen(self, categories: Collection[str]) -> list[tuple[str, torch.UntypedStorage]]:
        """Return the device's storages that belong to ``categories``, each once."""
        seen: set[int] = set()
        chosen = []
        for category, tensor in self._offloadable_tensors():
            storage = tensor.untyped_storage()
            # In fp32 masters are the parameters themselves. Their storages count as parameters, which come first.
            first = id(storage) not in seen
            seen.add(id(storage))
            if category in categories and first and _moves(tensor, self._parts.device):
                chosen.append((category, storage))
        return chosen

    @staticmethod
    def _check_class(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        for name, parameter in parameters:
            if sharded_param_of(parameter) is None and type(parameter) is not torch.nn.Parameter:
                raise ValueError(
                    f"engine.offload_states: expected parameters of class torch.nn.Parameter, got '{name}' of class "
                    f"{type(parameter).__name__}, which could not refuse to be used meanwhile; leave lp_params out"
                )

    def _let_go(self) -> None:
        """Release stage 3's gathered parameters, and refuse gathers from here on."""
        if self._parts.coordinator is not None:
            self._parts.coordinator.reset()
            self._persistent = [p for p in self._parts.coordinator.sharded_params if p.persistent]
            for sharded_param in self._persistent:
                sharded_param.release()
            self._parts.coordinator.context.suspend(_SUSPENDED)

    def _offloadable_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts = self._parts
        yield from ((COMPUTE, bucket.compute) for bucket in parts.buffer.buckets)
        for parameter in parts.model.parameters():
            sharded_param = sharded_param_of(parameter)
            if sharded_param is not None:
                yield COMPUTE, sharded_param.shard
            elif parameter.numel():
                yield COMPUTE, parameter.data
        yield from ((COMPUTE, bucket.owned) for bucket in parts.buffer.buckets)
        yield from ((MASTERS, bucket.master) for bucket in parts.buffer.buckets)
        yield from ((STATES, state) for state in parts.optimizer.method.memory())
        yield from parts.reducer.memory()

    def _leave_running(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Let the copies to the host go on after the call: record their end, and keep the allocator from handing their
        sources out to other streams before."""
        stream = torch.cuda.current_stream(self._parts.device)
        self._copied = torch.cuda.Event()
        self._copied.record(stream)
        for storage in storages:
            _bytes_of(storage).record_stream(stream)

    def _synchronize(self) -> None:
        """Let the host wait for the copies, before it uses or frees its own memory. The device needs no wait: later
        work that takes over its memory runs in the order of the stream."""
        if self._parts.device.type == "cuda":
            torch.cuda.current_stream(self._parts.device).synchronize()


_SUSPENDED = (
    "engine.offload_states() has brought states of this engine to the host; call engine.reload_states() before it is "
    "trained, saved, loaded or read"
)


def _kinds(include: Iterable[object] | None) -> list[str]:
    if include is None:
        return list(KINDS)
    if isinstance(include, str):
        raise ValueError(
            f"engine.offload_states: expected include to be a list of {list(KINDS)}, got {include!r} alone"
        )
    names = [str(getattr(state, "value", state)) for state in include]
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ValueError(f"engine.offload_states: expected include to be some of {list(KINDS)}, got {unknown[0]!r}")
    return names


def _moves(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return True if the tensor's memory belongs to the device's allocator. Tensors of other placements stay."""
    storage = tensor.untyped_storage()
    return tensor.device.type == device.type and storage.resizable() and bool(storage.nbytes())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _OnHost:
    """Source of parameters whose values are on the host for a time: it refuses what touches them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def run(self, function: Function, args: Arguments, kwargs: Keywords, absent: Sequence[torch.Tensor]) -> Any:
        """Raise RuntimeError, which says what to do."""
        name = next((name for name, parameter in self._model.named_parameters() if parameter is absent[0]), "?")
        if function is torch.Tensor.__repr__:
            return f"Parameter '{name}' of shape {tuple(absent[0].shape)}, offloaded"
        raise RuntimeError(
            f"parameter '{name}' is on the host, where engine.offload_states() has brought it; call "
            "engine.reload_states() before it is used"
        )
