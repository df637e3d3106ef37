"""``deepspeed.runtime.zero.stage_1_and_2``: the estimate of a model's memory."""

from zerolite.compat.deepspeed.runtime.zero.estimates import estimate_zero2_model_states_mem_needs_all_live

__all__ = ["estimate_zero2_model_states_mem_needs_all_live"]
