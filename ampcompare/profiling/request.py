"""What the processes that run a user's own script are asked to profile. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["ProfileRequest"]


@dataclass(frozen=True)
class ProfileRequest:
    """What to run, and how many steps of it to profile.

    Attributes:
        settings: the fields of `ExecSettings`.
        is_module: the script is the name of a module.
        steps, profiled: timed steps, and those under torch.profiler.
        answers: folder for the profile of each rank, and for the trace of rank 0.
        ended: file for the exit code of rank 0, written when it ends.
    """

    settings: dict[str, Any]
    is_module: bool
    steps: int
    profiled: int
    answers: str
    ended: str

    def answer(self, rank: int) -> Path:
        """Return the file for the profile of a rank."""
        return Path(self.answers) / f"profile-{rank}.json"

    @property
    def trace(self) -> Path:
        """The file for the trace of rank 0."""
        return Path(self.answers) / "trace.json"

    def write(self, path: Path) -> None:
        """Write the request for the processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProfileRequest:
        """Return the request of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
