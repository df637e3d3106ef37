"""Data: loaders, their positions, and metrics over all ranks."""
