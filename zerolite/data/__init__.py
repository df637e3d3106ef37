"""Loaders, their positions, and values brought together over ranks."""
