"""The exception that the checkpoint package raises for faulty checkpoints and unusable directories."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint, or one of its files, cannot be read, written or used.

    The message names the file, what was expected and what was found.
    """
