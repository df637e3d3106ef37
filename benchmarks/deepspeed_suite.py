"""DeepSpeed's own tests on `zerolite.compat.deepspeed`: how many pass, and why the others do not.

    git clone --branch v0.16.3 https://github.com/deepspeedai/DeepSpeed
    python benchmarks/deepspeed_suite.py DeepSpeed --only runtime/zero checkpoint

Each file of tests/unit runs in a pytest of its own, in which `import deepspeed` finds zerolite's, with a time limit.
About a quarter of the suite tests the insides of DeepSpeed, which zerolite does not have: read the kinds, not the sum.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
ABSENT = re.compile(r"has no (?:module )?'([\w.]+)'|cannot import name '(\w+)' from '(?:zerolite|deepspeed)")
ERROR = re.compile(r"^(?:E +|\S+:\d+: )?(?:[\w]+\.)*(\w*(?:Error|Exception|Failed|Timeout|Exit))\b", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """Outcome of one test. kind: "passed", "skipped", or the reason why it failed."""

    folder: str
    test: str
    kind: str


def kind_of(text: str) -> str:
    """The reason of a failure, from its traceback: the error that ended it, or what zerolite says it does not have."""
    absent = ABSENT.search(text)
    if absent is not None:
        return f"absent: {absent[1] or absent[2]}"
    errors = ERROR.findall(text)
    return errors[-1] if errors else "failed"


def read_report(report: Path, folder: str) -> list[Result]:
    """The results in a file that `pytest --junitxml` has written."""
    results = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            kind = kind_of(f"{problem.text or ''}\n{problem.get('message') or ''}")
        else:
            kind = "passed" if case.find("skipped") is None else "skipped"
        results.append(Result(folder, name, kind))
    return results


def run_file(tests: Path, file: Path, options: argparse.Namespace) -> list[Result]:
    """Run one file of tests; a file that crashes or takes too long is one result."""
    folder = str(file.parent.relative_to(tests / "unit"))
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file))
        command = [
            sys.executable,
            "-m",
            "zerolite.compat.deepspeed",
            *pytest,
            *(("-k", options.k) if options.k else ()),
        ]
        environ = {**os.environ, "DS_ACCELERATOR": options.device, "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(tests), environ.get("PYTHONPATH")]))
        # In `tests`, because in the checkout itself `import deepspeed` would find DeepSpeed's sources.
        with Path(directory, "output").open("w+") as output:
            process = subprocess.Popen(
                command, cwd=tests, env=environ, stdout=output, stderr=output, start_new_session=True
            )
            try:
                process.wait(options.timeout)
            except subprocess.TimeoutExpired:
                return [Result(folder, file.name, "took too long")]
            finally:
                end_session(process)
        if not report.is_file():
            return [Result(folder, file.name, f"no report, exit status {process.returncode}")]
        return read_report(report, folder)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End pytest and the ranks that its tests have started."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def table(results: Sequence[Result]) -> str:
    """Markdown: passed and failed by folder, then failures by kind."""
    lines = ["| folder | passed | failed | skipped |", "|---|---|---|---|"]
    for folder in sorted({result.folder for result in results}):
        kinds = Counter(r.kind for r in results if r.folder == folder)
        lines.append(row(folder, kinds))
    kinds = Counter(result.kind for result in results)
    lines += [row("**all**", kinds), "", "| why the others fail | tests |", "|---|---|"]
    lines += [f"| {kind} | {n} |" for kind, n in kinds.most_common() if kind not in ("passed", "skipped")]
    return "\n".join(lines)


def row(name: str, kinds: Counter[str]) -> str:
    failed = kinds.total() - kinds["passed"] - kinds["skipped"]
    return f"| {name} | {kinds['passed']} | {failed} | {kinds['skipped']} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("--only", nargs="+", default=["."], help="folders or files, relative to tests/unit")
    parser.add_argument("-k", help="pytest's -k")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="DS_ACCELERATOR")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one file")
    parser.add_argument("--json", type=Path, help="write every result there")
    options = parser.parse_args(argv)
    tests = options.checkout.resolve() / "tests"
    if not (tests / "unit").is_dir():
        parser.error(f"expected a checkout of DeepSpeed, with tests/unit, got '{options.checkout}'")
    files: list[Path] = []
    for name in options.only:
        path = tests / "unit" / name
        files += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    results: list[Result] = []
    for number, file in enumerate(files, 1):
        found = run_file(tests, file, options)
        results += found
        passed = sum(result.kind == "passed" for result in found)
        print(f"[{number}/{len(files)}] {file.relative_to(tests)}: {passed} of {len(found)} passed", file=sys.stderr)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
