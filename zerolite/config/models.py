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
from .precision import Bf16Config, Fp16Config, TorchAutocastConfig
from .profiling import CommsLoggerConfig, FlopsProfilerConfig
from .rules import (
    MAX_BATCH,
    Boolean,
    Choice,
    Dtype,
    FreeObject,
    Integer,
    IntegerOrAuto,
    Names,
    Number,
    OffOrNumber,
    Text,
)

Bool = Annotated[bool, BeforeValidator(Boolean())]
OptionalDtype = Annotated[str | None, BeforeValidator(Dtype())]
BatchSize = Annotated[
    int | None,
    BeforeValidator(Integer(1, MAX_BATCH, nullable=True, null_means="derived from the others")),
]
BucketSize = Annotated[
    int | None,
    BeforeValidator(Integer(1, nullable=True, null_means="chosen from the model's size")),
]
Elements = Annotated[int, BeforeValidator(Integer(0))]

MAX_ZERO_STAGE = 3
Stage = Literal[0, 1, 2, 3, "auto"]
AUTO_GRANULARITY = 1_048_576
"""Elements of a module that is gathered as one unit, where the configuration leaves the choice to zerolite."""


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


class LeafModuleConfig(_Block):
    """Modules that stage 3 gathers whole, with all that they hold, in DeepSpeed's terms; adds to `leaf_modules`."""

    classes: Annotated[tuple[str, ...], BeforeValidator(Names('["package.module.MoeBlock"]', nullable=False))] = Field(
        default=(), description="Class names, bare (`MoeBlock`) or with their module (`package.module.MoeBlock`)."
    )
    names: Annotated[tuple[str, ...], BeforeValidator(Names('["model.layers.0.mlp"]', nullable=False))] = Field(
        default=(), description="Qualified names in the model, exactly, such as `model.layers.0.mlp`."
    )
    name_suffixes: Annotated[tuple[str, ...], BeforeValidator(Names('["mlp.experts"]', nullable=False))] = Field(
        default=(), description="Ends of qualified names, such as `mlp.experts`."
    )


class ZeroConfig(_Block):
    """What is spread over the ranks."""

    stage: Annotated[Stage, BeforeValidator(IntegerOrAuto(0, MAX_ZERO_STAGE))] = Field(
        default=0,
        description="0: nothing; 1: optimizer states and master weights; 2: gradients too; 3: parameters too. "
        '`"auto"`: `initialize` plans the job at each stage and takes the one with the least traffic that fits into '
        "the device. (zerolite's own value.)",
    )
    reduce_bucket_size: BucketSize = Field(
        default=None,
        description='Elements in a bucket, which is reduced and gathered as one. null or `"auto"`: chosen from the '
        "model's size.",
    )
    allgather_bucket_size: BucketSize = Field(
        default=None,
        description="Elements gathered as one. Buckets are the same for both, so the smaller of the two sizes counts. "
        'null or `"auto"`: as `reduce_bucket_size`.',
    )
    overlap_comm: Annotated[bool | None, BeforeValidator(Boolean(nullable=True))] = Field(
        default=None,
        description="true: buckets are reduced while backward still runs, and the next forward waits for updated "
        "parameters only where a module needs them, so read parameters between steps through the engine "
        "(`engine.module`). null: the first of the two. false: neither. The numbers do not depend on it.",
    )
    contiguous_gradients: Bool = Field(
        default=True, description="Move each gradient into its bucket as soon as it is ready."
    )
    reduce_scatter: Bool = Field(
        default=True,
        description="Reduce to the owner of each part only; false: all-reduce, then keep a part; not at stage 3.",
    )
    ignore_unused_parameters: Bool = Field(
        default=True,
        description="Parameters that got no gradient on any rank are left alone, as torch does; false: they are an "
        "error that names them.",
    )
    # Stage 3. Sizes are in elements of whole parameters, over all ranks. At lower stages these keys are without effect.
    stage3_prefetch_bucket_size: Elements = Field(
        default=50_000_000,
        description="Stage 3: elements that are gathered ahead of the modules that need them. 0: no prefetch.",
    )
    stage3_param_persistence_threshold: Elements = Field(
        default=100_000,
        description="Stage 3: parameters of at most so many elements stay whole on every rank. 0: only empty ones do.",
    )
    stage3_model_persistence_threshold: Annotated[
        int | None, BeforeValidator(Integer(0, nullable=True, null_means="no limit"))
    ] = Field(
        default=None,
        description="Stage 3: most elements, over all parameters together, that may stay whole because of "
        '`stage3_param_persistence_threshold`. null or `"auto"`: no limit.',
    )
    stage3_max_live_parameters: Elements = Field(
        default=1_000_000_000,
        description="Stage 3: most elements that are gathered on a rank at a time, unless one use alone needs more.",
    )
    stage3_max_reuse_distance: Elements = Field(
        default=1_000_000_000,
        description="Stage 3: a parameter stays gathered after a use if at most so many elements are used before it is "
        "used again. 0: released after every use.",
    )
    stage3_module_granularity_threshold: Annotated[
        int, BeforeValidator(Integer(0, nullable=True, null_means="chosen by zerolite", null_value=AUTO_GRANULARITY))
    ] = Field(
        default=AUTO_GRANULARITY,
        description="Stage 3: a module that holds, with all modules in it, at most so many elements is gathered as one "
        'unit. null or `"auto"`: chosen by zerolite, which is the default. 0: every module that owns parameters is a '
        "unit.",
    )
    stage3_gather_16bit_weights_on_model_save: Bool = Field(
        default=False,
        description="Accepted, without effect: `engine.full_state_dict()` and `engine.save_16bit_model()` give whole "
        "weights at every stage when they are asked to.",
    )
    leaf_modules: Annotated[tuple[str, ...], BeforeValidator(Names('["*MoeBlock"]', nullable=False))] = Field(
        default=(),
        description='Stage 3: modules that are gathered as one unit whatever their size, such as `["*MoeBlock"]`: '
        "patterns (`*`, `?`, `[...]`; upper and lower case differ) of class names or of qualified names in the model. "
        "(zerolite's own key.)",
    )
    leaf_module: LeafModuleConfig = Field(
        default_factory=LeafModuleConfig,
        description="DeepSpeed's way to say the same as `leaf_modules`.",
    )

    @property
    def chosen_stage(self) -> int:
        """The stage as a number, once ``initialize`` has chosen one where the config says "auto". Raises ConfigError
        before."""
        if self.stage == "auto":
            raise ConfigError(
                [
                    (
                        "zero_optimization.stage",
                        'expected 0, 1, 2 or 3 here, got "auto", which is for zerolite.initialize: it takes the stage '
                        "that fits; name one",
                    )
                ]
            )
        return self.stage


