"""DeepSpeed's Python interface over zerolite's: ``import zerolite.compat.deepspeed as deepspeed``.

It contains the parts of DeepSpeed that scripts, accelerate, transformers, PEFT and TRL use. docs/deepspeed.md lists the
equal, different and absent parts. Names are imported on first use.
"""

from __future__ import annotations

from typing import Any

from zerolite.compat.deepspeed.version import __version__
from zerolite.utils.lazy import lazy_names

__all__ = [
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
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
    "launcher",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

_ABSENT = {
    "InferenceEngine": "it has no inference engine",
    "PipelineEngine": "a pipeline is trained by DeepSpeedEngine.train_batch()",
    "default_inference_config": "it has no inference engine",
    "init_inference": "it has no inference engine; generate with the trained module, or export it with "
    "engine.save_16bit_model()",
    "inference": "it has no inference engine",
    "moe": "it has no layers for mixtures of experts; a model's own layers train at every stage",
    "compression": "it compresses no models",
    "tp_model_init": "tensor parallelism is set in the config, by tensor_parallel.size",
    "sequence": "it has no attention of DeepSpeed-Ulysses; tensor_parallel.sequence_parallel shards sequences",
}

_load = lazy_names(
    __name__,
    {
        "DeepSpeedEngine": f"{__name__}.runtime.engine",
        "DeepSpeedOptimizer": f"{__name__}.runtime.base_optimizer",
        "PipelineModule": f"{__name__}.pipe",
        "add_config_arguments": f"{__name__}.start",
        "get_accelerator": f"{__name__}.accelerator",
        "init_distributed": f"{__name__}.comm",
        "initialize": f"{__name__}.start",
        **dict.fromkeys("accelerator checkpoint checkpointing comm launcher ops pipe runtime utils zero".split(), ""),
    },
)


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise AttributeError(f"zerolite's deepspeed has no {name!r}: {_ABSENT[name]} (docs/deepspeed.md)")
    return _load(name)
