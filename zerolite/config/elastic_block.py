"""The block `elasticity`, which derives batch sizes from the number of ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .elasticity import MAX_CHOICE, Elasticity
from .rules import MAX_BATCH, Boolean, Integer, Integers, OneOf

Bool = Annotated[bool, BeforeValidator(Boolean())]


class ElasticityConfig(BaseModel):
    """One global batch, whatever the number of ranks: a job that goes on with fewer or more of them takes the same
    steps. See [Batch sizes](#batch-sizes)."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    enabled: Bool = Field(
        default=False, description="Choose the batch sizes from this block. The other keys are without effect if false."
    )
    max_train_batch_size: Annotated[
        int | None,
        BeforeValidator(Integer(1, MAX_CHOICE, nullable=True, null_means="train_batch_size is given")),
    ] = Field(
        default=None,
        description="The global batch is chosen among the sizes up to this one, in samples: the one that the most "
        "numbers of ranks can split. Needed unless `train_batch_size` is given, which is then the global batch.",
    )
    micro_batch_sizes: Annotated[tuple[int, ...] | None, BeforeValidator(Integers(1, MAX_BATCH))] = Field(
        default=None, description="The micro-batch sizes, in samples, that are allowed. Needed."
    )
    min_gpus: Annotated[int, BeforeValidator(Integer(1, MAX_CHOICE))] = Field(
        default=1, description="Smallest number of ranks that the job may have."
    )
    max_gpus: Annotated[int, BeforeValidator(Integer(1, MAX_CHOICE))] = Field(
        default=10_000, description="Largest number of ranks that the job may have."
    )
    num_gpus_per_node: Annotated[int, BeforeValidator(Integer(1, MAX_CHOICE))] = Field(
        default=1, description="Numbers of ranks are multiples of this one: ranks come and go by whole nodes."
    )
    prefer_larger_batch: Bool = Field(
        default=True,
        description="Of global batches that equally many numbers of ranks can split, the largest; false: the smallest. "
        "So too of the micro-batch sizes that fit.",
    )
    ignore_non_elastic_batch_info: Bool = Field(
        default=False,
        description="Ignore `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`. "
        "false: the first is the global batch, and the other two are errors.",
    )
    min_time: Annotated[int, BeforeValidator(Integer(0))] = Field(
        default=0, description="Accepted, without effect: it tells a scheduler how long not to change the job."
    )
    version: Annotated[float, BeforeValidator(OneOf((0.1, 0.2)))] = Field(
        default=0.2, description="Accepted, without effect: there is one way to choose."
    )
    model_parallel_size: Annotated[int, BeforeValidator(OneOf((1,)))] = Field(
        default=1, description="Only 1 is possible: zerolite has no model parallelism."
    )

    def terms(self, train_batch_size: int | None) -> Elasticity:
        """What the block asks for, beside a global batch that may be given (in samples)."""
        return Elasticity(
            micros=self.micro_batch_sizes or (),
            min_gpus=self.min_gpus,
            max_gpus=self.max_gpus,
            num_gpus_per_node=self.num_gpus_per_node,
            prefer_larger=self.prefer_larger_batch,
            max_train=self.max_train_batch_size,
            train=None if self.ignore_non_elastic_batch_info else train_batch_size,
        )
