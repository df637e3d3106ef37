"""Version that programs see: DeepSpeed's interface at this version, and who provides it.

Clients compare it. From 0.16.4 on accelerate would use DeepSpeed's own tensor parallelism, and from 0.18.2 its sequence
parallelism, which are not here.
"""

__version__ = "0.16.3+zerolite"
