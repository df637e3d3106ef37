"""Builds the kernels of `csrc/` when they are first used; installing zerolite never compiles anything.

In a checkout this package is `op_builder/` beside `csrc/`; in a wheel both travel inside zerolite, as
`zerolite/op_builder` and `zerolite/csrc`. They are neighbours in both places.
"""

from pathlib import Path

__all__ = ["csrc_path"]


def csrc_path() -> Path:
    """Return the directory of the kernel sources, in a checkout and in an installed wheel.

    Raises:
        FileNotFoundError: the directory is missing, so the installation is incomplete.
    """
    path = Path(__file__).resolve().parent.parent / "csrc"
    if not path.is_dir():
        raise FileNotFoundError(
            f"expected the kernel sources in {path}, and there is no such directory: this installation of zerolite is "
            "incomplete; install it again with `pip install --force-reinstall --no-deps zerolite`"
        )
    return path
