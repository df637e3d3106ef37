"""Whole state dicts and 16-bit models at every stage, and the refusal to hand out partitioned ones."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerolite.accelerator import host_value, host_values
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.huggingface import ModelFile, ModelWriter, exported_dtype, plan_files
from zerolite.checkpoint.names import clean
from zerolite.checkpoint.safetensors import Entry
from zerolite.comm import Communicator
from zerolite.runtime.initial_sync import broadcast_into
from zerolite.runtime.zero.partition_parameters import GatheredParameters
from zerolite.runtime.zero.partitioned_parameter import AVAILABLE, handle_of, whole_shape
from zerolite.runtime.zero.released_parameter import opened

logger = logging.getLogger("zerolite")

_SHOWN = 8  # names in a message
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_allowed = 0  # calls under way that know what they do


def _partitioned(module: torch.nn.Module, prefix: str) -> list[str]:
    """The names of a module's parameters that are not available: in the model, where an engine knows it, or below
    the module that was asked."""
    found = []
    for key, parameter in module.named_parameters(remove_duplicate=False):
        handle = handle_of(parameter)
        if handle is not None and handle.status is not AVAILABLE:
            found.append(handle.name if handle.manager is not None else prefix + key)
    return found


def _before_save(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    found = [] if _allowed else _partitioned(module, prefix)
    if found:
        raise RuntimeError(
            f"state_dict: parameters are partitioned and would come out empty: {_listed(found)}. Call "
            "engine.full_state_dict(), or do it inside zerolite.zero.GatheredParameters(module)."
        )


def _before_load(module: torch.nn.Module, state: Any, prefix: str, *rest: Any) -> None:
    found = [] if _allowed else _partitioned(module, prefix)
    if found:
        raise RuntimeError(
            f"load_state_dict: parameters are partitioned and cannot take whole values: {_listed(found)}. Call "
            "engine.load_full_state_dict(state), or do it inside zerolite.zero.GatheredParameters(module, "
            "modifier_rank=0)."
        )


def guard_module(module: torch.nn.Module) -> None:
    """Let ``state_dict`` and ``load_state_dict`` raise RuntimeError while parameters of ``module`` are
    partitioned. For good: the hooks do nothing where none are."""
    if _before_save not in module._state_dict_pre_hooks.values():
        module.register_state_dict_pre_hook(_before_save)
        module.register_load_state_dict_pre_hook(_before_load)


def guard_state_dict(model: torch.nn.Module) -> None:
    """:func:`guard_module` for all modules of ``model``."""
    for module in model.modules():
        guard_module(module)


@dataclass(frozen=True)
class Masters:
    """The master weights of what an engine trains."""

    index: Mapping[int, int]  # of a parameter, by its id
    whole: Callable[[list[int]], list[torch.Tensor]]  # copies of those of some indices; called on all ranks


@torch.no_grad()
def full_state_dict(
    model: torch.nn.Module,
    comm: Communicator,
    rank0_only: bool,
    dtype: torch.dtype | None = None,
    masters: Masters | None = None,
) -> dict[str, Any]:
    """``model.state_dict()`` with whole tensors on the CPU, copies of their own; tied ones share one copy. Parameters
    are gathered one by one. ``rank0_only``: other ranks get an empty dict.

    dtype: of all floating tensors, fp32, bf16 or fp16, from the ``masters`` of those that have some; None: the one that
    each has. Raises ValueError for another. Called on all ranks.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(
            f"full_state_dict: expected dtype to be None or one of {', '.join(map(str, _DTYPES))}, got {dtype!r}"
        )
    kept = not rank0_only or comm.rank == 0
    state = _unguarded_state(model)
    copies: dict[int, torch.Tensor] = {}
    for name, owner in _owners(model, state).items():
        if id(owner) not in copies:
            copy = _whole_copy(owner, state[name], dtype, masters, kept)
            copies[id(owner)] = state[name] if copy is None else copy
        state[name] = copies[id(owner)]
    return state if kept else {}


