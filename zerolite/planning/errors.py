"""The one exception of a plan that cannot be made."""


class PlanError(Exception):
    """A sentence for the user: what cannot be planned, why, and what to do."""
