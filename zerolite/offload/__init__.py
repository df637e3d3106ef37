"""Offload: placement of states on the host or on disk, transfers, and the swap file."""
