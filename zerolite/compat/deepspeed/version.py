"""Version that programs read: that of DeepSpeed's interface, and the name of its provider.

Clients compare it: accelerate asks for 0.18.2 before it divides sequences, and OpenRLHF for 0.18.9 before it uses Muon.
"""

__version__ = "0.19.8+zerolite"
