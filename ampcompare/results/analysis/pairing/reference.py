"""Which row is the reference, with which the others are compared: the one that a text names, else a usual one."""

from __future__ import annotations

from collections.abc import Sequence

from ampcompare.backends.arm import Arm
from ampcompare.settings.stack import arm_text_with_stack

USUAL_REFERENCES = ("script", "fp32")


def default_reference(arms: Sequence[str]) -> str:
    """Return the arm that others are compared with where none is named: `script`, else `fp32`, else the first.

    Args:
        arms: one or more.
    """
    return next((arm for arm in USUAL_REFERENCES if arm in arms), arms[0])


def find_row_named(text: str, labels: Sequence[str]) -> str | None:
    """Return the row that a text names, the first of its arm where the text is no label; None if no row has that arm.

    Args:
        text: the label of a row, or an arm in any spelling, with its stack, such as `O2@old`.
        labels: of rows: `ARM[@STACK] [NAME=VALUE ...]`.

    Raises:
        ConfigError: it is no label, and no arm.
    """
    if text in labels:
        return text
    arm, at, stack = text.rpartition("@")
    wanted = arm_text_with_stack(str(Arm.parse(arm if at else text)), stack if at else None)
    return next((label for label in labels if label.partition(" ")[0] == wanted), None)
