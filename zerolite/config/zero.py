"""The block `zero_optimization`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from .offload import SUB_GROUP_SIZE, OffloadOptimizerConfig, OffloadParamConfig
from .values import NULL_IS_DEFAULT, Block, Bool, Count, Natural, NotNegative, Texts

AUTO_GRANULARITY = 1_048_576
"""Elements up to which a module is gathered as one unit if the configuration leaves the choice to zerolite."""


class LeafModuleConfig(Block):
    """Modules that stage 3 gathers as one unit, by DeepSpeed's keys. They add to `leaf_modules`."""

    classes: Texts = ()
    """Class names, bare (`MoeBlock`) or with their module (`package.module.MoeBlock`)."""
    names: Texts = ()
    """Qualified names in the model, exactly, such as `model.layers.0.mlp`."""
    name_suffixes: Texts = ()
    """Ends of qualified names, such as `mlp.experts`."""


class LocoConfig(Block):
    """Error feedback (LoCo): the part of a gradient that is lost in 4 bits is added to later ones. On if a key is
    given."""

    err_beta: Annotated[NotNegative, Field(le=1)] | None = None
    """Weight of earlier errors in the moving average that is added. null: 0.8."""
    reset_T: Count | None = None
    """Reductions of a bucket after which its average begins anew. null: 1024."""


