"""Sources and flags of the library for asynchronous file reads and writes."""

from __future__ import annotations

import sys

from .op import Op, Source


def async_io() -> Op:
    """Plain C++ and the kernel's own interface: io_uring needs no library, and where its header is missing the library
    has threads alone."""
    return Op(
        name="async_io",
        kind="cpp",
        sources=(Source("aio/aio.cpp", "aio.o"),),
        headers=("aio/*.h",),
        flags=("-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread"),
        link_flags=("-shared", "-pthread", *(("-s",) if sys.platform == "linux" else ())),
    )
