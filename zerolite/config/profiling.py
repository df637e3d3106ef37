"""Blocks that measure a job; docs/monitoring.md describes their output."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

from pydantic import AfterValidator, Field

from .values import Block, Bool, Count, Integer, Natural, NotNegative, Positive, Text, Texts, show

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
"""Collectives that zerolite launches."""

# The same collectives by the names under which DeepSpeed logs them, and those that zerolite never launches.
_SAME = {
    **{name: name for name in OPERATIONS},
    "all_reduce_coalesced": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "reduce_scatter_fn": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_fn": "all_gather",
}
_NEVER_SENT = (
    "all_gather_object all_to_all all_to_all_single barrier broadcast_object_list gather irecv isend "
    "monitored_barrier recv reduce scatter send"
).split()


def _operations(names: tuple[str, ...]) -> tuple[str, ...]:
    """Translate zerolite's or DeepSpeed's names to zerolite's, in a fixed order, each once."""
    for name in names:
        if name not in _SAME and name not in _NEVER_SENT:
            near = get_close_matches(name, [*_SAME, *_NEVER_SENT], n=1)
            remedy = f'did you mean "{near[0]}"?' if near else f"write some of {', '.join(OPERATIONS)}"
            raise ValueError(f"expected names of operations, got {show(name)} among them; {remedy}")
    meant = {_SAME[name] for name in names if name in _SAME}
    return tuple(operation for operation in OPERATIONS if operation in meant)


Operations = Annotated[Texts, AfterValidator(_operations), Field(description='write names such as ["all_reduce"]')]


class CommsLoggerConfig(Block):
    """Wait for each collective where it is launched, and measure it: count, bytes, time and bandwidth by operation.
    Communication does not overlap computation then, so switch it off in a job that is to be fast. See
    [Monitoring](monitoring.md)."""

    enabled: Bool = False
    """Measure collectives; rank 0 prints a table every `steps_per_print` steps (10 if that is null)."""
    verbose: Bool = False
    """Also print a line for each collective, on rank 0."""
    prof_all: Bool = True
    """Measure all operations, whatever `prof_ops` says."""
    debug: Bool = False
    """Also list collectives by the line of code that launches them."""
    prof_ops: Operations = ()
    """With `prof_all` false, the operations to measure: `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast`, or
    DeepSpeed's names of them (`reduce_scatter_tensor`, `all_gather_into_tensor`, …). Operations that zerolite never
    launches, such as `all_to_all`, have no effect."""

    def measures(self, operation: str) -> bool:
        return self.prof_all or operation in self.prof_ops


class FlopsProfilerConfig(Block):
    """Count the floating-point operations of one step by module, on rank 0. From then on report the used share of the
    device's peak. See [Monitoring](monitoring.md)."""

    enabled: Bool = False
    """Count and measure."""
    recompute_fwd_factor: NotNegative = 0.0
    """Share of the forward that backward recomputes where the counter cannot see it, such as in a compiled region: 1.0
    is one whole forward. What `torch.utils.checkpoint` recomputes is counted as it runs; the larger of the two goes
    into the hardware's FLOPs."""
    profile_step: Natural = 1
    """Optimizer steps of this job before the counted one. 0: the first step is counted."""
    module_depth: Annotated[Integer, Field(ge=-1)] = -1
    """Depth of the modules among which the largest are shown: 0 is the model, 1 its children. -1: the deepest level."""
    top_modules: Count = 1
    """Number of modules with the most FLOPs to show at each depth."""
    detailed: Bool = True
    """Show the tree of all modules down to `module_depth`."""
    output_file: Text | None = None
    """File for the profile. null: print it on rank 0."""
    peak_tflops: Positive | None = None
    """Dense peak of one device in the dtype of the computation, in TFLOP/s, such as 989 for bf16 on an H100 SXM. null:
    leave out the shares of it (MFU, HFU). (zerolite's own key.)"""
