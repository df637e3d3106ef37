"""Sequence parallelism: each rank has a part of every sequence, and attention sees all of it."""
