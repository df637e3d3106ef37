"""The exception that the checkpoint package raises for faulty checkpoints and unusable directories."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint, or a file of one, cannot be read, written or used. The message is a sentence that names the file,
    what was expected and what was found."""
