"""Blocks of the monitors and the FLOPs profiler. docs/monitoring.md lists the values that they write."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictStr

from .values import Block, Bool, Natural, NotNegative, Positive, Text


class _FileMonitor(Block):
    enabled: Bool = False
    """Write files."""
    output_path: Annotated[
        StrictStr, Field(title="a path", description='write one in quotes, or "" for the working folder')
    ] = ""
    """Folder that holds the folder of the job; "" = the working folder of the job."""
    job_name: Text = "DeepSpeedJobName"
    """Name of the folder of the job in `output_path`. Files that are there are continued."""


class CsvMonitorConfig(_FileMonitor):
    """Write a CSV file for each value, on rank 0. See [Monitoring](monitoring.md)."""


class TensorboardConfig(_FileMonitor):
    """Write TensorBoard's event files, on rank 0. Needs the extra: `pip install 'zerolite[tensorboard]'`."""


class WandbConfig(Block):
    """Log to Weights & Biases, on rank 0. Needs the extra: `pip install 'zerolite[wandb]'`."""

    enabled: Bool = False
    """Log to a run."""
    group: Text | None = None
    """Group of the run. null: none."""
    team: Text | None = None
    """Team (entity) of the run. null: the account's default."""
    project: Text = "deepspeed"
    """Project of the run."""


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
