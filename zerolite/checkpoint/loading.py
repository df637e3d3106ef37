"""Load a checkpoint into an engine, across stages and world sizes."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint.directory import find, run_of_this_job
from zerolite.checkpoint.errors import CheckpointError, NoCheckpoint
from zerolite.checkpoint.flat_ranges import Shard
from zerolite.checkpoint.manifest import INDEX, SavedGrid
from zerolite.checkpoint.matching import (
    NameMatch,
    check_complete,
    check_groups,
    check_shapes,
    listed,
    match_parameters,
)
from zerolite.checkpoint.model_state import OPTIMIZER, RANKS, Kinds, ModelState
from zerolite.checkpoint.random_state import load_random_state
from zerolite.checkpoint.reader import CheckpointReader
from zerolite.checkpoint.saving import agreed, undisturbed
from zerolite.checkpoint.state import (
    ModelFacts,
    OptimizerState,
    ParameterFacts,
    SavedState,
    TensorFacts,
    check_hyperparameters,
    joined,
)
from zerolite.comm import HostGroup, RaiseTogether, collective
from zerolite.data.dataloader import Loaders
from zerolite.zero.optimizer import LOCAL_GROUP_KEYS

logger = logging.getLogger("zerolite")
_CALL = "engine.load_checkpoint"
_SCHEDULED = ("lr", "initial_lr", "min_lr", "max_lr", "momentum", "betas", "base_momentum", "max_momentum")


@dataclass(frozen=True)
class LoadRequest:
    """Arguments of a load, on one rank."""

    load_dir: str
    tag: str | None
    load_module_strict: bool
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool
    missing_ok: bool


@dataclass(frozen=True)
class _Plan:
    """Everything is decided, and nothing has changed yet.

    Attributes:
        kinds: stored optimizer states; None to leave the engine's states alone.
        untrained: parameters whose stored states are not loaded, because they are frozen here.
        schedule_begins: the engine's schedule is not loaded and begins anew.
    """

    reader: CheckpointReader
    state: SavedState
    match: NameMatch
    buffers: list[str]
    kinds: Kinds | None
    untrained: list[str]
    scheduler_state: dict[str, Any] | None
    schedule_begins: bool


class Loader:
    """Loads checkpoints into one engine."""

    def __init__(
        self, state: ModelState, host: HostGroup, loaders: Loaders, register_unfrozen_params: Callable[[], None]
    ) -> None:
        """See :class:`~zerolite.checkpoint.saving.Saver`."""
        self._model_state, self._parts, self._host = state, state.parts, host
        self._loaders, self._register_unfrozen_params = loaders, register_unfrozen_params
        self._run = run_of_this_job()

    @collective
    @undisturbed()
    def load(self, request: LoadRequest, scheduler: Any) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint. Returns its directory and the client state; (None, {}) if a missing one is allowed.

        Raises CheckpointError. Until the tensors are read, nothing has been changed when it is raised.
        """
        request, ranks = agreed(self._host, _CALL, request)
        path = self._find(request, ranks)
        if path is None:
            return None, {}
        self._register_unfrozen_params()
        stages = self._stages(ranks)
        plan = ranks.run(lambda: self._plan(path, request, stages, scheduler))
        self._read(plan, ranks)
        if not request.load_module_only:
            ranks.run(lambda: plan.reader.trust(lambda: self._resume(plan, scheduler)))
            self._run.resume(plan.reader.manifest.run)
        self._report(plan, request)
        return str(path), plan.state.client_state

    def _find(self, request: LoadRequest, ranks: RaiseTogether) -> Path | None:
        """Let rank 0 look for the checkpoint, so that all ranks load the same one."""

        def look() -> Path | None:
            try:
                return find(Path(request.load_dir), request.tag)
            except NoCheckpoint:
                if request.missing_ok:
                    return None
                raise

        return ranks.gather(look if self._host.rank == 0 else lambda: None)[0]

    def _stages(self, ranks: RaiseTogether) -> list[ModelFacts]:
        """Return the facts of all pipeline stages; [] without a pipeline, where each rank describes the full model."""
        model = self._model_state
        if model.parts.topology.pipe.world_size == 1:
            return []
        describe = lambda: model.describe() if model.speaks_for_stage else None  # noqa: E731
        return [stage for stage in ranks.gather(describe) if stage is not None]

    # ---------------------------------------------------------------- deciding

    def _plan(self, path: Path, request: LoadRequest, stages: list[ModelFacts], scheduler: object) -> _Plan:
        self._parts.pipeline.check_between_steps()
        reader = self._open(path)
        state = reader.read_state(SavedState)
        model = joined(stages or [self._model_state.describe()])
        match = self._match(reader, state, model, request.load_module_strict)
        buffers = self._buffers(state.buffers, model, request.load_module_strict)
        trains = _trained_in_both(model.parameters, state.parameters, match)
        if request.load_module_only:
            return _Plan(reader, state, match, buffers, None, [], None, False)
        kinds = self._kinds(reader, state.optimizer) if request.load_optimizer_states else None
        schedule = _schedule(state, scheduler) if request.load_lr_scheduler_states else None
        if kinds is not None or schedule is not None:
            groups = state.optimizer.groups
            check_groups(model.groups, groups, trains)
            for group, saved in zip(self._parts.optimizer.param_groups, groups, strict=True):
                reader.trust(functools.partial(check_hyperparameters, group, saved.values))
        if state.loaders:
            self._loaders.check_state_dict(state.loaders)
        begins = scheduler is not None and schedule is None
        updated = {name for names in (kinds or {}).values() for name in names}
        untrained = [name for name, stored in match.names.items() if stored in updated and name not in trains]
        return _Plan(reader, state, match, buffers, kinds, untrained, schedule, begins)

    def _open(self, path: Path) -> CheckpointReader:
        if not path.is_dir():
            raise CheckpointError(
                f"'{path}', which rank 0 has found, is not there on this rank: load_dir must be on a file system that "
                "all nodes share"
            )
        reader = CheckpointReader(path)
        if self._host.rank == 0:
            for problem in reader.problems(sizes_only=True):
                raise problem
        return reader

    def _match(self, reader: CheckpointReader, state: SavedState, model: ModelFacts, strict: bool) -> NameMatch:
        parameters, stored = model.parameters, state.parameters
        match = match_parameters(parameters, stored)
        if not reader.manifest.exclude_frozen_parameters:
            if strict:
                check_complete("parameter", match.missing, match.unexpected)
            return match
        if strict:
            missing = [name for name in match.missing if parameters[name].trained]
            check_complete("parameter", missing, [name for name in match.unexpected if stored[name].trained])
        return match.without({name for name in stored if f"parameters/{name}" not in reader.tensors})

    def _buffers(self, stored: Mapping[str, TensorFacts], model: ModelFacts, strict: bool) -> list[str]:
        local, everywhere = self._model_state.named_buffers(), model.buffers
        if strict:
            missing = [name for name in everywhere if name not in stored]
            check_complete("buffer", missing, [name for name in stored if name not in everywhere])
        common = [name for name in local if name in stored]
        for name in common:
            if any(
                size > 1 and not stride for size, stride in zip(local[name].shape, local[name].stride(), strict=True)
            ):
                raise CheckpointError(
                    f"buffer '{name}': expected memory for each element, got elements that share it (expand); nothing "
                    "was loaded. Register a contiguous copy of it"
                )
        check_shapes("buffer ", {name: (local[name].shape, stored[name].shape) for name in common})
        return common

    def _kinds(self, reader: CheckpointReader, stored_optimizer: OptimizerState) -> Kinds:
        """Return the stored optimizer states. Raises CheckpointError if they belong to another optimizer."""
        kinds: Kinds = {}
        for key, stored in reader.tensors.items():
            if key.startswith(OPTIMIZER):
                state_name, _, name = key.removeprefix(OPTIMIZER).partition("/")
                kinds.setdefault(state_name, {})[name] = (stored.shape, stored.dtype)
        optimizer = self._parts.optimizer
        expected = optimizer.method.state_names
        saved, present = stored_optimizer.type, type(optimizer.inner).__name__
        other = _family(saved) != _family(present)
        other = other or bool(kinds and expected is not None and set(kinds) != set(expected))
        if other:
            names = f"; it keeps {', '.join(sorted(expected))}" if expected is not None else ""
            raise CheckpointError(
                f"the checkpoint has the states {', '.join(sorted(kinds)) or '(none)'} of {saved}, and the optimizer "
                f"here is {present}{names}. Nothing was loaded; pass load_optimizer_states=False to begin with new "
                "states"
            )
        updated = {name for names in (*kinds.values(), stored_optimizer.scalars.get("step", {})) for name in names}
        # The kernels keep every state of every parameter, so a parameter with one state must have all.
        for state_name, name in itertools.product(expected or (), sorted(updated)):
            if name not in kinds.get(state_name, {}):
                raise CheckpointError(
                    f"'{reader.path / INDEX}' is damaged: it lacks state '{state_name}' of parameter '{name}'. Nothing "
                    "was loaded; pass load_optimizer_states=False to begin with new states"
                )
        return kinds

    # ---------------------------------------------------------------- reading

    @collective
    @torch.no_grad()
    def _read(self, plan: _Plan, ranks: RaiseTogether) -> None:
        """Read parameters, buffers and states."""
        pipeline, reader = self._parts.pipeline, plan.reader
        # The outcome of the last step may still be on the device: read it now, or it would change the loaded counters
        # later.
        pipeline.state.settle()
        pipeline.zero_grad()
        # Parameters that the checkpoint lacks keep their values. The all-gather below takes all values from the
        # masters, so values that the user has written into parameters must be in the masters first.
        pipeline.written.collect_all()
        shards = list(self._model_state.stored_parameters(plan.match.names))
        shards += self._buffer_shards(plan)

        def make_room() -> None:
            self._update_groups(plan)
            if plan.kinds is not None:
                scalars = plan.state.optimizer.scalars
                shards.extend(self._model_state.stored_states(plan.match.names, plan.kinds, scalars))

        def fetch() -> None:
            try:
                reader.load(shards)
                self._parts.optimizer.method.end_load()
                self._parts.buffer.placements.drop_reads(replaced=plan.kinds is not None)  # optimizer states too
            except Exception as error:
                cause = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                raise CheckpointError(
                    f"{_CALL}, of '{reader.path}': rank {self._host.rank}: {cause.rstrip('. ')}. The engine holds a "
                    "part of it: load another one"
                ) from error

        # Two phases: if memory for the states runs out on one rank, all ranks raise before any rank has read tensors.
        try:
            ranks.run(lambda: reader.trust(make_room))
            ranks.run(fetch)
        except BaseException:
            self._parts.optimizer.method.drop_load()
            raise
        self._model_state.after_loading(plan.match.names)
        pipeline.all_gather_params()
        pipeline.state.on_weights_replaced()
        ranks.run(lambda: self._model_state.load_extra_state(plan.state.extra))

    def _update_groups(self, plan: _Plan) -> None:
        """Load hyperparameters. If only the schedule is loaded, load the learning rates that it continues from."""
        if plan.kinds is None and plan.scheduler_state is None:
            return
        for group, saved in zip(self._parts.optimizer.param_groups, plan.state.optimizer.groups, strict=True):
            if plan.kinds is not None:
                left_out = _SCHEDULED if plan.schedule_begins else ()
                _update_group(group, {key: value for key, value in saved.values.items() if key not in left_out})
            else:
                _update_group(group, {key: saved.values[key] for key in ("lr", "initial_lr") if key in saved.values})

    def _buffer_shards(self, plan: _Plan) -> Iterator[Shard]:
        """Yield the buffers: this rank's own values if they differed between ranks and the grid is the same."""
        same = plan.reader.manifest.grid == self._grid
        for shard in self._model_state.stored_buffers(plan.buffers):
            rank_key = f"{RANKS}{self._host.rank}/{shard.key}"
            yield replace(shard, key=rank_key) if same and rank_key in plan.reader.tensors else shard

    def _resume(self, plan: _Plan, scheduler: Any) -> None:
        """Load everything except the tensors of the model and the optimizer."""
        state = plan.state
        self._parts.pipeline.on_all_loaded({"counters": state.counters.model_dump(), "loss_scaler": state.loss_scaler})
        if plan.scheduler_state is not None:
            scheduler.load_state_dict(plan.scheduler_state)
        if state.loaders:
            self._loaders.load_state_dict(state.loaders)
        key = f"{RANKS}{self._rank_there(plan.reader.manifest.grid)}/random"
        if key in plan.reader.tensors:
            load_random_state(plan.reader.read(key), self._parts.device)

    @property
    def _grid(self) -> SavedGrid:
        return SavedGrid.of(self._parts.topology)

    def _rank_there(self, saved: SavedGrid) -> int:
        """Return the saved rank whose random states this rank continues with; a number that did not exist if there is
        none.

        If the grid has changed, ranks that compute one batch together take the states of one rank. So dropout drops the
        same elements on them.
        """
        if saved == self._grid:
            return self._host.rank
        data = self._parts.groups.mean.rank
        return data * saved.tensor if data < saved.data else saved.ranks

    def _report(self, plan: _Plan, request: LoadRequest) -> None:
        """Log on rank 0 what was not loaded, and what has changed."""
        if self._host.rank != 0:
            return
        match = plan.match
        if match.missing or match.unexpected:
            logger.warning(
                "%s: %d parameters of the model are not in '%s' and stay as they are (%s); %d of it are not in the "
                "model (%s)",
                *(_CALL, len(match.missing), plan.reader.path, listed(match.missing)),
                *(len(match.unexpected), listed(match.unexpected)),
            )
        if plan.untrained:
            logger.warning(
                "%s: %d parameters are frozen here and have optimizer states in the checkpoint, which are not loaded "
                "(%s). To train them on, unfreeze them before load_checkpoint",
                *(_CALL, len(plan.untrained), listed(plan.untrained)),
            )
        manifest = plan.reader.manifest
        saved, current = manifest.grid.data, self._grid.data
        before, now = manifest.config.get("train_batch_size"), self._parts.config.train_batch_size
        if saved != current and None not in (before, now) and before != now and not request.load_module_only:
            logger.warning(
                "%s: a step takes %s samples on %d ranks, and took %s on %d when the checkpoint was saved; set "
                "train_batch_size to have one size for any number of ranks",
                *(_CALL, now, current, before, saved),
            )


