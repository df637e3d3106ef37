"""Blocks for offload, activation checkpointing and asynchronous file I/O."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .values import NULL_IS_DEFAULT, Block, Bool, Count, Integer, Natural, NotNegative, Path, Texts

OffloadDevice = Literal["none", "cpu", "nvme"]
Device = Annotated[OffloadDevice, NULL_IS_DEFAULT, Field(title='"none" or "cpu" or "nvme" or null')]
Threads = Annotated[Count, Field(le=1024)]

DISK_BLOCK = 4096
"""Bytes: what is read from and written to disk directly is cut at multiples."""

SUB_GROUP_SIZE = 1_000_000_000
"""Elements: DeepSpeed's default."""


class _Offload(Block):
    device: Device = "none"
    """`"cpu"`: the host's memory; `"nvme"`: a disk; `"none"` or null: the device, whatever else the block says. Needed
    if it says anything else."""
    nvme_path: Path | None = None
    """Folder on the disk that is used, on every host: absolute, or relative to the one in which the job runs. Needed
    with `"nvme"`, without effect with `"cpu"`. Nothing is left in it when the job ends, however it does."""
    pin_memory: Bool = True
    """Register the host's memory with CUDA, so that copies run beside the device's work; false: they are slower, and
    the limit of locked memory (`ulimit -l`) does not matter. Without effect where ranks run on the CPU."""

    @property
    def enabled(self) -> bool:
        return self.device != "none"


class OffloadOptimizerConfig(_Offload):
    """Stages 1 to 3: where optimizer states, separate master weights and the reduced gradients that wait for the step
    rest. What rests off the device is updated by the CPU. The numbers do not depend on it where both compute alike."""

    buffer_count: Count = 4
    """Sub-groups (`sub_group_size`) that are on their way or being updated at the same time."""
    ratio: Annotated[NotNegative, Field(le=1)] = 1.0
    """The part of the elements that `"cpu"` has; the device keeps and updates the rest. At `"nvme"` only 1."""
    fast_init: Bool = False
    """Accepted, without effect: states on disk begin as zeros that are never written."""
    pipeline_read: Bool = False
    """Accepted, without effect: reads and writes always overlap the update."""
    pipeline_write: Bool = False
    """Accepted, without effect: reads and writes always overlap the update."""
    pipeline: Bool = False
    """Accepted, without effect: reads and writes always overlap the update."""


class OffloadParamConfig(_Offload):
    """Stage 3: where each rank's shards of the parameters rest, frozen ones too. They come to the device when they are
    gathered."""

    buffer_count: Count = 5
    """`"nvme"`: buffers for what is read ahead of its gather, of `buffer_size` elements each."""
    buffer_size: Count = 100_000_000
    """`"nvme"`: elements of this rank's shards in one buffer. What one gather needs is read whatever its size."""
    max_in_cpu: Natural = 1_000_000_000
    """`"nvme"`: most elements of each rank's shards that stay in the host's memory all the same. 0: all are on disk."""


class AioConfig(Block):
    """Reads and writes of `"nvme"`: direct, asynchronous I/O, with io_uring where the kernel has it and threads
    otherwise."""

    block_size: Annotated[Integer, Field(ge=DISK_BLOCK, le=2**30, multiple_of=DISK_BLOCK)] = 1_048_576
    """Bytes in one request to the disk; larger reads and writes are cut into these."""
    queue_depth: Annotated[Count, Field(le=4096)] = 8
    """Requests that a rank has in flight at the same time."""
    thread_count: Threads | None = None
    """Threads of each rank that read and write. null: as `intra_op_parallelism`, or 1 if that is null."""
    intra_op_parallelism: Threads | None = None
    """Another name of `thread_count`. If both are given they must be equal."""
    single_submit: Bool = False
    """Hand requests to the kernel one by one; false: as many at once as there are."""
    overlap_events: Bool = True
    """Take in what is complete while more is handed in; false: only afterwards."""
    checksums: Bool = False
    """Keep a checksum of what is written to disk, and compare it when it is read; costs time. (zerolite's own key.)"""

    @property
    def threads(self) -> int:
        """Threads of one rank: what ``thread_count`` or ``intra_op_parallelism`` says."""
        return self.thread_count or self.intra_op_parallelism or 1


class ActivationCheckpointingConfig(Block):
    """Inputs that `zerolite.checkpointing.checkpoint` keeps for backward, and where; and modules that the engine
    checkpoints by itself."""

    partition_activations: Bool = False
    """Each rank of a group in which activations are the same keeps its part of them only, and they are gathered in
    backward; those that differ between its ranks are found there and are an error. The group is given to
    `zerolite.checkpointing.configure`; without one there is nothing to cut."""
    cpu_checkpointing: Bool = False
    """Keep them in the host's memory; they come back ahead of their use in backward."""
    modules: Texts = ()
    """Modules whose forward is checkpointed, without a change to the model, such as `["blocks.*"]` or `["*Block"]`:
    patterns (`*`, `?`, `[...]`; upper and lower case differ) of qualified names in the model or of class names. What is
    in such a module is not checkpointed again, and containers (ModuleList, ModuleDict) never match. (zerolite's own
    key.)"""
