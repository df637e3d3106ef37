"""`zerolite plan --check`: measure a real job on this machine beside its plan.

The job's processes are started by zerolite's own launcher and run this module, one rank each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from zerolite.planning.errors import PlanError
from zerolite.planning.measure import Measurement, measure
from zerolite.planning.report import Screen
from zerolite.planning.result import Items, Plan, Traffic
from zerolite.planning.sources import load_batch, load_function, load_model_fn
from zerolite.utils.memory_tags import ACTIVATIONS, BUFFERS, ITEMS, MODEL_STATES, OTHER
from zerolite.utils.resources import count_cuda_devices, find_nproc_problem
from zerolite.utils.sizes import format_size

TOLERANCE = {"cpu": 0.02, "cuda": 0.05}
"""By how much of the measured peak the planned one may differ. Memory inside an operator is not seen by a plan."""

_STATES = (*MODEL_STATES, BUFFERS)
_REQUEST, _RANK, _LOG = "request.json", "rank{}.json", "log.txt"
_PEAK = "peak of a step"
_LAST_LINES = 15


class Line(NamedTuple):
    """One number of both sides.

    Attributes:
        unit: "bytes" or "calls".
        exact: whether they must be equal.
    """

    name: str
    planned: int
    measured: int
    unit: str = "bytes"
    exact: bool = True


def run_check(
    model: str, config: str, world_size: int, *, batch: str | None, loss: str | None, device: str, plan: Plan
) -> int:
    """Run ``plan``'s job for a few steps and print what rank 0 needed beside what was planned.

    Args:
        model, batch, loss: as on the command line.
        config: a path or JSON.
        device: "cuda" or "cpu".

    Returns 0 if model states and traffic are equal and the peak of a step is within :data:`TOLERANCE`, if need be
    without what operators took inside themselves, otherwise 1. Raises PlanError if the job cannot run here.
    """
    problem = find_problem(world_size, device)
    if problem is not None:
        raise PlanError(f"--check: {problem}")
    request = {"model": model, "config": config, "batch": batch, "loss": loss}
    measured = run_job(request, world_size, device)
    lines = list(compare(plan, measured))
    good = agrees(lines, TOLERANCE[device]) or agrees(_outside(lines, measured.inside_operators), TOLERANCE[device])
    print()
    print(render(lines, TOLERANCE[device], measured.inside_operators, Screen.of_terminal()), flush=True)
    return 0 if good else 1


def find_problem(world_size: int, device: str) -> str | None:
    """Say why a job of this size cannot run on this machine, or return None."""
    if device == "cuda":
        devices = count_cuda_devices(os.environ)
        if devices < world_size:
            have = f"has {devices} CUDA device{'' if devices == 1 else 's'}" if devices else "has no CUDA device"
            return (
                f"the real job needs a device for each of its {world_size} ranks, and this machine {have}; plan and "
                "check with --device cpu, or with a smaller --world-size"
            )
    problem = find_nproc_problem(world_size)
    return None if problem is None else problem.replace("--nproc", "--world-size")


# -------------------------------------------------------------------- the job


def run_job(request: Mapping[str, str | None], world_size: int, device: str) -> Measurement:
    """Start the processes, wait for them and return what rank 0 has measured. Raises PlanError if they fail."""
    with tempfile.TemporaryDirectory(prefix="zerolite-check-") as name:
        directory = Path(name)
        (directory / _REQUEST).write_text(json.dumps(dict(request)), encoding="utf-8")
        job = ["--nproc", str(world_size), "-m", "zerolite.planning.check", name]
        log = directory / _LOG
        with log.open("wb") as output:
            status = subprocess.run(
                [sys.executable, "-m", "zerolite.launcher.cli", *job],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(device),
            ).returncode
        result = directory / _RANK.format(0)
        if status != 0 or not result.exists():
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])
            raise PlanError(
                f"--check: the real job of {world_size} process{'' if world_size == 1 else 'es'} failed (exit status "
                f"{status}). The last lines of its output:\n{tail}"
            )
        return Measurement.model_validate_json(result.read_text(encoding="utf-8"))


def _environment(device: str) -> dict[str, str]:
    quiet = {"KINETO_LOG_LEVEL": "99"}  # the profiler's own lines
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**os.environ, **quiet, **hidden}


def measure_rank(directory: Path) -> None:
    """Measure in a process of the job what the request in ``directory`` says, and write it there. Called on all
    ranks."""
    request = json.loads((directory / _REQUEST).read_text(encoding="utf-8"))
    batch, loss = request["batch"], request["loss"]
    measured = measure(
        load_model_fn(request["model"]),
        request["config"],
        load_batch(batch) if batch else None,
        load_function(loss, "--loss") if loss else None,
    )
    path = directory / _RANK.format(measured.rank)
    path.write_text(measured.model_dump_json(), encoding="utf-8")


# -------------------------------------------------------------------- both sides


def compare(plan: Plan, measured: Measurement) -> Iterator[Line]:
    """Every number that both have."""
    known = [item for item in ITEMS if item not in (ACTIVATIONS, OTHER)]
    yield from _items("", plan.states, measured.states, _STATES)
    yield from _items(" at rest", plan.at_rest, measured.at_rest, known)
    none = dict.fromkeys(ITEMS, 0)
    yield from _items(" on the host", plan.host or none, measured.host, known)
    yield from _items(" on disk", plan.disk or none, measured.disk, known)
    yield Line(_PEAK, plan.step_peak.bytes, measured.step_peak, exact=False)
    yield from _traffic(plan.traffic, measured.traffic)


def _items(suffix: str, planned: Items, measured: Items, names: Iterable[str]) -> Iterator[Line]:
    for item in names:
        if planned[item] or measured[item]:
            yield Line(item.replace("_", " ") + suffix, planned[item], measured[item])


def _traffic(planned: list[Traffic], measured: list[Traffic]) -> Iterator[Line]:
    ours = {(row.op, row.tag): row for row in planned}
    theirs = {(row.op, row.tag): row for row in measured}
    for key in {**ours, **theirs}:
        one, other = ours.get(key), theirs.get(key)
        name = " of ".join(word.replace("_", "-" if word == key[0] else " ") for word in key)
        yield Line(name, one.nbytes if one else 0, other.nbytes if other else 0)
        yield Line(f"{name}, number", one.count if one else 0, other.count if other else 0, unit="calls")


def difference(line: Line) -> float:
    """Return the relative difference of the planned number from the measured one."""
    if line.planned == line.measured:
        return 0.0
    return (line.planned - line.measured) / line.measured if line.measured else float("inf")


def agrees(lines: list[Line], tolerance: float) -> bool:
    """True if numbers that must be equal are, and the others are near."""
    return all(abs(difference(line)) <= (0.0 if line.exact else tolerance) for line in lines)


def _outside(lines: list[Line], inside_operators: int) -> list[Line]:
    """``lines`` with a measured peak without what operators took inside themselves."""
    return [line._replace(measured=line.measured - inside_operators) if line.name == _PEAK else line for line in lines]


def render(lines: list[Line], tolerance: float, inside_operators: int, screen: Screen) -> str:
    """A table, and in a sentence what it shows. inside_operators: see :class:`Measurement`."""
    rows = [["check", "planned", "measured", "difference"]]
    for line in lines:
        sizes = [format_size(n) if line.unit == "bytes" else str(n) for n in (line.planned, line.measured)]
        equal = line.planned == line.measured
        rows.append([line.name, *sizes, "equal" if equal else f"{difference(line):+.2%}"])
    bad = [line.name for line in lines if not agrees([line], tolerance)]
    if not bad:
        verdict = f"The plan is right: states and traffic are equal, the peak is within {tolerance:.0%}."
    elif agrees(_outside(lines, inside_operators), tolerance):
        verdict = "The plan is right but for the scratch memory of kernels: states and traffic are equal."
    else:
        verdict = f"The plan is off: {', '.join(bad)}."
    if _PEAK in bad and inside_operators:
        rest = next(difference(line) for line in _outside(lines, inside_operators) if line.name == _PEAK)
        verdict += (
            f" {format_size(inside_operators)} of the measured peak were inside single operators, such as the scratch "
            f"memory of a kernel, which no plan sees; without them the peak differs by {rest:+.2%}."
        )
    return "\n".join([*screen.table(rows), "", *screen.paragraph(verdict)])


if __name__ == "__main__":
    measure_rank(Path(sys.argv[1]))
