"""Agreement of the ranks on stage 3's recorded trace, one step after it was recorded."""

from __future__ import annotations

import logging

from zerolite.zero.stage3.fetch_schedule import FetchSchedule

logger = logging.getLogger("zerolite")


class TraceAgreement:
    """Every rank's vote is a number for the trace that it has recorded. Votes travel in a step's statistics, and the
    next update, which all ranks call, lets the schedule follow the trace or drop it: when the host reads statistics is
    each rank's own affair.

    Whether the votes agreed is the same on all ranks, and while they agree the votes are, so all adopt the same traces.
    """

    def __init__(self, schedule: FetchSchedule, says: bool) -> None:
        """says: this rank logs."""
        self.schedule, self._says = schedule, says
        self._sent = 0
        self._last = 0
        self._agreed = True

    def vote(self) -> int:
        """Return this rank's vote, which travels in the statistics that are being collected."""
        self._sent = self._of_candidate()
        return self._sent

    def _of_candidate(self) -> int:
        """A number from 1 to 2^20 for a trace that waits to be compared; 0 if there is none."""
        waiting = self.schedule.candidate_hash
        return waiting % 1_048_573 + 1 if waiting else 0

    def cast(self) -> None:
        """An update begins that uses the statistics with the last :meth:`vote`. Only this counts: clipping may have
        collected them before the vote of the step before was decided on."""
        self._last = self._sent

    def note(self, agreed: bool) -> None:
        """The statistics have been read. agreed: all ranks gave the same vote."""
        self._agreed = agreed

    def decide(self) -> None:
        """Follow the trace of the last vote, or drop it. Called on all ranks, in the same place of every step."""
        agreed, self._agreed = self._agreed, True
        vote, self._last = self._last, 0
        if agreed and not vote:
            return
        if not agreed:
            self.schedule.reject()
            if self._says:
                logger.warning("stage 3: the ranks run their modules in different orders; nothing is prefetched")
        elif self._of_candidate() == vote:
            self.schedule.adopt()
