"""Write path of every checkpoint: by all ranks of a group, or by one process alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from zerolite.checkpoint.directory import newest_complete
from zerolite.checkpoint.planner import Scalars, Shard, ShardSavePlanner
from zerolite.checkpoint.storage import CheckpointWriter, Commit
from zerolite.checkpoint.together import storage_errors
from zerolite.comm import read_objects_without_numpy


def write_checkpoint(
    save_dir: Path, tag: str, shards: Sequence[Shard], scalars: Scalars, commit: Commit | None, group: Any = None
) -> Path:
    """Write ``shards``, which may be functions that make the values when they are written, and commit. Returns the
    checkpoint's directory.

    Args:
        group: the gloo group of the ranks that write; None for one process alone.
        commit: on the group's first rank.

    Raises CheckpointError on all ranks; what was there before is left then. Called on all ranks of the group.
    """
    writer = CheckpointWriter(commit)
    try:
        with storage_errors(
            f"saving checkpoint '{tag}' failed", lambda: f"{newest_complete(save_dir)} in '{save_dir}'"
        ):
            read_objects_without_numpy()
            # The public save() of torch 2.6 has no no_dist, and takes None for the default group.
            _save_state_dict(
                {},
                storage_writer=writer,
                planner=ShardSavePlanner(shards, scalars),
                process_group=group,
                no_dist=group is None,
            )
    finally:
        writer.close()
    return save_dir / tag
