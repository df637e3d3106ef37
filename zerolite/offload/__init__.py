"""What rests in the host's memory or on disk: tiers, transfers, the swap file."""
