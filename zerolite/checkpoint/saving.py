"""Save an engine to a committed checkpoint, in the background on request."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from zerolite.checkpoint import json_codec
from zerolite.checkpoint.directory import check_tag, default_tag, run_of_this_job
from zerolite.checkpoint.errors import CheckpointError
from zerolite.checkpoint.flat_ranges import Shard
from zerolite.checkpoint.huggingface import torchao_descriptions
from zerolite.checkpoint.manifest import Manifest, SavedGrid, library_versions
from zerolite.checkpoint.model_state import BUFFERS, RANKS, ModelState
from zerolite.checkpoint.random_state import save_random_state
from zerolite.checkpoint.safetensors import bytes_of
from zerolite.checkpoint.state import ModelFacts, joined
from zerolite.checkpoint.storage import Commit, Scalars, now, write_checkpoint
from zerolite.comm import HostGroup, RaiseTogether, collective, keep_track
from zerolite.data.dataloader import Loaders
from zerolite.utils.accelerator import host_memory
from zerolite.utils.lazy import collector_off
from zerolite.zero.optimizer import LOCAL_GROUP_KEYS

Request = TypeVar("Request")
logger = logging.getLogger("zerolite")
CLIENT = "client_state/"
_CALL = "engine.save_checkpoint"
_ALIGNMENT = 64  # bytes, of shards in a host copy
# References that keep savers alive, even after their engines, until everything is written or the failure is reported.
_unfinished: set[Saver] = set()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context without ``torch.inference_mode`` and without the cyclic garbage collector.

    Tensors made in inference mode could not be changed outside of it. And the plans of a save are many small objects
    without cycles. A collection looks at all objects of the program, which can take 0.2 s.
    """
    with collector_off(), torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of a save on one rank."""

    save_dir: str
    tag: str | None
    save_latest: bool
    exclude_frozen_parameters: bool
    async_save: bool


@dataclass(frozen=True)
class _Offer:
    """Message of each rank to the others before they save.

    Attributes:
        buffers: checksums by name.
        stage: facts of a pipeline stage, from the first rank of each.
    """

    buffers: dict[str, int]
    stage: ModelFacts | None


class Saver:
    """Saves one engine's checkpoints, one at a time."""

    def __init__(
        self, state: ModelState, host: HostGroup, loaders: Loaders, register_unfrozen_params: Callable[[], None]
    ) -> None:
        """
        Args:
            state: the tensors of the engine.
            host: all ranks of the job.
            loaders: the engine's data loaders, whose positions are saved.
            register_unfrozen_params: trains parameters from now on that have been unfrozen since the last backward.
        """
        self._model_state, self._parts, self._host = state, state.parts, host
        self._loaders, self._register_unfrozen_params = loaders, register_unfrozen_params
        self._run = run_of_this_job()  # which the checkpoints belong to
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._running: threading.Thread | None = None
        self._failure: BaseException | None = None
        keep_track(self)

    @collective
    @undisturbed()
    def save(self, request: SaveRequest, client_state: object, scheduler: object) -> str:
        """Save a checkpoint and return its directory.

        Args:
            request: arguments of the call.
            client_state: the user's.
            scheduler: the learning rate schedule.
        """
        self.wait_for_all()
        self._parts.reducer.wait()  # on all ranks before they exchange anything, see `StepPipeline.look_at_grads`
        request, ranks = agreed(self._host, _CALL, request)
        # Parameters that the user has just unfrozen need masters and states, which are part of the checkpoint.
        self._register_unfrozen_params()
        user: dict[str, object] = {}

        def offer() -> _Offer:
            if request.tag is not None:
                check_tag(request.tag)
            if client_state is not None and not isinstance(client_state, dict):
                raise TypeError(f"expected client_state to be a dict, got {type(client_state).__name__}")
            user.update(loaders=self._loaders.state_dict(), client_state=dict(client_state or {}))
            # Encode it once here, so that a value that cannot be saved is an error before anything is written.
            json_codec.encode(user["client_state"], "client_state", [])
            return self._offer()

        offers = ranks.gather(offer)
        self._parts.pipeline.check_ranks()
        save_dir = Path(request.save_dir)
        tag = request.tag or default_tag(self._parts.pipeline.state.global_steps)
        # States that offload keeps on disk may be too large for a copy in the host's memory.
        in_background = request.async_save and not self._parts.buffer.placements.on_disk

        def collect() -> Callable[[], None]:
            shards, scalars = self._shards(offers, request.exclude_frozen_parameters)
            commit = None
            if self._host.rank == 0:
                commit, tensors = self._commit(tag, request, offers, user, scheduler)
                shards += tensors
            if in_background:
                shards = self._copied(shards)
            return lambda: self._write(save_dir, tag, shards, scalars, commit)

        write = ranks.run(collect)
        if in_background:
            self._begin(write)
        else:
            write()
        return str(save_dir / tag)

    # ---------------------------------------------------------------- in the background

    def wait(self) -> None:
        """Wait until a save in the background has ended. Raises its error, once."""
        if self._running is not None:
            self._running.join()
            self._running = None
        _unfinished.discard(self)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    close = wait  # before the process group is destroyed

    def wait_for_all(self) -> None:
        """Wait as :meth:`wait` does, and also for the savers of other engines, which may use the same group."""
        self.wait()
        for other in list(_unfinished):
            if other._running is not None:
                other._running.join()

    def _begin(self, write: Callable[[], None]) -> None:
        def run() -> None:
            try:
                write()
                _unfinished.discard(self)
            except BaseException as error:  # raised by the next call in the training thread
                self._failure = error
                if self._host.rank == 0:
                    logger.error("%s, in the background: %s", _CALL, error)

        self._running = threading.Thread(target=run, name="zerolite-checkpoint")
        _unfinished.add(self)
        self._running.start()

    @torch.no_grad()
    def _copied(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards in host memory, complete when this returns, and valid until the next call.

        The memory is kept for the next save, because the first touch of new memory takes longer than the copy. It is
        pinned if shards come from a CUDA device.
        """
        values = [shard.tensor() for shard in shards]
        on_cuda = next((value.device for value in values if value.device.type == "cuda"), None)
        rooms = [-(-shard.nbytes // _ALIGNMENT) * _ALIGNMENT for shard in shards]
        if self._staging.numel() < sum(rooms):
            self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old memory before the new
            self._staging = host_memory(sum(rooms), pin=on_cuda is not None)
        copies, position = [], 0
        for shard, value, room in zip(shards, values, rooms, strict=True):
            memory = self._staging.narrow(0, position, shard.nbytes).view(shard.dtype).view(shard.box[1])
            memory.copy_(value, non_blocking=on_cuda is not None)
            copies.append(replace(shard, values=memory))
            position += room
        if on_cuda is not None:
            torch.cuda.current_stream(on_cuda).synchronize()
        return copies

    def _write(
        self, save_dir: Path, tag: str, shards: Sequence[Shard], scalars: Scalars, commit: Commit | None
    ) -> None:
        if not self._host.alive:
            raise CheckpointError(
                f"saving checkpoint '{tag}' failed: the process group was destroyed meanwhile; call "
                "engine.wait_for_checkpoint() first, or zerolite.destroy() instead"
            )
        write_checkpoint(save_dir, tag, shards, scalars, commit, self._host)

    # ---------------------------------------------------------------- contents

    def _offer(self) -> _Offer:
        pipeline = self._parts.pipeline
        pipeline.check_between_steps()
        pipeline.check_no_failed_update()
        self._parts.buffer.placements.verify()
        if pipeline.accumulating and self._host.rank == 0:
            logger.warning(
                "%s: called in the middle of a gradient accumulation. Training goes on as if it had not been, but a "
                "checkpoint holds no gradients: a job that continues from it begins the accumulation anew, without the "
                "micro-batches since the last step. Save when engine.step() has returned True to lose none",
                _CALL,
            )
        pipeline.written.collect_all()
        buffers = {name: _checksum(buffer) for name, buffer in self._model_state.named_buffers().items()}
        return _Offer(buffers, self._facts() if self._model_state.speaks_for_stage else None)

    def _facts(self) -> ModelFacts:
        extra, quantized = self._model_state.extra_state(), torchao_descriptions(self._parts.model)
        return replace(self._model_state.describe(), extra=extra, quantized=quantized)

    def _shards(self, offers: Sequence[_Offer], exclude_frozen: bool) -> tuple[list[Shard], Scalars]:
        """Return the model's tensors that this rank writes, its random state, and states that are one number."""
        self._parts.pipeline.state.settle()
        model = self._model_state
        stages = [offer.stage for offer in offers if offer.stage is not None]
        earlier = stages[: self._parts.topology.pipe.rank]
        shards, scalars = model.shards(exclude_frozen, {name for stage in earlier for name in stage.parameters})
        shards.append(Shard.whole(f"{RANKS}{self._host.rank}/random", save_random_state(self._parts.device)))
        return shards + self._buffers([offer.buffers for offer in offers]), scalars

    def _buffers(self, checksums: Sequence[dict[str, int]]) -> list[Shard]:
        """Return the buffers that this rank writes.

        The first rank that has a buffer writes it, and so do ranks with other values, under a name of their own.
        """
        rank = self._host.rank
        shards: list[Shard] = []
        for name, buffer in self._model_state.named_buffers().items():
            first = next(place for place, of_rank in enumerate(checksums) if name in of_rank)
            if rank == first:
                shards.append(Shard.whole(BUFFERS + name, buffer.detach()))
            elif checksums[rank][name] != checksums[first][name]:
                shards.append(Shard.whole(f"{RANKS}{rank}/{BUFFERS}{name}", buffer.detach()))
        return shards

    def _commit(
        self, tag: str, request: SaveRequest, offers: Sequence[_Offer], user: dict[str, object], scheduler: Any
    ) -> tuple[Commit, list[Shard]]:
        """Return the inputs of the commit, and the user's tensors, which the rank that commits writes."""
        model = joined([offer.stage for offer in offers if offer.stage is not None] or [self._facts()])
        tensors: list[torch.Tensor] = []
        state = {
            key: json_codec.encode(value, key, tensors) for key, value in self._state(model, user, scheduler).items()
        }
        shards = [Shard.whole(f"{CLIENT}{index}", tensor) for index, tensor in enumerate(tensors)]
        run = None if self._parts.config.checkpoint.overwrite else self._run
        manifest = self._manifest(tag, request)
        return Commit(Path(request.save_dir), manifest, state, run, request.save_latest), shards

    def _state(self, model: ModelFacts, user: dict[str, object], scheduler: Any) -> dict[str, object]:
        """Return the content of state.json before it is encoded. ``model``: facts of the full model."""
        optimizer = self._parts.optimizer
        groups = [
            {"names": names, "values": {key: value for key, value in group.items() if key not in LOCAL_GROUP_KEYS}}
            for names, group in zip(model.groups, optimizer.param_groups, strict=True)
        ]
        schedule = None
        if scheduler is not None:
            schedule = {"type": type(scheduler).__name__, "state": scheduler.state_dict()}
        return {
            **self._parts.pipeline.state.state_dict(),
            "parameters": {name: entry.model_dump() for name, entry in model.parameters.items()},
            "buffers": {name: entry.model_dump() for name, entry in model.buffers.items()},
            "quantized": model.quantized,
            "extra": model.extra,
            "optimizer": {"type": type(optimizer.inner).__name__, "groups": groups},
            "lr_scheduler": schedule,
            **user,
        }

    def _manifest(self, tag: str, request: SaveRequest) -> Manifest:
        parts = self._parts
        return Manifest(
            tag=tag,
            saved_at=now(),
            global_steps=parts.pipeline.state.global_steps,
            grid=SavedGrid.of(parts.topology),
            stage=parts.config.zero_optimization.stage,
            config=parts.config.model_dump(mode="json"),
            versions=library_versions(),
            exclude_frozen_parameters=request.exclude_frozen_parameters,
            run=self._run.id,
        )


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(bytes_of(tensor))


def agreed(host: HostGroup, call: str, request: Request) -> tuple[Request, RaiseTogether]:
    """Wait until all ranks make this ``call``, and compare their requests, dataclasses.

    If a rank does not come, the watchdog ends the job and names it.

    Returns:
        The request of all ranks, and the object that raises one rank's error on all ranks, as CheckpointError.

    Raises:
        CheckpointError: on all ranks, if the requests differ.
    """
    requests = host.gather(request, call)
    first: Any = requests[0]
    for rank, of_rank in enumerate(requests):
        for name, value in asdict(first).items():
            if getattr(of_rank, name) != value:
                raise CheckpointError(
                    f"{call}: expected the same arguments on all ranks, got {name}={value!r} on rank 0 and "
                    f"{name}={getattr(of_rank, name)!r} on rank {rank}"
                )
    return requests[0], RaiseTogether(host, call, CheckpointError, same=CheckpointError)


def directory_of(path: str | os.PathLike[str], what: str) -> str:
    """Return an absolute path. Raises ValueError, calling it ``what``, if it is not a path."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"expected {what} to be a directory, got {path!r}")
    return os.path.abspath(os.fspath(path))
