"""Full state dicts and 16-bit models at every stage."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.full_model import FullModel, FullTensor
from zerolite.checkpoint.huggingface import plan_files, torchao_descriptions, torchao_metadata, write_model
from zerolite.checkpoint.matching import listed
from zerolite.checkpoint.model_state import ModelState
from zerolite.checkpoint.parameter_access import ParameterAccess
from zerolite.checkpoint.partial_state import parts_in_state_dicts
from zerolite.checkpoint.safetensors import ToStore
from zerolite.checkpoint.saving import directory_of
from zerolite.checkpoint.state import clean
from zerolite.checkpoint.weight_stream import Piece, StreamOptions, StreamPlan, WeightStream, fingerprint, plan_buckets
from zerolite.comm import HostGroup, RaiseTogether, collective, raise_together
from zerolite.comm.flight_recorder import NOTHING_MAY_FOLLOW
from zerolite.utils.dtypes import FLOATS, HALF
from zerolite.utils.torch_private import as_plain_tensors
from zerolite.zero import inner_tensors

logger = logging.getLogger("zerolite")

_EXTRA = "_extra_state"  # torch's key for what a module's get_extra_state gives


@collective
class FullState:
    """Full state dicts of one engine's model, and export of the model into files."""

    def __init__(self, states: ModelState, access: ParameterAccess) -> None:
        self._states, self._parts, self._access = states, states.parts, access
        self._topology, self._device = states.parts.topology, states.parts.device
        self._host = HostGroup(self._topology.world, "whole model")  # not that of checkpoints: a save may be under way
        self._stream_plan: StreamPlan | None = None  # of the latest stream

    @torch.no_grad()
    def get(self, rank0_only: bool, dtype: torch.dtype | None) -> dict[str, Any]:
        """See ``Engine.full_state_dict``. Parameters are gathered one by one."""
        if dtype is not None and dtype not in FLOATS:
            raise ValueError(
                f"full_state_dict: expected dtype to be None or one of {', '.join(map(str, FLOATS))}, got {dtype!r}"
            )
        self._check_readable()
        full = self._full_model()
        copies: dict[str, torch.Tensor | None] = {}
        state: dict[str, Any] = {}
        for name, entry in full.entries.items():
            if isinstance(entry, FullTensor) and entry.owner not in copies:
                copies[entry.owner] = full.get(entry, dtype, rank0_only)
            state[name] = copies[entry.owner] if isinstance(entry, FullTensor) else entry
        needed = not rank0_only or self._topology.world.rank == 0
        return inner_tensors.join_all(self._parts.model, state) if needed else {}

    @torch.no_grad()
    def of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the full values of parameters of this model, on the CPU of all ranks."""
        self._check_readable()
        full = self._full_model()
        entries = {id(full.local(entry)[0]): entry for _, entry in full.tensors()}
        return [cast(torch.Tensor, full.get(entries[id(one)], None, rank0_only=False)) for one in parameters]

    @torch.no_grad()
    def stream(self, options: StreamOptions) -> WeightStream:
        """See ``zerolite.stream_full_weights``."""
        if self._topology.pipe.world_size > 1:
            raise RuntimeError(
                "zerolite.stream_full_weights: expected all layers on every rank, got a pipeline, whose stages each "
                "have their own; engine.full_state_dict() returns all of them"
            )
        self._check_readable()
        self._parts.param_gatherer.wait_all()
        stream_plan, planned = self._stream_plan, list[list[Piece]]()
        if stream_plan is None or not stream_plan.fits(options):
            stream_plan = StreamPlan(self._full_model(), self._parts.model, options)
            self._stream_plan = stream_plan if stream_plan.full.in_place else None  # others have copies of tensors

        def plan() -> int:
            planned.extend(plan_buckets(stream_plan, options))
            return fingerprint(planned, options.dtype)

        # Ranks that gather other tensors would wait for each other, so all know of errors and differences first.
        plans = RaiseTogether(self._host, "zerolite.stream_full_weights", ValueError).gather(plan)
        if len(set(plans)) > 1:
            raise ValueError(
                "zerolite.stream_full_weights: expected the same arguments on all ranks, got others on ranks "
                f"{listed([str(rank) for rank, one in enumerate(plans) if one != plans[0]])} than on rank 0"
            )
        return WeightStream(stream_plan.full, self._parts, planned, options.dtype)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """See ``Engine.load_full_state_dict``. Rank 0 sends parameters and buffers one by one, then the modules' extra
        state. Raises RuntimeError on all ranks, before anything is written."""
        self._parts.pipeline.check_available()
        full = self._full_model()
        local = inner_tensors.flattened(state or {}) if self._topology.world.rank == 0 else {}
        tensors = {name: entry for name, entry in full.tensors() if entry.in_model}
        extra = [name for name in full.entries if name.rpartition(".")[2] == _EXTRA]
        problem, present = self._host.broadcast(_compare(tensors | dict.fromkeys(extra), local, strict), 0)
        if problem:
            raise RuntimeError(
                f"load_full_state_dict: rank 0's state does not fit the model: {problem}. Nothing was loaded."
            )
        done: set[str] = set()
        for name, entry in tensors.items():
            if name in present and entry.owner not in done:
                done.add(entry.owner)
                full.set(entry, local.get(name))
        values = self._host.broadcast({name: local[name] for name in extra if name in local}, 0)
        for prefix, module in self._states.with_extra_state():
            key = f"{prefix}.{_EXTRA}" if prefix else _EXTRA
            if key in values:
                module.set_extra_state(values[key])
        self._parts.pipeline.written.on_loaded(full.parameters(done))

    @torch.no_grad()
    def save_16bit(self, save_dir: str | os.PathLike[str], max_shard_size: str | int, exclude_frozen: bool) -> None:
        """See ``Engine.save_16bit_model``. All ranks gather one parameter after the other, and rank 0 writes it
        (:func:`write_model`).

        Args:
            exclude_frozen: write only trained parameters, and the buffers of modules that have some.
        """
        computes = self._parts.precision.compute or self._parts.precision.autocast
        dtype = computes if computes in HALF else torch.bfloat16
        assert dtype is not None
        directory = Path(directory_of(save_dir, "save_dir"))
        self._check_readable()
        full, world = self._full_model(), self._topology.world
        tensors = dict(full.tensors())
        left_out = sorted(full.entries.keys() - tensors.keys())
        if left_out and world.rank == 0:
            logger.warning("save_16bit_model: left out what is no tensor: %s", listed(left_out))
        if exclude_frozen:
            tensors = _training(tensors)
        first: dict[str, str] = {}  # first name of a tensor, by its owner
        for name, known in tensors.items():
            first.setdefault(known.owner, name)
        written = {clean(name): tensors[name] for name in first.values()}
        entries = [ToStore(name, known.exported_dtype(dtype), known.shape) for name, known in written.items()]
        aliases = {clean(name): clean(first[k.owner]) for name, k in tensors.items() if name != first[k.owner]}
        metadata = torchao_metadata(written.keys(), torchao_descriptions(self._parts.model))
        plan = plan_files(entries, max_shard_size, aliases, metadata)
        lost: list[Exception] = []  # of a gather: then the other ranks' gathers have no partner, and this rank ends

        def gathered() -> Iterator[torch.Tensor | None]:
            names = (entry.name for file in plan for entry in file.entries)
            try:  # no name for a value: it would live on while the next one is gathered
                yield from (full.get(written[name], dtype, rank0_only=True) for name in names)
            except Exception as failure:
                lost.append(failure)
                raise

        values, error = gathered(), None
        if world.rank == 0:
            try:
                write_model(directory, plan, values)  # type: ignore[arg-type]  # the values are there on rank 0
            except NOTHING_MAY_FOLLOW:
                raise
            except Exception as failure:
                if lost:
                    raise lost[0] from None  # as it was: reading has failed, and not the writing of a file
                error = failure
        for _ in values:  # on the other ranks, and after an error: each is a collective, in which all ranks take part
            pass
        raise_together(world, self._device, "checkpoint", error, "engine.save_16bit_model", CheckpointError)

    def _full_model(self) -> FullModel:
        self._parts.param_gatherer.wait_all()
        inner_tensors.take_in_replaced(self._parts.model)
        return FullModel(self._parts, _local_state_dict(self._parts.model), self._access)

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
    """Return ``model.state_dict()``, although users may not call it. Partitioned parameters are empty in it, and
    weights that consist of other tensors are these."""
    with parts_in_state_dicts(), as_plain_tensors(), inner_tensors.inner_only():
        return dict(model.state_dict())


# -------------------------------------------------------------------- a model in files


def _training(tensors: Mapping[str, FullTensor]) -> dict[str, FullTensor]:
    modules = {name.rpartition(".")[0] for name, known in tensors.items() if known.trained}
    return {
        name: known
        for name, known in tensors.items()
        if known.trained or (not known.parameter and name.rpartition(".")[0] in modules)
    }


def _compare(
    targets: Mapping[str, FullTensor | None], state: Mapping[str, object], strict: bool
) -> tuple[str, set[str]]:
    """Return what does not fit ("" if all does), and the names that can be loaded. ``targets``: None for an extra
    state."""
    unexpected = [name for name in state if name not in targets]
    missing = [name for name in targets if name not in state]
    wrong = []
    for name, target in targets.items():
        if name in state and target is not None:
            value = state[name]
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != target.shape:
                wrong.append(f"{name} (expected {target.shape})")
    problems = [f"shapes differ for {listed(wrong)}"] if wrong else []
    if strict and missing:
        problems.append(f"missing {listed(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected {listed(unexpected)}")
    return "; ".join(problems), targets.keys() & state.keys()
