"""Gradients that come after their bucket has been launched, and the end of a pass of which something is learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerolite.comm import Communicator
from zerolite.utils.accelerator import host_values
from zerolite.zero.bucket_state import ReductionOptions
from zerolite.zero.gradient_bucket import GradientBucket, Pass, PassState
from zerolite.zero.launch_order import LaunchOrder
from zerolite.zero.layout import Slot
from zerolite.zero.stage3.launch_plan import LaunchPlan


class LateGradients:
    """Until it is known when each bucket's last gradient comes, one may come too late: reentrant checkpointing runs a
    backward inside the backward, and a module may be used several times. At the end of such a pass the ranks agree on
    what was late, which is reduced once more, and on when buckets are launched from then on. Later passes do not ask.
    """

    def __init__(
        self,
        comm: Communicator,
        options: ReductionOptions,
        order: LaunchOrder,
        current: Pass,
        reduce: Callable[[Sequence[GradientBucket]], None],
    ) -> None:
        """reduce: the sums of these buckets, and wait for all reductions."""
        self._comm, self._options, self._order, self._pass = comm, options, order, current
        self._reduce = reduce
        self._states: Sequence[GradientBucket] = ()
        self._looks = False  # in the first pass that reduces; equal on all ranks
        self._plan: LaunchPlan | None = None
        self._unexpected: RuntimeError | None = None  # a late gradient in a pass that follows a plan so far

    def use(self, states: Sequence[GradientBucket]) -> None:
        """Have these buckets, of some of which nothing is known."""
        self._states = states
        self._looks = self._options.shard

    def follow(self, plan: LaunchPlan) -> None:
        """Buckets are launched when units end."""
        self._plan = plan

    @property
    def possible(self) -> bool:
        """True if gradients may come in this pass after their bucket has been launched; equal on all ranks. At stage 3
        that may change within the pass, at the end of a use that departs from the plan."""
        return self._looks if self._plan is None else not self._plan.settled

    def note(self, state: GradientBucket, slot: Slot) -> None:
        """A gradient has come late. Raises RuntimeError if nothing was to come any more; at stage 3 :meth:`agree` does,
        because the use that has brought it may depart from the plan, which all ranks see when it ends."""
        if not self.possible:
            advice = (
                "Set zero_optimization.overlap_comm to false, so that buckets are reduced when backward has ended."
                if self._plan is None
                else "A parameter that is used in some steps only, outside the module that owns it, does this: put "
                "that module and its users in one unit (zero_optimization.leaf_modules)."
            )
            error = RuntimeError(
                f"parameter '{slot.name}' got another gradient in the same backward after its bucket was reduced: the "
                f"graph has contributions to it that it never had before. {advice}"
            )
            if self._plan is None:
                raise error
            self._unexpected = self._unexpected or error
        state.note_late()

    @torch.no_grad()
    def agree(self) -> None:
        """At the end of a pass: reduce again the buckets that got gradients after they were launched, on any rank; take
        over when buckets are launched from now on. Raises RuntimeError if a gradient has come late where none may.
        Called on all ranks."""
        unexpected, self._unexpected = self._unexpected, None
        if unexpected is not None and not self.possible:
            raise unexpected
        if not self.possible and not self._order.learning:
            return
        late = [int(state.state is PassState.LATE) for state in self._states]
        learned = self._completion_on_rank_0() if self._plan is None else self._plan.arrivals
        found = [*late, *learned]
        agreed = torch.tensor(found, dtype=torch.int64, device="cpu").to(self._states[0].device)
        self._reduce(())
        self._comm.all_reduce_max(agreed, "stats")
        values = found if self._comm.peers_agree else [int(value) for value in host_values(agreed)]
        self._reduce_again([state for state, again in zip(self._states, values, strict=False) if again])
        learned = values[len(late) :]
        if self._plan is not None:
            self._plan.learn(learned)
        else:
            self._order.learn(learned)
        self._looks = False
        self._order.stop_learning()

    def _completion_on_rank_0(self) -> list[int]:
        """Return the places in which rank 0 has completed the buckets in this pass. Zeros on other ranks, so that the
        maximum over ranks is what rank 0 says."""
        speaks = self._comm.rank == 0 or self._comm.peers_agree
        return self._order.completion() if self._order.learning and speaks else [0] * len(self._states)

    def _reduce_again(self, late: Sequence[GradientBucket]) -> None:
        """Reduce what has come late, and keep it together with what has been reduced before as one contribution."""
        self._reduce(late)
        if self._pass.in_accumulation <= 1 and not self._options.several_expected:
            for state in late:
                mean = state.fetch()
                if mean.dtype != state.dtype:
                    state.rest(mean.to(state.dtype))
