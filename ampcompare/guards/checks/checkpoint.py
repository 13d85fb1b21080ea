"""Guard of checkpoints: they must contain the state of amp."""

from collections.abc import Mapping
from typing import Any

from ampcompare.base.location import Location, user_location
from ampcompare.guards.detection.detector import Detector, guard_of_name

DEPTH = 3


class AmpStateUnsaved(Detector):
    """A `torch.save` with the state of an optimizer and without that of amp, while a loss scale moves.

    Reported at the next step, unless the state of amp was taken between the steps around it: it may be saved in its own
    file.
    """

    guard = guard_of_name("amp-state-unsaved")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._read_at = -1
        self._waiting: Location | None = None

    def at_amp_state_read(self) -> None:
        self._read_at = self.facts.attempts
        self._waiting = None

    def at_torch_save(self, value: Any) -> None:
        if self._read_at == self.facts.attempts or not self.facts.scales_dynamically():
            return
        if _contains_value_satisfying(value, _is_optimizer, DEPTH) and not _contains_value_satisfying(
            value, _is_amp_state, DEPTH
        ):
            self._waiting = user_location()

    def at_step_attempt(self, optimizer: Any, scaler: Any) -> None:
        location, self._waiting = self._waiting, None
        if location is not None:
            self.report("a checkpoint has the optimizer's state, but not that of the loss scale", location)


def _contains_value_satisfying(value: Any, wanted: Any, depth: int) -> bool:
    if wanted(value):
        return True
    if depth == 0:
        return False
    inner = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return any(_contains_value_satisfying(entry, wanted, depth - 1) for entry in inner)


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "param_groups" in value and "state" in value
    import torch

    return isinstance(value, torch.optim.Optimizer)


def _is_amp_state(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "loss_scaler0" in value or {"scale", "growth_factor"} <= value.keys()
    import torch

    return isinstance(value, torch.amp.GradScaler)
