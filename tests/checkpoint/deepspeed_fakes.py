"""Files laid out as DeepSpeed lays them out, made by hand: small, and broken in any way that a test asks for."""

from __future__ import annotations

import enum
import math
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

MODULES = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.fp16")


class Classes:
    """Classes with the names of DeepSpeed's, which can be pickled while :meth:`present`."""

    def __init__(self) -> None:
        self.stage = enum.IntEnum("ZeroStageEnum", {"one": 1, "two": 2, "three": 3})
        self.scaler = type("DynamicLossScaler", (), {})
        self.modules = {name: types.ModuleType(name) for name in MODULES}
        for cls, module in ((self.stage, "zero.config"), (self.scaler, "fp16.loss_scaler")):
            cls.__module__, cls.__qualname__ = f"deepspeed.runtime.{module}", cls.__name__
            self.modules[cls.__module__] = types.ModuleType(cls.__module__)
            setattr(self.modules[cls.__module__], cls.__name__, cls)

    def present(self) -> Any:
        return mock.patch.dict(sys.modules, self.modules)


@dataclass
class Fake:
    """A checkpoint of ``world_size`` ranks with one group of parameters: a 0-dimensional one, odd sizes, one that is
    smaller than the number of ranks, a frozen and a tied one. Change ``heads`` (by rank at stage 3, else one) and
    ``states`` before :meth:`write`."""

    stage: int
    world_size: int
    scaler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.classes = Classes()
        self.trained = {
            "a.weight": torch.arange(15.0).view(3, 5) - 4, "scale": torch.tensor(2.5),
            "b.bias": torch.linspace(-1, 1, 7), "b.pair": torch.tensor([3.0, 4.0]),
        }  # fmt: skip
        self.frozen = {"c.weight": torch.arange(10.0, 16.0).view(2, 3).bfloat16()}
        self.buffers = {"seen": torch.tensor(9), "mean": torch.ones(3)}
        self.tied = {"head.weight": "a.weight"}
        self.moments = {
            "exp_avg": {name: value.float() + 0.5 for name, value in self.trained.items()},
            "exp_avg_sq": {name: value.float().square() for name, value in self.trained.items()},
        }
        self.heads = [self._head(rank) for rank in range(self.world_size if self.stage == 3 else 1)]
        self.states = [self._state(rank) for rank in range(self.world_size)]

    def _partition(self, values: dict[str, torch.Tensor], rank: int, padded: bool) -> torch.Tensor:
        """Return a rank's partition of the flat values. padded: with the padding at the end, which the masters of
        stages 1 and 2 are without."""
        flats = [value.detach().float().flatten() for value in values.values()]
        if self.stage == 3:
            return torch.cat([self._cut(flat, rank) for flat in flats])
        flat = torch.cat(flats)
        numel = flat.numel()
        part = 2 * math.ceil(numel / (2 * self.world_size))
        flat = torch.nn.functional.pad(flat, (0, part * self.world_size - numel), value=-7.0)
        stop = (rank + 1) * part if padded else max(rank * part, min((rank + 1) * part, numel))
        return flat[rank * part : stop].clone()

    def _cut(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        part = math.ceil(flat.numel() / self.world_size)
        padded = torch.nn.functional.pad(flat, (0, part * self.world_size - flat.numel()), value=-7.0)
        return padded[rank * part : (rank + 1) * part].clone()

    def _head(self, rank: int) -> dict[str, Any]:
        shown = {name: value.detach() for name, value in {**self.trained, **self.frozen}.items()}
        if self.stage == 3:
            shown = {name: value.flatten()[:0] for name, value in shown.items()}
        shown |= {alias: shown[name] for alias, name in self.tied.items()}
        frozen: dict[str, Any] = {"frozen_param_shapes": None, "frozen_param_fragments": None}
        if self.stage > 1:
            values = {n: self._cut(v.flatten(), rank) if self.stage == 3 else v for n, v in self.frozen.items()}
            shapes = {name: value.shape for name, value in self.frozen.items()}
            frozen = {"frozen_param_shapes": OrderedDict(shapes), "frozen_param_fragments": OrderedDict(values)}
        return {
            "module": OrderedDict({**shown, **self.buffers}),
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [OrderedDict({name: value.shape for name, value in self.trained.items()})],
            "shared_params": dict(self.tied) if rank == 0 else {},
            **frozen,
            **{"lr_scheduler": {"last_batch_iteration": 4}, "data_sampler": None, "random_ltd": None},
            **{"skipped_steps": 1, "global_steps": 6, "global_samples": 48},
            **{"dp_world_size": self.world_size, "mp_world_size": 1, "ds_version": "0.19.8"},
            "ds_config": {"train_batch_size": 8 * self.world_size, "train_micro_batch_size_per_gpu": 4},
            **self.client_state,
        }

    def _state(self, rank: int) -> dict[str, Any]:
        settings = {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.25, "amsgrad": False}
        kernels = {"decoupled_weight_decay": True, "foreach": None, "fused": True}
        state = {name: self._partition(values, rank, padded=True) for name, values in self.moments.items()}
        optimizer = {
            "state": {0: {"step": torch.tensor(5.0), **state}},
            "param_groups": [{**settings, **kernels, "params": [0]}],
        }
        masters = [self._partition(self.trained, rank, padded=False)]
        saved: dict[str, Any] = {"zero_stage": self.classes.stage(self.stage), "loss_scaler": None}
        if self.scaler is not None:
            saved["loss_scaler"] = self.classes.scaler()
            vars(saved["loss_scaler"]).update(self.scaler)
        if self.stage == 3:
            saved |= {"partition_count": self.world_size, "optimizer_state_dict": optimizer}
            saved |= {"fp32_flat_groups": masters}
        else:
            saved |= {"partition_count": [self.world_size], "base_optimizer_state": optimizer}
            saved |= {"single_partition_of_fp32_groups": masters}
        return {"optimizer_state_dict": saved, "ds_config": {}, "ds_version": "0.19.8"}

    def write(self, directory: Path, tag: str = "global_step6") -> Path:
        """The directory of the checkpoint."""
        path = directory / tag
        path.mkdir(parents=True)
        with self.classes.present():
            for rank, head in enumerate(self.heads):
                prefix = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
                torch.save(head, path / f"{prefix}mp_rank_00_model_states.pt")
            for rank, state in enumerate(self.states):
                torch.save(state, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        (directory / "latest").write_text(tag)
        return path
