"""`op_builder/` of a checkout under the name that it has in a wheel, `zerolite.op_builder`; a wheel lacks this file.

It is found by its place beside this package and not through `sys.path`, on which an `op_builder` of another project or
of another checkout might come first.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from op_builder import *  # noqa: F403
else:
    _directory = Path(__file__).resolve().parent.parent / "op_builder"
    _spec = importlib.util.spec_from_file_location(
        __name__, _directory / "__init__.py", submodule_search_locations=[str(_directory)]
    )
    sys.modules[__name__] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