def _unguarded_state(model: torch.nn.Module) -> dict[str, Any]:
    """``model.state_dict()``, in which partitioned parameters are empty."""
    global _allowed
    _allowed += 1
    try:
        with opened():
            return dict(model.state_dict())
    finally:
        _allowed -= 1


def _owners(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict; of parameters and buffers these themselves, so that tied ones are one object."""
    known: dict[str, torch.Tensor] = {}
    for name, tensor in (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)):
        known[clean(name)] = tensor  # wrappers of modules leave their names out of a state dict, some of them
    return {name: known.get(clean(name), value) for name, value in state.items() if isinstance(value, torch.Tensor)}


def _whole_copy(
    owner: torch.Tensor, value: torch.Tensor, dtype: torch.dtype | None, masters: Masters | None, kept: bool
) -> torch.Tensor | None:
    """The whole values of ``owner``, which a state dict has as ``value``, on the CPU; None if they are not ``kept``.
    Called on all ranks."""
    target = exported_dtype(value.dtype, dtype)
    index = masters.index.get(id(owner)) if masters is not None and target != value.dtype else None
    if masters is not None and index is not None:
        (master,) = masters.whole([index])
        return master.to("cpu", target) if kept else None
    partitioned = handle_of(owner) is not None
    with GatheredParameters(owner, modifier_rank=None, enabled=partitioned, check=False):
        whole = owner.data if partitioned else value
        return whole.detach().to("cpu", target, copy=True) if kept else None


# -------------------------------------------------------------------- a model in files


@torch.no_grad()
def save_16bit_model(
    model: torch.nn.Module,
    comm: Communicator,
    device: torch.device,
    save_dir: str | Path,
    dtype: torch.dtype,
    masters: Masters,
    max_shard_size: str | int,
    exclude_frozen: bool,
) -> None:
    """Rank 0 writes the model as safetensors files (see :class:`ModelWriter`), while all ranks gather one parameter
    after the other. All floating tensors are in ``dtype``. exclude_frozen: only what trains, that is trained parameters
    and the buffers of the modules that have some.

    Raises ValueError for a size that is none, CheckpointError on all ranks if rank 0 cannot write. Called on all ranks.
    """
    state = _unguarded_state(model)
    owners = _owners(model, state)
    left_out = sorted(state.keys() - owners.keys())
    if left_out and comm.rank == 0:
        logger.warning("save_16bit_model: left out what is no tensor: %s", _listed(left_out))
    if exclude_frozen:
        owners = _training(owners, masters)
    first: dict[int, str] = {}  # of a tensor
    for name, owner in owners.items():
        first.setdefault(id(owner), name)
    names = {clean(name): name for name in first.values()}
    entries = [
        Entry(written, exported_dtype(state[name].dtype, dtype), tuple(_shape(owners[name], state[name])))
        for written, name in names.items()
    ]
    aliases = {clean(name): clean(first[id(owner)]) for name, owner in owners.items() if name != first[id(owner)]}
    plan = plan_files(entries, max_shard_size, aliases)
    writer = ModelWriter(Path(save_dir), plan)

    def get(entry: Entry) -> torch.Tensor | None:
        name = names[entry.name]
        return _whole_copy(owners[name], state[name], dtype, masters, comm.rank == 0)

    with contextlib.ExitStack() as stack:
        _on_rank0(functools.partial(stack.enter_context, writer), comm, device)
        for file in plan:
            values = _Gathered(file, get)
            _on_rank0(functools.partial(writer.write, file, values), comm, device, values)
        _on_rank0(writer.commit, comm, device)


def _training(owners: Mapping[str, torch.Tensor], masters: Masters) -> dict[str, torch.Tensor]:
    modules = {name.rpartition(".")[0] for name, owner in owners.items() if id(owner) in masters.index}
    return {
        name: owner
        for name, owner in owners.items()
        if id(owner) in masters.index
        or (not isinstance(owner, torch.nn.Parameter) and name.rpartition(".")[0] in modules)
    }


def _shape(owner: torch.Tensor, value: torch.Tensor) -> torch.Size:
    return whole_shape(owner) if handle_of(owner) is not None else value.shape


class _Gathered:
    """The whole values of a file's tensors, one by one; iterated over on all ranks at the same time."""

    def __init__(self, file: ModelFile, get: Callable[[Entry], torch.Tensor | None]) -> None:
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


def _on_rank0(
    work: Callable[[], object], comm: Communicator, device: torch.device, values: _Gathered | None = None
) -> None:
    """Rank 0 does ``work``, for which the others only iterate over ``values``. If it raises, all ranks do: the others
    CheckpointError. Called on all ranks."""
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            work()
        except Exception as error:
            if values is not None and values.failed:
                raise  # a collective's error, not rank 0's own
            failure = error
    if values is not None:
        deque(values, maxlen=0)  # also what rank 0 has not asked for
    text = b"" if failure is None else (str(failure) or type(failure).__name__).encode()
    length = torch.tensor(len(text), device=device)
    comm.broadcast(length, "checkpoint")
    if not (count := int(host_value(length))):
        return
    sent = torch.tensor(list(text) if text else [0] * count, dtype=torch.uint8, device=device)
    comm.broadcast(sent, "checkpoint")
    if failure is not None:
        raise failure
    raise CheckpointError(f"rank 0: {bytes(int(code) for code in host_values(sent)).decode()}")


@torch.no_grad()
def load_full_state_dict(
    model: torch.nn.Module, state: Mapping[str, Any] | None, comm: Communicator, device: torch.device, strict: bool
) -> list[str]:
    """Write rank 0's whole values into parameters and buffers, one by one; what other ranks pass is ignored. Returns
    the names written. ``strict``: names must be exactly the model's. Raises RuntimeError on all ranks, before
    anything is written. Called on all ranks."""
    targets: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    transient = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key in module._non_persistent_buffers_set
    }
    targets.update((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n not in transient)
    given = dict(state or {}) if comm.rank == 0 else {}
    present = _agree(targets, given, comm, device, strict)
    done: set[int] = set()
    for name, target in targets.items():
        if name not in present or id(target) in done:
            continue
        done.add(id(target))
        handle = handle_of(target)
        if handle is not None:
            with GatheredParameters(target, modifier_rank=0):
                if comm.rank == 0:
                    target.data.copy_(given[name])
            continue
        if comm.rank == 0:
            target.data.copy_(given[name])
        broadcast_into(target.data, comm, device, "parameters")
    return [name for name in targets if name in present]


def _agree(
    targets: Mapping[str, torch.Tensor],
    given: Mapping[str, Any],
    comm: Communicator,
    device: torch.device,
    strict: bool,
) -> set[str]:
    """The names that rank 0 has, known to all; RuntimeError on all ranks if they do not fit."""
    names = list(targets)
    flags = torch.zeros(len(names) + 1, dtype=torch.int64, device="cpu")
    unexpected: list[str] = []
    if comm.rank == 0:
        unexpected = [name for name in given if name not in targets]
        fits = [given[n].shape == whole_shape(targets[n]) if n in given else None for n in names]
        flags[:-1] = torch.tensor(
            [0 if fit is None else 1 if fit else 2 for fit in fits], dtype=torch.int64, device="cpu"
        )
        flags[-1] = len(unexpected)
    flags = flags.to(device)
    comm.broadcast(flags, "initial_sync")
    codes = [int(value) for value in host_values(flags)]
    missing = [name for name, code in zip(names, codes, strict=False) if code == 0]
    wrong = [
        f"{name} (expected {tuple(whole_shape(targets[name]))})"
        for name, code in zip(names, codes, strict=False)
        if code == 2
    ]
    problems = []
    if wrong:
        problems.append(f"shapes differ for {_listed(wrong)}")
    if strict and missing:
        problems.append(f"missing {_listed(missing)}")
    if strict and codes[-1]:
        problems.append(f"unexpected {_listed(unexpected) if unexpected else f'{codes[-1]} names (see rank 0)'}")
    if problems:
        raise RuntimeError(
            f"load_full_state_dict: rank 0's state does not fit the model: {'; '.join(problems)}. Nothing was loaded."
        )
    return {name for name, code in zip(names, codes, strict=False) if code == 1}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
