"""Blocks that choose the dtype of the computation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .values import DTYPE, Block, Bool, Count, Natural, NotNegative, Texts


class Fp16Config(Block):
    """Compute in float16 with fp32 master weights and a loss scale."""

    enabled: Bool = False
    """Compute in float16."""
    loss_scale: NotNegative = 0.0
    """Static factor by which the loss is multiplied before backward; 0 = dynamic."""
    initial_scale_power: Annotated[Natural, Field(le=127)] = 16
    """A dynamic loss scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """Steps in a row without overflow after which a dynamic loss scale doubles."""
    hysteresis: Count = 2
    """Overflows (steps) that it takes to halve a dynamic loss scale."""
    consecutive_hysteresis: Bool = False
    """Start to count overflows anew after every step without one, so that only overflows in a row count."""
    min_loss_scale: Count = 1
    """A dynamic loss scale never falls below this factor."""
    fp16_master_weights_and_grads: Bool = False
    """Keep master weights and accumulated gradients in float16 instead of fp32."""
    output_dtype: Annotated[Literal["fp32", "fp16"], DTYPE] | None = None
    """Dtype of the model's 16-bit outputs. null: if the model returns a loss (a floating tensor without dimensions),
    only the loss becomes fp32, else all outputs do. "fp32": all become fp32. "fp16": all but a loss stay as they are.
    Only fp32 outputs take gradients from outside of the model. (zerolite's own key; see [precision](precision.md).)"""


class Bf16Config(Block):
    """Compute in bfloat16 with fp32 master weights. The block may also be spelled `bfloat16`."""

    enabled: Bool = False
    """Compute in bfloat16."""
    check_grad_overflow: Bool = True
    """Skip the step, on all ranks, when a gradient is not finite."""
    bf16_master_weights_and_grads: Bool = False
    """Keep master weights and accumulated gradients in bfloat16 instead of fp32."""
    bf16_optimizer_states: Bool = False
    """Keep the optimizer's states in bfloat16 too; needs `bf16_master_weights_and_grads`."""
    output_dtype: Annotated[Literal["fp32", "bf16"], DTYPE] | None = None
    """Dtype of the model's 16-bit outputs. null: if the model returns a loss (a floating tensor without dimensions),
    only the loss becomes fp32, else all outputs do. "fp32": all become fp32. "bf16": all but a loss stay as they are.
    (zerolite's own key; see [precision](precision.md).)"""


class TorchAutocastConfig(Block):
    """Run the forward pass under torch.autocast; parameters stay in fp32."""

    enabled: Bool = False
    """Run forward under torch.autocast."""
    dtype: Annotated[Literal["bf16", "fp16"], DTYPE] = "bf16"
    """Dtype in which autocast computes."""
    lower_precision_safe_modules: Texts | None = None
    """Classes of modules whose gradients are reduced in `dtype`, such as `torch.nn.Linear`. null: all gradients are
    reduced in fp32."""
    output_dtype: Annotated[Literal["fp32"], DTYPE] | None = None
    """Dtype of the model's 16-bit outputs. null: if the model returns a loss (a floating tensor without dimensions),
    only the loss becomes fp32, else all outputs do. "fp32": all become fp32. (zerolite's own key.)"""
