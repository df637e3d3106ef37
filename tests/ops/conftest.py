"""Kernels of the tests of operators."""

from __future__ import annotations

import pytest

from tests.ops.cases import kernels_of, library
from zerolite.ops.cpu_kernels import ISA_NAMES, CpuKernels


@pytest.fixture(params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest, one_thread: None) -> CpuKernels:
    """The CPU kernels of every instruction set. Threads that wait for each other would be slow on a busy machine."""
    return kernels_of(request.param)


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    """The CPU kernels, with which the CUDA kernels are compared."""
    return CpuKernels(library())
