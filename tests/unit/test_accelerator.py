from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from zerolite.utils.accelerator import HostRead, host_value, host_values

FAULTS = """
import resource, sys, torch
from zerolite.utils.accelerator import keep_freed_memory
done = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(4 << 20)  # 16 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(done, faults())
"""


def run(**env: str) -> tuple[str, int]:
    result = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    done, count = result.stdout.split()
    return done, int(count)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_used_again() -> None:
    """20 tensors of 4096 pages each: with the memory kept, hardly any page comes from the kernel."""
    done, faults = run()
    if done == "False":
        pytest.skip("not glibc")
    assert faults < 4096
    for name in ("ZEROLITE_KEEP_FREED_MEMORY", "MALLOC_TRIM_THRESHOLD_"):
        assert run(**{name: "0"})[0] == "False"


def test_a_read_of_the_host_has_the_values_of_its_call() -> None:
    source = torch.tensor([1.5, -2.0])
    read = HostRead(source)
    source.zero_()
    assert read.get().tolist() == [1.5, -2.0], "the values at the time of the call"
    assert host_values(torch.tensor([[1.0], [2.0]])) == [1.0, 2.0] and host_value(torch.tensor(3)) == 3
