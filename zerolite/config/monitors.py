"""Blocks of the monitors; docs/monitoring.md lists the values that are written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .rules import Boolean, Text, show


@dataclass(frozen=True)
class Folder(Text):
    """A path; "" is the folder in which the job runs."""

    def __call__(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f'expected a path, got {show(value)}; write one in quotes, or "" for the working folder')
        return value


@dataclass(frozen=True)
class OptionalText(Text):
    """A non-empty string or null."""

    @property
    def expected(self) -> str:
        return "a string or null"

    def __call__(self, value: object) -> str | None:  # type: ignore[override]
        return None if value is None else super().__call__(value)


@dataclass(frozen=True)
class JobName(Text):
    """A folder in another one: no path that leads out of it."""

    def __call__(self, value: object) -> str:
        name = super().__call__(value)
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(
                f"expected the name of a folder in output_path, got {show(value)}, which leads out of it; write a name "
                "without .. and without a / in front, and the rest of the path into output_path"
            )
        return name


Switch = Annotated[bool, BeforeValidator(Boolean())]
OutputPath = Annotated[str, BeforeValidator(Folder())]
Name = Annotated[str, BeforeValidator(Text())]
FolderName = Annotated[str, BeforeValidator(JobName())]
OptionalName = Annotated[str | None, BeforeValidator(OptionalText())]

_OUTPUT_PATH = 'Folder that holds the folder of the job; "" = the one in which the job runs.'
_JOB_NAME = "Name of the folder of the job in `output_path`. A job that writes into an old one continues it."


class _Monitor(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CsvMonitorConfig(_Monitor):
    """Write a CSV file for each value, on rank 0. See [Monitoring](monitoring.md)."""

    enabled: Switch = Field(default=False, description="Write CSV files.")
    output_path: OutputPath = Field(default="", description=_OUTPUT_PATH)
    job_name: FolderName = Field(default="DeepSpeedJobName", description=_JOB_NAME)


class JsonlMonitorConfig(_Monitor):
    """Write one file, `events.jsonl`, with a JSON object for each step, on rank 0. (zerolite's own block.)"""

    enabled: Switch = Field(default=False, description="Write `events.jsonl`.")
    output_path: OutputPath = Field(default="", description=_OUTPUT_PATH)
    job_name: FolderName = Field(default="zerolite", description=_JOB_NAME)


class TensorboardConfig(_Monitor):
    """Write TensorBoard's event files, on rank 0. Needs the extra: `pip install 'zerolite[tensorboard]'`."""

    enabled: Switch = Field(default=False, description="Write event files.")
    output_path: OutputPath = Field(default="", description=_OUTPUT_PATH)
    job_name: FolderName = Field(default="DeepSpeedJobName", description=_JOB_NAME)


class WandbConfig(_Monitor):
    """Log to Weights & Biases, on rank 0. Needs the extra: `pip install 'zerolite[wandb]'`."""

    enabled: Switch = Field(default=False, description="Log to a run.")
    group: OptionalName = Field(default=None, description="Group of the run. null: none.")
    team: OptionalName = Field(default=None, description="Team (entity) of the run. null: the account's default.")
    project: Name = Field(default="deepspeed", description="Project of the run.")
