"""Run a probe of `api/doctor/probes.py` in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.processes.call import TIME_LIMIT, Answer, call_in_child

__all__ = ["ask"]

PROBES = Path(__file__).resolve().parent / "probes.py"


def ask(
    probe: str,
    *,
    path: Sequence[str] | None = None,
    seconds: float = TIME_LIMIT,
    options: dict[str, Any] | None = None,
) -> Answer:
    """Return the answer of a probe.

    Args:
        probe: name of a function in `probes.py`.
        path, seconds, options: as for `call_in_child`.
    """
    return call_in_child(PROBES, probe, path=path, seconds=seconds, options=options)
