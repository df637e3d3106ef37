"""The configuration as frozen models. Build them with `load_config`, which reports every error at once.

The string below a field says what the key does and in which unit; docs/configuration.md is generated from these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from . import batch
from .errors import ConfigError
from .monitors import CsvMonitorConfig, FlopsProfilerConfig, TensorboardConfig, WandbConfig
from .offload import ActivationCheckpointingConfig, AioConfig
from .parallelism import ExpertParallelConfig, PipelineConfig, SequenceParallelConfig, TensorParallelConfig
from .precision import Bf16Config, Fp16Config, TorchAutocastConfig
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

BatchSize = Annotated[Count, Field(le=MAX_BATCH)] | None
Interval = Annotated[
    Count | None,
    # Infinity, which accelerate writes for "never", is text when hjson reads it.
    BeforeValidator(lambda value: None if value in (math.inf, "Infinity") else value),
]
ReduceOp = Annotated[
    Literal["mean", "sum"], BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
]
Tiles = Annotated[
    Literal["auto"] | Bool | Count,
    Field(title='tokens of a tile, at least 1, or true, false or "auto"', description="write one of these"),
]


class OptimizerConfig(Block):
    """Optimizer that `initialize` builds if none is passed to it; null for a model that is only evaluated."""

    type: Text
    """Adam, AdamW, AdamW8bit, SGD, Adagrad, Lion, or the name of any class of torch.optim."""
    params: Arguments = FrozenDict()
    """Arguments of its constructor (`lr`, `betas`, ...). `"auto"` leaves an argument at its default."""


class SchedulerConfig(Block):
    """Learning rate schedule that `initialize` builds if none is passed to it."""

    type: Text
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle, or the name of any class of
    torch.optim.lr_scheduler."""
    params: Arguments = FrozenDict()
    """Arguments of its constructor, in optimizer steps where they count. `"auto"` leaves an argument at its default."""


class DataTypesConfig(Block):
    """Dtypes that the precision does not decide."""

    grad_accum_dtype: Dtype | None = None
    """Dtype in which gradients of micro-batches are added: fp32 or the dtype of the computation. null: fp32, unless
    master weights and gradients are kept in 16 bits."""
    buffer_dtype: Dtype | None = None
    """Dtype to which `initialize` casts the model's floating buffers, except those of `fp32_modules` and of batch
    norms. null: each buffer keeps its own."""


class CheckpointConfig(Block):
    """Saving and loading; see [Checkpoints](checkpoints.md)."""

    overwrite: Bool = False
    """Let a job that has not loaded a checkpoint of a run replace that run's checkpoints. false: it is an error.
    (zerolite's own key.)"""


