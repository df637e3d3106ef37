"""Reads of the memory behind a stand-in raise, as in a torch built with CUDA on any device."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = """
#include <c10/core/StorageImpl.h>
extern "C" void refuse(void* storage, const char* message) {
  static_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}
"""
NAME = "_set_storage_data_ptr_access_error_msg"


@functools.cache
def compiled() -> Any:
    """The function that torch itself compiles into its CUDA part only."""
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        pytest.skip("no C++ compiler")
    package = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "refuse.cpp", Path(directory) / "refuse.so"
        source.write_text(SOURCE)
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{package}/include", f"-L{package}/lib", "-lc10"]
        subprocess.run([compiler, str(source), "-o", str(library), *flags], check=True, capture_output=True)
        refuse = ctypes.CDLL(str(library)).refuse
    refuse.argtypes, refuse.restype = [ctypes.c_void_p, ctypes.c_char_p], None
    return refuse


def refuse_reads(patch: pytest.MonkeyPatch, refuses: bool) -> None:
    """Let torch refuse reads as if built with CUDA, or not."""
    if not refuses:
        patch.delattr(torch._C, NAME, raising=False)
    elif not hasattr(torch._C, NAME):
        refuse = compiled()
        patch.setattr(torch._C, NAME, lambda storage, text: refuse(storage, text.encode()), raising=False)
