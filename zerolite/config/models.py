"""The configuration as frozen models. Build them with `load_config`, which reports every error at once.

The string below each field says what it does and in which unit; docs/configuration.md is generated from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from . import batch
from .elasticity import ElasticityConfig
from .errors import ConfigError
from .monitors import CsvMonitorConfig, JsonlMonitorConfig, TensorboardConfig, WandbConfig
from .offload import ActivationCheckpointingConfig, AioConfig
from .parallelism import PipelineConfig, TensorParallelConfig
from .precision import Bf16Config, Fp16Config, TorchAutocastConfig
from .profiling import CommsLoggerConfig, FlopsProfilerConfig
from .values import (
    MAX_BATCH,
    Arguments,
    Block,
    Bool,
    Count,
    Dtype,
    FrozenDict,
    Natural,
    NotNegative,
    Positive,
    Text,
    Texts,
)
from .zero import ZeroConfig


def _no_fraction(value: float) -> float:
    if 0 < value < 1:
        raise ValueError(f"expected a finite number of at least 1, or 0, got {value:g}; write 0 to turn it off")
    return value


BatchSize = Annotated[Count, Field(le=MAX_BATCH)] | None
Interval = Annotated[
    Count | None,
    # Infinity, which accelerate writes for "never", is text when hjson reads it.
    BeforeValidator(lambda value: None if value in (math.inf, "Infinity") else value),
]
Seconds = Annotated[NotNegative, AfterValidator(_no_fraction), Field(title="a finite number of at least 1, or 0")]


class OptimizerConfig(Block):
    """The optimizer that `initialize` builds when it is not given one; null for a model that is only evaluated."""

    type: Text
    """Name of the optimizer: Adam, AdamW, SGD, Adagrad, Lion, or any class of torch.optim."""
    params: Arguments = FrozenDict()
    """Arguments of its constructor (`lr`, `betas`, ...). `"auto"` leaves an argument at its default."""


class SchedulerConfig(Block):
    """The learning rate schedule that `initialize` builds when it is not given one."""

    type: Text
    """Name of the schedule: WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle, or any class of
    torch.optim.lr_scheduler."""
    params: Arguments = FrozenDict()
    """Arguments of its constructor, in optimizer steps where they count. `"auto"` leaves an argument at its default."""


class DataTypesConfig(Block):
    """Dtypes that do not follow from the precision."""

    grad_accum_dtype: Dtype | None = None
    """Dtype in which micro-batches are added up: fp32 or the dtype of the computation. null: fp32, unless master
    weights and gradients are kept in 16 bits."""
    buffer_dtype: Dtype | None = None
    """Dtype to which `initialize` casts the model's floating buffers, except those of `fp32_modules` and of batch
    norms. null: each buffer keeps its own."""


class CheckpointConfig(Block):
    """Saving and loading; see [Checkpoints](checkpoints.md)."""

    keep_last: Count | None = None
    """Checkpoints with the default tag, `global_step<N>`, that stay when another one is complete; those with tags of
    your own always stay. null: all. (zerolite's own key.)"""
    overwrite: Bool = False
    """Let a job that has loaded no checkpoint from its save directory replace those that other runs have left there.
    Otherwise that is an error. (zerolite's own key.)"""
    timeout_s: Positive = 300.0
    """Seconds that ranks wait for each other at the beginning of a save or a load, until an error names those that do
    not come. (zerolite's own key.)"""


class ZeroliteConfig(Block):
    """A whole configuration. `load_config` makes one; `resolve` fills in the batch sizes."""

    train_batch_size: BatchSize = None
    """Samples that one optimizer step sees, over all ranks: micro-batch x accumulation x ranks."""
    train_micro_batch_size_per_gpu: BatchSize = None
    """Samples in one forward and backward on one rank. null: the user's own loader decides."""
    gradient_accumulation_steps: BatchSize = None
    """Micro-batches in one optimizer step. null: derived from the other two sizes, or 1."""
    elasticity: ElasticityConfig = ElasticityConfig()
    dataloader_drop_last: Bool = False
    """Leave out the samples of `training_data` at the end of a pass that do not fill a batch on every rank. false:
    every sample comes; some are repeated to make ranks even, and the last batch may be smaller."""
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    fp32_modules: Texts = ()
    """Modules that keep fp32 parameters and compute in fp32 in 16-bit training, such as `["*.router"]`: patterns (`*`,
    `?`, `[...]`; upper and lower case differ) of qualified names in the model; `*.norm` matches `norm` too. Inputs and
    outputs are cast for them. (zerolite's own key; see [precision](precision.md).)"""
    gradient_clipping: NotNegative = 0.0
    """Largest global 2-norm of the gradients; larger ones are scaled down to it. 0 = off."""
    zero_optimization: ZeroConfig = ZeroConfig()
    zero_allow_untested_optimizer: Bool = False
    """Stages 1 to 3: let an optimizer class that zerolite does not know update flat parts of parameters. Right only if
    each element is updated by itself (see [optimizers](optimizers.md))."""
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    aio: AioConfig = AioConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    communication_data_type: Dtype | None = None
    """Dtype in which gradients travel. null: the dtype they have, and fp32 for bf16 gradients from 64 data-parallel
    ranks on, where sums in bf16 would lose precision."""
    divide_plain_backward: Bool = False
    """Divide the gradients of a plain `loss.backward()` by `gradient_accumulation_steps`, as `engine.backward(loss)`
    does. false: your loop divides the loss, as without an engine."""
    prescale_gradients: Bool = False
    """Divide gradients by the number of ranks before they are summed, not after."""
    gradient_predivide_factor: Positive = 1.0
    """Divide gradients by this factor before they are summed and by the rest after; not together with
    `prescale_gradients`."""
    data_types: DataTypesConfig = DataTypesConfig()
    steps_per_print: Interval = None
    """Optimizer steps between two lines of progress on rank 0. null or Infinity: never."""
    wall_clock_breakdown: Bool = False
    """Measure forward, backward, the waits for reductions and for gathers, and step, on rank 0: means over
    `steps_per_print` steps (10 if that is null) are printed and written to the monitors."""
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    memory_breakdown: Bool = False
    """Print what the memory of rank 0 holds every `steps_per_print` steps (10 if that is null), and write it to the
    monitors."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    jsonl_monitor: JsonlMonitorConfig = JsonlMonitorConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    wandb: WandbConfig = WandbConfig()
    dump_state: Bool = False
    """Print the resolved configuration when the engine is built."""
    max_consecutive_skipped_steps: Natural = 50
    """Training raises after so many steps in a row that were skipped because a gradient was not finite; 0 = never.
    (zerolite's own key.)"""
    consistency_check_interval: Natural = 100
    """Steps between two comparisons of the weights that all ranks hold, by a hash, which every save makes too; where
    ranks differ, all of them raise an error that names the parameters and ranks. The learning rates, betas and other
    numbers of the param groups are compared in every step. 0 = compare nothing. (zerolite's own key.)"""
    memory_check: Literal["error", "warn", "off"] = "error"
    """Before `initialize` allocates anything, it compares what the model states need with what the device has free (the
    host, where ranks run on the CPU): raise where they do not fit, warn, or do not look. (zerolite's own key.)"""
    desync_timeout_s: Seconds = 300.0
    """Seconds that a rank may wait for the others, within a step or between two, before the job is ended and every rank
    says where each of them is; 0 = never. Raise it above the longest time that one rank works alone while others wait.
    (zerolite's own key.)"""
    check_collectives: Bool = False
    """Before each collective the ranks compare its operation, number of elements and dtype, and raise where they
    differ. Slow; to find the cause of a hang. (zerolite's own key.)"""

    _auto: frozenset[str] = PrivateAttr(default=frozenset())
    _without_effect: tuple[tuple[str, str], ...] = PrivateAttr(default=())

    @property
    def without_effect(self) -> tuple[tuple[str, str], ...]:
        """(path, sentence) of each given key that has no effect."""
        return self._without_effect

    def note_auto(self, keys: Iterable[str]) -> None:
        """Note which keys are given as "auto", whose value must still be found by :meth:`resolve`."""
        self._auto = frozenset(keys)

    def note_without_effect(self, found: Iterable[tuple[str, str]]) -> None:
        self._without_effect = tuple(found)

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
        except ConfigError as error:
            raise ConfigError(errors + error.errors) from None
        solved = {batch.TRAIN: sizes.train, batch.MICRO: sizes.micro, batch.ACCUMULATION: sizes.accumulation}
        for key in sorted(self._auto):
            if solved[key] is None:
                sentence = (
                    f'expected a number, got "auto", and nothing is given to derive it from; write {batch.TRAIN} or '
                    f"{batch.MICRO} as a number, or leave the key out if your own loader decides"
                )
                errors.append((key, sentence))
        if errors:
            raise ConfigError(errors)
        resolved = self.model_copy(update=solved)
        resolved.note_auto(())
        return resolved

    def _batch_sizes(self, world_size: int) -> batch.BatchSizes:
        if self.elasticity.enabled:
            return self.elasticity.solve(self.train_batch_size, world_size)
        given = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        return batch.solve(*given, world_size)

    @property
    def model_ranks(self) -> int:
        """Ranks that one copy of the model is spread over, beside ZeRO."""
        return self.tensor_parallel.ranks * self.pipeline.stages