class ZeroliteConfig(Block):
    """Whole configuration. `load_config` makes one; `resolve` fills in the batch sizes."""

    train_batch_size: BatchSize = None
    """Samples of one optimizer step over all ranks: micro-batch x accumulation x ranks."""
    train_micro_batch_size_per_gpu: BatchSize = None
    """Samples in one forward and backward on one rank. null: the user's own loader decides."""
    gradient_accumulation_steps: BatchSize = None
    """Micro-batches in one optimizer step. null: derived from the other two sizes, or 1."""
    managed_gradient_accumulation: Bool = True
    """Count micro-batches, and let `engine.step()` update after `gradient_accumulation_steps` of them. false: every
    `engine.step()` updates, with the sum of the gradients of all backwards since the last one."""
    dataloader_drop_last: Bool = False
    """Leave out the last samples of `training_data` if they do not fill a batch on every rank. false: use every sample.
    Some are then repeated to give all ranks equally many, and the last batch may be smaller."""
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    fp32_modules: Texts = ()
    """Modules that keep fp32 parameters and compute in fp32 in 16-bit training, such as `["*.router"]`. The patterns
    (`*`, `?`, `[...]`; case-sensitive) match qualified names in the model; `*.norm` matches `norm` too. Their inputs
    and outputs are cast. (zerolite's own key; see [precision](precision.md).)"""
    gradient_clipping: NotNegative = 0.0
    """Largest global 2-norm of the gradients; gradients with a larger norm are scaled down to it. 0 = off."""
    zero_optimization: ZeroConfig = ZeroConfig()
    zero_allow_untested_optimizer: Bool = False
    """Stages 1 to 3: let an optimizer class that zerolite does not know update flat parts of parameters. It must update
    each element by itself (see [optimizers](optimizers.md))."""
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    aio: AioConfig = AioConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    tiled_loss: Tiles = False
    """Compute a language model's head and its cross entropy over tiles of tokens, so that its logits are never whole in
    memory. A number: tokens of a tile. `true`: tiles of 2^26 logits. `"auto"`: so too, for heads of 16,384 outputs and
    more. `false`: off. (zerolite's own key; see [long sequences](long-context.md).)"""
    tiled_mlp: Tiles = False
    """Compute MLPs over tiles of tokens, and each tile again in the backward, so that their wide activations are never
    whole in memory. A number: tokens of a tile. `true`: tiles of 2^26 elements of the widest activation. `"auto"`: so
    too, for calls of more than four tiles. `false`: off. (zerolite's own key; see
    [long sequences](long-context.md).)"""
    checkpoint: CheckpointConfig = CheckpointConfig()
    communication_data_type: Dtype | None = None
    """Dtype in which gradients are reduced. null: their own dtype, but fp32 for bf16 gradients from 64 data-parallel
    ranks on, where sums in bf16 would lose precision."""
    divide_plain_backward: Bool = False
    """Divide the gradients of a plain `loss.backward()` by `gradient_accumulation_steps`, as `engine.backward(loss)`
    does. false: your loop divides the loss itself, as without an engine."""
    gradient_allreduce_op: ReduceOp = "mean"
    """Gradient that an update gets: the `"mean"` over data-parallel ranks, or their `"sum"`, for losses that your loop
    has divided by the samples of all ranks. Accumulation, norms and clipping are the same. With `"sum"`,
    `engine.backward(loss, weight=...)` gives the weighted mean times the number of ranks."""
    prescale_gradients: Bool = False
    """Divide gradients by the number of ranks before they are summed, not after."""
    gradient_predivide_factor: Positive = 1.0
    """Divide gradients by this factor before they are summed, and by (number of ranks / factor) after. Not together
    with `prescale_gradients`."""
    data_types: DataTypesConfig = DataTypesConfig()
    steps_per_print: Interval = None
    """Optimizer steps between two lines of progress on rank 0. null or Infinity: no lines."""
    wall_clock_breakdown: Bool = False
    """Measure forward, backward, step, and the waits for reductions and gathers on rank 0. Means over `steps_per_print`
    steps (10 if that is null) are printed and written to the monitors."""
    memory_breakdown: Bool = False
    """Print the contents of rank 0's memory every `steps_per_print` steps (10 if that is null), and write them to the
    monitors."""
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    wandb: WandbConfig = WandbConfig()
    dump_state: Bool = False
    """Print the resolved configuration when the engine is built."""
    max_consecutive_skipped_steps: Natural = 50
    """Raise after so many steps in a row that were skipped because a gradient was not finite; 0 = never. (zerolite's
    own key.)"""
    consistency_check_interval: Natural = 100
    """Steps between two comparisons, by hash, of the weights that all ranks hold; every save compares them too. If they
    differ, all ranks raise an error that names the parameters and ranks. Numbers of the param groups, such as learning
    rates and betas, are compared in every step. 0 = compare nothing. (zerolite's own key.)"""
    desync_timeout_s: NotNegative = 300.0
    """Seconds that a rank may wait for the others, within a step or between two. After them all ranks print where each
    of them is, and the job is ended. 0 = never. Choose it longer than any time that one rank works alone while others
    wait. (zerolite's own key.)"""

    _auto: frozenset[str] = PrivateAttr(default=frozenset())
    _without_effect: tuple[tuple[str, str], ...] = PrivateAttr(default=())

    @property
    def without_effect(self) -> tuple[tuple[str, str], ...]:
        """(path, sentence) of each given key without effect."""
        return self._without_effect

    def note_auto(self, keys: Iterable[str]) -> None:
        """Note the keys that are given as "auto"; :meth:`resolve` must find their values."""
        self._auto = frozenset(keys)

    def note_without_effect(self, settings: Iterable[tuple[str, str]]) -> None:
        self._without_effect = tuple(settings)

    def resolve(self, world_size: int) -> ZeroliteConfig:
        """Return a copy with the batch sizes filled in for `world_size` data-parallel ranks.

        train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world_size. If neither batch
        size is given, both stay None: the user's own loader decides. The accumulation is always set.

        Raises:
            ConfigError: the sizes contradict each other, or a size is "auto" and cannot be derived.
            ValueError: world_size is not an integer of at least 1.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size: expected an integer of at least 1, got {world_size!r}; pass the rank count")
        errors: list[tuple[str, str]] = []
        for path, block in (("optimizer.type", self.optimizer), ("scheduler.type", self.scheduler)):
            if block is not None and block.type == "auto":
                errors.append((path, 'expected a name, got "auto", which has no default here; write the name'))
        accumulation = self.gradient_accumulation_steps if self.managed_gradient_accumulation else 1
        try:
            sizes = batch.solve(self.train_batch_size, self.train_micro_batch_size_per_gpu, accumulation, world_size)
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
