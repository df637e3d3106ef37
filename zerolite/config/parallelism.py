"""Blocks for tensor, sequence and pipeline parallelism."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .values import NULL_IS_DEFAULT, Arguments, Block, Bool, Count, Natural, NotNegative, Texts, show

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"]
ONE_CHUNK = ("gpipe", "1f1b")
TWO_CHUNKS = ("zbv", "dualpipev")

_STYLE_KEYS = ("style", "parts", "gather_output")


def _styles(plan: dict[str, object]) -> dict[str, object]:
    for pattern, style in plan.items():
        words = style if isinstance(style, dict) else {"style": style}
        if not isinstance(words.get("style"), str):
            raise ValueError(
                'expected styles such as "column", "row", "vocab" or {"style": "column", "parts": 3}, got '
                f"{show(style)} for {show(pattern)}; write one of these"
            )
        unknown = [key for key in words if key not in _STYLE_KEYS]
        if unknown:
            raise ValueError(
                f"expected {', '.join(_STYLE_KEYS)} in the style of {show(pattern)}, got {show(unknown[0])}; remove it"
            )
    return plan


def _lower(value: object) -> object:
    return value if not isinstance(value, str) or value.lower().startswith("type:") else value.lower()


Plan = Annotated[
    Arguments,
    Field(min_length=1),
    AfterValidator(_styles),
    Field(title="an object of module names and styles", description='write {"blocks.*.mlp.up": "column", ...}'),
]
PartitionMethod = Annotated[
    str,
    Field(pattern="^((?i:type):|(parameters|uniform)$)", strict=True),
    BeforeValidator(_lower),
    Field(title='"parameters", "uniform" or "type:REGEX"', description="write one of these"),
]


class TensorParallelConfig(Block):
    """Shard layers over `size` ranks that see the same batch; see [tensor parallelism](tensor-parallelism.md)."""

    size: Count = 1
    """Ranks that share each layer; a divisor of the number of ranks. 1 = off."""
    plan: Plan | Literal["auto"] = "auto"
    """Layers to shard and how: patterns of module names with `"column"`, `"row"` or `"vocab"`, as in
    `{"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}`; Hugging Face's words are understood. `"auto"`: the plan
    of the model itself (`base_model_tp_plan`, `_tp_plan`); with `"*": "auto"` in the object, for all modules that its
    other patterns do not match."""
    sequence_parallel: Bool = False
    """Keep only a part of the sequence on each rank between the sharded layers: less memory for activations, as much
    traffic in a forward, and half as much again in a backward."""
    divide: Texts | Literal["auto"] = "auto"
    """Numbers in modules that must be divided by `size`, such as the number of heads: patterns of `module.attribute`.
    `"auto"`: known names in modules with sharded layers."""


class SequenceParallelConfig(Block):
    """Divide each sequence over `size` ranks; see [long sequences](long-context.md). (zerolite's own block.)"""

    size: Count = 1
    """Ranks that have parts of the same sequences; a divisor of the number of ranks. 1 = off."""
    attention: Literal["auto", "ulysses", "ring"] = "auto"
    """How a token sees the other parts: `"ulysses"` exchanges tokens for heads, so `size` divides the number of heads;
    `"ring"` passes keys and values on. `"auto"`: ulysses within a host, as far as there are heads, and rings across."""
    inputs: Literal["whole", "parts", "parts in training"] = "whole"
    """What `engine(...)` is given: `"whole"` sequences, of which each rank takes its part, or `"parts"` that the loader
    has cut. Then the gradient is the mean over ranks, as in data parallelism, and the loss accounts for the labels of
    the other parts. `"parts in training"`: in eval mode each rank has whole sequences of its own."""


class ExpertParallelConfig(Block):
    """Spread the experts of mixtures over `size` ranks, which exchange tokens; see [experts](experts.md)."""

    size: Count = 1
    """Ranks that have all experts together: a divisor of the number of data-parallel ranks (times
    `tensor_parallel.size`, of which it is a multiple) and of the number of experts. 1 = off. (zerolite's own key.)"""
    enabled: Bool = True
    """DeepSpeed's switch. false: each rank has all experts, whatever the size."""
    capacity: Natural = 0
    """Most tokens of one rank that an expert takes in a forward of a layer. It drops the others, and no rank waits for
    numbers of tokens. 0: nothing is dropped. (zerolite's own key.)"""
    load_balance_coeff: Annotated[
        NotNegative, NULL_IS_DEFAULT, Field(title="a finite number of at least 0 or null")
    ] = 0.0
    """After every step the router's bias of an expert moves by so much: up if the expert was chosen less often than the
    mean of its layer, over all ranks and micro-batches, else down. For routers with a bias that only chooses
    (DeepSeek-V3, GLM-4.5, dots.1, MiniMax-M2, LFM2). 0: biases stay. (torchtitan's key.)"""
    log_load: Bool = False
    """Write to the monitors how often each expert was chosen in a step, relative to the mean of its layer.
    (zerolite's own key.)"""

    @property
    def ranks(self) -> int:
        """Ranks that have all experts together."""
        return self.size if self.enabled else 1


class PipelineConfig(Block):
    """Put consecutive layers on `stages` groups of ranks; see [pipeline parallelism](pipeline-parallelism.md)."""

    stages: Annotated[Count, NULL_IS_DEFAULT, Field(title="an integer of at least 1 or null")] = 1
    """Groups of ranks, each with a part of the layers; a divisor of the number of ranks."""
    split: Texts | Literal["auto"] = "auto"
    """For a model that is not an `nn.Sequential`: the first module of the second stage, of the third, and so on.
    `"auto"`: the longest list of equal modules is divided by `partition_method`."""
    partition_method: PartitionMethod = "parameters"
    """Divide the layers so that stages have equally many `"parameters"`, layers (`"uniform"`), or layers whose class
    name matches (`"type:REGEX"`)."""
    schedule: Schedule = "1f1b"
    """Order of forwards and backwards, a schedule of torch.distributed.pipelining. The number of micro-batches is
    `gradient_accumulation_steps`."""
    chunks: Count | None = None
    """Parts of the model on each rank. null: 1 for gpipe and 1f1b, 2 for the others."""
    activation_checkpoint_interval: Natural = 0
    """Layers that are checkpointed together: backward recomputes their activations. 0 = off."""

    @property
    def chunks_per_rank(self) -> int:
        return self.chunks or (1 if self.schedule in ONE_CHUNK else 2)
