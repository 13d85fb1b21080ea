"""The search for the smallest change, with runs that answer at once."""

from collections.abc import Sequence

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.remedies import Tested as Outcome
from ampcompare.diagnosis.remedies import search
from ampcompare.results.records.diagnosis import Fault, Place

FAULT = Fault(
    kind="overflow",
    place=Place(module="", operation="log", where="loss.py:4", phase="forward"),
    step=0,
    text="log",
    near=[("", "loss.py:2"), ("", "loss.py:3")],
)


@pytest.mark.parametrize(
    ("needed", "trials"),
    [
        ({"loss.py:4"}, 1),
        ({"loss.py:3"}, 3),
        ({"loss.py:4", "loss.py:2"}, 4),  # each alone changes nothing
        ({"loss.py:2", "loss.py:3"}, 6),  # and the third is dropped again
    ],
)
def test_lines_that_help_only_together_are_found(needed: set[str], trials: int) -> None:
    """The change that is found holds the lines that remove the fault and no other."""

    def run(arm: Arm, lines: Sequence[str]) -> Outcome:
        return Outcome([] if needed <= set(lines) else [FAULT])

    found = search(Arm.parse("apex:O2"), [FAULT], None, run, [])
    assert set(found.change.lines) == needed
    assert len(found.trials) >= trials


def test_no_change_is_found_where_none_helps() -> None:
    """The search ends, within the runs that are allowed."""
    found = search(Arm.parse("apex:O2"), [FAULT], None, lambda arm, lines: Outcome([FAULT]), [], most=4)
    assert found.change is None
    assert len(found.trials) == 4
