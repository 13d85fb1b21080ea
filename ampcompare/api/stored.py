"""Load results that an earlier call wrote: the command `report`."""

from __future__ import annotations

from pathlib import Path

from ampcompare.experiment.load import reload_comparison
from ampcompare.runs.records.comparison import Comparison

__all__ = ["load_comparison"]


def load_comparison(path: str | Path, *, reference: str | None = None) -> Comparison:
    """Load a run directory again, of `compare` or of `run`, or a single `report.json` or `record.json`.

    A run directory is summed up again from its records. Nothing is trained.

    Args:
        path: such as "runs/first".
        reference: another arm to compare with; in a run directory that is one more look at its runs, and is counted.

    Returns:
        The comparison. Records with a fault are left out, and named in `excluded`.

    Raises:
        RecordError: there is no such file or folder, or it holds no results.
        ConfigError: no row is named like the reference, or another command uses the folder.
    """
    return reload_comparison(Path(path), reference=reference)
