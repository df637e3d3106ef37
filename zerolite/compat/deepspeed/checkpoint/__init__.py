"""``deepspeed.checkpoint``."""
