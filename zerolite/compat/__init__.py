"""Importers of other programs' checkpoints."""
