"""Blocks that choose the dtype of the computation."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .rules import Boolean, Dtype, Integer, Number, Texts

Bool = Annotated[bool, BeforeValidator(Boolean())]

_LOSS_ONLY = (
    "Dtype of the model's 16-bit outputs. null: where the model returns a loss (a floating tensor without dimensions), "
    'only that becomes fp32; where it returns none, all of them do. "fp32": all of them become fp32.'
)
_KEPT = _LOSS_ONLY + ' "{0}": all but a loss stay as they are.{1} (zerolite\'s own key; see [precision](precision.md).)'


class _Precision(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fp16Config(_Precision):
    """Compute in float16 with fp32 master weights and a loss scale."""

    enabled: Bool = Field(default=False, description="Compute in float16.")
    auto_cast: Bool = Field(
        default=False, description="Cast floating inputs to float16. The engine does so in any case."
    )
    loss_scale: Annotated[float, BeforeValidator(Number(0.0))] = Field(
        default=0.0, description="Static factor by which the loss is multiplied before backward; 0 = dynamic."
    )
    initial_scale_power: Annotated[int, BeforeValidator(Integer(0, 127))] = Field(
        default=16, description="A dynamic loss scale starts at 2 to this power."
    )
    loss_scale_window: Annotated[int, BeforeValidator(Integer(1))] = Field(
        default=1000, description="Steps in a row without overflow after which a dynamic loss scale doubles."
    )
    hysteresis: Annotated[int, BeforeValidator(Integer(1))] = Field(
        default=2, description="Overflows (steps) that are tolerated before a dynamic loss scale is halved."
    )
    consecutive_hysteresis: Bool = Field(
        default=False,
        description="Refill the hysteresis after every step without overflow, so that only overflows in a row count.",
    )
    min_loss_scale: Annotated[int, BeforeValidator(Integer(1))] = Field(
        default=1, description="A dynamic loss scale never falls below this factor."
    )
    fp16_master_weights_and_grads: Bool = Field(
        default=False, description="Keep master weights and accumulated gradients in float16 instead of fp32."
    )
    output_dtype: Annotated[str | None, BeforeValidator(Dtype(("fp32", "fp16")))] = Field(
        default=None, description=_KEPT.format("fp16", " Only fp32 outputs take gradients from outside of the model.")
    )


class Bf16Config(_Precision):
    """Compute in bfloat16 with fp32 master weights. The block may also be spelled `bfloat16`."""

    enabled: Bool = Field(default=False, description="Compute in bfloat16.")
    immediate_grad_update: Annotated[
        bool, BeforeValidator(Boolean(always="gradients always accumulate as they arrive"))
    ] = Field(default=True, description="Gradients are accumulated as they arrive. Only true is possible.")
    check_grad_overflow: Bool = Field(
        default=True, description="Skip the step, on all ranks, when a gradient is not finite."
    )
    bf16_master_weights_and_grads: Bool = Field(
        default=False, description="Keep master weights and accumulated gradients in bfloat16 instead of fp32."
    )
    bf16_optimizer_states: Bool = Field(
        default=False,
        description="Keep the optimizer's states in bfloat16 too; needs `bf16_master_weights_and_grads`.",
    )
    output_dtype: Annotated[str | None, BeforeValidator(Dtype(("fp32", "bf16")))] = Field(
        default=None, description=_KEPT.format("bf16", "")
    )


class TorchAutocastConfig(_Precision):
    """Run the forward pass under torch.autocast; parameters stay in fp32."""

    enabled: Bool = Field(default=False, description="Run forward under torch.autocast.")
    dtype: Annotated[str, BeforeValidator(Dtype(("bf16", "fp16"), nullable=False))] = Field(
        default="bf16", description="The dtype autocast computes in."
    )
    lower_precision_safe_modules: Annotated[tuple[str, ...] | None, BeforeValidator(Texts())] = Field(
        default=None,
        description="Classes of modules whose gradients are reduced in `dtype`, such as `torch.nn.Linear`. null: all "
        "gradients are reduced in fp32.",
    )
    output_dtype: Annotated[str | None, BeforeValidator(Dtype(("fp32",)))] = Field(
        default=None, description=f"{_LOSS_ONLY} (zerolite's own key.)"
    )
