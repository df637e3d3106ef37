"""Diagnostics: consistency between ranks, and diagnosis of hangs."""
