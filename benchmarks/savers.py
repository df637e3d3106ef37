"""Competitors of `checkpoint.py`: each trains the same model with the same AdamW, and keeps its states in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.competitors import plain_loop, wrap_ddp, wrap_fsdp2
from benchmarks.engines import engine_loop, make_deepspeed_engine, make_zerolite_engine
from benchmarks.setting import Competitor, Setting, Step, by_name, optimizer_for

TAG = "saved"


class Saver:
    """One rank of a competitor. All methods are called on all ranks.

    Attributes:
        step: train on a micro-batch; gives the loss of this rank.
        asynchronous: it has `save_async` and `wait`.
    """

    asynchronous = False
    step: Step

    def save(self, directory: Path) -> None:
        """Write parameters and optimizer states into a directory that does not exist."""
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        raise NotImplementedError

    def save_async(self, directory: Path) -> None:
        """Return when training can go on."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when the save that save_async began is complete."""
        raise NotImplementedError


class DeepSpeedSaver(Saver):
    """Its default: torch.save, one file a rank for the optimizer and the masters, and the weights once more."""

    def __init__(self, model: nn.Module, setting: Setting, stage: int) -> None:
        self.engine = self.make(model, setting, stage)
        self.step = engine_loop(self.engine)

    def make(self, model: nn.Module, setting: Setting, stage: int) -> Any:
        return make_deepspeed_engine(model, setting, stage, small_buckets=True)

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), TAG)

    def load(self, directory: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(directory), TAG)
        if path is None:
            raise RuntimeError(f"expected to load {directory / TAG}, but nothing was loaded")


class ZeroliteSaver(DeepSpeedSaver):
    """The engines have methods of the same names."""

    asynchronous = True

    def make(self, model: nn.Module, setting: Setting, stage: int) -> Any:
        return make_zerolite_engine(model, setting, stage)

    def save_async(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), TAG, async_save=True)

    def wait(self) -> None:
        self.engine.wait_for_checkpoint()


class FSDP2Saver(Saver):
    """torch.distributed.checkpoint as its documentation has it, with FileSystemWriter's defaults (files are synced)."""

    asynchronous = True

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.model = wrap_fsdp2(model, setting)
        self.optimizer = optimizer_for(model, fused=True)
        self.step = plain_loop(model, self.optimizer, setting, autocasts=False)
        self.background = dist.new_group(backend="gloo")
        # Kept from save to save, so that it can use its memory again; the other options need CUDA or a process.
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.future: Any = None

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, directory: Path) -> None:
        checkpoint.save(self._state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        state = self._state()
        checkpoint.load(state, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def save_async(self, directory: Path) -> None:
        self.future = checkpoint.async_save(
            self._state(), checkpoint_id=directory, process_group=self.background, async_stager=self.stager
        )

    def wait(self) -> None:
        self.future.result()


class DDPSaver(Saver):
    """torch.save on the first rank, torch.load on all."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.model = wrap_ddp(model)
        self.optimizer = optimizer_for(self.model, fused=True)
        self.step = plain_loop(self.model, self.optimizer, setting, autocasts=True)

    def save(self, directory: Path) -> None:
        if dist.get_rank() == 0:
            directory.mkdir()
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, directory / "state.pt")

    def load(self, directory: Path) -> None:
        state = torch.load(directory / "state.pt", map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


COMPETITORS = by_name(
    [
        *(Competitor(f"zerolite-{stage}", ZeroliteSaver, "zerolite", {"stage": stage}) for stage in (2, 3)),
        *(Competitor(f"deepspeed-{stage}", DeepSpeedSaver, "deepspeed", {"stage": stage}) for stage in (2, 3)),
        Competitor("fsdp2", FSDP2Saver),
        Competitor("ddp", DDPSaver),
    ]
)
