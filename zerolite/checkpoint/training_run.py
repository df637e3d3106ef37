"""Identity of a training run, and the check that a save does not harm checkpoints of another run.

A run is one training, however many jobs it takes: a job that loads a checkpoint continues its run. Its id stands in
the manifest of every checkpoint. A save replaces or prunes a checkpoint, or moves ``latest`` away from it, only if the
job has seen it when it first came to the directory, and continues its run; or if it has saved it itself. So of two jobs
that continue one run at the same time, the second to save gets an error, and no checkpoint is lost.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from zerolite.checkpoint import directory as directories
from zerolite.checkpoint.directory import Complete
from zerolite.checkpoint.errors import CheckpointError

_JOB_ID_VARIABLE = "ZEROLITE_JOB_ID"  # the launcher's: the same on all nodes and after a restart, then "-" and the node


class TrainingRun:
    """The run of one job, and the checkpoints that the job may replace. Only the rank that commits asks it."""

    def __init__(self, run_id: str = "") -> None:
        """run_id: default a random one."""
        self.id = run_id or secrets.token_hex(16)
        self._known = {self.id}
        self._ours: dict[str, set[tuple[str, str]]] = {}  # by directory: run and time of checkpoints

    def take_over(self, directory: Path, there: Sequence[Complete], loaded: Complete, resumed: bool) -> None:
        """Continue the run of ``loaded``, a checkpoint in ``directory``.

        Args:
            there: all checkpoints in the directory, as they were before this one was read; they may be replaced.
            resumed: the checkpoint was loaded as a whole, so what is saved from now on, anywhere, is of its run.
        """
        self._known.update(known.run for known in (*there, loaded))
        self._ours.setdefault(_key(directory), set()).update(map(_identity, (*there, loaded)))
        if resumed and loaded.run:
            self.id = loaded.run

    def check(self, directory: Path, new: Complete, save_latest: bool, keep_last: int | None, overwrite: bool) -> str:
        """Look whether saving ``new`` into ``directory`` would harm a checkpoint of another run, or one that another
        job has saved meanwhile. Called with the lock of the directory.

        Args:
            overwrite: checkpoints of other runs may be replaced if they were there when this job first saved here.

        Returns:
            A sentence if the save must leave ``latest`` and all other checkpoints alone, "" if it need not.

        Raises:
            CheckpointError: The save would replace such a checkpoint.
        """
        if _key(directory) not in self._ours:
            there = directories.complete_checkpoints(directory)
            ours = {_identity(known) for known in there if overwrite or known.run in self._known}
            self._ours[_key(directory)] = ours
        ours = self._ours[_key(directory)]
        refusal = ""
        for harm, known in directories.harmed(directory, new.tag, save_latest, keep_last):
            if known.run and _identity(known) not in ours:
                refusal = refusal or _refusal(directory, harm, known, meanwhile=known.run in self._known)
                if harm == directories.REPLACE:
                    raise CheckpointError(refusal)
        ours.add(_identity(new))
        return refusal


@functools.cache
def run_of_this_job() -> TrainingRun:
    """The run of this process, which all its engines share."""
    return TrainingRun(os.environ.get(_JOB_ID_VARIABLE, "").partition("-")[0])


def _key(directory: Path) -> str:
    return os.path.realpath(directory)


def _identity(known: Complete) -> tuple[str, str]:
    """Equal for a checkpoint and its copies."""
    return known.run, known.saved_at


def _refusal(directory: Path, harm: str, known: Complete, meanwhile: bool) -> str:
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
