"""``deepspeed.pipe``: models as lists of layers for pipeline parallelism."""

from zerolite.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
