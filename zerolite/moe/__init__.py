"""Mixtures of experts whose experts are spread over ranks."""

from zerolite.moe.expert_parallel import ExpertParallel

__all__ = ["ExpertParallel"]
