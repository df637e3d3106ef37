"""Save an engine to a committed checkpoint, in the background if asked."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerolite.checkpoint import plain
from zerolite.checkpoint.description import ModelFacts, first_with, joined, of_earlier_stages
from zerolite.checkpoint.directory import check_tag, default_tag
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.manifest import About, SavedGrid, count_parameters, library_versions
from zerolite.checkpoint.model_state import BUFFERS, RANKS, ModelState
from zerolite.checkpoint.pieces import empty_shard, whole
from zerolite.checkpoint.planner import Scalars, Shard
from zerolite.checkpoint.random_state import save_random_state
from zerolite.checkpoint.run import TrainingRun
from zerolite.checkpoint.safetensors import as_bytes
from zerolite.checkpoint.staging import Staging
from zerolite.checkpoint.storage import Commit, now
from zerolite.checkpoint.together import meet, one_request, together
from zerolite.checkpoint.writing import write_checkpoint
from zerolite.comm import HostGroup, keep_track
from zerolite.config import ZeroliteConfig
from zerolite.utils.dtypes import CODES
from zerolite.zero.sharded_optimizer import KEPT
from zerolite.zero.step import StepPipeline

logger = logging.getLogger("zerolite")
CLIENT = "client_state/"
_CALL = "engine.save_checkpoint"
# They live, whatever becomes of their engines, until all is written or the failure has been told.
_unfinished: set[Saver] = set()


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of a save, which a rank was called with."""

    save_dir: str
    tag: str | None
    save_latest: bool
    exclude_frozen_parameters: bool
    async_save: bool


@dataclass(frozen=True)
class UserState:
    """Arguments of the first rank, which are saved."""

    client_state: dict[str, Any]
    loaders: list[Any]


@dataclass(frozen=True)
class _Offer:
    """Message of each rank to the others before they save.

    Attributes:
        request: None on a rank that has finished its batches and follows the others.
        buffers: a checksum by name.
        stage: of a pipeline, from the first rank of each.
    """

    request: SaveRequest | None
    buffers: dict[str, int]
    stage: _Stage | None


@dataclass(frozen=True)
class _Stage:
    """Contents of one stage of a pipeline."""

    description: ModelFacts
    extra: dict[str, Any]


@dataclass(frozen=True)
class EngineParts:
    """Components of the engine whose checkpoints these are."""

    model: ModelState
    pipeline: StepPipeline
    config: ZeroliteConfig
    device: torch.device
    host: HostGroup
    wake: Callable[[], None]  # parameters that have been unfrozen since the last backward are trained from now on


