"""Build the kernels of `csrc/` on first use; installing zerolite compiles nothing unless asked to.

In a checkout this package is `op_builder/` beside `csrc/`. In a wheel both are inside zerolite, as
`zerolite/op_builder` and `zerolite/csrc`, side by side too. `from zerolite import op_builder` works in both.
"""

from .build import csrc_path
from .cache import describe_cache
from .load import OpStatus, build_into, load, status
from .ops import OPS, OpUnavailable
from .tools import describe_tools

__all__ = ["OPS", "OpStatus", "OpUnavailable", "build_into", "csrc_path", "describe_cache", "describe_tools"]
__all__ += ["load", "status"]
