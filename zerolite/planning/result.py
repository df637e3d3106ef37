"""Result of a plan: one rank's memory by item and over a step, its traffic, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from zerolite.utils.memory_tags import BUFFERS, MODEL_STATES

GIGA = 1e9
Items = dict[str, int]
"""Bytes by item, for all of zerolite.utils.memory_tags.ITEMS."""

AT_REST = (*MODEL_STATES, BUFFERS)
"""Items that exist during the whole step; all others come and go."""


class PlanError(Exception):
    """The job cannot be planned. The message says why and what to do."""


class RefusedError(PlanError):
    """The engine refuses the job; with another setting it may accept it."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank uses the most memory.

    Attributes:
        phase: initialize, forward, backward or step.
        module: qualified name of the innermost running module; "" is the model itself.
        op: the operator that allocated, as in aten.mm; "" if none did.
    """

    bytes: int
    items: Items
    phase: str = ""
    module: str = ""
    module_class: str = ""
    op: str = ""


@dataclass(frozen=True)
class TimePoint:
    """One point of the time line of a step."""

    items: Items
    phase: str

    @property
    def bytes(self) -> int:
        return sum(self.items.values())


class Traffic(_Frozen):
    """All collectives of one kind that one rank launches in one step. Sizes in bytes.

    Attributes:
        count: launches. Several tensors in one group (NCCL's ncclGroup) are one launch.
        nbytes: size of the full tensors: a gather of P bytes on N ranks counts P, not P / N.
        sent: bytes that this rank sends if the collectives run as rings, the bandwidth-optimal algorithm. A gather or a
            reduce-scatter sends (N - 1) / N of ``nbytes``, an all-reduce twice that. A broadcast sends all of it.
        inter_node: the part of ``sent`` that leaves the node, averaged over the ranks of a node.
        unaligned: number of buffers (full tensors, ranks' parts, shards) that are not aligned to 16 bytes, for which
            NCCL takes a slow path.
    """

    op: str = Field(description="such as all_reduce, all_gather, all_to_all, permute")
    tag: str = Field(description="its purpose: gradients, parameters, stats, ...")
    dimension: str = Field(
        default="data",
        description="of the grid: data, shard, replicate, sequence, ring, expert, expert data, expert shard, tensor, "
        "model, world",
    )
    ranks: int = Field(default=1, description="ranks that take part")
    count: int
    nbytes: int
    sent: int
    inter_node: int | None = Field(description="None where the number of nodes was not given")
    unaligned: int = 0


class Machine(_Frozen):
    """Speeds of the devices and of the wires between them, for the time of a step.

    Attributes:
        tflops: 10^12 operations a second that forward and backward reach: products and everything between them.
        intra_bandwidth: GB/s (10^9) of a rank to the others of its node, in each direction; None: not given.
        inter_bandwidth: GB/s of a node to the others, all its network cards together, in each direction.
        latency: microseconds of a hop between nodes.
        intra_latency: microseconds of a hop within a node, or of an exchange there by copies in memory.
        memory_bandwidth: GB/s of a device's memory, for the passes of the engine over its own memory; None: they take
            no time.
    """

    tflops: float = Field(gt=0)
    intra_bandwidth: float | None = Field(default=None, gt=0)
    inter_bandwidth: float | None = Field(default=None, gt=0)
    latency: float = Field(default=10.0, ge=0)
    intra_latency: float = Field(default=2.5, ge=0)
    memory_bandwidth: float | None = Field(default=None, gt=0)

    def seconds(self, flops: int, nbytes: int) -> tuple[float, float]:
        """Return the time of operations, and of passes over ``nbytes`` of memory."""
        passes = 0.0 if self.memory_bandwidth is None else nbytes / (GIGA * self.memory_bandwidth)
        return flops / (1e12 * self.tflops), passes

    def lacks(self, world_size: int, nodes: int | None) -> str:
        """Return the argument that a job of this size needs and that was not given; "" if it has all."""
        if nodes is None and world_size > 1:
            return "nodes"
        nodes = nodes or 1
        if world_size > nodes and self.intra_bandwidth is None:
            return "intra_bandwidth"
        return "inter_bandwidth" if nodes > 1 and self.inter_bandwidth is None else ""


class StepTime(_Frozen):
    """Time of a step in seconds, by a simulated clock.

    Attributes:
        step: from the end of one step to the end of the next.
        products: forward and backward of the model.
        passes: copies, sums and the update, which the memory of the device bounds.
        exposed: the rest, in which the device waits for communication.
    """

    step: float
    products: float
    passes: float
    exposed: float


class Plan(_Frozen):
    """Memory and traffic of one rank of a job, found by running the engine on tensors without memory. Sizes in bytes.

    Attributes:
        parameters: elements of the full model.
        states: model states and buffers on the device, each item at its largest within a step. Figure 1 of the ZeRO
            paper counts the same.
        at_rest: items on the device between two steps.
        peak: the moment of the most device memory over all phases.
        initialize_peak: that moment while the engine is made.
        step_peak: that moment in a step after the warm-up.
        timeline: memory of the device in that step, at most 1000 points.
        host, disk: offloaded items and staging buffers there, each item at its largest within a step; None if there are
            none.
        host_peak: the most host memory that the rank uses at once, for offloaded items or for the model before the
            engine is built. With device "cpu" the device's memory counts too.
        flops: operations of one rank's forward and backward in one step (matrix products, convolutions, attention);
            None without a batch.
        recomputed_flops: operations of forwards that activation checkpointing runs again; not part of ``flops``.
        device_memory: memory of each rank's device.
        host_memory: memory of each host, which its ranks share.
    """

    model: str
    stage: int
    world_size: int
    nodes: int | None
    rank: int
    device: str = Field(description="cuda or cpu: the kind of the simulated communicator")
    precision: str = Field(description="fp32, bf16, fp16, or autocast with its dtype")
    micro_batch: int | None
    accumulation: int
    batch: str | None = Field(description="shapes and dtypes of one micro-batch; None if none was given")
    parameters: int
    trained_parameters: int
    grid: str = Field(default="", description="dimensions of the ranks; empty for data parallelism alone")
    data_parallel: int = Field(description="ranks that have the same parameters")
    states: Items
    at_rest: Items
    peak: Peak
    initialize_peak: Peak
    step_peak: Peak
    timeline: list[TimePoint]
    traffic: list[Traffic]
    host_waits: int = Field(description="reads of CUDA memory for which the host waits in the step that begins them")
    host: Items | None
    disk: Items | None
    host_peak: int
    flops: int | None = None
    recomputed_flops: int = 0
    time: StepTime | None = Field(default=None, description="of a step; None where no speeds were given")
    device_memory: int | None
    host_memory: int | None
    notes: list[str] = Field(description="sentences with assumptions, and with memory that is not in the numbers")

    @property
    def model_states(self) -> int:
        """Bytes of model states (without buffers), each at its largest within a step."""
        return total(self.states, MODEL_STATES)

    @property
    def offloaded(self) -> int:
        """Bytes of model states on the host or on disk."""
        return sum(total(items, MODEL_STATES) for items in (self.host, self.disk) if items is not None)

    @property
    def spare(self) -> int | None:
        """Bytes of device memory left at the peak, negative if the job does not fit; None if no memory was given."""
        return None if self.device_memory is None else self.device_memory - self.peak.bytes

    @property
    def ranks_per_host(self) -> int | None:
        """Number of ranks on each host; None if the number of nodes was not given."""
        nodes = 1 if self.world_size == 1 else self.nodes
        return None if nodes is None else self.world_size // nodes

    @property
    def host_spare(self) -> int | None:
        """Bytes of a host's memory left when all its ranks are at their peak, negative if they do not fit.

        None if the host's memory or the number of nodes was not given.
        """
        if self.host_memory is None or self.ranks_per_host is None:
            return None
        return self.host_memory - self.ranks_per_host * self.host_peak

    @property
    def fits(self) -> bool | None:
        """True if the device and the host are large enough; None if no memory was given."""
        if self.host_spare is not None and self.host_spare < 0:
            return False
        return None if self.spare is None else self.spare >= 0

    @property
    def sent(self) -> int:
        """Bytes that this rank sends in one step."""
        return sum(entry.sent for entry in self.traffic)

    @property
    def collectives(self) -> dict[str, int]:
        """Launches of one step by kind, as in ``{"all_gather": 64, "reduce_scatter": 34, "all_reduce": 1}``."""
        counts: dict[str, int] = {}
        for entry in self.traffic:
            counts[entry.op] = counts.get(entry.op, 0) + entry.count
        return counts

    @property
    def inter_node(self) -> int | None:
        """Part of ``sent`` that leaves the node; None if the number of nodes was not given."""
        return None if self.nodes is None else sum(entry.inter_node or 0 for entry in self.traffic)


def total(items: Items, names: Iterable[str]) -> int:
    """Return the sum of some items."""
    return sum(items[name] for name in names)


def item_label(item: str) -> str:
    """Return the name of an item for reports."""
    return item.replace("_", " ")


class Comparison(_Frozen):
    """Plans of one job with different ZeRO settings, in the order of :func:`~zerolite.planning.settings.compare`.

    Attributes:
        rows: (setting, plan).
        chosen: index of the fastest setting that fits, or without times of the first; None if none does or no memory
            was given. Compressed traffic is chosen only for a config that has its keys.
        left_out: sentences about settings that the engine refuses, that were not planned, or that are not chosen though
            they are faster.
    """

    rows: list[tuple[str, Plan]]
    chosen: int | None
    left_out: list[str] = []