class Saver:
    """Saves one engine's checkpoints, one at a time."""

    def __init__(self, parts: EngineParts, run: TrainingRun) -> None:
        self._parts = parts
        self._run = run
        self._host = parts.host
        self._staging = Staging()
        self._told = False  # that nothing is saved in the background
        self._running: threading.Thread | None = None
        self._failure: BaseException | None = None
        keep_track(self)

    def save(self, request: SaveRequest | None, user: Callable[[], UserState], scheduler: Any) -> str:
        """Save a checkpoint; called on all ranks; ``request`` is None on those that have finished their batches.
        Returns the checkpoint's directory."""
        self.wait_for_all()
        meet(self._host, self._parts.config.checkpoint.timeout_s, _CALL)
        self._parts.wake()
        own: list[UserState] = []

        def offer() -> _Offer:
            if request is not None:
                if request.tag is not None:
                    check_tag(request.tag)
                own.append(user())
                plain.encode(own[0].client_state, "client_state", [])
            return self._offer(request)

        ranks = together(self._host, _CALL)
        offers = ranks.gather(offer)
        requests = {rank: of_rank.request for rank, of_rank in enumerate(offers) if of_rank.request is not None}
        agreed: SaveRequest = one_request(_CALL, requests)
        self._parts.pipeline.check_ranks()
        source = min(requests)
        users = own[0] if own else None
        if source:  # a rank that goes on while the first one has finished
            users = self._host.broadcast(users, source)
        tag = agreed.tag or default_tag(self._parts.pipeline.outcomes.global_steps)

        in_background = agreed.async_save and not self._rests_on_disk()

        def collect() -> _Collected:
            found = self._collect(offers, agreed, tag, users, scheduler)
            return self._staged(found) if in_background else found

        collected = ranks.run(collect)
        if in_background:
            self._begin(collected, tag)
        else:
            self._write(collected, tag)
        return str(Path(agreed.save_dir) / tag)

    def _rests_on_disk(self) -> bool:
        """True if offload keeps states on disk, so that host memory may be too small for a copy of
        everything. Says so, once."""
        found = self._parts.model.buffer.placements.on_disk
        if found and not self._told and self._host.rank == 0:
            logger.warning(
                "%s: async_save copies what is saved into the host's memory first, and offload keeps states of this "
                "job on disk because they are too large for it: checkpoints are complete when the call returns",
                _CALL,
            )
        self._told = self._told or found
        return found

    # ---------------------------------------------------------------- in the background

    def nbytes(self) -> int:
        """Bytes of parameters, masters and states that this rank writes."""
        return sum(shard.nbytes for shard in self._parts.model.shards(exclude_frozen=False, with_scalars=False)[0])

    def wait(self) -> None:
        """Wait until the save in the background, if there is one, has ended. Raises what went wrong with it, once."""
        if self._running is not None:
            self._running.join()
            self._running = None
        _unfinished.discard(self)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close before the process group is destroyed."""
        self.wait()

    def wait_for_all(self) -> None:
        """The same, and until those of other engines, which may use the same group, have ended."""
        self.wait()
        for other in list(_unfinished):
            if other._running is not None:
                other._running.join()

    def _begin(self, collected: _Collected, tag: str) -> None:
        def run() -> None:
            try:
                self._write(collected, tag)
                _unfinished.discard(self)
            except BaseException as error:  # raised by the next call
                self._failure = error
                if self._host.rank == 0:
                    logger.error("%s, in the background: %s", _CALL, error)

        self._running = threading.Thread(target=run, name="zerolite-checkpoint")
        _unfinished.add(self)
        self._running.start()

    def _staged(self, collected: _Collected) -> _Collected:
        return _Collected(self._staging.copy(collected.shards), collected.scalars, collected.commit, collected.save_dir)

    def _write(self, collected: _Collected, tag: str) -> None:
        if not self._host.alive:
            raise CheckpointError(
                f"saving checkpoint '{tag}' failed: the process group was destroyed meanwhile; call "
                "engine.wait_for_checkpoint() first, or zerolite.destroy() instead"
            )
        write_checkpoint(
            collected.save_dir, tag, collected.shards, collected.scalars, collected.commit, self._host.group
        )

    # ---------------------------------------------------------------- what is saved

    def _offer(self, request: SaveRequest | None) -> _Offer:
        parts = self._parts
        parts.pipeline.check_between_steps()
        parts.pipeline.check_whole()
        self._tell_of_gradients()
        parts.pipeline.written.take_all()
        buffers = {name: _checksum(buffer) for name, buffer in parts.model.named_buffers().items()}
        return _Offer(request, buffers, self._stage() if parts.model.speaks_for_stage else None)

    def _tell_of_gradients(self) -> None:
        """Say that gradients are not saved, where no step has used them yet."""
        if self._parts.pipeline.accumulating and self._host.rank == 0:
            logger.warning(
                "%s: called in the middle of a gradient accumulation. Training goes on as if it had not been, but a "
                "checkpoint holds no gradients: a job that continues from it begins the accumulation anew, without the "
                "micro-batches since the last step. Save when engine.step() has returned True to lose none",
                _CALL,
            )

    def _stage(self) -> _Stage:
        return _Stage(self._parts.model.describe(), self._parts.model.extra_state())

    def _collect(
        self, offers: Sequence[_Offer], agreed: SaveRequest, tag: str, user: UserState | None, scheduler: Any
    ) -> _Collected:
        parts, rank = self._parts, self._host.rank
        stages = [offer.stage for offer in offers if offer.stage is not None]
        elsewhere = of_earlier_stages([stage.description for stage in stages], parts.model.topology.pipe.rank)
        shards, scalars = parts.model.shards(agreed.exclude_frozen_parameters, elsewhere)
        state = parts.pipeline.state_dict()
        shards += whole(f"{RANKS}{rank}/random", save_random_state(parts.device)).shards()
        shards += self._buffers([offer.buffers for offer in offers])
        commit = None
        if rank == 0:
            assert user is not None, "this rank's own, or what it was sent"
            model = _whole(stages or [self._stage()])
            encoded, tensors = self._encoded(state, model, user, scheduler)
            for index, tensor in enumerate(tensors):
                key = f"{CLIENT}{index}"
                shards += (
                    whole(key, tensor).shards() if tensor.numel() else [empty_shard(key, tensor.shape, tensor.dtype)]
                )
            commit = Commit(
                Path(agreed.save_dir),
                self._about(tag, agreed, model.description),
                encoded,
                self._run,
                agreed.save_latest,
                parts.config.checkpoint.keep_last,
                parts.config.checkpoint.overwrite,
            )
        return _Collected(shards, scalars, commit, Path(agreed.save_dir))

    def _buffers(self, checksums: Sequence[dict[str, int]]) -> list[Shard]:
        """Written by the first rank that has them, and by those that have other values. checksums: of each rank."""
        rank, first = self._host.rank, first_with(checksums)
        shards: list[Shard] = []
        for name, buffer in self._parts.model.named_buffers().items():
            if not buffer.numel():
                shards.append(empty_shard(BUFFERS + name, buffer.shape, buffer.dtype))
            elif rank == first[name]:
                shards += whole(BUFFERS + name, buffer.detach()).shards()
            elif checksums[rank][name] != checksums[first[name]][name]:
                shards += whole(f"{RANKS}{rank}/{BUFFERS}{name}", buffer.detach()).shards()
        return shards

    def _encoded(
        self, state: dict[str, Any], model: _Stage, user: UserState, scheduler: Any
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The content of state.json, and the tensors in it. model: the whole one."""
        tensors: list[torch.Tensor] = []
        optimizer = self._parts.model.optimizer
        groups = [
            {"names": names, "values": {key: value for key, value in group.items() if key not in KEPT}}
            for names, group in zip(model.description.groups, optimizer.param_groups, strict=True)
        ]
        everything: dict[str, Any] = {
            **state,
            "parameters": {name: entry.model_dump() for name, entry in model.description.parameters.items()},
            "buffers": {name: entry.model_dump() for name, entry in model.description.buffers.items()},
            "extra": model.extra,
            "optimizer": {"type": type(optimizer.inner).__name__, "groups": groups},
            "lr_scheduler": None
            if scheduler is None
            else {"type": type(scheduler).__name__, "state": scheduler.state_dict()},
            "loaders": user.loaders,
            "client_state": user.client_state,
        }
        return {key: plain.encode(value, key, tensors) for key, value in everything.items()}, tensors

    def _about(self, tag: str, agreed: SaveRequest, description: ModelFacts) -> About:
        parts, model = self._parts, self._parts.model
        described = description.parameters
        layout = model.buffer.layout
        return About(
            tag=tag,
            saved_at=now(),
            global_steps=parts.pipeline.outcomes.global_steps,
            world_size=self._host.world_size,
            stage=parts.config.zero_optimization.chosen_stage,
            precision={
                "compute": ", ".join(sorted({entry.dtype for entry in described.values()})),
                "master": ", ".join(sorted({CODES[master.dtype] for master in model.buffer.master})),
            },
            config=parts.config.model_dump(mode="json"),
            versions=library_versions(),
            parameters=count_parameters(described),
            layout={
                "partitioned": model.buffer.shard,
                "alignment": layout.alignment,
                "buckets": [bucket.numel for bucket in layout.buckets],
                "grid": asdict(SavedGrid.of(model.topology)),
            },
            exclude_frozen_parameters=agreed.exclude_frozen_parameters,
            run=self._run.id,
        )


@dataclass(frozen=True)
class _Collected:
    shards: list[Shard]
    scalars: Scalars
    commit: Commit | None  # on rank 0
    save_dir: Path


def _whole(stages: Sequence[_Stage]) -> _Stage:
    extra: dict[str, Any] = {}
    for stage in reversed(stages):  # the first one that has a module counts
        extra |= stage.extra
    return _Stage(joined([stage.description for stage in stages]), extra)


def _checksum(tensor: torch.Tensor) -> int:
    host = tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()
    return zlib.crc32(as_bytes(host))
