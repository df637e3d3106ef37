"""Identity of a training run: a save never replaces or removes a checkpoint of another run.

A run is one training, of one or more jobs: a job that loads a checkpoint completely continues its run. The manifest of
every checkpoint names the id of its run.
"""

from __future__ import annotations

import functools
import os
import secrets

from zerolite.checkpoint.directory import CompleteCheckpoint

_JOB_ID_VARIABLE = "ZEROLITE_JOB_ID"  # the launcher's: the same on all nodes and after a restart, then "-" and the node


class TrainingRun:
    """The run of one job. Only the rank that commits uses it, so ranks cannot disagree on it."""

    def __init__(self, run_id: str = "") -> None:
        """
        Args:
            run_id: default: a random one.
        """
        self.id = run_id or secrets.token_hex(16)
        self._earlier = {""}  # runs that this one continues; imported checkpoints name none

    def resume(self, run: str) -> None:
        """Continue the run of a loaded checkpoint, which may name none ("")."""
        self._earlier.add(self.id)
        self.id = run or self.id

    def owns(self, known: CompleteCheckpoint) -> bool:
        """Return True if a save of this job may replace or remove a checkpoint."""
        return known.run == self.id or known.run in self._earlier


@functools.cache
def run_of_this_job() -> TrainingRun:
    """Return the run of this process, which all its engines share."""
    return TrainingRun(os.environ.get(_JOB_ID_VARIABLE, "").partition("-")[0])
