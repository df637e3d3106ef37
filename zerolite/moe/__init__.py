"""Mixtures of experts whose experts are spread over ranks, and the experts that their routers choose.

``ExpertParallel`` makes a module of experts of a list of modules. ``record_routing`` and ``replay_routing`` are
contexts in which a model's choices of experts are kept, and made again.
"""

from zerolite.moe.expert_parallel import ExpertParallel
from zerolite.moe.routing import record_routing, replay_routing

__all__ = ["ExpertParallel", "record_routing", "replay_routing"]
