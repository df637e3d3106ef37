"""Table of dtypes by name: torch's names, and those of the config and of safetensors files."""

from __future__ import annotations

CONFIG = {"fp32": ("float32", "float"), "bf16": ("bfloat16",), "fp16": ("float16", "half")}
"""By the config's name, torch's names, the first of which is what torch prints."""

SAFETENSORS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",  # torch 2.7
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""By the safetensors format's code, torch's name."""
