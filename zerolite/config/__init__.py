"""Configuration: DeepSpeed's JSON schema as frozen models. It never imports torch."""

from __future__ import annotations

from .errors import ConfigError
from .load import load_config
from .models import Tiles, ZeroliteConfig
from .offload import ActivationCheckpointingConfig

__all__ = ["ActivationCheckpointingConfig", "ConfigError", "Tiles", "ZeroliteConfig", "load_config"]
