"""The exceptions of a plan that cannot be made."""


class PlanError(Exception):
    """A sentence for the user: what cannot be planned, why, and what to do."""


class RefusedError(PlanError):
    """The engine does not take this job; another setting may do."""
