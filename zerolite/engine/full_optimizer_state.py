"""Optimizer state dict of torch's form with whole tensors, from a sharded optimizer."""

from __future__ import annotations

from typing import Any

import torch

from zerolite.access.parameter_access import ParameterAccess
from zerolite.checkpoint.model_state import ModelState
from zerolite.comm import HostGroup

_NUMBER, _ELEMENTS, _OTHER = "number", "elements", "other"


@torch.no_grad()
def full_optimizer_state_dict(states: ModelState, access: ParameterAccess, rank0_only: bool) -> dict[str, Any]:
    """See :meth:`zerolite.Engine.full_optimizer_state_dict`. Called on all ranks."""
    if states.topology.pipe.world_size > 1:
        raise RuntimeError(
            "full_optimizer_state_dict: expected all layers on every rank, got a pipeline, whose stages each have the "
            "states of their own layers; save_checkpoint() writes all of them"
        )
    here = states.topology.world.rank == 0 or not rank0_only
    own = {p.fragment.slot.index: (p, states.optimizer.method.state_of(p)) for p in states.optimizer.pieces()}
    described = {
        index: {name: _describe(states, piece, name, value) for name, value in state.items()}
        for index, (piece, state) in own.items()
    }
    # All ranks walk through the same parameters and states: what any of them has, from the first that has it.
    known: dict[int, dict[str, tuple[Any, int]]] = {}
    host = HostGroup(states.topology.world, "whole model")  # not that of checkpoints: a save may be under way
    for row, source in host.gather((described, states.comm.rank)):
        for index, kinds in row.items():
            for name, kind in kinds.items():
                known.setdefault(index, {}).setdefault(name, (kind, source))
    whole: dict[int, dict[str, Any]] = {}
    positions = states.optimizer.positions()
    for index in sorted(known):
        state = own[index][1] if index in own else {}
        for name, ((kind, *details), source) in known[index].items():
            value = details[0] if kind == _NUMBER else None
            if kind == _ELEMENTS:
                value = access.whole_state(index, state.get(name), details[0])
            elif kind == _OTHER:
                value = _sent(states, state.get(name), details[0], details[1], source)
            if here:
                whole.setdefault(positions[index], {})[name] = value.cpu() if torch.is_tensor(value) else value
    return {"state": whole, "param_groups": states.optimizer.numbered_groups()} if here else {}


def _describe(states: ModelState, piece: Any, name: str, value: Any) -> tuple[Any, ...]:
    """A state's kind; its value if it is one number, otherwise its dtype, and its shape if that is not the piece's."""
    if not torch.is_tensor(value) or states.is_scalar(name, value, piece):
        return _NUMBER, value.cpu() if torch.is_tensor(value) else value
    if value.shape == states.shape_of(piece):
        return _ELEMENTS, value.dtype
    return _OTHER, value.dtype, value.shape


def _sent(states: ModelState, own: Any, dtype: torch.dtype, shape: torch.Size, source: int) -> torch.Tensor:
    """A state that one data-parallel rank has whole, or all of them."""
    device = states.buffer.placements.device
    value = torch.empty(shape, dtype=dtype, device=device) if own is None else own.to(device).clone()
    states.comm.broadcast(value, "access", source)
    return value
