"""Full state dicts and 16-bit models at every stage, and the hooks that refuse partial ones."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint.checkpointer import directory_of
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.full_model import FullModel, FullTensor, describe, first_names, merge_stages
from zerolite.checkpoint.huggingface import ModelFile, ModelWriter, exported_dtype, plan_files
from zerolite.checkpoint.matching import listed
from zerolite.checkpoint.model_state import ModelState
from zerolite.checkpoint.names import clean
from zerolite.checkpoint.parameter_access import ParameterAccess
from zerolite.checkpoint.safetensors import ToStore
from zerolite.comm import Communicator, HostGroup, Topology, collective, raise_together
from zerolite.comm.initial_sync import broadcast_into
from zerolite.tensor_parallel.shard_spec import shard_spec_of
from zerolite.utils.accelerator import host_values
from zerolite.utils.dtypes import FLOATS, HALF
from zerolite.utils.module_hook import ModuleHook
from zerolite.utils.torch_private import as_plain_tensors
from zerolite.zero.stage3.gathered_parameters import GatheredParameters
from zerolite.zero.stage3.partitioned_parameter import sharded_param_of

logger = logging.getLogger("zerolite")

_EXTRA = "_extra_state"  # torch's key for what a module's get_extra_state gives

_allowed = 0  # calls in progress that may see a rank's part of the state


def _sharded_names(module: torch.nn.Module, prefix: str) -> list[str]:
    """Return the names of a module's parameters of which this rank has only a part."""
    named = module.named_parameters(remove_duplicate=False)
    return [prefix + key for key, parameter in named if shard_spec_of(parameter) is not None]


class _RefusalHook(ModuleHook):
    """Hook that calls ``refuse``. A copy of the module keeps the hook if it has parts of parameters too."""

    def __init__(self, refuse: Callable[..., None], module: torch.nn.Module) -> None:
        self._refuse, self._module = refuse, weakref.ref(module)

    def __call__(self, *args: Any) -> None:
        self._refuse(*args)

    def stays_in_copies(self) -> bool:
        module = self._module()
        return module is None or bool(_sharded_names(module, ""))


