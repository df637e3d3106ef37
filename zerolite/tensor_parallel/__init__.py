"""Tensor parallelism: layers of which each rank of a group holds a part, for the same batch.

:func:`apply` cuts a model that is written without it; the layers can also be used directly.
"""

from zerolite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from zerolite.tensor_parallel.cutting import apply
from zerolite.tensor_parallel.functions import all_gather, copy, gather, reduce, reduce_scatter, scatter
from zerolite.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from zerolite.tensor_parallel.logits import VocabParallelLogits
from zerolite.tensor_parallel.plan import PlanError

__all__ = [
    "ColumnParallelLinear",
    "PlanError",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "VocabParallelLogits",
    "all_gather",
    "apply",
    "copy",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "vocab_parallel_cross_entropy",
]
