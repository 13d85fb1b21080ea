"""What a library is told: which arm trains, and what that means for its own precision; and what it tells: figures."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.location import message_with_script_line
from ampcompare.base.patches import Subscriptions
from ampcompare.script.recording.recorder import RecordedSteps

Through = Callable[..., AbstractContextManager[None]]


class TrainerContext:
    """The arm, for the files of this folder; `half` is the 16-bit type of its autocast, if it has one."""

    def __init__(
        self, arm: Arm, half: torch.dtype | None, rows: RecordedSteps | None, through: Through
    ) -> None:
        self._arm = arm
        self._rows = rows
        self._notes: set[str] = set()
        self.through = through
        self.is_script = arm.is_as_written
        self.half = half

    def note_replaced_setting(self, setting: str) -> None:
        """Note once that the arm decides in the place of a setting, such as `precision="16-mixed"` of Lightning."""
        self.note_departure(f"the arm decides in the place of {setting}")

    def note_departure(self, text: str) -> None:
        """Note once in what a run departs from the script or from the arm."""
        if not self.is_script and self._rows is not None and text not in self._notes:
            self._notes.add(text)
            self._rows.add_arm_departure_note(text)

    def refuse_unless_script(self, setting: str, advice: str) -> None:
        """Refuse what no arm but `script` can replace."""
        if not self.is_script:
            raise UnsupportedCombination.with_advice(
                message_with_script_line(
                    f"{setting} has its own precision and steps, which {self._arm} cannot replace"
                ),
                "script",
                remedy=advice,
            )


# Follows a module of a library, of the given name, that was just imported.
Follow = Callable[[str, TrainerContext, Subscriptions], None]
