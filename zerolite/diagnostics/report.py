"""`zerolite report`: versions, devices, processor and kernels of this machine.

It is meant for users and bug reports, so it works on broken installations too: even torch may fail to import.
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
Print the versions, devices and processor features of this machine, its process-group
backends, and for each library of kernels whether it can be used, why not, and where it is."""

# Features that matter for the speed of a step; processors name hundreds.
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
    features = processor()
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
        "processor": {**features, "instruction set of the kernels": instruction_set(features["features"].split(), ops)},
        "process groups": {"backends": backends(torch)},
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


def cuda_kernels(ops: list[dict[str, object]]) -> str:
    """Return a phrase about the compiler of the kernels that update on CUDA."""
    usable = {op["name"] for op in ops if op["compatible"]}
    if "cuda_kernels" in usable:
        return "compiled by nvcc"
    if "cuda_kernels_nvrtc" in usable:
        return "compiled by NVRTC, and compared with PyTorch's operations before they are used"
    return "none; torch's optimizers update"


def processor() -> Section:
    """Describe the name, cores and features of the processor."""
    try:
        from cpuinfo import get_cpu_info

        about = get_cpu_info()
    except Exception as error:  # it parses the output of several programs, which may have any form
        about = {"brand_raw": f"unknown ({type(error).__name__}: {error})"}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    has = set(about.get("flags", ()))
    return {
        "name": about.get("brand_raw", "unknown"),
        "machine": platform.machine(),
        "logical processors": f"{os.cpu_count()}, of which this process may use {usable}",
        "features": " ".join(name for name in FEATURES if name in has),
    }


def instruction_set(features: Sequence[str], ops: list[dict[str, object]]) -> str:
    """Return the instruction set of the CPU kernels.

    The library answers if it is built; otherwise it is the widest set of which the processor has all features.
    """
    names: dict[str, set[str]] = {}
    for source in op_builder.OPS["cpu_kernels"].sources:
        for flag in source.flags:
            if flag.startswith("-DZL_ISA="):
                names[flag.partition("=")[2]] = {f[2:] for f in source.flags if f.startswith("-m")}
    if any(op["name"] == "cpu_kernels" and op["built"] for op in ops):
        return list(names)[op_builder.load("cpu_kernels").zl_best_isa()]
    return [name for name, needed in names.items() if needed <= set(features)][-1]


def backends(torch: ModuleType | None) -> str:
    """Return the backends of torch.distributed, such as "gloo nccl"."""
    if not torch:
        return "unknown"
    if not torch.distributed.is_available():
        return "none"
    unreal = ("undefined", "fake")  # a placeholder, and a double for tests
    names = [name for name in torch.distributed.Backend.backend_list if name not in unreal]
    return " ".join(name for name in names if torch.distributed.is_backend_available(name))


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