class ZeroConfig(Block):
    """States that are sharded over the ranks."""

    stage: Annotated[Natural, Field(le=3)] = 0
    """Sharded states. 0: none; 1: optimizer states and master weights; 2: gradients too; 3: parameters too. `zerolite
    plan --compare` says which stage is the first that fits."""
    shard_size: Count | None = None
    """Stages 1 to 3: data-parallel ranks that divide the states among them, such as those of a node. Every other such
    set of ranks holds the same shards: gathers stay in a set, and reduced gradients are then summed over the sets. A
    divisor of the number of data-parallel ranks. null: all of them. (zerolite's own key; see
    [many nodes](many-nodes.md).)"""
    zero_hpz_partition_size: Natural = 1
    """Stage 3: data-parallel ranks that divide the parameters among them, such as those of a node, so that gathers stay
    among them. All ranks divide gradients, masters and optimizer states, and exchange updated values once a step. A
    divisor of the number of data-parallel ranks; 1 or 0: all of them divide everything. (See
    [many nodes](many-nodes.md).)"""
    zero_quantized_weights: Bool = False
    """With `zero_hpz_partition_size`: send updated values between sets of ranks with 8 bits an element. The owner of a
    master keeps it exact. (See [many nodes](many-nodes.md#8-and-4-bits-between-nodes).)"""
    zero_quantized_gradients: Bool = False
    """With `shard_size` or `zero_hpz_partition_size`: send gradients between sets of ranks with 4 bits an element, and
    add them in fp32."""
    zeropp_loco_param: LocoConfig = LocoConfig()
    reduce_bucket_size: Count | None = None
    """Elements in a bucket, which one collective reduces or gathers. null or `"auto"`: the larger of 40 M and 1 M for
    each data-parallel rank; at most an eighth of the model, at least 4 Mi."""
    allgather_bucket_size: Count | None = None
    """Elements that one all-gather gathers. Both collectives use the same buckets, so the smaller of the two sizes
    counts. null or `"auto"`: `reduce_bucket_size`."""
    overlap_comm: Bool | None = None
    """null or true: (1) buckets are reduced while backward still runs; (2) at stages 1 and 2 a module of the next
    forward waits only for its own updated parameters, and what reads a parameter earlier waits for it (see
    [drop-in](drop-in.md#values-of-parameters-at-stages-1-and-2)); (3) at stage 3 what an update sends between the sets
    of `zero_hpz_partition_size` hides behind the next forward. false: none of these. The results are the same."""
    contiguous_gradients: Bool = True
    """Move each gradient into its bucket as soon as it is ready."""
    reduce_scatter: Bool = True
    """Stages 1 and 2: reduce-scatter gradients to the owner of each part. false: all-reduce, then keep a part."""
    collectives_in_backward: Bool | None = None
    """Stages 0 to 2: the model launches collectives of its own within backward (SyncBatchNorm, an all-to-all). true: no
    reduction is waited for inside a backward, so full gradients need memory there. false: it does not. null: the first
    backward shows it, if torch.distributed's process groups count them: name it for messages between two ranks, and for
    libraries with communicators of their own. (zerolite's own key.)"""
    ignore_unused_parameters: Bool = True
    """Leave parameters without a gradient on any rank unchanged, as torch does. false: they are an error that names
    them."""
    whole_parameters: Bool = False
    """Stages 1 to 3: update each parameter as a whole on one rank, by an optimizer of a class that zerolite does not
    know (see [optimizers](optimizers.md)). Optimizers that are known to need it get it in any case, and
    elementwise ones update parts. (zerolite's own key.)"""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()
    sub_group_size: Annotated[
        Natural,
        NULL_IS_DEFAULT,
        AfterValidator(lambda numel: numel or SUB_GROUP_SIZE),
        Field(title="an integer of at least 0 or null"),
    ] = SUB_GROUP_SIZE
    """With offload: largest number of elements of a rank's shards that are updated at once. 0 or null: the default."""
    # Stage 3. Sizes are in elements of whole parameters. At lower stages these keys have no effect.
    stage3_prefetch_bucket_size: Natural = 50_000_000
    """Stage 3: elements that are gathered ahead of the modules that need them. 0: no prefetch."""
    stage3_param_persistence_threshold: Natural = 100_000
    """Stage 3: parameters of at most so many elements stay whole on every rank. 0: only empty ones."""
    stage3_model_persistence_threshold: Natural | None = None
    """Stage 3: limit of the elements of all parameters that stay whole because of
    `stage3_param_persistence_threshold`. null or `"auto"`: no limit."""
    stage3_max_live_parameters: Natural | None = None
    """Stage 3: largest number of elements that are gathered on a rank at a time, unless one module alone needs more.
    null or `"auto"`: 1e9, or two and a half times the largest repeated block if that is more, so that no block is
    divided (with `stage3_module_granularity_threshold` 1e9)."""
    stage3_max_reuse_distance: Natural = 1_000_000_000
    """Stage 3: a parameter stays gathered after its use if at most so many elements are used before it is needed again.
    0: release it after every use."""
    stage3_module_granularity_threshold: Natural | None = None
    """Stage 3: a module with at most so many elements, including those of all modules in it, is gathered as one unit.
    null or `"auto"`: 1048576; repeated blocks are units too if two of them fit into `stage3_max_live_parameters`.
    Blocks repeat if a `ModuleList` or `Sequential` has several children of their class. 0: every module that owns
    parameters is a unit."""
    stage3_gather_16bit_weights_on_model_save: Bool = False
    """Accepted, without effect: `engine.full_state_dict()` and `engine.save_16bit_model()` return and save whole
    weights at every stage."""
    leaf_modules: Texts = ()
    """Stage 3: modules that are gathered as one unit at any size, such as `["*MoeBlock"]`. The patterns (`*`, `?`,
    `[...]`; case-sensitive) match class names or qualified names in the model. Each pattern must match a module. Where
    ranks take different branches, name the module whose forward has the branch, not the one that some ranks skip.
    (zerolite's own key.)"""
    leaf_module: LeafModuleConfig = LeafModuleConfig()

    @property
    def ranks_of_shards(self) -> int | None:
        """Ranks of a set that has all shards; None for all ranks."""
        return self.shard_size or (self.zero_hpz_partition_size if self.is_hierarchical else None)

    @property
    def feeds_errors_back(self) -> bool:
        """True if a key of `zeropp_loco_param` is given."""
        return self.zeropp_loco_param != LocoConfig()

    @property
    def key_of_sets(self) -> str:
        """The key behind :attr:`ranks_of_shards`, for messages."""
        return f"zero_optimization.{'zero_hpz_partition_size' if self.is_hierarchical else 'shard_size'}"

    @property
    def is_hierarchical(self) -> bool:
        """True if the ranks of a set divide the parameters, and all ranks the states."""
        return self.stage == 3 and self.zero_hpz_partition_size > 1

    @field_validator("stage", mode="before")
    @classmethod
    def _refuse_auto(cls, value: object) -> object:
        # Runs before the validator of all keys, which would take "auto" for the default.
        if isinstance(value, str) and value == "auto":
            raise ValueError(
                'expected an integer from 0 to 3, got "auto"; `zerolite plan --compare` says which stage is the first '
                "that fits"
            )
        return value
