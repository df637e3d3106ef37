"""Observer that learns if the program launches collectives of its own within backwards."""

from __future__ import annotations

import logging
from typing import Any

from zerolite.comm.process_group import program_collectives
from zerolite.engine.components import ModuleCall
from zerolite.zero.observers import StepObserver
from zerolite.zero.reducer import Reducer

logger = logging.getLogger("zerolite")


class ProgramCollectives(StepObserver):
    """Counts the collectives of all groups that are not zerolite's, and tells the reducer when a backward has some.

    The first backward is not known yet. A model that communicates in its backward does so in its forward too, with few
    exceptions, so a forward of the engine that does is taken for a sign until a backward has ended.
    """

    def __init__(self, reducer: Reducer, call: ModuleCall, logs: bool) -> None:
        """
        Args:
            reducer: its ``program_communicates`` is set.
            call: the engine's forward.
            logs: this rank logs for all.
        """
        self._reducer, self._call, self._logs = reducer, call, logs
        self._call_module = call.replace(self._forward)
        self._learning = True
        self._before = 0

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        before = program_collectives()
        outputs = self._call_module(*args, **kwargs)
        if self._learning and program_collectives() != before:
            self._reducer.program_communicates = True
        return outputs

    def on_backward_begin(self) -> None:
        self._before = program_collectives()

    def on_backward_end(self) -> None:
        if self._learning:
            self._learning = self._reducer.program_communicates = False
            if self._call.call_module == self._forward:  # otherwise another one has been put around it
                self._call.replace(self._call_module)
        if not self._reducer.program_communicates and program_collectives() != self._before:
            self._reducer.program_communicates = True
            if self._logs:
                logger.info(
                    "the program launches collectives of its own within backward: from now on no reduction is waited "
                    "for inside it, which needs the memory of full gradients"
                )
