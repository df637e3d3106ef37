"""The block `zero_optimization`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .errors import ConfigError
from .offload import SUB_GROUP_SIZE, OffloadOptimizerConfig, OffloadParamConfig
from .values import NULL_IS_DEFAULT, Block, Bool, Count, Natural, Texts

AUTO_GRANULARITY = 1_048_576
"""Elements of a module that is gathered as one unit whatever it is, where the configuration leaves the choice to
zerolite."""


class LeafModuleConfig(Block):
    """Modules that stage 3 gathers whole, with all that they hold, in DeepSpeed's terms; adds to `leaf_modules`."""

    classes: Texts = ()
    """Class names, bare (`MoeBlock`) or with their module (`package.module.MoeBlock`)."""
    names: Texts = ()
    """Qualified names in the model, exactly, such as `model.layers.0.mlp`."""
    name_suffixes: Texts = ()
    """Ends of qualified names, such as `mlp.experts`."""


class ZeroConfig(Block):
    """The states that are sharded over the ranks."""

    keeps_auto = "stage"

    stage: Annotated[Natural, Field(le=3)] | Literal["auto"] = 0
    """0: nothing; 1: optimizer states and master weights; 2: gradients too; 3: parameters too. `"auto"`: `initialize`
    plans the job at each stage and takes the one with the least traffic that fits into the device. (zerolite's own
    value.)"""
    reduce_bucket_size: Count | None = None
    """Elements in a bucket, which is reduced and gathered as one. null or `"auto"`: 40 M, or 1 M for each data-parallel
    rank if that is more, but at most an eighth of the model (and at least 4 Mi)."""
    allgather_bucket_size: Count | None = None
    """Elements gathered as one. Buckets are the same for both, so the smaller of the two sizes counts. null or
    `"auto"`: as `reduce_bucket_size`."""
    overlap_comm: Bool | None = None
    """true: buckets are reduced while backward still runs, and (stages 1 and 2) the next forward waits for updated
    parameters only where a module needs them. PyTorch's functions that read a parameter before wait for it; C++
    extensions, constructors (`torch.tensor(p)`, `nn.Parameter(p)`), scripted functions, CUDA graphs and views taken
    before the step do not: access `engine.module` first, which waits for all. null: the first of the two. false:
    neither. The numbers do not depend on it."""
    contiguous_gradients: Bool = True
    """Move each gradient into its bucket as soon as it is ready."""
    reduce_scatter: Bool = True
    """Reduce to the owner of each part only; false: all-reduce, then keep a part (stages 1 and 2)."""
    ignore_unused_parameters: Bool = True
    """Parameters that got no gradient on any rank are left alone, as torch does; false: they are an error that names
    them."""
    whole_parameters: Bool = False
    """Stages 1 and 2: each parameter belongs whole to one rank, for optimizers that need whole matrices (see
    [optimizers](optimizers.md)). Always so for those that are known to. (zerolite's own key.)"""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()
    sub_group_size: Annotated[Count, NULL_IS_DEFAULT, Field(title="an integer of at least 1 or null")] = SUB_GROUP_SIZE
    """With offload: most elements of a rank's shards that one step of the update has in hand. null: the default."""
    # Stage 3. Sizes are in elements of whole parameters, over all ranks. At lower stages these keys are without effect.
    stage3_prefetch_bucket_size: Natural = 50_000_000
    """Stage 3: elements that are gathered ahead of the modules that need them. 0: no prefetch."""
    stage3_param_persistence_threshold: Natural = 100_000
    """Stage 3: parameters of at most so many elements stay whole on every rank. 0: only empty ones do."""
    stage3_model_persistence_threshold: Natural | None = None
    """Stage 3: most elements, over all parameters together, that may stay whole because of
    `stage3_param_persistence_threshold`. null or `"auto"`: no limit."""
    stage3_max_live_parameters: Natural = 1_000_000_000
    """Stage 3: most elements that are gathered on a rank at a time, unless one use alone needs more."""
    stage3_max_reuse_distance: Natural = 1_000_000_000
    """Stage 3: a parameter stays gathered after a use if at most so many elements are used before it is used again. 0:
    released after every use."""
    stage3_module_granularity_threshold: Natural | None = None
    """Stage 3: a module that holds, with all modules in it, at most so many elements is gathered as one unit. null or
    `"auto"`: 1048576, and repeated blocks (several children of one class in a `ModuleList` or `Sequential`) are units
    too, where two fit into `stage3_max_live_parameters`. 0: every module that owns parameters is a unit."""
    stage3_gather_16bit_weights_on_model_save: Bool = False
    """Accepted, without effect: `engine.full_state_dict()` and `engine.save_16bit_model()` give whole weights at every
    stage when they are asked to."""
    leaf_modules: Texts = ()
    """Stage 3: modules that are gathered as one unit whatever their size, such as `["*MoeBlock"]`: patterns (`*`, `?`,
    `[...]`; upper and lower case differ) of class names or of qualified names in the model, each of which must match
    one. (zerolite's own key.)"""
    leaf_module: LeafModuleConfig = LeafModuleConfig()

    @property
    def chosen_stage(self) -> int:
        """The stage as a number, once ``initialize`` has chosen one where the config says "auto". Raises ConfigError
        before."""
        if self.stage == "auto":
            sentence = (
                'expected 0, 1, 2 or 3 here, got "auto", which is for zerolite.initialize: it takes the stage that '
                "fits; name one"
            )
            raise ConfigError([("zero_optimization.stage", sentence)])
        return self.stage
