"""``deepspeed.runtime.zero.stage3``: the estimate of a model's memory."""

from zerolite.compat.deepspeed.runtime.zero.estimates import estimate_zero3_model_states_mem_needs_all_live

__all__ = ["estimate_zero3_model_states_mem_needs_all_live"]
