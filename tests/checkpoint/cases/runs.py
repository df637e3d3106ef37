"""Jobs that save into one directory."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoint.cases.crashes import _config, _of_all, _train
from tests.toolkit.training import make_engine
from zerolite.checkpoint import run as runs
from zerolite.checkpoint.errors import CheckpointError


def engines(directory: Path, background: bool) -> list[str]:
    """Three jobs, each with an engine on all ranks. Gives what this rank is told in the second one, which saves without
    loading; in the first one, which saves again after the second has loaded and saved; and in a third one."""
    jobs = []
    for _ in range(3):
        runs.run_of_this_job.cache_clear()
        jobs.append(make_engine(_config(2)))

    def save(job: int) -> str:
        """Save, and return what this rank is told."""
        _train(jobs[job], 1)
        try:
            jobs[job].save_checkpoint(directory, async_save=background)
            jobs[job].wait_for_checkpoint()
        except CheckpointError as error:
            return str(error)
        return ""

    assert save(0) == ""
    texts = [save(1)]
    jobs[1].load_checkpoint(directory)
    assert save(1) == ""
    texts.append(save(0))
    jobs[2].load_checkpoint(directory)
    _of_all(None)
    texts.append(save(2))
    assert len({json.loads(path.read_bytes())["run"] for path in directory.glob("*/manifest.json")}) == 1
    return texts
