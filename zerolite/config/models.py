"""The configuration as frozen models. Build them with `load_config`, which reports every error at once.

Each field's description says what it does and in which unit; docs/configuration.md is generated from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from . import batch
from .contradictions import find_contradictions
from .elastic_block import ElasticityConfig
from .elasticity import solve as solve_elastic
from .errors import ConfigError
from .monitors import CsvMonitorConfig, JsonlMonitorConfig, TensorboardConfig, WandbConfig
from .offload import ActivationCheckpointingConfig, AioConfig
from .parallelism import PipelineConfig, TensorParallelConfig
from .precision import Bf16Config, Fp16Config, TorchAutocastConfig
from .profiling import CommsLoggerConfig, FlopsProfilerConfig
from .rules import (
    MAX_BATCH,
    Boolean,
    Choice,
    Dtype,
    FreeObject,
    Integer,
    Interval,
    Number,
    OffOrNumber,
    Text,
    Texts,
)
from .zero import ZeroConfig

Bool = Annotated[bool, BeforeValidator(Boolean())]
OptionalDtype = Annotated[str | None, BeforeValidator(Dtype())]
BatchSize = Annotated[
    int | None,
    BeforeValidator(Integer(1, MAX_BATCH, nullable=True, null_means="derived from the others")),
]


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OptimizerConfig(_Block):
    """The optimizer that `initialize` builds when it is not given one."""

    type: Annotated[str, BeforeValidator(Text())] = Field(
        description="Name of the optimizer: Adam, AdamW, SGD, Adagrad, Lion, or any class of torch.optim."
    )
    params: Annotated[dict[str, Any], PlainValidator(FreeObject())] = Field(
        default_factory=lambda: FreeObject()({}),
        description='Arguments of its constructor (`lr`, `betas`, ...). `"auto"` leaves an argument at its default.',
    )


class SchedulerConfig(_Block):
    """The learning rate schedule that `initialize` builds when it is not given one."""

    type: Annotated[str, BeforeValidator(Text())] = Field(
        description="Name of the schedule: WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle, or any "
        "class of torch.optim.lr_scheduler."
    )
    params: Annotated[dict[str, Any], PlainValidator(FreeObject())] = Field(
        default_factory=lambda: FreeObject()({}),
        description='Arguments of its constructor, in optimizer steps where they count. `"auto"` leaves an argument at '
        "its default.",
    )


class DataTypesConfig(_Block):
    """Dtypes that do not follow from the precision."""

    grad_accum_dtype: OptionalDtype = Field(
        default=None,
        description="Dtype in which micro-batches are added up: fp32 or the dtype of the computation. null: fp32, "
        "unless master weights and gradients are kept in 16 bits.",
    )
    buffer_dtype: OptionalDtype = Field(
        default=None,
        description="Dtype to which `initialize` casts the model's floating buffers, except those of `fp32_modules` "
        "and of batch norms. null: each buffer keeps its own.",
    )


class CheckpointConfig(_Block):
    """Saving and loading; see [Checkpoints](checkpoints.md)."""

    keep_last: Annotated[int | None, BeforeValidator(Integer(1, nullable=True, null_means="all"))] = Field(
        default=None,
        description="Checkpoints with the default tag, `global_step<N>`, that stay when another one is complete; those "
        "with tags of your own always stay. null: all. (zerolite's own key.)",
    )
    overwrite: Bool = Field(
        default=False,
        description="Let a job that has loaded no checkpoint from its save directory replace those that other runs "
        "have left there. Otherwise that is an error. (zerolite's own key.)",
    )
    timeout_s: Annotated[float, BeforeValidator(Number(0.0, exclusive=True))] = Field(
        default=300.0,
        description="Seconds that ranks wait for each other at the beginning of a save or a load, until an error names "
        "those that do not come. (zerolite's own key.)",
    )


class ZeroliteConfig(_Block):
    """A whole configuration. `load_config` makes one; `resolve` fills in the batch sizes."""

    train_batch_size: BatchSize = Field(
        default=None,
        description="Samples that one optimizer step sees, over all ranks: micro-batch x accumulation x ranks.",
    )
    train_micro_batch_size_per_gpu: BatchSize = Field(
        default=None,
        description="Samples in one forward and backward on one rank. null: the user's own loader decides.",
    )
    gradient_accumulation_steps: BatchSize = Field(
        default=None,
        description="Micro-batches in one optimizer step. null: derived from the other two sizes, or 1.",
    )
    elasticity: ElasticityConfig = Field(
        default_factory=ElasticityConfig, description="Batch sizes that follow from the number of ranks."
    )
    dataloader_drop_last: Bool = Field(
        default=False,
        description="Leave out the samples of `training_data` at the end of a pass that do not fill a batch on every "
        "rank. false: every sample comes; some are repeated to make ranks even, and the last batch may be smaller.",
    )
    optimizer: OptimizerConfig | None = Field(
        default=None,
        description="The optimizer. null: given to `initialize`, or none, for a model that is only evaluated.",
    )
    scheduler: SchedulerConfig | None = Field(
        default=None, description="The learning rate schedule. null: none, or given to `initialize`."
    )
    fp16: Fp16Config = Field(default_factory=Fp16Config, description="float16.")
    bf16: Bf16Config = Field(default_factory=Bf16Config, description="bfloat16; also spelled `bfloat16`.")
    torch_autocast: TorchAutocastConfig = Field(default_factory=TorchAutocastConfig, description="torch.autocast.")
    fp32_modules: Annotated[tuple[str, ...], BeforeValidator(Texts('["*.router", "*.norm"]', nullable=False))] = Field(
        default=(),
        description='Modules that keep fp32 parameters and compute in fp32 in 16-bit training, such as `["*.router"]`: '
        "patterns (`*`, `?`, `[...]`; upper and lower case differ) of qualified names in the model; `*.norm` matches "
        "`norm` too. Inputs and outputs are cast for them. (zerolite's own key; see [precision](precision.md).)",
    )
    gradient_clipping: Annotated[float, BeforeValidator(Number(0.0))] = Field(
        default=0.0, description="Largest global 2-norm of the gradients; larger ones are scaled down to it. 0 = off."
    )
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig, description="What is spread over the ranks.")
    zero_allow_untested_optimizer: Bool = Field(
        default=False,
        description="Stages 1 to 3: let an optimizer class that zerolite does not know update flat parts of "
        "parameters. Right only if each element is updated by itself (see [optimizers](optimizers.md)).",
    )
    tensor_parallel: TensorParallelConfig = Field(
        default_factory=TensorParallelConfig, description="Each layer on several ranks."
    )
    pipeline: PipelineConfig = Field(
        default_factory=PipelineConfig, description="Layers on several ranks, one after another."
    )
    aio: AioConfig = Field(default_factory=AioConfig, description='How `"nvme"` reads and writes.')
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        default_factory=ActivationCheckpointingConfig, description="What is kept for backward, and where."
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving and loading.")
    communication_data_type: OptionalDtype = Field(
        default=None,
        description="Dtype in which gradients travel. null: the dtype they have, and fp32 for bf16 gradients from 64 "
        "data-parallel ranks on, where sums in bf16 would lose precision.",
    )
    divide_plain_backward: Bool = Field(
        default=False,
        description="Divide the gradients of a plain `loss.backward()` by `gradient_accumulation_steps`, as "
        "`engine.backward(loss)` does. false: your loop divides the loss, as without an engine.",
    )
    prescale_gradients: Bool = Field(
        default=False, description="Divide gradients by the number of ranks before they are summed, not after."
    )
    gradient_predivide_factor: Annotated[float, BeforeValidator(Number(0.0, exclusive=True))] = Field(
        default=1.0,
        description="Divide gradients by this factor before they are summed and by the rest after; not together with "
        "`prescale_gradients`.",
    )
    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig, description="Other dtypes.")
    steps_per_print: Annotated[int | None, BeforeValidator(Interval(1, nullable=True, null_means="never"))] = Field(
        default=None, description="Optimizer steps between two lines of progress on rank 0. null or Infinity: never."
    )
    wall_clock_breakdown: Bool = Field(
        default=False,
        description="Measure forward, backward, the waits for reductions and for gathers, and step, on rank 0: means "
        "over `steps_per_print` steps (10 if that is null) are printed and written to the monitors.",
    )
    comms_logger: CommsLoggerConfig = Field(
        default_factory=CommsLoggerConfig, description="Time and bandwidth of each collective."
    )
    memory_breakdown: Bool = Field(
        default=False,
        description="Print what the memory of rank 0 holds every `steps_per_print` steps (10 if that is null), and "
        "write it to the monitors.",
    )
    flops_profiler: FlopsProfilerConfig = Field(
        default_factory=FlopsProfilerConfig, description="FLOPs of a step by module, and the share of the peak."
    )
    csv_monitor: CsvMonitorConfig = Field(default_factory=CsvMonitorConfig, description="CSV files.")
    jsonl_monitor: JsonlMonitorConfig = Field(default_factory=JsonlMonitorConfig, description="A file of JSON lines.")
    tensorboard: TensorboardConfig = Field(default_factory=TensorboardConfig, description="TensorBoard.")
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Weights & Biases.")
    dump_state: Bool = Field(default=False, description="Print the resolved configuration when the engine is built.")
    max_consecutive_skipped_steps: Annotated[int, BeforeValidator(Integer(0))] = Field(
        default=50,
        description="Training raises after so many steps in a row that were skipped because a gradient was not finite; "
        "0 = never. (zerolite's own key.)",
    )
    consistency_check_interval: Annotated[int, BeforeValidator(Integer(0))] = Field(
        default=100,
        description="Steps between two comparisons of the weights that all ranks hold, by a hash, which every save "
        "makes too; where ranks differ, all of them raise an error that names the parameters and ranks. The learning "
        "rates, betas and other numbers of the param groups are compared in every step. 0 = compare nothing. "
        "(zerolite's own key.)",
    )
    memory_check: Annotated[Literal["error", "warn", "off"], BeforeValidator(Choice(("error", "warn", "off")))] = Field(
        default="error",
        description="Before `initialize` allocates anything, it compares what the model states need with what the "
        "device has free (the host, where ranks run on the CPU): raise where they do not fit, warn, or do not look. "
        "(zerolite's own key.)",
    )
    desync_timeout_s: Annotated[float, BeforeValidator(OffOrNumber(1.0))] = Field(
        default=300.0,
        description="Seconds that a rank may wait for the others, within a step or between two, before the job is "
        "ended and every rank says where each of them is; 0 = never. Raise it above the longest time that one rank "
        "works alone while others wait. (zerolite's own key.)",
    )
    check_collectives: Bool = Field(
        default=False,
        description="Before each collective the ranks compare its operation, number of elements and dtype, and raise "
        "where they differ. Slow; to find the cause of a hang. (zerolite's own key.)",
    )

    # Keys given as "auto" whose value must still be found by resolve().
    _auto: frozenset[str] = PrivateAttr(default=frozenset())
    # (path, sentence) of each given key that has no effect.
    _without_effect: tuple[tuple[str, str], ...] = PrivateAttr(default=())

    @property
    def without_effect(self) -> tuple[tuple[str, str], ...]:
        """(path, sentence) of each given key that has no effect."""
        return self._without_effect

    def model_post_init(self, context: Any) -> None:
        if context:
            self._auto = frozenset(context.get("auto", ()))

    @model_validator(mode="after")
    def _no_contradictions(self, info: ValidationInfo) -> ZeroliteConfig:
        invalid = (info.context or {}).get("invalid", ())
        errors = [(c.paths[0], c.sentence) for c in find_contradictions(self) if not set(c.paths) & set(invalid)]
        if errors:
            raise ConfigError(errors)
        return self

    def resolve(self, world_size: int) -> ZeroliteConfig:
        """The same configuration with the batch sizes filled in for `world_size` data-parallel ranks.

        train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size. Both batch sizes
        stay None when neither is given: the user's own loader decides. The accumulation is never None afterwards.
        With `elasticity`, the train batch size is the same for every world_size.

        Raises:
            ConfigError: the given sizes contradict each other, the world size does not fit what `elasticity` says, or
                a key is "auto" and nothing says what it should be.
            ValueError: world_size is not an integer of at least 1.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size: expected an integer of at least 1, got {world_size!r}; pass the rank count")
        errors: list[tuple[str, str]] = []
        for path, block in (("optimizer.type", self.optimizer), ("scheduler.type", self.scheduler)):
            if block is not None and block.type == "auto":
                errors.append((path, 'expected a name, got "auto", which has no default here; write the name'))
        try:
            sizes = self._batch_sizes(world_size)
        except batch.BatchSizeError as error:
            errors.append((error.key, error.sentence))
            raise ConfigError(errors) from None
        solved = {batch.TRAIN: sizes.train, batch.MICRO: sizes.micro, batch.ACCUMULATION: sizes.accumulation}
        for key in sorted(self._auto):
            if solved[key] is None:
                errors.append(
                    (
                        key,
                        f'expected a number, got "auto", and nothing is given to derive it from; write {batch.TRAIN} '
                        f"or {batch.MICRO} as a number, or leave the key out if your own loader decides",
                    )
                )
        if errors:
            raise ConfigError(errors)
        resolved = self.model_copy(update=solved)
        resolved._auto = frozenset()
        return resolved

    def _batch_sizes(self, world_size: int) -> batch.BatchSizes:
        if self.elasticity.enabled:
            return solve_elastic(self.elasticity.terms(self.train_batch_size), world_size)
        given = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        return batch.solve(*given, world_size)

    @property
    def model_ranks(self) -> int:
        """Ranks that one copy of the model is spread over, beside ZeRO."""
        return self.tensor_parallel.ranks * self.pipeline.stages
