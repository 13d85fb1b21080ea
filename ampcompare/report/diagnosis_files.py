"""The files that a diagnosis leaves in a folder."""

from __future__ import annotations

from pathlib import Path

from ampcompare.base.files.run_files import RunFile
from ampcompare.base.files.write import write_atomically
from ampcompare.records.diagnosis import Diagnosis
from ampcompare.records.run import dump_json
from ampcompare.report.base import FORMATS

__all__ = ["write_diagnosis"]


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write `diagnosis.json`, and `diagnosis.html` where the extra for it is installed; return the files.

    Raises:
        EnvironmentUnfit: the folder cannot be written.
    """
    written = [folder / f"{RunFile.DIAGNOSIS}.json"]
    write_atomically(written[0], dump_json(diagnosis) + "\n")
    if not FORMATS["html"].missing:
        from ampcompare.report.html.diagnosis_page import diagnosis_page

        written.append(folder / f"{RunFile.DIAGNOSIS}.html")
        write_atomically(written[1], diagnosis_page(diagnosis))
    return written
