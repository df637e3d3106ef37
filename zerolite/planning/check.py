"""`zerolite plan --check`: measurement of a real job on this machine, and comparison with its plan.

zerolite's launcher starts the job, and each of its processes runs this module as one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from zerolite.comm import collective
from zerolite.planning.errors import PlanError
from zerolite.planning.measure import Measurement, measure
from zerolite.planning.report import Screen
from zerolite.planning.result import AT_REST, Plan, counted, item_label
from zerolite.planning.sources import load_batch, load_function, load_model_fn
from zerolite.utils.memory_tags import ACTIVATIONS, ITEMS, OTHER
from zerolite.utils.resources import count_cuda_devices, find_nproc_problem
from zerolite.utils.sizes import format_size

TOLERANCE = {"cpu": 0.02, "cuda": 0.05}
"""Allowed difference of the planned peak, relative to the measured one, by device type."""

_REQUEST, _RANK, _LOG = "request.json", "rank{}.json", "log.txt"
_PEAK = "peak of a step"
_LAST_LINES = 15


class Line(NamedTuple):
    """A planned and a measured number.

    Attributes:
        planned: bytes, or number of calls, of the plan.
        measured: the same of the real job.
        tolerance: largest relative difference that counts as equal.
        calls: the unit is calls, not bytes.
    """

    name: str
    planned: int
    measured: int
    tolerance: float = 0.0
    calls: bool = False

    @property
    def difference(self) -> float:
        if self.planned == self.measured:
            return 0.0
        return (self.planned - self.measured) / self.measured if self.measured else float("inf")

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.tolerance


def run_check(request: Mapping[str, str | None], device: str, plan: Plan) -> int:
    """Run ``plan``'s job for a few steps and print the measurements of rank 0 beside the plan.

    Args:
        request: the options "model", "config", "batch" and "loss" of the command line.
        device: "cuda" or "cpu".
        plan: the plan of rank 0.

    Returns:
        0 if model states and traffic are equal and the peak of a step is within :data:`TOLERANCE`; otherwise 1.

    Raises:
        PlanError: the job cannot run here.
    """
    problem = find_problem(plan.world_size, device)
    if problem is not None:
        raise PlanError(f"--check: {problem}")
    measured = run_job(request, plan.world_size, device)
    lines = list(compare(plan, measured, TOLERANCE[device]))
    print("", *render(lines, Screen.of_terminal()), sep="\n", flush=True)
    return 0 if all(line.agrees for line in lines) else 1


def find_problem(world_size: int, device: str) -> str | None:
    """Return the reason why a job of this size cannot run on this machine, or None."""
    devices = count_cuda_devices(os.environ) if device == "cuda" else world_size
    if devices < world_size:
        have = f"has {counted(devices, 'CUDA device')}" if devices else "has no CUDA device"
        return (
            f"the real job needs a device for each of its {world_size} ranks, and this machine {have}; plan and "
            "check with --device cpu, or with a smaller --world-size"
        )
    problem = find_nproc_problem(world_size)
    return None if problem is None else problem.replace("--nproc", "--world-size")


# -------------------------------------------------------------------- the job


def run_job(request: Mapping[str, str | None], world_size: int, device: str) -> Measurement:
    """Start the processes, wait for them and return the measurement of rank 0. Raises PlanError if they fail."""
    without_cuda = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}  # otherwise the engine would use a device
    environment = {**os.environ, "KINETO_LOG_LEVEL": "99", **without_cuda}  # the level silences torch's profiler
    with tempfile.TemporaryDirectory(prefix="zerolite-check-") as name:
        directory = Path(name)
        (directory / _REQUEST).write_text(json.dumps(dict(request)), encoding="utf-8")
        job = ["--nproc", str(world_size), "-m", "zerolite.planning.check", name]
        log, result = directory / _LOG, directory / _RANK.format(0)
        with log.open("wb") as output:
            status = subprocess.run(
                [sys.executable, "-m", "zerolite.launcher.cli", *job],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            ).returncode
        if status != 0 or not result.exists():
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])
            raise PlanError(
                f"--check: the real job of {counted(world_size, 'process', 'es')} failed (exit status {status}). The "
                f"last lines of its output:\n{tail}"
            )
        return Measurement.model_validate_json(result.read_text(encoding="utf-8"))


@collective
def measure_rank(directory: Path) -> None:
    """Run the request in ``directory`` as one rank of the job, and write its measurement there."""
    request = json.loads((directory / _REQUEST).read_text(encoding="utf-8"))
    batch, loss = request["batch"], request["loss"]
    measured = measure(
        load_model_fn(request["model"]),
        request["config"],
        load_batch(batch) if batch else None,
        load_function(loss, "--loss") if loss else None,
    )
    (directory / _RANK.format(measured.rank)).write_text(measured.model_dump_json(), encoding="utf-8")


# -------------------------------------------------------------------- comparison


def compare(plan: Plan, measured: Measurement, tolerance: float) -> Iterator[Line]:
    """Yield every number that is planned and measured. ``tolerance`` is that of the peak; all others must be equal."""
    none = dict.fromkeys(ITEMS, 0)
    measurable = [item for item in ITEMS if item not in (ACTIVATIONS, OTHER)]
    for suffix, planned, found, items in (
        ("", plan.states, measured.states, AT_REST),
        (" at rest", plan.at_rest, measured.at_rest, measurable),
        (" on the host", plan.host or none, measured.host, measurable),
        (" on disk", plan.disk or none, measured.disk, measurable),
    ):
        named = (Line(item_label(item) + suffix, planned[item], found[item]) for item in items)
        yield from (line for line in named if line.planned or line.measured)
    yield Line(_PEAK, plan.step_peak.bytes, measured.step_peak, tolerance)
    ours, theirs = ({(row.op, row.tag): row for row in rows} for rows in (plan.traffic, measured.traffic))
    for op, tag in {**ours, **theirs}:
        name, one, other = f"{op.replace('_', '-')} of {item_label(tag)}", ours.get((op, tag)), theirs.get((op, tag))
        yield Line(name, one.nbytes if one else 0, other.nbytes if other else 0)
        yield Line(f"{name}, number", one.count if one else 0, other.count if other else 0, calls=True)


def render(lines: list[Line], screen: Screen) -> list[str]:
    """Return a table of ``lines``, and the verdict."""
    rows = [["check", "planned", "measured", "difference"]]
    for line in lines:
        sizes = [str(n) if line.calls else format_size(n) for n in (line.planned, line.measured)]
        rows.append([line.name, *sizes, f"{line.difference:+.2%}" if line.planned != line.measured else "equal"])
    wrong = [line.name for line in lines if not line.agrees]
    tolerance = max(line.tolerance for line in lines)
    right = f"The plan is right: states and traffic are equal, the peak is within {tolerance:.0%}."
    verdict = f"The plan differs from the job: {', '.join(wrong)}." if wrong else right
    return [*screen.table(rows), "", *screen.paragraph(verdict)]


if __name__ == "__main__":
    measure_rank(Path(sys.argv[1]))
