"""Who saves and loads: each competitor trains the same model with the same AdamW, and keeps its states in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.competitors import CLIP, Competitor, Setting, make_zerolite_engine, optimizer_for

TAG = "saved"


class Saver:
    """One rank of a competitor. All methods are called on all ranks."""

    asynchronous = False  # whether it has save_async

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Train on a micro-batch; the loss of this rank."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Parameters and optimizer states, into a directory that does not exist."""
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        raise NotImplementedError

    def save_async(self, directory: Path) -> None:
        """Return when training can go on."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until what save_async began is complete."""
        raise NotImplementedError


class _EngineSaver(Saver):
    """zerolite's and DeepSpeed's engines have methods of the same names."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), TAG)

    def load(self, directory: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(directory), TAG)
        if path is None:
            raise RuntimeError(f"expected to load {directory / TAG}, but nothing was loaded")


class ZeroliteSaver(_EngineSaver):
    asynchronous = True

    def __init__(self, model: nn.Module, setting: Setting, stage: int) -> None:
        super().__init__(make_zerolite_engine(model, setting, stage))

    def save_async(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), TAG, async_save=True)

    def wait(self) -> None:
        self.engine.wait_for_checkpoint()


class DeepSpeedSaver(_EngineSaver):
    """Its default: torch.save, one file a rank for the optimizer and the masters, and the weights once more."""

    def __init__(self, model: nn.Module, setting: Setting, stage: int) -> None:
        import deepspeed  # type: ignore[import-not-found]

        zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 4_000_000}  # its default reserves 2 GB
        if stage < 3:
            zero["allgather_bucket_size"] = 4_000_000
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": setting.micro_batch,
            "gradient_clipping": CLIP,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if setting.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        optimizer = optimizer_for(model, fused=True)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        super().__init__(engine)


class _PlainSaver(Saver):
    """A model and torch's optimizer."""

    autocast = False  # in bf16

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.model, self.setting = model, setting
        self.optimizer = optimizer_for(model, fused=True)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        autocast = self.autocast and self.setting.dtype == "bf16"
        with torch.autocast(self.setting.device, torch.bfloat16, enabled=autocast):
            loss: Tensor = self.model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class FSDP2Saver(_PlainSaver):
    """torch.distributed.checkpoint as its documentation has it, with FileSystemWriter's defaults (files are synced)."""

    asynchronous = True

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        import torch.distributed.checkpoint.state_dict  # here, so that no save pays for it
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if setting.dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(setting.device, (setting.world_size,))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        super().__init__(model, setting)
        self.background = dist.new_group(backend="gloo")
        # Kept from save to save, so that it can use its memory again; the other options need CUDA or a process.
        self.stager = DefaultStager(StagingOptions(False, False, False, False))
        self.future: Any = None

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, directory: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(self._state(), checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        checkpoint.load(state, checkpoint_id=directory)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def save_async(self, directory: Path) -> None:
        from torch.distributed import checkpoint

        self.future = checkpoint.async_save(
            self._state(), checkpoint_id=directory, process_group=self.background, async_stager=self.stager
        )

    def wait(self) -> None:
        self.future.result()


class DDPSaver(_PlainSaver):
    """torch.save on the first rank, torch.load on all."""

    autocast = True

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), setting)

    def save(self, directory: Path) -> None:
        if dist.get_rank() == 0:
            directory.mkdir()
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, directory / "state.pt")

    def load(self, directory: Path) -> None:
        state = torch.load(directory / "state.pt", map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


COMPETITORS = {
    competitor.name: competitor
    for competitor in (
        *(Competitor(f"zerolite-{stage}", ZeroliteSaver, "zerolite", {"stage": stage}) for stage in (2, 3)),
        *(Competitor(f"deepspeed-{stage}", DeepSpeedSaver, "deepspeed", {"stage": stage}) for stage in (2, 3)),
        Competitor("fsdp2", FSDP2Saver),
        Competitor("ddp", DDPSaver),
    )
}
