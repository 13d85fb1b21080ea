"""The output of a script: into a log of bounded size, and through the patterns of metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ampcompare.base.secrets import StreamMask
from ampcompare.settings.script import ScriptMetric

__all__ = ["OutputReader", "to_number"]

MAX_LOG_BYTES = 2**24
MAX_LINE_BYTES = 2**16
BLOCK = 2**16


class OutputReader:
    """Reads a pipe to its end; run `pump` in a thread.

    Attributes:
        values: of each metric with a pattern, in the order of the output.
    """

    def __init__(self, pipe: BinaryIO, log: Path, metrics: Sequence[ScriptMetric]) -> None:
        self._pipe = pipe
        self._log = log
        self._patterns = {metric.name: re.compile(metric.pattern) for metric in metrics if metric.pattern is not None}
        self.values: dict[str, list[float]] = {name: [] for name in self._patterns}

    def pump(self) -> None:
        """Copy and match all that comes; a progress bar ends its lines by a carriage return."""
        written, rest, secrets = 0, b"", StreamMask()
        with self._pipe, self._log.open("wb") as log:
            while block := self._pipe.read1(BLOCK):  # type: ignore[attr-defined]
                if written < MAX_LOG_BYTES:
                    log.write(secrets.feed(block[: MAX_LOG_BYTES - written]))
                    log.flush()
                    if written + len(block) > MAX_LOG_BYTES:
                        log.write(f"\nampcompare: the log ends here, at {MAX_LOG_BYTES // 2**20} MiB\n".encode())
                written += len(block)
                if not self._patterns:
                    continue
                *lines, rest = re.split(rb"[\r\n]", rest + block)
                for line in lines:
                    self._match(line)
                rest = rest[-MAX_LINE_BYTES:]
            self._match(rest)
            log.write(secrets.end())

    def _match(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", errors="replace")
        for name, pattern in self._patterns.items():
            for found in pattern.finditer(text):
                number = to_number(found[1])
                if number is not None:
                    self.values[name].append(number)


def to_number(text: str | None) -> float | None:
    """Return the number that a text holds, with digits before or behind; None if it holds none."""
    try:
        return float((text or "").strip().rstrip("%.,;"))
    except ValueError:
        return None
