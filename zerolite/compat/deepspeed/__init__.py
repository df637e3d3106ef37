"""DeepSpeed's Python interface over zerolite's: ``import zerolite.compat.deepspeed as deepspeed``.

It contains the parts of DeepSpeed that scripts, accelerate, transformers, PEFT and TRL use. docs/deepspeed.md lists the
equal, different and absent parts. Names are imported on first use.
"""

from __future__ import annotations

from typing import Any

from zerolite.compat.deepspeed.absent import sentence_for
from zerolite.compat.deepspeed.version import __version__
from zerolite.utils.lazy import lazy_names

_MODULES = "accelerator checkpoint checkpointing comm compression launcher ops pipe runtime utils zero".split()
_HOMES = {
    "DeepSpeedConfig": f"{__name__}.runtime.config",
    "DeepSpeedConfigError": f"{__name__}.runtime.config",
    "DeepSpeedEngine": f"{__name__}.runtime.engine",
    "DeepSpeedOptimizer": f"{__name__}.runtime.base_optimizer",
    "PipelineModule": f"{__name__}.pipe",
    "add_config_arguments": f"{__name__}.start",
    "get_accelerator": f"{__name__}.accelerator",
    "init_distributed": f"{__name__}.comm",
    "initialize": f"{__name__}.start",
    "tp_model_init": f"{__name__}.start",
    **dict.fromkeys(_MODULES, ""),
}
__all__ = ["__version__"]
__all__.extend(_HOMES)

_load = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    sentence = sentence_for(name)
    if sentence is not None:
        raise AttributeError(sentence)
    return _load(name)
