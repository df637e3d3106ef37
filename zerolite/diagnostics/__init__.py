"""Diagnostics: consistency between ranks, diagnosis of hangs, and uneven numbers of batches."""
