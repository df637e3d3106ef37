"""Universal checkpoints as DeepSpeed 0.19 makes them, by hand: small, and broken in any way that a test asks for."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

MODULES = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.fp16.loss_scaler")


class DynamicLossScaler:
    """A class with the name of DeepSpeed's, which can be pickled while :func:`deepspeed_present`."""

    __module__ = MODULES[-1]


def deepspeed_present() -> Any:
    modules = {name: types.ModuleType(name) for name in MODULES}
    modules[MODULES[-1]].DynamicLossScaler = DynamicLossScaler  # type: ignore[attr-defined]
    return mock.patch.dict(sys.modules, modules)


@dataclass
class Fake:
    """A checkpoint with one group of parameters: a 0-dimensional one, odd sizes, a frozen and a tied one. Change
    ``heads`` (by rank at stage 3, else one) and ``optimizer`` before :meth:`write`."""

    stage: int
    world_size: int
    scaler: dict[str, Any] | None = None
    client_state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trained = {
            "a.weight": torch.arange(15.0).view(3, 5) - 4, "scale": torch.tensor(2.5),
            "b.bias": torch.linspace(-1, 1, 7), "b.pair": torch.tensor([3.0, 4.0]),
        }  # fmt: skip
        self.frozen = {"c.weight": torch.arange(10.0, 16.0).view(2, 3).bfloat16()}
        self.buffers = {"seen": torch.tensor(9), "mean": torch.ones(3)}
        self.tied = {"head.weight": "a.weight"}
        self.moments = {
            "exp_avg": {name: value + 0.5 for name, value in self.trained.items()},
            "exp_avg_sq": {name: value.square() for name, value in self.trained.items()},
        }
        self.heads = [self._head(rank) for rank in range(self.world_size if self.stage == 3 else 1)]
        settings = {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.25, "amsgrad": False}
        kernels = {"decoupled_weight_decay": True, "foreach": None, "fused": True}
        self.optimizer: dict[str, Any] = {"param_groups": [{**settings, **kernels, "params": [0]}]}
        if self.scaler is not None:
            self.optimizer["loss_scaler"] = DynamicLossScaler()
            vars(self.optimizer["loss_scaler"]).update(self.scaler)
        if self.stage == 3:
            self.optimizer["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(5.0)}}}

    def _head(self, rank: int) -> dict[str, Any]:
        module = {**self.trained, **self.frozen}
        if self.stage == 3:
            module = {name: value.flatten()[:0] for name, value in module.items()}
        module |= {alias: module[name] for alias, name in self.tied.items()}
        frozen = {name: value.flatten() for name, value in self.frozen.items()}
        padded = {n: torch.nn.functional.pad(v, (0, -len(v) % self.world_size)) for n, v in frozen.items()}
        return {
            "module": OrderedDict({**module, **self.buffers}),
            "buffer_names": list(self.buffers),
            "param_shapes": [OrderedDict({name: value.shape for name, value in self.trained.items()})],
            "shared_params": dict(self.tied) if rank == 0 else {},
            "frozen_param_shapes": OrderedDict({name: value.shape for name, value in self.frozen.items()}),
            "frozen_param_fragments": {name: v.chunk(self.world_size)[rank].clone() for name, v in padded.items()},
            **{"optimizer": None, "lr_scheduler": {"last_batch_iteration": 4}, "data_sampler": None},
            **{"skipped_steps": 1, "global_steps": 6, "global_samples": 48},
            **{"dp_world_size": self.world_size, "mp_world_size": 1, "ds_version": "0.19.8"},
            "ds_config": {"train_batch_size": 8 * self.world_size, "train_micro_batch_size_per_gpu": 4},
            **self.client_state,
        }

    def write(self, directory: Path, tag: str = "step6_universal") -> Path:
        """The directory of the checkpoint."""
        path = directory / tag
        path.mkdir(parents=True)
        for rank, head in enumerate(self.heads):
            torch.save(head, path / (f"zero_pp_rank_{rank}_" * (self.stage == 3) + "mp_rank_00_model_states.pt"))
        for state, values in {"fp32": self.trained, **self.moments}.items():
            for name, value in values.items():
                (path / "zero" / name).mkdir(parents=True, exist_ok=True)
                content = value.flatten() if self.stage == 3 else {"cat_dim": 0, "param": value}
                torch.save(content, path / "zero" / name / f"{state}.pt")
                if self.stage < 3:
                    torch.save(torch.tensor(5.0), path / "zero" / name / "step.pt")
        with deepspeed_present():
            torch.save(self.optimizer, path / "zero" / "optimizer_state.pt")
        (directory / "latest_universal").write_text(tag)
        return path
