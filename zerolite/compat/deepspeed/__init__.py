"""DeepSpeed's Python interface over zerolite's: ``import zerolite.compat.deepspeed as deepspeed``.

It contains the parts of DeepSpeed that scripts, accelerate, transformers, PEFT and TRL use. docs/deepspeed.md lists the
equal, different and absent parts. Names are imported on first use.
"""

from __future__ import annotations

from zerolite.compat.deepspeed.absent import with_sentences
from zerolite.compat.deepspeed.version import __version__
from zerolite.utils.lazy import lazy_names

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "OnDevice",
    "PipelineModule",
    "__version__",
    "add_config_arguments",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "accelerator",
    "checkpoint",
    "checkpointing",
    "comm",
    "compression",
    "launcher",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

__getattr__ = with_sentences(
    __name__,
    lazy_names(
        __name__,
        {
            "DeepSpeedConfig": f"{__name__}.runtime.config",
            "DeepSpeedConfigError": f"{__name__}.runtime.config",
            "OnDevice": f"{__name__}.utils.init_on_device",
            "DeepSpeedEngine": f"{__name__}.runtime.engine",
            "DeepSpeedOptimizer": f"{__name__}.runtime.base_optimizer",
            "PipelineModule": f"{__name__}.pipe",
            "add_config_arguments": f"{__name__}.start",
            "get_accelerator": f"{__name__}.accelerator",
            "init_distributed": f"{__name__}.comm",
            "initialize": f"{__name__}.start",
            **dict.fromkeys(
                "accelerator checkpoint checkpointing comm compression launcher ops pipe runtime utils zero".split(), ""
            ),
        },
    ),
)
