"""Run a probe of `api/doctor/probes.py`, by its name, in a child process with a time limit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ampcompare.base.processes.call import call_in_child

__all__ = ["ask"]

ask = partial(call_in_child, Path(__file__).resolve().with_name("probes.py"))
