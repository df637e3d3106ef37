"""The exceptions that the checkpoint package raises for faulty checkpoints and unusable directories."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint, or one of its files, cannot be read, written or used.

    The message names the file, what was expected and what was found.
    """


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this path."""


class DamagedFile(CheckpointError):
    """A file of a checkpoint is missing, or not as it was written. The reader adds which other checkpoint is there."""
