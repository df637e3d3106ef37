"""Version that programs read: that of DeepSpeed's interface, and the name of its provider.

Clients compare it. From 0.16.4 on accelerate would use DeepSpeed's tensor parallelism, and from 0.18.2 on its sequence
parallelism, which this package lacks.
"""

__version__ = "0.16.3+zerolite"
