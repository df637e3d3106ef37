"""Blocks for tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .rules import Boolean, Choice, FrozenDict, Integer, Texts, show

Bool = Annotated[bool, BeforeValidator(Boolean())]
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
ONE_CHUNK = ("gpipe", "1f1b")
TWO_CHUNKS = ("zbv", "dualpipev")


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class PlanRule:
    """An object of patterns and styles, or the word "auto", which is kept."""

    expected = 'an object of module names and styles, or "auto"'

    def __call__(self, value: object) -> Any:
        if value == "auto" and isinstance(value, str):
            return value
        if not isinstance(value, Mapping) or not value:
            raise ValueError(f'expected {self.expected}, got {show(value)}; write {{"blocks.*.mlp.up": "column", ...}}')
        styles: dict[str, Any] = {}
        for pattern, style in value.items():
            named = isinstance(style, Mapping) and isinstance(style.get("style"), str)
            if not isinstance(pattern, str) or not (isinstance(style, str) or named):
                raise ValueError(
                    f'expected styles such as "column", "row", "vocab" or {{"style": "column", "parts": 3}}, got '
                    f"{show(style)} for {show(pattern)}; write one of these"
                )
            unknown = [key for key in style if key not in _STYLE_KEYS] if isinstance(style, Mapping) else []
            if unknown:
                raise ValueError(
                    f"expected {', '.join(_STYLE_KEYS)} in the style of {show(pattern)}, got {show(unknown[0])}; "
                    "remove it"
                )
            styles[pattern] = FrozenDict(style) if isinstance(style, Mapping) else style
        return FrozenDict(styles)


_STYLE_KEYS = ("style", "parts", "gather_output")


class NamesOrAuto(Texts):
    """A list of non-empty strings, or the word "auto", which is kept."""

    @property
    def expected(self) -> str:
        return 'an array of strings or "auto"'

    def __call__(self, value: object) -> Any:
        return value if value == "auto" and isinstance(value, str) else super().__call__(value)


class PartitionMethod:
    """How layers are given to stages."""

    words = ("parameters", "uniform", "profile")
    expected = '"parameters", "uniform", "profile" or "type:REGEX"'

    def __call__(self, value: object) -> str:
        known = isinstance(value, str) and (value.lower() in self.words or value.lower().startswith("type:"))
        if not isinstance(value, str) or not known:
            raise ValueError(f"expected {self.expected}, got {show(value)}; write one of these")
        return value if value.lower().startswith("type:") else value.lower()


class TensorParallelConfig(_Block):
    """Layers are cut over `size` ranks that see the same batch; see [tensor parallelism](tensor-parallelism.md)."""

    size: Annotated[int, BeforeValidator(Integer(1))] = Field(
        default=1, description="Ranks that share each layer. They divide the number of ranks; 1 = off."
    )
    autotp_size: Annotated[int, BeforeValidator(Integer(0))] = Field(
        default=0, description="DeepSpeed's name of `size`, with a plan that the model's structure gives; 0 = not used."
    )
    plan: Annotated[Any, BeforeValidator(PlanRule())] = Field(
        default="auto",
        description='Which layers are cut and how: patterns of module names with `"column"`, `"row"` or `"vocab"`, as '
        'in `{"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}`; Hugging Face\'s words are understood. '
        '`"auto"`: the plan that the model brings (`base_model_tp_plan`), or that its structure gives; with '
        '`"*": "auto"` in the object, all that its other patterns do not say.',
    )
    sequence_parallel: Bool = Field(
        default=False,
        description="Between the layers that are cut, each rank keeps a part of the sequence only: less memory for "
        "activations, the same traffic.",
    )
    divide: Annotated[Any, BeforeValidator(NamesOrAuto('["blocks.*.attn.heads"]', nullable=False))] = Field(
        default="auto",
        description="Numbers that modules keep and that a rank has only a part of, such as heads: patterns of "
        '`module.attribute`. `"auto"`: known names in modules whose layers are cut.',
    )

    @property
    def ranks(self) -> int:
        """Ranks that share each layer, whichever key says so."""
        return max(self.size, self.autotp_size, 1)


class PipelineConfig(_Block):
    """Consecutive layers on `stages` groups of ranks; see [pipeline parallelism](pipeline-parallelism.md)."""

    stages: Annotated[int, BeforeValidator(Integer(1, nullable=True, null_means="1", null_value=1))] = Field(
        default=1, description="Groups of ranks, each with a part of the layers. They divide the number of ranks."
    )
    split: Annotated[Any, BeforeValidator(NamesOrAuto('["blocks.6"]', nullable=False))] = Field(
        default="auto",
        description="For a model that is no sequence of layers: the modules with which the second stage, the third and "
        'so on begin. `"auto"`: the longest list of equal modules is divided by `partition_method`.',
    )
    partition_method: Annotated[str, BeforeValidator(PartitionMethod())] = Field(
        default="parameters",
        description='What stages are to have equally much of: `"parameters"`, layers (`"uniform"`), layers whose class '
        'has a name (`"type:REGEX"`), or time (`"profile"`).',
    )
    schedule: Annotated[Literal[SCHEDULES], BeforeValidator(Choice(SCHEDULES))] = Field(  # type: ignore[valid-type]
        default="1f1b",
        description="The order of forwards and backwards, of torch.distributed.pipelining. Micro-batches are those of "
        "`gradient_accumulation_steps`.",
    )
    chunks: Annotated[
        int | None, BeforeValidator(Integer(1, nullable=True, null_means="as many as the schedule needs"))
    ] = Field(default=None, description="Parts of the model on each rank. null: 1 for gpipe and 1f1b, 2 for others.")
    activation_checkpoint_interval: Annotated[int, BeforeValidator(Integer(0))] = Field(
        default=0, description="Layers whose activations are computed anew in backward, as one; 0 = off."
    )

    @property
    def chunks_per_rank(self) -> int:
        return self.chunks or (1 if self.schedule in ONE_CHUNK else 2)
