"""Whether a run was asked to stop: it saves and ends at its next drain point."""


class StopRequest:
    """Whether a run was asked to stop; it also stops, as if asked, at the first drain point from `step` updates on."""

    def __init__(self, step: int | None = None) -> None:
        self.asked = False
        self.step = step

    def is_due(self, updates_before: int, updates_after: int) -> bool:
        """Return whether to stop after the updates from `updates_before` up to `updates_after`."""
        return self.asked or (self.step is not None and updates_before < self.step <= updates_after)
