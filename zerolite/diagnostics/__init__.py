"""What must be equal on all ranks, what a rank waits for, and ranks whose batches have run out."""
