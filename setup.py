"""Packaging of zerolite. Nothing is compiled here: kernels are built at run time, on the machine that uses them.

With `ZEROLITE_BUILD_OPS=1` what needs no GPU is built ahead: a wheel then holds libraries and is of one platform; an
editable install puts them into the user's cache.

`csrc/` (sources of the kernels) and `op_builder/` (what builds them) live at the top level of the repository and travel
inside the wheel as `zerolite/csrc` and `zerolite/op_builder`.
"""

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD_OPS = os.environ.get("ZEROLITE_BUILD_OPS") == "1"


# Python runs this line when it starts; see zerolite/compat/as_deepspeed.py.
AS_DEEPSPEED = (
    'import os; os.environ.get("ZEROLITE_DEEPSPEED_COMPAT") == "1" and '
    '__import__("zerolite.compat.as_deepspeed", fromlist=["activate"]).activate()\n'
)


class BuildPy(build_py):  # type: ignore[misc]  # setuptools has no types
    """Python modules as ever, the line for ZEROLITE_DEEPSPEED_COMPAT, and the libraries if they are to be built
    ahead."""

    def run(self) -> None:
        super().run()
        prebuilt = Path(self.build_lib, "zerolite", "op_builder", "prebuilt")
        if not self.editable_mode:
            shutil.rmtree(prebuilt, ignore_errors=True)  # of an earlier build in the same directory
            Path(self.build_lib, "zerolite_deepspeed.pth").write_text(AS_DEEPSPEED, encoding="utf-8")
        if BUILD_OPS:
            sys.path.insert(0, str(ROOT))
            import op_builder

            for name, op in op_builder.OPS.items():
                if op.kind == "cpp" and self.editable_mode:
                    op_builder.load(name)
                elif op.kind == "cpp":
                    op_builder.build_into(prebuilt, name)


def read_version() -> str:
    """Read `__version__` from zerolite/version.py without importing zerolite (which would need torch)."""
    text = (ROOT / "zerolite" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('zerolite/version.py: expected a line `__version__ = "X.Y.Z"` and found none')
    return match.group(1)


PLOT = ["matplotlib>=3.7"]
TENSORBOARD = ["tensorboard>=2.12"]
WANDB = ["wandb>=0.16"]
TEST = ["mypy>=1.8", "pytest>=8", "pytest-xdist>=3.7", "ruff>=0.6", "setuptools>=68", "wheel"]
TRANSFORMERS = ["transformers>=4.40"]  # tests of its models are skipped where it is absent
DIGITS = ["scikit-learn>=1.0"]  # the data of examples/digits
LORA = ["peft>=0.10", "transformers>=4.40"]  # examples/lora
CLIENTS = [
    "accelerate>=1.0",
    "diffusers>=0.30",
    "lightning>=2.2",
    "peft>=0.10",
    "transformers>=4.46",
    "trl>=0.12",
]  # tests/clients
RAY = ["ray[train]>=2.9"]  # examples/ray_train
BENCH = ["deepspeed>=0.15", "numpy"]
DOCS = ["mkdocs-material>=9.5", "mkdocs>=1.6", "mkdocstrings[python]>=0.26"]  # `make site`

setup(
    name="zerolite",
    version=read_version(),
    description="A small training runtime for PyTorch: data parallelism and ZeRO from a DeepSpeed JSON config",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["zerolite", "zerolite.*"]),
        "zerolite.csrc",
        *["zerolite." + name for name in find_packages(include=["op_builder", "op_builder.*"])],
    ],
    package_dir={"zerolite": "zerolite", "zerolite.csrc": "csrc", "zerolite.op_builder": "op_builder"},
    package_data={"zerolite.csrc": ["*", "**/*"], "zerolite.compat": ["alias/**/*"]},
    include_package_data=False,
    zip_safe=False,
    cmdclass={"build_py": BuildPy},
    options={"bdist_wheel": {"plat_name": sysconfig.get_platform()}} if BUILD_OPS else {},
    setup_requires=["ninja"] if BUILD_OPS else [],
    install_requires=[
        "torch>=2.6",
        "pydantic>=2.7",
        "hjson",
        "psutil",
        "ninja",
        "py-cpuinfo",
        "tqdm",
    ],
    extras_require={
        "test": TEST,
        "transformers": TRANSFORMERS,
        "digits": DIGITS,
        "lora": LORA,
        "clients": CLIENTS,
        "ray": RAY,
        "bench": BENCH,
        "docs": DOCS,
        "plot": PLOT,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
    },
    entry_points={"console_scripts": ["zerolite = zerolite.launcher.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
