"""Whole state dicts of a model at every stage, and the refusal to hand out partitioned ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerolite.accelerator import host_values
from zerolite.comm import Communicator
from zerolite.runtime.initial_sync import broadcast_into
from zerolite.runtime.zero.partition_parameters import GatheredParameters
from zerolite.runtime.zero.partitioned_parameter import AVAILABLE, handle_of, whole_shape
from zerolite.runtime.zero.released_parameter import opened

_SHOWN = 8  # names in a message


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


@torch.no_grad()
def full_state_dict(model: torch.nn.Module, comm: Communicator, rank0_only: bool) -> dict[str, Any]:
    """``model.state_dict()`` with whole tensors on the CPU, copies of their own; tied ones share one copy. Parameters
    are gathered one by one. ``rank0_only``: other ranks get an empty dict. Called on all ranks."""
    global _allowed
    _allowed += 1
    try:
        with opened():
            state = dict(model.state_dict())
    finally:
        _allowed -= 1
    kept = not rank0_only or comm.rank == 0
    owners = dict(model.named_parameters(remove_duplicate=False))
    copies: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        owner = owners.get(name, value)
        if not isinstance(owner, torch.Tensor):
            continue
        if id(owner) not in copies:
            with GatheredParameters(owner, modifier_rank=None, enabled=handle_of(owner) is not None, check=False):
                whole = owner.data if handle_of(owner) is not None else value
                copies[id(owner)] = whole.detach().to("cpu", copy=True) if kept else value
        state[name] = copies[id(owner)]
    return state if kept else {}


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
    flags = torch.zeros(len(names) + 1, dtype=torch.int64)
    unexpected: list[str] = []
    if comm.rank == 0:
        unexpected = [name for name in given if name not in targets]
        fits = [given[n].shape == whole_shape(targets[n]) if n in given else None for n in names]
        flags[:-1] = torch.tensor([0 if fit is None else 1 if fit else 2 for fit in fits], dtype=torch.int64)
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
