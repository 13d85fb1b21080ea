"""Show runs that exist against another reference than that of their plan: one more look, written into the journal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from ampcompare.analysis.inference.looks import Design
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError, EnvironmentUnfit, close_matches
from ampcompare.base.files.read import read_json
from ampcompare.base.files.write import write_atomically
from ampcompare.experiment.journal import Journal, journal_head, read_looks
from ampcompare.experiment.ownership import LOCK
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord, dump_json

__all__ = ["NO_JOURNAL", "chosen_reference", "compare_against"]

NO_JOURNAL = (
    "Nothing was tested: another reference is another look at these runs, and there is no journal here to count it. "
    "Name a run directory of this version, or run that comparison in its own run directory."
)
NOT_WRITABLE = (
    "Nothing was tested: another reference is another look at these runs, and it could not be counted because the run "
    "directory is not writable."
)


def chosen_reference(text: str, arms: Sequence[str]) -> str:
    """Return the row that a text names: by its label, or by its arm in any spelling.

    Raises:
        ConfigError: no row has this name.
    """
    if text in arms:
        return text
    with contextlib.suppress(ConfigError):
        if (canonical := str(Arm.parse(text))) in arms:
            return canonical
    close = close_matches(text, arms)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"--reference {text!r} is not one of the arms of these runs: {', '.join(arms)}{hint}")


def compare_against(
    journal: Journal, records: Sequence[RunRecord], summarize: Callable[[Design | None], Comparison], *, counted: bool
) -> Comparison:
    """Return the comparison against the reference of a journal that was made for it, and count the look.

    The look is tested at the error rate that earlier looks left, and its text names the reference as a changed term.
    The same reference again is the same look, which spends nothing.

    Args:
        journal: with the looks so far.
        records: of the plan.
        summarize: gives the comparison under a design.
        counted: whether the version that wrote the run directory kept a journal.

    Raises:
        ConfigError: another command is using the run directory.
    """
    if not counted:
        return summarize(Design(0.0, 0.0, notes=(NO_JOURNAL,)))
    design = journal.design(records)
    if journal.looks and design.looks == journal.looks:
        return summarize(design)  # it was looked at so before
    ended = {f"{record.arm}@{record.config.recipe.seed}" for record in records if record.status != "interrupted"}
    if not journal.cells.keys() <= ended:
        return summarize(journal.untested())
    lock = FileLock(journal.folder.resolve() / LOCK)
    try:
        with lock.acquire(timeout=0):
            journal = replace(journal, looks=tuple(read_looks(journal.folder)))
            comparison = journal.record(summarize(journal.design(records)))
            _name_last_look(journal.folder)
            return comparison
    except Timeout:
        raise ConfigError(
            f"{journal.folder} is in use by another command, and another reference is a look that must be recorded "
            f"there; try again when that command has ended"
        ) from None
    except (OSError, EnvironmentUnfit):
        return summarize(journal.untested(NOT_WRITABLE))


def _name_last_look(folder: Path) -> None:
    """Write the last look's hash into the plan, so that a removed look is detected."""
    path = folder / "plan.json"
    plan = read_json(path)
    head = journal_head(folder)
    if plan.get("journal") != head:
        write_atomically(path, dump_json({**plan, "journal": head}))
