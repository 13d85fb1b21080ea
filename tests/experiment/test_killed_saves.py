"""What is said of a script that was killed while it saved."""

import pytest

from ampcompare.experiment.killed_saves import KillOutcome, kill_outcome_lines_and_is_all_well

LOADS = KillOutcome("94 % of last.pt written", True, "resumes behind step 2")
BARE = KillOutcome("before it writes last.pt", False, "no file is left to start from")
SPOILED = KillOutcome("5 % of last.pt written", False, "last.pt does not load: EOFError")


@pytest.mark.parametrize(
    ("kills", "is_first", "said"),
    [
        ([LOADS, LOADS], False, "kills: what is left loads after each of 2"),
        (
            [BARE, BARE],
            True,
            "kills: nothing is left to load after each of 2, since this was the first save: a later",
        ),
        (
            [BARE, LOADS],
            True,
            "kills: what is left loads after 1 of 2, and nothing is left to load after 1 of 2, since",
        ),
        ([BARE, LOADS], False, "kills: what is left does not serve after 1 of 2: save under another name"),
        ([BARE, SPOILED], True, "kills: what is left does not serve after 1 of 2: save under another name"),
    ],
)
def test_files_that_are_gone_are_not_said_to_load(
    kills: list[KillOutcome], is_first: bool, said: str
) -> None:
    lines, is_well = kill_outcome_lines_and_is_all_well(kills, is_first=is_first)
    assert lines[-1].startswith(said)
    assert is_well == ("does not serve" not in said)
