"""Version that programs read: that of DeepSpeed's interface, and the name of its provider.

Clients compare it. From 0.18.2 on accelerate uses DeepSpeed's sequence parallelism.
"""

__version__ = "0.18.2+zerolite"
