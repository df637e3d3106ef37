"""Blocks that measure a job; docs/monitoring.md describes their output."""

from __future__ import annotations

from .values import Block, Bool, Natural, NotNegative, Positive


class FlopsProfilerConfig(Block):
    """Count the floating-point operations of one step, on rank 0. From then on report the used share of the device's
    peak. See [Monitoring](monitoring.md)."""

    enabled: Bool = False
    """Count and measure."""
    recompute_fwd_factor: NotNegative = 0.0
    """Share of the forward that backward recomputes where the counter cannot see it, such as in a compiled region: 1.0
    is one whole forward. What `torch.utils.checkpoint` recomputes is counted as it runs; the larger of the two goes
    into the hardware's FLOPs."""
    profile_step: Natural = 1
    """Optimizer steps of this job before the counted one. 0: the first step is counted."""
    peak_tflops: Positive | None = None
    """Dense peak of one device in the dtype of the computation, in TFLOP/s, such as 989 for bf16 on an H100 SXM. null:
    leave out the shares of it (MFU, HFU). (zerolite's own key.)"""
