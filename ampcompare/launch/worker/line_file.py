"""`steps.jsonl` and `epochs.jsonl`: a line for each update, and for each evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.records.evaluation import EpochResult
from ampcompare.records.run import StepRecord, dump_json

__all__ = ["LineFile"]


class LineFile:
    """Appends records as lines; use it as a context. It is unbuffered, so that every record survives a crash.

    Raises:
        EnvironmentUnfit: the disk is full or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._cannot_write(error) from error

    def write(self, records: Iterable[StepRecord | EpochResult]) -> None:
        """Append records, each as one line.

        Raises:
            EnvironmentUnfit: the disk is full.
        """
        text = "".join(dump_json(record, indent=None) + "\n" for record in records).encode()
        try:
            while text:  # a nearly full disk may accept only a part
                text = text[self._file.write(text) :]
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> EnvironmentUnfit:
        reason = error.strerror or error
        return EnvironmentUnfit(f"cannot write {self._path}: {reason}; free some space or choose another --output-dir")

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
