"""Mixtures of experts whose experts are spread over ranks, and the experts that their routers choose.

``ExpertParallel`` makes a module of experts of a list of modules. ``record_routing`` and ``replay_routing`` are
contexts in which a model's choices of experts are kept, and made again. ``load_balancing_loss`` and ``router_z_loss``
are those of the joint batch.
"""

from zerolite.moe.balancing import load_balancing_loss, router_z_loss
from zerolite.moe.expert_parallel import ExpertParallel
from zerolite.moe.routing import record_routing, replay_routing

__all__ = ["ExpertParallel", "load_balancing_loss", "record_routing", "replay_routing", "router_z_loss"]
