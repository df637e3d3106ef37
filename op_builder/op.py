"""Description of a kernel library and its sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Source:
    """One call of the compiler.

    Attributes:
        path: the source, relative to csrc/.
        object: name of the object file, unique within the op.
        flags: what this call has beside the flags of the op.
        host: of an "nvrtc" op, whether the C++ compiler is called.
    """

    path: str
    object: str
    flags: tuple[str, ...] = ()
    host: bool = False


@dataclass(frozen=True)
class Op:
    """A library with a plain C interface.

    Attributes:
        name: what `load` calls it; the library's file begins with it.
        kind: "cpp" is compiled by a C++ compiler alone, "cuda" by nvcc for one compute capability, "nvrtc" by
            NVRTC for one, with a C++ compiler for what runs on the host.
        sources: the calls of the compiler, which run at the same time.
        headers: patterns relative to csrc/ of what the sources include; a change of these files builds anew.
        flags: of every call that compiles.
        link_flags: of the call that links.
    """

    name: str
    kind: Literal["cpp", "cuda", "nvrtc"]
    sources: tuple[Source, ...]
    headers: tuple[str, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
