"""`zerolite report`: versions, devices, processor, and the kernels that can be used on this machine.

It is meant for users and bug reports, so it works on broken installations too: even torch may fail to import. Of
drivers and libraries ``python -m torch.utils.collect_env`` tells.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from zerolite.utils.builder import op_builder
from zerolite.utils.text import command_parser
from zerolite.version import __version__

DESCRIPTION = """\
Print the versions, the CUDA devices and the processor that zerolite finds here, and for each
library of kernels whether it can be used, why not, and where it is. For drivers and libraries
of this machine: python -m torch.utils.collect_env"""

# Features of a processor that matter for the speed of a step; it has hundreds.
FEATURES = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "asimd", "asimdhp", "sve", "sve2", "bf16"),
)

Section = dict[str, str]


def find_torch() -> tuple[Any, str]:
    """Return torch and an empty string, or None and why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        return None, f"cannot be imported: {type(error).__name__}: {error}"
    return torch, ""


def collect(build: bool) -> dict[str, Any]:
    """Collect everything that is printed: sections of names and values, and a list of ops.

    Args:
        build: first build the libraries that can be built and are not yet.
    """
    torch, problem = find_torch()
    ops = [op_report(name, torch, build) for name in op_builder.OPS]
    cache, cache_problem = op_builder.describe_cache()
    return {
        "versions": {
            "zerolite": __version__,
            "python": f"{platform.python_version()}, {sys.executable}",
            "torch": problem or str(torch.__version__),
            "CUDA of torch": str(torch.version.cuda or "none") if torch else "unknown",
            **op_builder.describe_tools(),
        },
        "devices": {**devices(torch), "kernels on CUDA": cuda_kernels(ops)},
        "processor": processor(),
        "cache": {"directory": cache, "usable": "yes" if not cache_problem else f"no: {cache_problem}"},
        "ops": ops,
    }


def devices(torch: ModuleType | None) -> Section:
    """Describe the CUDA devices that torch sees."""
    if not torch or not torch.cuda.is_available():
        return {"cuda": "none"}
    by_name = {}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        gib = about.total_memory / 2**30
        by_name[f"cuda:{index}"] = f"{about.name}, {gib:.1f} GiB, compute capability {about.major}.{about.minor}"
    return by_name


def processor() -> Section:
    """Describe the name, cores and features of the processor."""
    try:
        from cpuinfo import get_cpu_info

        about = get_cpu_info()
    except Exception as error:  # it parses the output of several programs, which may have any form
        about = {"brand_raw": f"unknown ({type(error).__name__}: {error})"}
    has = set(about.get("flags", ()))
    return {
        "name": about.get("brand_raw", "unknown"),
        "cores": f"{os.cpu_count()}",
        "features": " ".join(name for name in FEATURES if name in has),
    }


def cuda_kernels(ops: list[dict[str, object]]) -> str:
    """Return a phrase about the compiler of the kernels that update on CUDA."""
    usable = {op["name"] for op in ops if op["compatible"]}
    if "cuda_kernels" in usable:
        return "compiled by nvcc"
    if "cuda_kernels_nvrtc" in usable:
        return "compiled by NVRTC, and compared with PyTorch's operations before they are used"
    return "none; torch's optimizers update"


def op_report(name: str, torch: Any, build: bool) -> dict[str, Any]:
    """Describe one op: if it can be used, why not, if it is built, and its path."""
    has_device = op_builder.OPS[name].kind != "cpp" and torch and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_device else None
    torch_cuda = torch.version.cuda if has_device else None
    status = op_builder.status(name, capability=capability, torch_cuda=torch_cuda)
    if build and status.compatible:
        try:
            op_builder.load(name, capability=capability, torch_cuda=torch_cuda)
            status = op_builder.status(name, capability=capability, torch_cuda=torch_cuda)
        except op_builder.OpUnavailable as error:
            status = op_builder.OpStatus(name, False, str(error), None)
    path = str(status.path) if status.path else None
    return {
        "name": name,
        "compatible": status.compatible,
        "reason": status.reason,
        "built": status.built,
        "path": path,
    }


def render(report: dict[str, Any]) -> str:
    """Return the report as aligned text."""
    sections = {name: values for name, values in report.items() if name != "ops"}
    for op in report["ops"]:
        values = {"compatible": "yes" if op["compatible"] else "no", "built": op["path"] or "no"}
        if op["reason"]:
            values["note" if op["compatible"] else "why not"] = op["reason"]
        sections[f"op {op['name']}"] = values
    width = max(len(key) for values in sections.values() for key in values)
    lines = []
    for name, values in sections.items():
        lines.append(name)
        for key, value in values.items():
            first, *rest = str(value).splitlines() or [""]
            lines.append(f"  {key:<{width}}  {first}".rstrip())
            lines += [f"  {'':<{width}}  {line}" for line in rest]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, prog: str = "zerolite report") -> int:
    """Print the report and return 0."""
    parser = command_parser(prog, DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--build", action="store_true", help="build the kernels that can be built and are not yet")
    options = parser.parse_args(argv)
    report = collect(options.build)
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
