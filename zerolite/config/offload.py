"""Blocks for offload, activation checkpointing and asynchronous file I/O."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .rules import Boolean, ChoiceOrNull, Integer, Number, PathOrNull, Texts

Bool = Annotated[bool, BeforeValidator(Boolean())]
OffloadDevice = Literal["none", "cpu", "nvme"]
Device = Annotated[OffloadDevice, BeforeValidator(ChoiceOrNull(("none", "cpu", "nvme"), null_word="none"))]
OptionalPath = Annotated[str | None, BeforeValidator(PathOrNull())]
Count = Annotated[int, BeforeValidator(Integer(1))]
OptionalCount = Annotated[int | None, BeforeValidator(Integer(1, 1024, nullable=True, null_means="as the other key"))]

DISK_BLOCK = 4096
"""Bytes: what is read from and written to disk directly is cut at multiples."""

SUB_GROUP_SIZE = 1_000_000_000
"""Elements: DeepSpeed's default."""

_NVME_PATH = (
    "Folder on the disk that is used, on every host: absolute, or relative to the one in which the job runs. Needed "
    'with `"nvme"`, without effect with `"cpu"`. Nothing is left in it when the job ends, however it does.'
)
_PIN_MEMORY = (
    "Register the host's memory with CUDA, so that copies run beside the device's work; false: they are slower, and "
    "the limit of locked memory (`ulimit -l`) does not matter. Without effect where ranks run on the CPU."
)
_DEVICE = (
    '`"cpu"`: the host\'s memory; `"nvme"`: a disk; `"none"` or null: the device, whatever else the block says. Needed '
    "if it says anything else."
)
_ALWAYS = "Accepted, without effect: reads and writes always overlap the update."


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OffloadOptimizerConfig(_Block):
    """Stages 1 to 3: where optimizer states, separate master weights and the reduced gradients that wait for the step
    rest. What rests off the device is updated by the CPU. The numbers do not depend on it where both compute alike."""

    device: Device = Field(default="none", description=_DEVICE)
    nvme_path: OptionalPath = Field(default=None, description=_NVME_PATH)
    buffer_count: Count = Field(
        default=4, description="Sub-groups (`sub_group_size`) that are on their way or being updated at the same time."
    )
    pin_memory: Bool = Field(default=True, description=_PIN_MEMORY)
    ratio: Annotated[float, BeforeValidator(Number(0.0, maximum=1.0))] = Field(
        default=1.0,
        description='The part of the elements that `"cpu"` has; the device keeps and updates the rest. At `"nvme"` '
        "only 1.",
    )
    fast_init: Bool = Field(
        default=False,
        description="Accepted, without effect: states on disk begin as zeros that nobody writes.",
    )
    pipeline_read: Bool = Field(default=False, description=_ALWAYS)
    pipeline_write: Bool = Field(default=False, description=_ALWAYS)
    pipeline: Bool = Field(default=False, description=_ALWAYS)

    @property
    def enabled(self) -> bool:
        return self.device != "none"


class OffloadParamConfig(_Block):
    """Stage 3: where each rank's shards of the parameters rest, frozen ones too. They come to the device when they are
    gathered."""

    device: Device = Field(default="none", description=_DEVICE)
    nvme_path: OptionalPath = Field(default=None, description=_NVME_PATH)
    buffer_count: Count = Field(
        default=5, description='`"nvme"`: buffers for what is read ahead of its gather, of `buffer_size` elements each.'
    )
    buffer_size: Count = Field(
        default=100_000_000,
        description='`"nvme"`: elements of this rank\'s shards in one buffer. What one gather needs is read whatever '
        "its size.",
    )
    max_in_cpu: Annotated[int, BeforeValidator(Integer(0))] = Field(
        default=1_000_000_000,
        description="`\"nvme\"`: most elements of each rank's shards that stay in the host's memory all the same. 0: "
        "all are on disk.",
    )
    pin_memory: Bool = Field(default=True, description=_PIN_MEMORY)

    @property
    def enabled(self) -> bool:
        return self.device != "none"


class AioConfig(_Block):
    """How `"nvme"` reads and writes: direct, asynchronous I/O, with io_uring where the kernel has it and threads
    otherwise."""

    block_size: Annotated[int, BeforeValidator(Integer(DISK_BLOCK, 2**30, multiple=DISK_BLOCK))] = Field(
        default=1_048_576, description="Bytes in one request to the disk; larger reads and writes are cut into these."
    )
    queue_depth: Annotated[int, BeforeValidator(Integer(1, 4096))] = Field(
        default=8, description="Requests that a rank has in flight at the same time."
    )
    thread_count: OptionalCount = Field(
        default=None,
        description="Threads of each rank that read and write. null: as `intra_op_parallelism`, or 1 if that is null.",
    )
    intra_op_parallelism: OptionalCount = Field(
        default=None, description="Another name of `thread_count`. If both are given they must be equal."
    )
    single_submit: Bool = Field(
        default=False, description="Hand requests to the kernel one by one; false: as many at once as there are."
    )
    overlap_events: Bool = Field(
        default=True, description="Take in what is complete while more is handed in; false: only afterwards."
    )
    checksums: Bool = Field(
        default=False,
        description="Keep a checksum of what is written to disk, and compare it when it is read; costs time. "
        "(zerolite's own key.)",
    )

    @property
    def threads(self) -> int:
        """Threads of one rank: what ``thread_count`` or ``intra_op_parallelism`` says."""
        return self.thread_count or self.intra_op_parallelism or 1


class ActivationCheckpointingConfig(_Block):
    """What `zerolite.checkpointing.checkpoint` keeps for backward, and where; and modules that the engine checkpoints
    by itself."""

    partition_activations: Bool = Field(
        default=False,
        description="Each rank of a group in which activations are the same keeps its part of them only, and they are "
        "gathered in backward; those that differ between its ranks are found there and are an error. The group is "
        "given to `zerolite.checkpointing.configure`; without one there is nothing to cut.",
    )
    cpu_checkpointing: Bool = Field(
        default=False, description="Keep them in the host's memory; they come back ahead of their use in backward."
    )
    contiguous_memory_optimization: Bool = Field(
        default=False,
        description="Put what one of the first two keys keeps into one piece of memory of `number_checkpoints` equal "
        "slots, as long as the first checkpoint's inputs; what does not fit gets memory of its own, with a warning.",
    )
    number_checkpoints: Annotated[int | None, BeforeValidator(Integer(1, nullable=True, null_means="not known"))] = (
        Field(
            default=None,
            description="With `contiguous_memory_optimization`: the most checkpoints whose backward has not come yet: "
            "those of one forward, times the micro-batches under way.",
        )
    )
    synchronize_checkpoint_boundary: Bool = Field(
        default=False, description="Wait for the device at each boundary of a checkpoint; for measurements."
    )
    profile: Bool = Field(
        default=False,
        description="Measure forward, recomputation, copies and gathers of checkpoints: a line after each step, on "
        "rank 0.",
    )
    modules: Annotated[tuple[str, ...], BeforeValidator(Texts('["blocks.*"]', nullable=False))] = Field(
        default=(),
        description='Modules whose forward is checkpointed, without a change to the model, such as `["blocks.*"]` or '
        '`["*Block"]`: patterns (`*`, `?`, `[...]`; upper and lower case differ) of qualified names in the model or of '
        "class names. What is in such a module is not checkpointed again, and containers (ModuleList, ModuleDict) "
        "never match. (zerolite's own key.)",
    )