def _trained_in_both(
    parameters: Mapping[str, ParameterFacts], stored: Mapping[str, ParameterFacts], match: NameMatch
) -> dict[str, str]:
    """Return the stored names, by the name here, of parameters with elements that are trained on both sides."""
    return {
        name: other
        for name, other in match.names.items()
        if parameters[name].trained and stored[other].trained and 0 not in parameters[name].shape
    }


def _schedule(state: SavedState, scheduler: object) -> dict[str, Any] | None:
    saved = state.lr_scheduler
    if saved is None or scheduler is None:
        if saved is not None or scheduler is not None:
            which = (
                "has a schedule, and the engine has none" if scheduler is None else "has no schedule for the engine's"
            )
            logger.warning("%s: the checkpoint %s", _CALL, which)
        return None
    if saved.type not in (None, type(scheduler).__name__):
        raise CheckpointError(
            f"the schedule in the checkpoint is a {saved.type}, and the engine's is a {type(scheduler).__name__}. "
            "Nothing was loaded; pass load_lr_scheduler_states=False"
        )
    return dict(saved.state)


def _family(optimizer: str) -> str:
    """Return a name that is the same for optimizers with the same states."""
    return "Adam" if optimizer in ("Adam", "AdamW", "AdamW8bit") else optimizer


def _update_group(group: dict[str, Any], values: Mapping[str, object]) -> None:
    for key, value in values.items():
        if key in LOCAL_GROUP_KEYS or (key not in group and key != "initial_lr"):
            continue
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value.item() if isinstance(value, torch.Tensor) else value
