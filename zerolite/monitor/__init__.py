"""Monitoring: scalar writers, timers, FLOPs and memory report."""

from .monitor import Monitor, open_monitor
from .step_log import StepLog
from .writers import Event, Writer

__all__ = ["Event", "Monitor", "StepLog", "Writer", "open_monitor"]
