"""What the process that runs a user's own script is asked to watch. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """What to run, and what to see of it.

    Attributes:
        settings: the fields of `ExecSettings`.
        is_module: the script is the name of a module.
        lines: file:line of calls that run in fp32.
        rank: the process that is watched; the others only stop with it.
        answer: file for the diagnosis and the names of functions in fp32.
        ended: file for the exit code of the watched process, written when it ends.
    """

    settings: dict[str, Any]
    is_module: bool
    steps: int
    at: list[int]
    reference: str
    lines: list[str]
    rank: int
    answer: str
    ended: str

    def write(self, path: Path) -> None:
        """Write the request for a process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Request:
        """Return the request of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
