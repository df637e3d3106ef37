"""The exceptions of a plan that cannot be made."""


class PlanError(Exception):
    """The job cannot be planned. The message says why and what to do."""


class RefusedError(PlanError):
    """The engine refuses the job; with another setting it may accept it."""
