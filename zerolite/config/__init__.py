"""Configuration: DeepSpeed's JSON schema as frozen models. It never imports torch."""

from __future__ import annotations

from .errors import ConfigError
from .load import load_config
from .models import (
    DataTypesConfig,
    OptimizerConfig,
    SchedulerConfig,
    ZeroliteConfig,
)
from .offload import ActivationCheckpointingConfig, AioConfig, OffloadOptimizerConfig, OffloadParamConfig
from .precision import Bf16Config, Fp16Config, TorchAutocastConfig
from .zero import LeafModuleConfig, ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "Bf16Config",
    "ConfigError",
    "DataTypesConfig",
    "Fp16Config",
    "LeafModuleConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TorchAutocastConfig",
    "ZeroConfig",
    "ZeroliteConfig",
    "load_config",
]
