"""Blocks for offload, activation checkpointing and asynchronous file I/O."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .values import NULL_IS_DEFAULT, Block, Bool, Count, Integer, Natural, NotNegative, Path, Texts

OffloadDevice = Literal["none", "cpu", "nvme"]
Device = Annotated[OffloadDevice, NULL_IS_DEFAULT, Field(title='"none" or "cpu" or "nvme" or null')]

DISK_BLOCK = 4096
"""Bytes. Direct reads and writes of a disk begin and end at multiples."""

SUB_GROUP_SIZE = 1_000_000_000
"""Elements: DeepSpeed's default."""


class _Offload(Block):
    device: Device = "none"
    """`"cpu"`: the host's memory; `"nvme"`: a disk; `"none"` or null: no offload. Needed if the block has other
    keys."""
    nvme_path: Path | None = None
    """Folder on a disk of every host, absolute or relative to the working folder. Needed with `"nvme"`, without effect
    with `"cpu"`. Nothing is left in it, however the job ends."""
    pin_memory: Bool = True
    """Register the host's memory with CUDA, so that copies overlap the device's work. false: copies are slower, and the
    limit of locked memory (`ulimit -l`) does not matter. Without effect on CPU ranks."""

    @property
    def enabled(self) -> bool:
        return self.device != "none"


class OffloadOptimizerConfig(_Offload):
    """Stages 1 to 3: keep optimizer states, separate master weights, and the reduced gradients that wait for the step
    off the device. The CPU updates them. The results are the same if CPU and device compute alike."""

    buffer_count: Count = 4
    """Sub-groups (`sub_group_size`) that are copied or updated at the same time."""
    ratio: Annotated[NotNegative, Field(le=1)] = 1.0
    """Share of the elements on `"cpu"`; the device keeps and updates the rest. With `"nvme"` only 1."""


class OffloadParamConfig(_Offload):
    """Stage 3: keep each rank's parameter shards, frozen ones too, off the device. They are copied to it when they are
    gathered."""

    buffer_count: Count = 5
    """`"nvme"`: number of buffers of `buffer_size` elements for shards that are read ahead of their gather."""
    buffer_size: Count = 100_000_000
    """`"nvme"`: elements of this rank's shards in one buffer. A larger gather is read all the same."""
    max_in_cpu: Natural = 1_000_000_000
    """`"nvme"`: up to so many elements of each rank's shards stay in the host's memory. 0: all are on disk."""


class AioConfig(Block):
    """Reads and writes of `"nvme"`: direct, asynchronous I/O by io_uring, or by threads if the kernel lacks it."""

    block_size: Annotated[Integer, Field(ge=DISK_BLOCK, le=2**30, multiple_of=DISK_BLOCK)] = 1_048_576
    """Bytes in one request to the disk; larger reads and writes are divided."""
    queue_depth: Annotated[Count, Field(le=4096)] = 8
    """Requests of a rank in flight at the same time."""
    thread_count: Annotated[Count, NULL_IS_DEFAULT, Field(le=1024, title="an integer from 1 to 1024 or null")] = 1
    """Threads of each rank that read and write."""


class ActivationCheckpointingConfig(Block):
    """Placement of the inputs that `zerolite.checkpointing.checkpoint` keeps for backward, and modules that the engine
    checkpoints itself."""

    cpu_checkpointing: Bool = False
    """Keep the inputs in the host's memory, and copy them back ahead of their use in backward."""
    modules: Texts = ()
    """Modules whose forward is checkpointed without a change to the model, such as `["blocks.*"]` or `["*Block"]`. The
    patterns (`*`, `?`, `[...]`; case-sensitive) match qualified names in the model or class names. Modules inside of a
    checkpointed one are not checkpointed again, and containers (ModuleList, ModuleDict) never match. (zerolite's own
    key.)"""
