"""``python -m zerolite.compat.deepspeed train.py``: run a program whose ``import deepspeed`` finds zerolite's."""

from __future__ import annotations

import os
import runpy
import sys

from zerolite.compat.as_deepspeed import activate

USAGE = "usage: python -m zerolite.compat.deepspeed (script.py | -m module) [args ...]"


def main() -> None:
    """Run the target named on the command line as Python itself would."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"] or (arguments[0].startswith("-") and arguments[0] != "-m"):
        sys.exit(USAGE)
    activate()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