class DataTypesConfig(_Block):
    """Dtypes that do not follow from the precision."""

    grad_accum_dtype: OptionalDtype = Field(
        default=None,
        description="Dtype in which micro-batches are added up: fp32 or the dtype of the computation. null: fp32, "
        "unless master weights and gradients are kept in 16 bits.",
    )


class CheckpointConfig(_Block):
    """Saving and loading; see [Checkpoints](checkpoints.md)."""

    keep_last: Annotated[int | None, BeforeValidator(Integer(1, nullable=True, null_means="all"))] = Field(
        default=None,
        description="Checkpoints with the default tag, `global_step<N>`, that stay when another one is complete; those "
        "with tags of your own always stay. null: all. (zerolite's own key.)",
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
    optimizer: OptimizerConfig | None = Field(default=None, description="The optimizer. null: given to `initialize`.")
    scheduler: SchedulerConfig | None = Field(
        default=None, description="The learning rate schedule. null: none, or given to `initialize`."
    )
    fp16: Fp16Config = Field(default_factory=Fp16Config, description="float16.")
    bf16: Bf16Config = Field(default_factory=Bf16Config, description="bfloat16; also spelled `bfloat16`.")
    torch_autocast: TorchAutocastConfig = Field(default_factory=TorchAutocastConfig, description="torch.autocast.")
    fp32_modules: Annotated[tuple[str, ...], BeforeValidator(Names('["*.router", "*.norm"]', nullable=False))] = Field(
        default=(),
        description='Modules that keep fp32 parameters and compute in fp32 in 16-bit training, such as `["*.router"]`: '
        "patterns (`*`, `?`, `[...]`; upper and lower case differ) of qualified names in the model; `*.norm` matches "
        "`norm` too. Inputs and outputs are cast for them. (zerolite's own key; see [precision](precision.md).)",
    )
    gradient_clipping: Annotated[float, BeforeValidator(Number(0.0))] = Field(
        default=0.0, description="Largest global 2-norm of the gradients; larger ones are scaled down to it. 0 = off."
    )
    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig, description="What is spread over the ranks.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving and loading.")
    communication_data_type: OptionalDtype = Field(
        default=None,
        description="Dtype in which gradients travel. null: the dtype they have.",
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
    steps_per_print: Annotated[int | None, BeforeValidator(Integer(1, nullable=True, null_means="never"))] = Field(
        default=None, description="Optimizer steps between two lines of progress on rank 0. null: never."
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
        """The same configuration with the batch sizes filled in for `world_size` ranks.

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
