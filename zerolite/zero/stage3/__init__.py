"""Stage 3: parameters of which each rank holds a part, gathered around their uses."""
