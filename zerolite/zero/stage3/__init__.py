"""Stage 3: partitioned parameters, gathered around their uses."""
