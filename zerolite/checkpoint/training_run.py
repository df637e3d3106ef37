"""Identity of a training run, and the check that a save does not harm checkpoints of another run.

A run is one training, of one or more jobs: a job that loads a checkpoint continues its run. The manifest of every
checkpoint names the id of its run. A save may replace or prune a checkpoint, or move ``latest`` away from it, in two
cases. Either the job has saved it itself, or the checkpoint belongs to its run and existed when the job first used the
directory. So if two jobs continue one run at the same time, the second to save gets an error, and no checkpoint is
lost.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from zerolite.checkpoint import directory as directories
from zerolite.checkpoint.directory import CompleteCheckpoint
from zerolite.checkpoint.errors import CheckpointError

_JOB_ID_VARIABLE = "ZEROLITE_JOB_ID"  # the launcher's: the same on all nodes and after a restart, then "-" and the node


class TrainingRun:
    """The run of one job, and the checkpoints that the job may replace. Only the rank that commits uses it."""

    def __init__(self, run_id: str = "") -> None:
        """
        Args:
            run_id: default: a random one.
        """
        self.id = run_id or secrets.token_hex(16)
        self._own_runs = {self.id}
        self._ours: dict[str, set[tuple[str, str]]] = {}  # by directory: run and time of checkpoints

    def take_over(
        self, directory: Path, there: Sequence[CompleteCheckpoint], loaded: CompleteCheckpoint, resumed: bool
    ) -> None:
        """Continue the run of ``loaded``, a checkpoint in ``directory``.

        Args:
            directory: directory of the checkpoints.
            there: all checkpoints in it before this one was read; this job may replace them.
            loaded: the checkpoint.
            resumed: it was loaded completely, so checkpoints that are saved from now on, anywhere, belong to its run.
        """
        self._own_runs.update(known.run for known in (*there, loaded))
        self._ours.setdefault(_key(directory), set()).update(map(_identity, (*there, loaded)))
        if resumed and loaded.run:
            self.id = loaded.run

    def check(
        self, directory: Path, new: CompleteCheckpoint, save_latest: bool, keep_last: int | None, overwrite: bool
    ) -> str:
        """Check if saving ``new`` would harm a checkpoint of another run, or one that another job has saved meanwhile.

        Called with the lock of the directory.

        Args:
            directory: directory of the checkpoints.
            new: the checkpoint to be saved.
            save_latest: ``latest`` would point to it.
            keep_last: number of checkpoints that would be kept.
            overwrite: checkpoints of other runs may be replaced if they were there when this job first saved here.

        Returns:
            A sentence if the save must leave ``latest`` and all other checkpoints alone, "" if it need not.

        Raises:
            CheckpointError: The save would replace such a checkpoint.
        """
        if _key(directory) not in self._ours:
            there = directories.complete_checkpoints(directory)
            ours = {_identity(other) for other in there if overwrite or other.run in self._own_runs}
            self._ours[_key(directory)] = ours
        ours = self._ours[_key(directory)]
        refusal = ""
        for harm, known in directories.harmed(directory, new.tag, save_latest, keep_last):
            if known.run and _identity(known) not in ours:
                refusal = refusal or _refusal(directory, harm, known, meanwhile=known.run in self._own_runs)
                if harm == directories.REPLACE:
                    raise CheckpointError(refusal)
        ours.add(_identity(new))
        return refusal


@functools.cache
def run_of_this_job() -> TrainingRun:
    """Return the run of this process, which all its engines share."""
    return TrainingRun(os.environ.get(_JOB_ID_VARIABLE, "").partition("-")[0])


def _key(directory: Path) -> str:
    return os.path.realpath(directory)


def _identity(known: CompleteCheckpoint) -> tuple[str, str]:
    """Return a key that is equal for a checkpoint and its copies, which have other tags."""
    return known.run, known.saved_at


def _refusal(directory: Path, harm: str, known: CompleteCheckpoint, meanwhile: bool) -> str:
    which = f"checkpoint '{known.tag}' in '{directory}' (step {known.global_steps}, saved at {known.saved_at})"
    if meanwhile:
        return (
            f"this save would {harm} {which}, which another job of the same run has saved since this job came to that "
            "directory: two jobs have resumed from one checkpoint. End one of them, or give it a directory of its own; "
            "if this one goes on alone, start it again, so that it loads that checkpoint"
        )
    return (
        f"this save would {harm} {which}, which is of another run ('{known.run}'). To continue that run, call "
        "engine.load_checkpoint on that directory before the first save; to begin anew, save into another directory, "
        'remove the checkpoints, or set "checkpoint": {"overwrite": true}; to save beside it, pass save_latest=False'
    )
