"""``deepspeed.runtime.sequence_parallel``: sequences that several ranks share."""

from zerolite.compat.deepspeed.runtime.sequence_parallel import ulysses_sp

__all__ = ["ulysses_sp"]
