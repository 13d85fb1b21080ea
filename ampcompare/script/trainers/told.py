"""What a library is told: which arm trains, and what that means for the library's own precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.script.apex_amp.session import here
from ampcompare.script.legacy.record.rows import Rows

__all__ = ["Through", "Told"]

Through = Callable[..., AbstractContextManager[None]]


class Told:
    """The arm, for the files of this folder.

    Attributes:
        is_script: the script trains as it is written.
        half: the 16-bit type of the arm's autocast; None if it has none.
        through: lets calls of modules in a block count as calls of what they call.

    Args: as of `Trainers`.
    """

    def __init__(self, arm: Arm, half: torch.dtype | None, rows: Rows | None, through: Through) -> None:
        self._arm = arm
        self._rows = rows
        self._notes: set[str] = set()
        self.through = through
        self.is_script = arm.backend == "script"
        self.half = half

    def replaces(self, setting: str) -> None:
        """Note once that the arm decides in the place of a setting, such as `precision="16-mixed"` of Lightning."""
        text = f"the arm decides in the place of {setting}"
        if not self.is_script and self._rows is not None and text not in self._notes:
            self._notes.add(text)
            self._rows.add_note(text)

    def refuse(self, what: str, advice: str) -> None:
        """Refuse what no arm can replace.

        Raises:
            UnsupportedCombination: the arm is any but `script`.
        """
        if not self.is_script:
            raise UnsupportedCombination(
                here(
                    f"{what} has its own precision and steps, which {self._arm} cannot replace; {advice}, or compare "
                    "script only"
                )
            )
