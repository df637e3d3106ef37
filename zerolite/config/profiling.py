"""Blocks that measure a job; docs/monitoring.md describes their output."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .monitors import OptionalName
from .rules import Boolean, Integer, Number, Texts, show

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
"""What zerolite sends."""

# Names under which DeepSpeed logs the same, and those of what zerolite never sends.
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
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "scatter",
    "send",
)


@dataclass(frozen=True)
class Operations(Texts):
    """A list of operations in zerolite's or DeepSpeed's names, kept in zerolite's, in order, each once."""

    def __call__(self, value: object) -> tuple[str, ...]:
        names = super().__call__(value) or ()
        for name in names:
            if name not in _SAME and name not in _NEVER_SENT:
                near = get_close_matches(name, [*_SAME, *_NEVER_SENT], n=1)
                remedy = f'did you mean "{near[0]}"?' if near else f"write some of {', '.join(OPERATIONS)}"
                raise ValueError(f"expected names of operations, got {show(name)} among them; {remedy}")
        meant = {_SAME[name] for name in names if name in _SAME}
        return tuple(operation for operation in OPERATIONS if operation in meant)


Switch = Annotated[bool, BeforeValidator(Boolean())]


class _Profiling(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CommsLoggerConfig(_Profiling):
    """Wait for each collective where it is launched, and measure it: count, bytes, time and bandwidth by operation.
    Costs the overlap of communication and computation, so not for a job that is to be fast. See
    [Monitoring](monitoring.md)."""

    enabled: Switch = Field(
        default=False,
        description="Measure collectives; rank 0 prints a table every `steps_per_print` steps (10 if that is null).",
    )
    verbose: Switch = Field(default=False, description="Print a line for each collective too, on rank 0.")
    prof_all: Switch = Field(default=True, description="Measure all operations, whatever `prof_ops` says.")
    debug: Switch = Field(
        default=False, description="Tell collectives apart by the line of code that launches them, too."
    )
    prof_ops: Annotated[tuple[str, ...], BeforeValidator(Operations('["all_reduce"]', nullable=False))] = Field(
        default=(),
        description="With `prof_all` false, the operations that are measured: "
        + ", ".join(f"`{name}`" for name in OPERATIONS)
        + ", or DeepSpeed's names of them (`reduce_scatter_tensor`, `all_gather_into_tensor`, …). Names of what "
        "zerolite never sends, such as `all_to_all`, are without effect.",
    )

    def measures(self, operation: str) -> bool:
        return self.prof_all or operation in self.prof_ops


class FlopsProfilerConfig(_Profiling):
    """Count the floating-point operations of one step by module, on rank 0, and say from then on which share of the
    device's peak is used. See [Monitoring](monitoring.md)."""

    enabled: Switch = Field(default=False, description="Count and measure.")
    recompute_fwd_factor: Annotated[float, BeforeValidator(Number(0.0))] = Field(
        default=0.0,
        description="Forwards that backward computes anew, in forwards, where the counter cannot see it (inside a "
        "compiled region, for one). What `torch.utils.checkpoint` recomputes is counted as it runs; the larger of the "
        "two goes into the hardware's FLOPs.",
    )
    profile_step: Annotated[int, BeforeValidator(Integer(0))] = Field(
        default=1, description="Optimizer steps of this job before the one that is counted. 0: the first is."
    )
    module_depth: Annotated[int, BeforeValidator(Integer(-1))] = Field(
        default=-1,
        description="Depth of the modules among which the largest are shown: 0 is the model, 1 its children. -1: the "
        "deepest there is.",
    )
    top_modules: Annotated[int, BeforeValidator(Integer(1))] = Field(
        default=1, description="How many modules with most FLOPs are shown at each depth."
    )
    detailed: Switch = Field(default=True, description="Show the tree of all modules down to `module_depth`.")
    output_file: OptionalName = Field(
        default=None, description="File that gets the profile. null: it is printed on rank 0."
    )
    peak_tflops: Annotated[float | None, BeforeValidator(Number(0.0, exclusive=True, nullable=True))] = Field(
        default=None,
        description="Peak of one device in the dtype of the computation, dense, in TFLOP/s (10^12 a second), such as "
        "989 for bf16 on an H100 SXM. null: shares of it (MFU, HFU) are left out. (zerolite's own key.)",
    )
