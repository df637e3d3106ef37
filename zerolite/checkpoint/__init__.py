"""Checkpoints: saved by every rank, loaded at any stage and world size."""
