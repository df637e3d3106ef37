"""Configuration: DeepSpeed's JSON schema as frozen models. Never imports torch."""

from __future__ import annotations

from .errors import ConfigError
from .load import load_config
from .models import (
    DataTypesConfig,
    LeafModuleConfig,
    OptimizerConfig,
    SchedulerConfig,
    ZeroConfig,
    ZeroliteConfig,
)
from .precision import Bf16Config, Fp16Config, TorchAutocastConfig

__all__ = [
    "Bf16Config",
    "ConfigError",
    "DataTypesConfig",
    "Fp16Config",
    "LeafModuleConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TorchAutocastConfig",
    "ZeroConfig",
    "ZeroliteConfig",
    "load_config",
]