def _before_save(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    found = [] if _allowed else _sharded_names(module, prefix)
    if found:
        raise RuntimeError(
            f"state_dict: this rank has tensor-parallel shards of parameters: {listed(found)}. Call "
            "engine.full_state_dict() on all ranks, which returns the full parameters."
        )


def _before_load(module: torch.nn.Module, state: object, prefix: str, *rest: Any) -> None:
    found = [] if _allowed else _sharded_names(module, prefix)
    if found:
        raise RuntimeError(
            f"load_state_dict: this rank has tensor-parallel shards of parameters, which cannot load full "
            f"values: {listed(found)}. Call engine.load_full_state_dict(state) on all ranks."
        )


def _forbid_shard_state_dicts(model: torch.nn.Module) -> None:
    """Let ``state_dict`` and ``load_state_dict`` of modules with sharded parameters raise RuntimeError, for good."""
    for module in model.modules():
        if not any(isinstance(hook, _RefusalHook) for hook in module._state_dict_pre_hooks.values()):
            _RefusalHook(_before_save, module).install(module.register_state_dict_pre_hook)
            _RefusalHook(_before_load, module).install(module.register_load_state_dict_pre_hook)


def forbid_partial_state_dicts(model: torch.nn.Module, topology: Topology) -> None:
    """Let ``state_dict`` and ``load_state_dict`` raise RuntimeError where a part would be taken for the full model.

    This holds for all modules with tensor-parallel shards, and for the model of a pipeline stage. The hooks are never
    removed, because the model stays a part of the full one when its engine is deleted.
    """
    if topology.tensor.world_size > 1:
        _forbid_shard_state_dicts(model)
    if topology.pipe.world_size > 1:
        stage = f"this rank has stage {topology.pipe.rank + 1} of {topology.pipe.world_size} of the model only"
        model.register_state_dict_pre_hook(functools.partial(_refuse_stage, f"state_dict: {stage}", _SAVE_REMEDY))
        model.register_load_state_dict_pre_hook(
            functools.partial(_refuse_stage, f"load_state_dict: {stage}", _LOAD_REMEDY)
        )


_SAVE_REMEDY = "Call engine.full_state_dict() on all ranks, which returns that of the full model."
_LOAD_REMEDY = "Call engine.load_full_state_dict(state) on all ranks, which takes that of the full model."


def _refuse_stage(what: str, remedy: str, module: torch.nn.Module, *rest: Any) -> None:
    if not _allowed:
        raise RuntimeError(f"{what}. {remedy}")


@collective
class FullState:
    """Full state dicts of one engine's model and optimizer, and export of the model into files."""

    def __init__(self, states: ModelState, access: ParameterAccess) -> None:
        self._states, self._parts, self._access = states, states.parts, access
        self._topology, self._device = states.parts.topology, states.parts.device

    @torch.no_grad()
    def get(self, rank0_only: bool, dtype: torch.dtype | None) -> dict[str, Any]:
        """See ``Engine.full_state_dict``. Parameters are gathered one by one."""
        if dtype is not None and dtype not in FLOATS:
            raise ValueError(
                f"full_state_dict: expected dtype to be None or one of {', '.join(map(str, FLOATS))}, got {dtype!r}"
            )
        whole = self._full_model()
        copies: dict[str, torch.Tensor | None] = {}
        state: dict[str, Any] = {}
        for name, entry in whole.entries.items():
            if isinstance(entry, FullTensor) and entry.owner not in copies:
                copies[entry.owner] = whole.get(entry, dtype, rank0_only)
            state[name] = copies[entry.owner] if isinstance(entry, FullTensor) else entry
        return state if not rank0_only or self._topology.world.rank == 0 else {}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """See ``Engine.load_full_state_dict``. Rank 0 sends parameters and buffers one by one, then the modules' extra
        state. Raises RuntimeError on all ranks, before anything is written."""
        self._parts.pipeline.check_available()
        self._parts.param_gatherer.wait_all()
        model, topology, device = self._parts.model, self._topology, self._device
        own: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        transient = {
            f"{prefix}.{key}" if prefix else key
            for prefix, module in model.named_modules(remove_duplicate=False)
            for key in module._non_persistent_buffers_set
        }
        own.update((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n not in transient)
        first = first_names(own)
        known = {name: describe(first[id(tensor)], tensor, tensor, trained=False) for name, tensor in own.items()}
        extra = _with_extra_state(model)
        targets = merge_stages({**known, **dict.fromkeys(extra)}, topology)
        here = {known[name].owner: tensor for name, tensor in own.items()}
        given = dict(state or {}) if topology.world.rank == 0 else {}
        present = _agree(targets, given, topology.world, device, strict)
        done: set[str] = set()
        for name, target in targets.items():
            if name in present and isinstance(target, FullTensor) and target.owner not in done:
                done.add(target.owner)
                _distribute(given.get(name), target, here.get(target.owner), topology, device)
        others = sorted(name for name in present if targets[name] is None)
        if others:
            host = HostGroup(topology.world, "whole model")
            values = host.broadcast({name: given.get(name) for name in others}, 0)
            for name, module in extra.items():
                if name in values:
                    module.set_extra_state(values[name])
        loaded = (tensor for name, tensor in own.items() if known[name].owner in done)
        self._parts.pipeline.written.on_loaded(t for t in loaded if isinstance(t, torch.nn.Parameter))

    def get_optimizer_state(self, rank0_only: bool) -> dict[str, Any]:
        """See ``Engine.full_optimizer_state_dict``. States are gathered one by one."""
        self._check_readable()
        self._parts.pipeline.state.settle()
        return full_optimizer_state_dict(self._states, self._access, rank0_only)

    @torch.no_grad()
    def save_16bit(self, save_dir: str | os.PathLike[str], max_shard_size: str | int, exclude_frozen: bool) -> None:
        """See ``Engine.save_16bit_model``. All ranks gather one parameter after the other, and rank 0 writes it
        (:class:`ModelWriter`).

        Args:
            exclude_frozen: write only trained parameters, and the buffers of modules that have some.

        Raises:
            ValueError: for a wrong ``max_shard_size``.
            CheckpointError: on all ranks if rank 0 cannot write.
        """
        computes = self._parts.precision.compute or self._parts.precision.autocast
        dtype = computes if computes in HALF else torch.bfloat16
        assert dtype is not None
        directory = Path(directory_of(save_dir, "save_dir"))
        whole, world, device = self._full_model(), self._topology.world, self._device
        tensors = dict(whole.tensors())
        left_out = sorted(whole.entries.keys() - tensors.keys())
        if left_out and world.rank == 0:
            logger.warning("save_16bit_model: left out what is no tensor: %s", listed(left_out))
        if exclude_frozen:
            tensors = _training(tensors)
        first: dict[str, str] = {}  # first name of a tensor, by its owner
        for name, known in tensors.items():
            first.setdefault(known.owner, name)
        written = {clean(name): tensors[name] for name in first.values()}
        entries = [ToStore(name, exported_dtype(known.dtype, dtype), known.shape) for name, known in written.items()]
        aliases = {clean(name): clean(first[k.owner]) for name, k in tensors.items() if name != first[k.owner]}
        plan = plan_files(entries, max_shard_size, aliases)
        writer = ModelWriter(directory, plan)

        def get(entry: ToStore) -> torch.Tensor | None:
            return whole.get(written[entry.name], dtype, rank0_only=True)

        with contextlib.ExitStack() as stack:
            _on_rank0(functools.partial(stack.enter_context, writer), world, device)
            for file in plan:
                values = _Gathered(file, get)
                _on_rank0(functools.partial(writer.write, file, values), world, device, values)
            _on_rank0(writer.commit, world, device)

    def _full_model(self) -> FullModel:
        self._check_readable()
        self._parts.param_gatherer.wait_all()
        model = self._parts.model
        return FullModel(model, _local_state_dict(model), self._topology, self._device, self._access)

    def _check_readable(self) -> None:
        self._parts.pipeline.check_available()
        self._parts.pipeline.check_no_failed_update()
        placements = self._parts.buffer.placements
        if placements.on_disk:
            error: Exception | None = None
            try:
                placements.verify()
            except OSError as failure:
                error = failure
            raise_together(self._topology.world, self._device, "verify", error, "reading the full model")


def _local_state_dict(model: torch.nn.Module) -> dict[str, object]:
    """Return ``model.state_dict()``, in which partitioned parameters are empty, although users may not call it."""
    global _allowed
    _allowed += 1
    try:
        with as_plain_tensors():
            return dict(model.state_dict())
    finally:
        _allowed -= 1


# -------------------------------------------------------------------- a model in files


def _training(tensors: Mapping[str, FullTensor]) -> dict[str, FullTensor]:
    modules = {name.rpartition(".")[0] for name, known in tensors.items() if known.trained}
    return {
        name: known
        for name, known in tensors.items()
        if known.trained or (not known.parameter and name.rpartition(".")[0] in modules)
    }


class _Gathered:
    """Iterator over the full values of a file's tensors. All ranks iterate at the same time."""

    def __init__(self, file: ModelFile, get: Callable[[ToStore], torch.Tensor | None]) -> None:
        self._entries = iter(file.entries)
        self._get = get
        self.failed = False

    def __iter__(self) -> _Gathered:
        return self

    def __next__(self) -> Any:
        entry = next(self._entries)
        try:
            return self._get(entry)
        except BaseException:
            self.failed = True
            raise


@collective
def _on_rank0(
    work: Callable[[], object], comm: Communicator, device: torch.device, values: _Gathered | None = None
) -> None:
    """Run ``work`` on rank 0, while the other ranks only iterate over ``values``. If it raises, all ranks raise: the
    others CheckpointError."""
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            work()
        except Exception as error:
            if values is not None and values.failed:
                raise  # a collective's error, not rank 0's own
            failure = error
    if values is not None:
        deque(values, maxlen=0)  # rank 0 too takes part in the gathers that its failed work has left over
    raise_together(comm, device, "checkpoint", failure, "engine.save_16bit_model", CheckpointError)


def _with_extra_state(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules with a ``get_extra_state`` of their own, by its key in a state dict."""
    plain = torch.nn.Module.get_extra_state
    return {
        f"{prefix}.{_EXTRA}" if prefix else _EXTRA: module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not plain
    }


@collective
def _distribute(
    given: torch.Tensor | None, target: FullTensor, here: torch.Tensor | None, topology: Topology, device: torch.device
) -> None:
    """Send rank 0's full values, or this rank's part of them, into the tensor ``here``.

    Args:
        given: the values, on rank 0 alone.
        here: None if this rank's stage does not have the tensor.
    """
    if topology.trivial and here is not None and sharded_param_of(here) is None:
        if given is not None:
            here.data.copy_(given)
        broadcast_into(here.data, topology.world, device, "parameters")
        return
    values = given
    if not topology.trivial:
        values = torch.empty(target.shape, dtype=target.dtype, device=device)
        if given is not None:
            values.copy_(given)
        broadcast_into(values, topology.world, device, "parameters")
    if here is None:
        return
    spec = shard_spec_of(here)
    with GatheredParameters(here, modifier_rank=0, enabled=sharded_param_of(here) is not None):
        if values is not None and (topology.data.rank == 0 or sharded_param_of(here) is None):
            here.data.copy_(values if spec is None else spec.of(values))


def _agree(
    targets: Mapping[str, FullTensor | None],
    given: Mapping[str, object],
    comm: Communicator,
    device: torch.device,
    strict: bool,
) -> set[str]:
    """Return the names that rank 0 has. Raises RuntimeError on all ranks if they or their shapes do not fit."""
    names = list(targets)
    flags = torch.zeros(len(names) + 1, dtype=torch.int64, device="cpu")
    unexpected: list[str] = []
    if comm.rank == 0:
        unexpected = [name for name in given if name not in targets]
        fits = [_fits(given[name], targets[name]) if name in given else None for name in names]
        flags[:-1] = torch.tensor(
            [0 if fit is None else 1 if fit else 2 for fit in fits], dtype=torch.int64, device="cpu"
        )
        flags[-1] = len(unexpected)
    flags = flags.to(device)
    # Rank 0's findings go to all ranks, which make the same message of them. So no error need be exchanged.
    comm.broadcast(flags, "initial_sync")
    codes = [int(value) for value in host_values(flags)]
    missing = [name for name, code in zip(names, codes, strict=False) if code == 0]
    wrong = [_expected(name, targets[name]) for name, code in zip(names, codes, strict=False) if code == 2]
    problems = []
    if wrong:
        problems.append(f"shapes differ for {listed(wrong)}")
    if strict and missing:
        problems.append(f"missing {listed(missing)}")
    if strict and codes[-1]:
        problems.append(f"unexpected {listed(unexpected) if unexpected else f'{codes[-1]} names (see rank 0)'}")
    if problems:
        raise RuntimeError(
            f"load_full_state_dict: rank 0's state does not fit the model: {'; '.join(problems)}. Nothing was loaded."
        )
    return {name for name, code in zip(names, codes, strict=False) if code == 1}


def _fits(given: object, target: FullTensor | None) -> bool:
    return target is None or (isinstance(given, torch.Tensor) and tuple(given.shape) == target.shape)


def _expected(name: str, target: FullTensor | None) -> str:
    return f"{name} (expected {target.shape})" if target is not None else name


# -------------------------------------------------------------------- an optimizer's states

_NUMBER, _ELEMENTS, _OTHER = "number", "elements", "other"


@collective
@torch.no_grad()
def full_optimizer_state_dict(states: ModelState, access: ParameterAccess, rank0_only: bool) -> dict[str, Any]:
    """See :meth:`zerolite.Engine.full_optimizer_state_dict`."""
    if states.parts.topology.pipe.world_size > 1:
        raise RuntimeError(
            "full_optimizer_state_dict: expected all layers on every rank, got a pipeline, whose stages each have the "
            "states of their own layers; save_checkpoint() writes all of them"
        )
    here = states.parts.topology.world.rank == 0 or not rank0_only
    own = {p.index: (p, states.parts.optimizer.method.state_of(p)) for p in states.parts.optimizer.shards()}
    described = {
        index: {name: _describe(states, shard, name, value) for name, value in state.items()}
        for index, (shard, state) in own.items()
    }
    # Each state is a collective, so all ranks walk through the same ones: the union of all ranks' states. A state has
    # the description of the first rank that has it.
    described_on: dict[int, dict[str, tuple[Any, int]]] = {}
    host = HostGroup(states.parts.topology.world, "whole model")  # not that of checkpoints: a save may be under way
    for row, source in host.gather((described, states.parts.groups.mean.rank)):
        for index, kinds in row.items():
            for name, kind in kinds.items():
                described_on.setdefault(index, {}).setdefault(name, (kind, source))
    full: dict[int, dict[str, Any]] = {}
    positions = states.parts.optimizer.positions()
    for index in sorted(described_on):
        state = own[index][1] if index in own else {}
        for name, ((kind, *details), source) in described_on[index].items():
            value = details[0] if kind == _NUMBER else None
            if kind == _ELEMENTS:
                value = access.full_state(index, state.get(name), details[0])
            elif kind == _OTHER:
                value = _broadcast(states, state.get(name), details[0], details[1], source)
            if here:
                full.setdefault(positions[index], {})[name] = value.cpu() if torch.is_tensor(value) else value
    return {"state": full, "param_groups": states.parts.optimizer.numbered_groups()} if here else {}


def _describe(states: ModelState, shard: Any, name: str, value: object) -> tuple[object, ...]:
    """Return a state's kind, then its value if it is one number, otherwise its dtype, and its shape if that is not the
    shard's."""
    if not torch.is_tensor(value) or states.is_scalar(name, value, shard):
        return _NUMBER, value.cpu() if torch.is_tensor(value) else value
    if value.shape == states.shape_of(shard):
        return _ELEMENTS, value.dtype
    return _OTHER, value.dtype, value.shape


def _broadcast(states: ModelState, own: Any, dtype: torch.dtype, shape: torch.Size, source: int) -> torch.Tensor:
    """Broadcast a state that one data-parallel rank, or each of them, has in full."""
    device = states.parts.buffer.placements.device
    value = torch.empty(shape, dtype=dtype, device=device) if own is None else own.to(device).clone()
    states.parts.groups.mean.broadcast(value, "access", source)
    return value
