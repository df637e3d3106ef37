"""Utilities for every layer: device, memory, sizes, addresses, hooks."""
