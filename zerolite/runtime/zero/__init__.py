"""ZeRO: the partition and what rests in it."""
